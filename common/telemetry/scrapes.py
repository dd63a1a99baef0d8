"""Metrics over plain HTTP, for Prometheus."""

from __future__ import annotations

import logging
from typing import Any

PATIENCE_S = 10.0
"""Maximum time for which a scraper may send nothing, or read nothing of an answer."""
_LOG = logging.getLogger(__name__)


def serve_scrapes(host: str, port: int, registry: Any) -> int:
    """Serve a registry of prometheus_client in separate threads. Returns the port.

    Raises OSError if the address cannot be used.
    """
    # Imported late: this takes a while.
    from prometheus_client import start_http_server

    server, _ = start_http_server(port, host, registry=registry)
    # Without a time limit, each silent connection would keep a thread.
    server.RequestHandlerClass = type("Handler", (_handler_of(server),), {"timeout": PATIENCE_S})
    # The default would write a traceback for each scraper that disconnects.
    server.handle_error = _note  # type: ignore[method-assign]
    return server.server_port


def _handler_of(server: Any) -> type:
    handler: type = server.RequestHandlerClass
    return handler


def _note(request: Any, client_address: Any) -> None:
    _LOG.debug("a scrape from %s failed", client_address, exc_info=True)
