"""The KV cache: its blocks, their assignment to requests, and the memory behind them."""
