"""Ports for servers of tests."""

from __future__ import annotations

from headrace.common import ports


def free_port(host: str = "127.0.0.1") -> int:
    """A free TCP port, which no outgoing connection takes before the server listens on it."""
    return ports.free_port(host)
