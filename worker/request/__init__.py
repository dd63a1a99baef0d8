"""The request: its tokens, its sampling parameters, and its part of a step."""
