"""The neutral middle: what a chat and a completion are, from a checked request to the pieces of its answers."""
