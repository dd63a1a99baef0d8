"""The request: its tokens, how they are sampled, what a step computes of it and gives to it."""
