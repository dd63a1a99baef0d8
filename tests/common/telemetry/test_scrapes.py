"""The port for scrapes, beside clients that say nothing."""

from __future__ import annotations

import socket
import threading

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from headrace.common.telemetry import scrapes
from tests.patience import patience
from tests.redis_server import until


def test_silent_connections_end_quietly_and_keep_no_thread(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scrapes, "PATIENCE_S", 2.0)
    registry = CollectorRegistry()
    Gauge("things", "Things", registry=registry).set(3)
    port = scrapes.serve_scrapes("127.0.0.1", 0, registry)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
    for connection in silent[:5]:
        connection.sendall(b"GET / HT")
    until(lambda: num_answering() >= 10, "each has a thread")
    assert "things 3.0" in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=patience(5)).text
    until(lambda: not num_answering(), "no thread is left")
    for connection in silent:
        connection.close()
    assert "Traceback" not in capfd.readouterr().err


def num_answering() -> int:
    """The threads of connections."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())
