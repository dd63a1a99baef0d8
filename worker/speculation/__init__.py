"""Speculative decoding: who proposes the next tokens, how many are worth verifying, and which are accepted."""
