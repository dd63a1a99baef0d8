"""The processes that serve: planned for this machine, started, assigned to cores, and restarted when they fail."""
