"""The KV cache: its blocks, who holds them, and its memory."""
