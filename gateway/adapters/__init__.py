"""Operators load, list and unload LoRA adapters, as vLLM's clients do it, and models of a host."""
