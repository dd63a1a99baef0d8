"""Metrics and spans of the gateway."""
