"""Where a graph's weights lie in memory."""
