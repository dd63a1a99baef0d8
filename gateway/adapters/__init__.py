"""Operators' HTTP: LoRA adapters, in the form of vLLM, the models of a host, and the workers of the fleet."""
