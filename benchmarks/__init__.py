"""Benchmarks: each runs headrace and a peer in the same run, alternating, and prints the ratio with its spread."""
