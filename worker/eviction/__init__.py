"""Eviction of KV blocks of long sequences: the rule, the state of one sequence, and the model's graph."""
