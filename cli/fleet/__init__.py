"""Work with a running fleet: chat, status, explain, drain, and its keys and certificates."""
