"""The machine: NUMA nodes, pinned threads, addresses."""
