"""A pipeline: consecutive layers of one model on each of several processes, which may be on several hosts."""
