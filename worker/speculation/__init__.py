"""Speculative decoding: sources of proposed tokens, how many of them to verify, and which to accept."""
