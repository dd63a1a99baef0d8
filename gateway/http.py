"""The HTTP surface: which path does what. docs/protocol.md has every field.

Starlette only finds the route; requests are read and answered on the bare ASGI messages (see `exchange`), so that a
chunk of a stream costs one prepared write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import uvicorn
from starlette.routing import Route, Router

from headrace.gateway import openai_types
from headrace.gateway.chat_output import ChatChoice, WholeChat
from headrace.gateway.choice import Piece
from headrace.gateway.conversation import conversation_of
from headrace.gateway.detokenizer import detokenize
from headrace.gateway.exchange import Exchange, HttpError, Message, Receive, Send, draining
from headrace.gateway.formats import Formats
from headrace.gateway.generation import Account, Generator, Plan, Usage
from headrace.gateway.logs import request_id_var
from headrace.gateway.metrics import CONTENT_TYPE, Metrics
from headrace.gateway.models import Models
from headrace.gateway.openai_answers import (
    ChatLogprobs,
    ChatStream,
    CompletionLogprobs,
    CompletionStream,
    WholeChoice,
    encode,
    identity,
    model_value,
    token_bytes_of,
    whole_chat,
    whole_completion,
)
from headrace.gateway.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from headrace.gateway.planning import Chats, plan_of
from headrace.gateway.prompts import Prompts
from headrace.gateway.sampling import invalid
from headrace.gateway.tools import schemas_of
from headrace.gateway.upstream import Upstream
from headrace.protos.status import Reason, StatusError

KEEP_CONNECTION_S = 75
_LOG = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]


class _Stream(Protocol):
    """Makes the events of a streamed answer, of pieces or of what readers make of them."""

    def piece(self, index: int, piece: Any) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...


class _Whole(Protocol):
    """Gathers one choice of an answer that is not streamed."""

    def push(self, piece: Any) -> None: ...


class HttpEdge:
    """The ASGI application."""

    def __init__(
        self,
        models: Models,
        prompts: Prompts,
        generator: Generator,
        upstream: Upstream,
        metrics: Metrics,
        formats: Formats | None = None,
    ) -> None:
        """Without `formats`, chat templates tell how models write tool calls and reasoning."""
        self._models = models
        self._chats = Chats(models, prompts, formats or Formats())
        self._prompts = prompts
        self._generator = generator
        self._upstream = upstream
        self._metrics = metrics
        self._running: set[Exchange] = set()
        routes = [
            self._route("POST", f"{prefix}{path}", name, handler)
            for prefix in ("/v1", "/v3")
            for path, name, handler in (
                ("/chat/completions", "chat", self._chat),
                ("/completions", "completions", self._completions),
            )
        ]
        routes += [
            self._route("GET", f"{prefix}{path}", "models", handler)
            for prefix in ("/v1", "/v3")
            for path, handler in (("/models", self._list_models), ("/models/{name:path}", self._get_model))
        ]
        routes += [
            self._route("POST", "/tokenize", "tokenize", self._tokenize),
            self._route("POST", "/detokenize", "detokenize", self._detokenize),
            self._route("GET", "/metrics", "metrics", self._show_metrics),
        ]
        routes += [
            self._route("GET", f"{prefix}/health/{path}", "health", handler)
            for prefix in ("", "/v2")
            for path, handler in (("live", self._live), ("ready", self._ready))
        ]
        unknown = _Endpoint(self, "unknown", None, self._unknown_path)
        self._router = Router(routes, redirect_slashes=False, default=unknown)

    def _route(self, method: str, path: str, name: str, handler: Handler) -> Route:
        return Route(path, _Endpoint(self, name, method, handler))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._router(scope, receive, send)

    def interrupt(self) -> None:
        """End all requests that are still being answered, with an error that says the gateway stops."""
        for exchange in list(self._running):
            exchange.interrupt()

    async def answer(self, exchange: Exchange, name: str, handler: Handler) -> None:
        """Run a handler; whatever goes wrong becomes an error of the one shape. Counts the outcome."""
        outcome = "ok"
        self._running.add(exchange)
        self._metrics.in_flight.inc()
        request_id_var.set(exchange.caller.request_id)
        try:
            try:
                await handler(exchange)
            except asyncio.CancelledError:
                outcome = "cancelled"
                task = asyncio.current_task()
                if exchange.disconnected:
                    if task is not None:
                        task.uncancel()
                    return
                if not exchange.interrupted:
                    raise
                if task is not None:
                    task.uncancel()
                raise draining() from None
        except HttpError as error:
            outcome = error.code
            await exchange.fail(error)
        except StatusError as error:
            outcome = error.reason.name.lower()
            if error.row.http_status >= 500:
                _LOG.warning("%s failed: %s", name, error.message)
            await exchange.fail(error)
        except Exception:
            outcome = "internal"
            _LOG.exception("%s failed", name)
            await exchange.fail(StatusError(Reason.INTERNAL, "the gateway failed; its log has the reason"))
        finally:
            self._running.discard(exchange)
            self._metrics.in_flight.dec()
            self._metrics.request_ended(name, outcome, time.monotonic() - exchange.caller.arrived_s)
            await exchange.close()

    # --- generation -------------------------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        request = openai_types.decode_body(await exchange.body(), ChatRequest)
        chat = await self._chats.plan(request)
        model, plan, reading = chat.model, chat.plan, chat.reading
        who = identity("chatcmpl", plan.requests[0].request_id, int(time.time()), model.card)
        logprobs = ChatLogprobs(model.text.tokenizer.token_bytes) if request.logprobs else None
        if request.stream:
            stream = ChatStream(who, logprobs, _wants_usage(request), reading.num_id_chars)
            await self._stream(exchange, [plan], stream, chat.choices())
        else:
            chats = [WholeChat(reading.num_id_chars) for _ in plan.requests]
            usage = await self._gather(exchange, [plan], chats, chat.choices())
            await exchange.respond(whole_chat(who, chats, logprobs, usage))

    async def _completions(self, exchange: Exchange) -> None:
        request = openai_types.decode_body(await exchange.body(), CompletionRequest)
        openai_types.check_completion(request)
        model = await self._models.find(request.model or "")
        tokenizer = model.text.tokenizer
        plans: list[Plan] = []
        echoes: list[str] = []
        for prompt in openai_types.prompts_of(request):
            if isinstance(prompt, str):
                add_special_tokens = request.add_special_tokens is not False
                token_ids = await self._prompts.of_text(model, prompt, add_special_tokens=add_special_tokens)
                echo = prompt
            else:
                token_ids = prompt
                echo = detokenize(prompt, tokenizer.token_bytes, tokenizer.special_ids) if request.echo else ""
            plans.append(plan_of(request, model, token_ids))
            echoes += [echo] * plans[-1].job.num_choices
        if not request.echo:
            echoes = []
        who = identity("cmpl", plans[0].requests[0].request_id, int(time.time()), model.card)
        logprobs = None if request.logprobs is None else CompletionLogprobs(tokenizer.token_bytes)
        if request.stream:
            await self._stream(exchange, plans, CompletionStream(who, logprobs, _wants_usage(request), echoes))
        else:
            choices = [WholeChoice() for plan in plans for _ in plan.requests]
            usage = await self._gather(exchange, plans, choices)
            await exchange.respond(whole_completion(who, choices, logprobs, usage, echoes))

    async def _stream(
        self,
        exchange: Exchange,
        plans: Sequence[Plan],
        stream: _Stream,
        readers: Sequence[ChatChoice] = (),
    ) -> None:
        """Answer with a stream. `readers`, one for each choice, make of its pieces what the stream takes."""
        account = Account(plans)
        keep_alive = asyncio.create_task(exchange.keep_alive())
        try:
            async with aclosing(self._generator.stream(plans, exchange.caller)) as pieces:
                async for index, piece in pieces:
                    read = readers[index].push(piece) if readers else piece
                    events = stream.piece(index, read)
                    if read.ending is not None:
                        account.ended(index, read.ending)
                        if not account.num_open:
                            break
                    if events:
                        await exchange.write(events)
            await exchange.write(events + stream.end(account.usage), last=True)
        finally:
            keep_alive.cancel()

    async def _gather(
        self,
        exchange: Exchange,
        plans: Sequence[Plan],
        choices: Sequence[_Whole],
        readers: Sequence[ChatChoice] = (),
    ) -> Usage:
        """Fill the choices. `readers`, one for each choice, make of its pieces what the choice takes."""
        account = Account(plans)
        pieces: AsyncGenerator[tuple[int, Piece], None] = self._generator.stream(plans, exchange.caller)
        async with aclosing(pieces):
            async for index, piece in pieces:
                read = readers[index].push(piece) if readers else piece
                choices[index].push(read)
                if read.ending is not None:
                    account.ended(index, read.ending)
        return account.usage

    # --- models, tokens, state --------------------------------------------------------------------------------------

    async def _list_models(self, exchange: Exchange) -> None:
        cards = [model_value(model.card) for model in await self._models.listed()]
        await exchange.respond(encode({"object": "list", "data": cards}))

    async def _get_model(self, exchange: Exchange) -> None:
        model = await self._models.find(exchange.scope["path_params"]["name"])
        await exchange.respond(encode(model_value(model.card)))

    async def _tokenize(self, exchange: Exchange) -> None:
        request = openai_types.decode_body(await exchange.body(), TokenizeRequest)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        openai_types.check_tokenize(request)
        model = await self._models.find(request.model or "")
        if request.prompt is not None:
            add_special_tokens = request.add_special_tokens is not False
            token_ids = await self._prompts.of_text(model, request.prompt, add_special_tokens=add_special_tokens)
        else:
            tools = request.tools or ()
            schemas_of(tools)
            conversation = conversation_of(request, model.chat_template(), tools)
            prompt = await self._prompts.of_conversation(model, conversation)
            token_ids = list(prompt.token_ids)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": model.card.max_context_tokens,
            "tokens": token_ids,
            "token_strs": None,
        }
        if request.return_token_strs:
            table = model.text.tokenizer.token_bytes
            answer["token_strs"] = [token_bytes_of(table, i).decode(errors="replace") for i in token_ids]
        await exchange.respond(encode(answer))

    async def _detokenize(self, exchange: Exchange) -> None:
        request = openai_types.decode_body(await exchange.body(), DetokenizeRequest)
        model = await self._models.find(request.model or "")
        if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) < model.card.vocab_size:
            raise invalid("tokens", f"tokens must be from 0 to {model.card.vocab_size - 1}")
        await exchange.respond(encode({"prompt": detokenize(request.tokens, model.text.tokenizer.token_bytes)}))

    async def _show_metrics(self, exchange: Exchange) -> None:
        try:
            workers = await self._upstream.list_workers()
        except StatusError as error:
            _LOG.debug("the workers cannot be listed: %s", error.message)
            workers = []
        await exchange.respond(self._metrics.exposition(workers), content_type=CONTENT_TYPE.encode())

    async def _live(self, exchange: Exchange) -> None:
        await exchange.respond(encode({"status": "live"}))

    async def _ready(self, exchange: Exchange) -> None:
        ready = self._models.ready
        body = {"status": "ready" if ready else "no model can be asked for"}
        await exchange.respond(encode(body), status=200 if ready else 503)

    async def _unknown_path(self, exchange: Exchange) -> None:
        path = exchange.scope["path"][:200]
        raise StatusError(Reason.NOT_FOUND, f"there is nothing at {path}; the API is at /v1, such as /v1/models")


class _Endpoint:
    """A route's ASGI application: checks the method and hands the exchange to the edge."""

    def __init__(self, edge: HttpEdge, name: str, method: str | None, handler: Handler) -> None:
        self._edge = edge
        self._name = name
        self._methods = {"GET": ("GET", "HEAD"), "POST": ("POST",)}.get(method or "", ())
        self._handler = handler

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        handler = self._handler
        if self._methods and scope["method"] not in self._methods:
            handler = self._wrong_method
        await self._edge.answer(Exchange(scope, receive, send), self._name, handler)

    async def _wrong_method(self, exchange: Exchange) -> None:
        allowed = ", ".join(self._methods)
        message = f"{exchange.scope['method'][:20]} is not allowed here; use {self._methods[0]}"
        raise HttpError(405, "method_not_allowed", message, [(b"allow", allowed.encode())])


def _wants_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


class HttpServer(uvicorn.Server):
    """The server of an `HttpEdge`. Signals are the caller's business: it sets `should_exit`."""

    def __init__(self, edge: HttpEdge, stop_timeout_s: int) -> None:
        config = uvicorn.Config(
            edge,
            http="httptools",
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_CONNECTION_S,
            timeout_graceful_shutdown=stop_timeout_s,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address, so that whether it is free is known before anything else starts.

    Port 0 binds any free port. Raises `OSError`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound
