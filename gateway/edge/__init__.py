"""Bytes in and out: HTTP connections, bodies, TLS, and how failures look."""
