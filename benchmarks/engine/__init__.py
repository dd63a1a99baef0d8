"""Benchmarks of the engine: its throughput, its steps, its start."""
