"""Benchmarks of adapters, of encoders, and of models against llama.cpp."""
