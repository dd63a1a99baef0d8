"""openvino-genai's ContinuousBatchingPipeline behind a thin HTTP server: `python genai_server.py MODEL_DIR ...`.

It runs in an environment that has openvino-genai and uvicorn, which need not be that of headrace, so it imports nothing
of it. There is as little around the pipeline as possible: one thread drives its steps; another turns tokens into text,
those of all streams of a step in one call; the event loop writes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it would report each import over the network

import openvino_genai as genai  # noqa: E402
import uvicorn  # noqa: E402

_BLOCK_TOKENS = 32
_TOKENS_A_STEP = 256
_TAIL = 12
_FINISHED = {genai.GenerationFinishReason.STOP: "stop", genai.GenerationFinishReason.LENGTH: "length"}


@dataclass
class Text:
    """The text of an answer. Only its last tokens, `tail`, are decoded again; `said` of their text has been sent."""

    tail: list[int] = field(default_factory=list)
    said: str = ""

    def more(self, decoded: str, is_last: bool, decode: Callable[[list[list[int]]], list[str]]) -> str:
        """The new text of the decoded tail. A character of several tokens is held back until its last token."""
        if decoded.endswith("\ufffd") and not is_last:
            return ""
        new = decoded[len(self.said) :]
        self.said = decoded
        if len(self.tail) > _TAIL:
            # The last token stays, because the text of a first token may differ from that of a later one. One that is
            # only the end of a character has no text of its own.
            (last,) = decode([self.tail[-1:]])
            if last and "\ufffd" not in last:
                self.tail, self.said = self.tail[-1:], last
        return new


@dataclass
class _Stream:
    """An answer."""

    handle: Any
    num_prompt_tokens: int
    pieces: asyncio.Queue[tuple[str, int, str]] = field(default_factory=asyncio.Queue)
    text: Text = field(default_factory=Text)


class _Engine:
    """Drives the pipeline as long as there are requests."""

    def __init__(self, pipeline: Any, tokenizer: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._loop = loop
        self._streams: dict[int, _Stream] = {}
        self._wake = threading.Condition()
        self._new: queue.SimpleQueue[tuple[int, Any, Any, asyncio.Future[_Stream]]] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[list[tuple[_Stream, list[int], str]]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        threading.Thread(target=self._drive, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    async def begin(self, prompt: str, config: Any) -> _Stream:
        """Add a request. Raises ValueError if the pipeline refuses it."""
        inputs = self._tokenizer.encode(prompt).input_ids
        added: asyncio.Future[_Stream] = self._loop.create_future()
        with self._wake:
            self._new.put((next(self._numbers), inputs, config, added))
            self._wake.notify()
        return await added

    def _drive(self) -> None:
        while True:
            with self._wake:
                while not self._streams and self._new.empty():
                    self._wake.wait()
            while not self._new.empty():
                self._add(*self._new.get())
            if not self._streams:
                continue
            self._pipeline.step()
            made = []
            for number, stream in list(self._streams.items()):
                tokens: list[int] = []
                reason = ""
                while stream.handle.can_read():
                    for output in stream.handle.read().values():
                        tokens += output.generated_ids
                        reason = _FINISHED.get(output.finish_reason, "")
                if stream.handle.get_status() != genai.GenerationStatus.RUNNING:
                    del self._streams[number]
                    reason = reason or "stop"
                if tokens or reason:
                    made.append((stream, tokens, reason))
            if made:
                self._steps.put(made)

    def _add(self, number: int, inputs: Any, config: Any, added: asyncio.Future[_Stream]) -> None:
        try:
            stream = _Stream(self._pipeline.add_request(number, inputs, config), inputs.get_shape()[-1])
        except RuntimeError as error:
            self._loop.call_soon_threadsafe(added.set_exception, ValueError(str(error)))
            return
        self._streams[number] = stream
        self._loop.call_soon_threadsafe(added.set_result, stream)

    def _write(self) -> None:
        while True:
            made = self._steps.get()
            for stream, tokens, _ in made:
                stream.text.tail += tokens
            decode = self._tokenizer.decode
            decoded = decode([stream.text.tail for stream, _, _ in made])
            pieces = [
                (stream, (stream.text.more(tail, bool(reason), decode), len(tokens), reason))
                for (stream, tokens, reason), tail in zip(made, decoded, strict=True)
            ]
            self._loop.call_soon_threadsafe(_hand_over, pieces)


def _hand_over(pieces: list[tuple[_Stream, tuple[str, int, str]]]) -> None:
    for stream, piece in pieces:
        stream.pieces.put_nowait(piece)


class _Api:
    """POST /v1/completions and /v1/chat/completions, GET /v1/models. An ASGI application."""

    def __init__(self, name: str, pipeline: Any, tokenizer: Any) -> None:
        self._name = name
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._engine: _Engine | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._engine is None:
            self._engine = _Engine(self._pipeline, self._tokenizer, asyncio.get_running_loop())
        if scope["path"] == "/v1/models":
            await _whole(send, 200, {"object": "list", "data": [{"id": self._name, "object": "model"}]})
            return
        is_chat = scope["path"] == "/v1/chat/completions"
        if scope["method"] != "POST" or not (is_chat or scope["path"] == "/v1/completions"):
            await _whole(send, 404, _error("there is no such endpoint"))
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        try:
            body = json.loads(raw)
            prompt = self._tokenizer.apply_chat_template(body["messages"], True) if is_chat else body["prompt"]
            stream = await self._engine.begin(prompt, _config(body))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            await _whole(send, 400, _error(f"{type(error).__name__}: {error}"))
            return
        answer = (
            self._stream(send, stream, body, is_chat) if body.get("stream") else self._answer(send, stream, is_chat)
        )
        writing = asyncio.create_task(answer)
        gone = asyncio.create_task(_until_gone(receive))
        await asyncio.wait((writing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():  # the client has left; nobody else wants the answer
            stream.handle.cancel()
            writing.cancel()
        gone.cancel()

    async def _stream(self, send: Any, stream: _Stream, body: dict[str, Any], is_chat: bool) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": "cmpl", "object": kind, "created": int(time.time()), "model": self._name}
        count = 0
        reason = ""
        while not reason:
            text, num_tokens, reason = await stream.pieces.get()
            count += num_tokens
            if text or reason:
                await _event(send, {**head, "choices": [_choice(text, reason or None, is_chat, "delta")]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await _event(send, {**head, "choices": [], "usage": _usage(stream, count)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _answer(self, send: Any, stream: _Stream, is_chat: bool) -> None:
        pieces: list[tuple[str, int, str]] = []
        while not pieces or not pieces[-1][2]:
            pieces.append(await stream.pieces.get())
        text = "".join(piece[0] for piece in pieces)
        usage = _usage(stream, sum(piece[1] for piece in pieces))
        kind = "chat.completion" if is_chat else "text_completion"
        choice = _choice(text, pieces[-1][2], is_chat, "message")
        head = {"id": "cmpl", "object": kind, "created": int(time.time()), "model": self._name}
        await _whole(send, 200, {**head, "choices": [choice], "usage": usage})


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _config(body: dict[str, Any]) -> Any:
    """The request's parameters. Raises TypeError or ValueError."""
    config = genai.GenerationConfig()
    config.max_new_tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
    config.ignore_eos = bool(body.get("ignore_eos"))
    temperature = float(body.get("temperature", 1.0))
    config.do_sample = temperature > 0
    if config.do_sample:
        config.temperature = temperature
        config.top_p = float(body.get("top_p", 1.0))
        config.rng_seed = int(body.get("seed") or time.monotonic_ns() % (1 << 31))
    config.apply_chat_template = False
    return config


def _choice(text: str, reason: str | None, is_chat: bool, where: str) -> dict[str, Any]:
    content = {where: {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def _usage(stream: _Stream, count: int) -> dict[str, int]:
    prompt = stream.num_prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


async def _event(send: Any, chunk: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": b"data: %s\n\n" % json.dumps(chunk).encode(), "more_body": True})


async def _whole(send: Any, status: int, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--kv-token-bytes", type=int, required=True)
    args = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = args.kv_bytes // (args.kv_token_bytes * _BLOCK_TOKENS)
    scheduler.max_num_seqs = args.max_num_seqs
    scheduler.max_num_batched_tokens = _TOKENS_A_STEP
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(args.model_dir, scheduler, "CPU", {"KV_CACHE_PRECISION": "u8"}, {})
    application = _Api(args.name, pipeline, pipeline.get_tokenizer())
    uvicorn.run(
        application,
        host="127.0.0.1",
        port=args.port,
        http="httptools",
        loop="uvloop",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
