"""Benchmarks of the gateway and of whole systems over HTTP."""
