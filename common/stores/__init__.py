"""Redis, API keys, and files that change while a process runs."""
