"""A proxy that keeps what a client asked and what it was answered. Clients are given its address for the system's."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

BOUND_S = 300
_OF_ONE_HOP = frozenset(("connection", "content-length", "host", "transfer-encoding"))


@dataclass
class Exchange:
    """A request and its answer."""

    method: str
    path: str
    headers: dict[str, str]
    """Those of the request, in lower case."""
    body: bytes
    status: int
    ignored: str
    """The header `x-headrace-ignored` of the answer."""
    answer: bytes

    @property
    def request(self) -> dict[str, Any]:
        """The body of the request as JSON."""
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def usage(self) -> tuple[int, int] | None:
        """Cached tokens of the prompt and all of them, if the answer of a chat says so, streamed or not."""
        texts = [line.removeprefix(b"data: ") for line in self.answer.splitlines() if line.startswith(b"data: {")]
        for text in reversed(texts or [self.answer]):
            if usage := json.loads(text).get("usage"):
                return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0), usage["prompt_tokens"]
        return None


class Recorder:
    """Passes everything on to a server. `exchanges` has what is complete."""

    def __init__(self, base_url: str) -> None:
        self.exchanges: list[Exchange] = []
        self._client = httpx.Client(base_url=base_url, verify=False, trust_env=False, timeout=BOUND_S)
        self._client.headers.clear()  # what the client does not say, the system does not hear
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                recorder._pass_on(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        """The address for the client, without /v1."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def turns(self) -> list[Exchange]:
        """The turns of an agent over the OpenAI API: chats with the tools of the first. Agents also ask for titles of
        conversations, and let others of their prompts look for what is worth to be remembered."""
        chats = [one for one in self.exchanges if one.path == "/v1/chat/completions"]
        tools = [one.request.get("tools") for one in chats]
        first = next((one for one in tools if one), None)
        return [chat for chat, given in zip(chats, tools, strict=True) if given and given == first]

    def end(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._client.close()

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        passed = {name: value for name, value in headers.items() if name not in _OF_ONE_HOP}
        with self._client.stream(handler.command, handler.path, headers=passed, content=body) as answer:
            handler.send_response(answer.status_code)
            for name, value in answer.headers.multi_items():
                if name not in _OF_ONE_HOP:
                    handler.send_header(name, value)
            # The end of the answer is the end of the connection.
            handler.send_header("connection", "close")
            handler.end_headers()
            handler.close_connection = True
            parts = []
            for part in answer.iter_raw():
                parts.append(part)
                handler.wfile.write(part)
                handler.wfile.flush()
        ignored = answer.headers.get("x-headrace-ignored", "")
        made = Exchange(handler.command, handler.path, headers, body, answer.status_code, ignored, b"".join(parts))
        self.exchanges.append(made)


@contextmanager
def recording(base_url: str) -> Iterator[Recorder]:
    """A recorder in front of a server."""
    recorder = Recorder(base_url)
    try:
        yield recorder
    finally:
        recorder.end()
