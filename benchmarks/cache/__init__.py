"""Benchmarks of cached prefixes that outlive a worker, lie on a disk or come from other workers."""
