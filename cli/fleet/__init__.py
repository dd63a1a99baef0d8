"""Work with a running fleet: status, explain, drain, and its keys and certificates."""
