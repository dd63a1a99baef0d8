"""An MCP server for tests: Streamable HTTP with sessions, whose answers are JSON or server-sent events."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from tests.patience import patience

ADD = {
    "name": "add",
    "description": "Add two numbers",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "annotations": {"readOnlyHint": True},
}
FAIL = {"name": "fail", "inputSchema": {"type": "object", "properties": {}}}
SLOW = {"name": "slow", "inputSchema": {"type": "object", "properties": {}}}
SAY = {"name": "say", "inputSchema": {"type": "object", "properties": {"kind": {"type": "string"}}}}
SAID: dict[str, Any] = {
    "parts": {
        "content": [
            {"type": "text", "text": "one é😀"},
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "file:///a", "text": "two"}},
            {"type": "resource_link", "uri": "file:///b", "name": "b"},
        ]
    },
    "structured": {"content": [], "structuredContent": {"x": 1}},
    "much": {"content": [{"type": "text", "text": "x" * 70_000}]},
    "nothing": {},
}


class McpServer:
    """What the server does, and what it was asked. `reset` between tests."""

    def __init__(self) -> None:
        self.url = ""
        # Not begun anew: a session of an earlier test may still be about to end.
        self.session_ids = (f"session-{number}" for number in itertools.count())
        self.reset()

    def reset(self) -> None:
        """Forget everything, and be as at the beginning."""
        self.tools: list[Any] = [ADD, FAIL, SLOW, SAY]
        self.events = False
        """Answer with server-sent events rather than JSON."""
        self.page = 100
        self.status = 0
        """Answer with this status, if it is not 0."""
        self.headers: dict[str, str] = {}
        self.body: bytes | None = None
        """Answer requests with this JSON."""
        self.version = "2025-06-18"
        self.has_sessions = True
        self.pings = False
        """Ask the client something in each stream."""
        self.seen: list[tuple[str, Any, dict[str, str]]] = []
        """Method of HTTP, message and headers of each request."""
        self.accepted = ""
        """Refuse requests without this value of the header Authorization, if it is not empty."""
        self.token_answer: tuple[int, Any] = (200, {"access_token": "one", "token_type": "Bearer", "expires_in": 3600})
        """Status and JSON of the answer to a request for a token."""
        self.token_requests: list[tuple[dict[str, str], str]] = []
        """The form and the header Authorization of each request for a token."""
        self.cancelled = threading.Event()
        self.called_slow = threading.Event()
        self.open: set[str] = set()
        """The ids of sessions that have not ended."""

    def methods(self) -> list[str]:
        """The methods of the requests and notifications so far."""
        return [message.get("method", "answer") for kind, message, _ in self.seen if kind == "POST"]

    def sent(self, method: str) -> list[Any]:
        """The messages of this method so far."""
        return [message for _, message, _ in self.seen if message.get("method") == method]

    def result(self, message: Any) -> dict[str, Any]:
        """The result of a request, or its error."""
        params = message.get("params", {})
        match message["method"]:
            case "initialize":
                info = {"name": "tests", "version": "1"}
                return {"result": {"protocolVersion": self.version, "capabilities": {"tools": {}}, "serverInfo": info}}
            case "tools/list":
                first = int(params.get("cursor", 0))
                found: dict[str, Any] = {"tools": self.tools[first : first + self.page]}
                if first + self.page < len(self.tools):
                    found["nextCursor"] = str(first + self.page)
                return {"result": found}
            case "tools/call":
                return self._called(params["name"], params["arguments"])
        return {"error": {"code": -32601, "message": "no such method"}}

    def _called(self, name: str, arguments: Any) -> dict[str, Any]:
        if name == "add" and "a" not in arguments:
            return {"error": {"code": -32602, "message": "a is required"}}
        if name == "add":
            return {"result": {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}}
        if name == "say":
            return {"result": SAID[arguments["kind"]]}
        if name == "slow":
            self.called_slow.set()
            self.cancelled.wait(patience(20))
        return {"result": {"content": [{"type": "text", "text": "it broke"}], "isError": True}}


@contextmanager
def serving_mcp() -> Iterator[McpServer]:
    """The server on a port of loopback."""
    server = McpServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/token":
                server.token_requests.append((dict(parse_qsl(body.decode())), self.headers["Authorization"]))
                status, answer = server.token_answer
                self._answer(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})
                return
            message = json.loads(body)
            self._seen("POST", message)
            if server.accepted and self.headers.get("Authorization") != server.accepted:
                self._answer(401)
            elif server.status:
                self._answer(server.status)
            elif message.get("method") == "initialize":
                session = next(server.session_ids) if server.has_sessions else ""
                server.open.add(session)
                self._result(message, {"Mcp-Session-Id": session} if session else {})
            elif server.has_sessions and self.headers.get("Mcp-Session-Id") not in server.open:
                self._answer(404)
            elif "id" in message and "method" in message:
                self._result(message, {})
            else:
                if message.get("method") == "notifications/cancelled":
                    server.cancelled.set()
                self._answer(202)

        def do_DELETE(self) -> None:
            self._seen("DELETE", {})
            server.open.discard(self.headers.get("Mcp-Session-Id", ""))
            self._answer(204)

        def _seen(self, kind: str, message: Any) -> None:
            server.seen.append((kind, message, {name.lower(): value for name, value in self.headers.items()}))

        def _result(self, message: Any, headers: dict[str, str]) -> None:
            answer = {"jsonrpc": "2.0", "id": message["id"], **server.result(message)}
            body = json.dumps(answer).encode() if server.body is None else server.body
            if not server.events:
                self._answer(200, body, {"Content-Type": "application/json", **headers, **server.headers})
                return
            asked = b'{"jsonrpc":"2.0","id":"p","method":"ping"}'
            before = b"event: message\r\ndata: " + asked + b"\r\n\r\n" if server.pings else b""
            progress = b': hello\n\nid: 7\ndata: {"jsonrpc":"2.0",\ndata: "method":"notifications/progress"}\n\n'
            events = before + progress + b"data: " + body + b"\n\n"
            self._answer(200, events, {"Content-Type": "text/event-stream", **headers, **server.headers})

        def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **(headers or {}), **server.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # the client did not wait
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/mcp"
    try:
        yield server
    finally:
        server.cancelled.set()
        http.shutdown()
        http.server_close()
        thread.join()
