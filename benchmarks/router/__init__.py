"""Benchmarks of the router and the fleet, real and simulated."""
