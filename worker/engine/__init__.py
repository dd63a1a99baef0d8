"""Continuous batching: requests, the scheduler, the cost of steps, and the thread that runs steps."""
