"""KV blocks that workers exchange with one another."""
