"""Benchmarks of chats with images."""
