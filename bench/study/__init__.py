"""Experiments on one host: which servers are started with which flags, the loads on them, and what comes of it."""
