"""KV blocks that workers get from one another."""
