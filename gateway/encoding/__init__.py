"""Turns texts into vectors and scores: checks and tokenizes them, sends them to the model, and charges the caller's
key."""
