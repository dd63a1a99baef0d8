"""Layers with a sliding window: their parts of KV blocks, which are given up when no query can reach them."""
