"""The host: NUMA nodes, pinned threads, addresses."""
