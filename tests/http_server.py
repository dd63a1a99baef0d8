"""HTTP servers on loopback for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

Answer: TypeAlias = Callable[[BaseHTTPRequestHandler], None]
"""Answers one request; see `respond`. Requests may come from several threads."""


def respond(
    handler: BaseHTTPRequestHandler,
    status: int,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    cut: int | None = None,
) -> None:
    """Send a response. With `cut`, close the connection after that many bytes of the body."""
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command == "HEAD":
        return
    handler.wfile.write(body if cut is None else body[:cut])
    if cut is not None:
        handler.close_connection = True


def body_of(handler: BaseHTTPRequestHandler) -> bytes:
    """The body of a request."""
    return handler.rfile.read(int(handler.headers["Content-Length"]))


def _not_found(handler: BaseHTTPRequestHandler) -> None:
    respond(handler, 404)


@contextmanager
def http_server(get: Answer = _not_found, post: Answer = _not_found) -> Iterator[str]:
    """Serve GET, HEAD and POST requests. Yields the URL of the server, without a path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            get(self)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            post(self)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
