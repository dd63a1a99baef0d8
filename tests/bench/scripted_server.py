"""A server with a script: every answer's pieces come at known times, cheaply enough for thousands a second.

Run as a process (`python -m tests.bench.scripted_server`), it prints its port. The model of a request says what
happens, as in `ttft=100,gap=20`; see `Script`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import uvloop


@dataclass(frozen=True)
class Script:
    """What an answer is. Times are in milliseconds.

    `short` tokens less than asked for, `usage` 0: none is sent, `status` other than 200 refuses, `cut`: the connection
    is closed after so many pieces, `role` 1: a piece without content comes at once, `empty` 1: pieces have no text,
    `same` 1: all answers are the same, `bad` 1: one event is no JSON, `close` 1: no kept connections, `split` 1: events
    come in two parts, `reason` 0: no finish reason, `joined` 1: it comes with the last text instead of behind it,
    `seen`: prompt tokens in the usage (0: words of the prompt), `cached`: tokens of the prompt that were in the cache,
    `drafts` 1: each token had a draft of two tokens, the first of which was right, `stamp` 1: a piece's text is when
    its request came and when it is written, by `time.perf_counter`.
    """

    ttft: float = 0.0
    gap: float = 0.0
    short: int = 0
    usage: int = 1
    status: int = 200
    cut: int = 0
    role: int = 0
    empty: int = 0
    same: int = 0
    bad: int = 0
    close: int = 0
    split: int = 0
    reason: int = 1
    joined: int = 0
    seen: int = 0
    stamp: int = 0
    cached: int = 0
    drafts: int = 0

    @classmethod
    def of(cls, model: str) -> Script:
        """The script in the name of a model; the ordinary one for other names."""
        known = {field.name for field in fields(cls)}
        pairs = [part.split("=") for part in model.split(",") if "=" in part]
        return cls(**{name: float(value) if "." in value else int(value) for name, value in pairs if name in known})


_NUMBERS = itertools.count()
_PROFILED: list[str] = []
_DRAFTED = [0]


def _text(message: dict[str, Any]) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


class _Answer(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, rest = bytes(self._received).partition(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if len(rest) < length:
                return
            self._received = bytearray(rest[length:])
            method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
            self._request(method, path, rest[:length])

    def _whole(self, status: int, body: object, close: bool = False) -> None:
        raw = json.dumps(body).encode()
        extra = b"Connection: close\r\n" if close else b""
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n" % (
            status,
            len(raw),
            extra,
        )
        self._transport.write(head + raw)

    def _metrics(self) -> None:
        (drafts,) = _DRAFTED
        lines = [
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {drafts}.0',
            f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {2 * drafts}.0',
            f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {drafts}.0',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} {drafts}.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 0.0',
        ]
        raw = "\n".join(lines).encode()
        head = b"HTTP/1.1 200 X\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(raw)
        self._transport.write(head + raw)

    def _request(self, method: str, path: str, raw: bytes) -> None:
        if path == "/v1/models":
            self._whole(200, {"object": "list", "data": [{"id": "scripted"}, {"id": "short", "max_model_len": 512}]})
            return
        if path == "/profiled":
            self._whole(200, {"data": [{"id": name} for name in _PROFILED]})
            return
        if path == "/metrics":
            self._metrics()
            return
        if path == "/tokenize":
            # One token around the text, one a word, and one more for a long word.
            words = json.loads(raw)["prompt"].split()
            tokens = 1 + sum(1 + (len(word) > 7) for word in words)
            self._whole(200, {"tokens": [0] * tokens, "count": tokens})
            return
        if method == "GET":
            self._whole(404, {"error": {"message": "not found"}})
            return
        if path in ("/start_profile", "/stop_profile"):
            _PROFILED.append(path)
            self._whole(200, {})
            return
        body = json.loads(raw)
        script = Script.of(body["model"])
        if script.status != 200:
            self._whole(script.status, {"error": {"message": f"scripted {script.status}", "type": "x"}})
            return
        asyncio.get_running_loop().create_task(self._stream(path, body, script, time.perf_counter()))

    async def _stream(self, path: str, body: dict[str, Any], script: Script, start_s: float) -> None:
        chat = "messages" in body
        count = (body.get("max_tokens") or body.get("max_completion_tokens") or 16) - script.short
        close = "Connection: close\r\n" if script.close else ""
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{close}Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        self._transport.write(head)

        def event(content: str, reason: str | None = None) -> bytes:
            part = {"delta": {"content": content}} if chat else {"text": content}
            chunk = {"id": "x", "object": "chunk", "choices": [{"index": 0, **part, "finish_reason": reason}]}
            return b"data: %s\n\n" % json.dumps(chunk).encode()

        def write(raw: bytes) -> None:
            self._transport.write(b"%x\r\n%s\r\n" % (len(raw), raw))

        async def until(due_s: float) -> None:
            # Timers of uvloop are whole milliseconds; the last one is waited out turn by turn.
            while (left_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s - 0.001 if left_s > 0.002 else 0)

        if script.role:
            write(event(""))
        number = next(_NUMBERS)
        for place in range(count):
            await until(start_s + (script.ttft + place * script.gap) / 1000)
            if script.cut and place == script.cut:
                self._transport.close()
                return
            text = "" if script.empty else ("same " if script.same else f"{number}.{place} ")
            if script.stamp:
                text = f"{start_s!r} {time.perf_counter()!r} "
            if script.bad and place == 1:
                write(b"data: {nonsense\n\n")
            raw = event(text, "length" if script.joined and place == count - 1 else None)
            if script.split:
                write(raw[:20])
                await asyncio.sleep(0)
                write(raw[20:])
            else:
                write(raw)
        if script.reason and not script.joined:
            write(event("", "length" if count >= (body.get("max_tokens") or 0) else "stop"))
        if script.drafts:
            _DRAFTED[0] += count
        if script.usage:
            said = " ".join(map(_text, body["messages"])) if chat else body["prompt"]
            prompt = script.seen or 1 + sum(1 + (len(word) > 7) for word in said.split())
            usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
            usage |= {"prompt_tokens_details": {"cached_tokens": script.cached}} if script.cached else {}
            write(b"data: %s\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
        write(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")
        if script.close:
            self._transport.close()


@asynccontextmanager
async def served(port: int) -> AsyncIterator[str]:
    """The server in this process. Yields its URL."""
    server = await asyncio.get_running_loop().create_server(_Answer, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def scripted_server() -> Iterator[str]:
    """The server as a process of its own. Yields its URL."""
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-m", "tests.bench.scripted_server"]
    process = subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    uvloop.run(_serve())
