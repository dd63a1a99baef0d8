"""Texts into vectors and scores: checked and tokenized, sent to the model, charged to the caller's key."""
