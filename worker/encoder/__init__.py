"""Models that turn a text into a vector or a score: batches by length, one pass, no KV cache."""
