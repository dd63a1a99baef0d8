"""Layers with a sliding window: their parts of KV blocks, which are released when no query can reach them."""
