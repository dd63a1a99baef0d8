"""A server that answers chats as a gateway does, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import body_of, http_server, respond


class ChatServer:
    """A server that answers each question with its last message reversed. `asked` records the requests."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.refusal: tuple[int, str] | None = None
        self.break_off = False
        self.invalid = ""
        self.reasoning = ""
        self.hold = False
        """Whether an answer stops after its first letter, until the client has gone."""

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        content = body["messages"][-1]["content"]
        text = (content if isinstance(content, str) else content[-1]["text"])[::-1]
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None}
        if self.reasoning:
            yield {"choices": [{"index": 0, "delta": {"reasoning_content": self.reasoning}}], "usage": None}
        for letter in text:
            yield {"choices": [{"index": 0, "delta": {"content": letter}}], "usage": None}
        if not self.break_off:
            yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}
            yield {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": len(text)}}


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    """A running server."""
    state = ChatServer()

    def list_models(handler: BaseHTTPRequestHandler) -> None:
        if state.refusal is not None and state.refusal[0] == 401:
            respond(handler, 401)
            return
        respond(handler, 200, json.dumps({"data": [{"id": "m1"}, {"id": "m2"}]}).encode())

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(body_of(handler))
        state.asked.append(body)
        if state.refusal is not None:
            status, message = state.refusal
            respond(handler, status, json.dumps({"error": {"message": message}}).encode())
            return
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in state.events(body)]
        lines += [f"data: {state.invalid}\n\n"] if state.invalid else []
        end = "" if state.break_off else "data: [DONE]\n\n"
        if state.hold:
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write("".join(lines[:2]).encode())
            handler.wfile.flush()
            handler.rfile.read(1)  # the client sends nothing more, and goes
            handler.close_connection = True
            return
        respond(handler, 200, (": keep-alive\n\n" + "".join(lines) + end).encode())

    with http_server(list_models, answer) as state.url:
        yield state
