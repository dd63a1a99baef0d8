"""The host: NUMA nodes, pinned threads, addresses, the precision of its CPU."""
