"""Benchmarks of adapters and of encoders."""
