"""Heads that propose tokens from a model's hidden states: their files, their graphs, and the states that they read."""
