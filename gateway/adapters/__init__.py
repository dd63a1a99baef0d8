"""Loading, listing and unloading LoRA adapters, as vLLM's clients do it."""
