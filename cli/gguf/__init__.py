"""GGUF files: their tensors as they are stored, and the graph of the model that they belong to."""
