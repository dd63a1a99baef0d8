"""Lets operators load, list and unload LoRA adapters, in the form of vLLM, and load and unload models of a host."""
