"""Serves models that turn a text into a vector or a score: in batches by length, with one pass and no KV cache."""
