"""Continuous batching: requests, the scheduler, what a step costs, and the thread that runs steps."""
