"""The placement of a graph's weights in memory."""
