"""Experiments on one host: which servers are started with which flags, the loads on them, and the results."""
