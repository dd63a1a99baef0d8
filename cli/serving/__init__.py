"""Starts the processes: plans them for this machine, assigns them to cores, and restarts those that fail."""
