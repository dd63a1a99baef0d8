"""Sends requests of one API over one client, and completes their records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.bench.apis import Api, Options, Prompt
from headrace.bench.connection import Client, Exchange
from headrace.bench.record import Record
from headrace.bench.stream import Stream
from headrace.bench.target import with_body


class Sent(Protocol):
    """A request that was sent."""

    def cancel(self) -> object:
        """Abandon it: its end is not told. Does nothing after its end."""


class Sender(Protocol):
    """Sends requests and records their answers."""

    def prepared(self, prompt: Prompt) -> bytes:
        """The request as bytes, made before it is due."""

    def start(self, request: bytes, record: Record, answered: Callable[[], None], may_wait: bool = False) -> Sent:
        """Send it. `answered` is called later, at the end of the answer, or up to a second after it if it `may_wait`.
        Failures go into the record."""

    def read(self) -> None:
        """Complete the records of all answers that have arrived."""


async def ask(sender: Sender, request: bytes, record: Record) -> None:
    """Send a request, and wait for the end of its answer."""
    end = asyncio.Event()
    sent = sender.start(request, record, end.set)
    try:
        await end.wait()
    finally:
        sent.cancel()


class HttpSender:
    """See `Sender`. Conversations ask one of `models`, in turn or at random, or the one of `options` if there are
    none. Requests carry an id that begins with `id_prefix`, if it is not empty. `stream_of` makes what reads an answer
    into its record, and then makes a call."""

    def __init__(
        self,
        client: Client,
        api: Api,
        options: Options,
        models: Sequence[str] = (),
        id_prefix: str = "",
        chance: random.Random | None = None,
        stream_of: Callable[[Api, Record, Callable[[], None]], Stream] = Stream,
    ) -> None:
        self._client = client
        self._api = api
        self._options = [options._replace(model=model) for model in models] or [options]
        self._id_prefix = id_prefix
        self._chance = chance
        self._stream_of = stream_of
        self._chosen: dict[int, Options] = {}
        self._num_prepared = 0
        self._heads: dict[str, bytes] = {}
        """Heads of requests, by model."""

    def prepared(self, prompt: Prompt) -> bytes:
        """Head and body."""
        options = self._options_of(prompt.number)
        head = self._heads.get(options.model)
        if head is None:
            head = self._heads[options.model] = self._client.target.head("POST", self._api.path(options.model))
        if self._id_prefix:
            head = b"%bx-request-id: %b%d\r\n" % (head, self._id_prefix.encode(), self._num_prepared)
            self._num_prepared += 1
        return with_body(head, self._api.body(prompt, options))

    def _options_of(self, conversation: int) -> Options:
        if self._chance is None or len(self._options) == 1:
            return self._options[conversation % len(self._options)]
        if conversation not in self._chosen:
            self._chosen[conversation] = self._chance.choice(self._options)
        return self._chosen[conversation]

    def start(self, request: bytes, record: Record, answered: Callable[[], None], may_wait: bool = False) -> Exchange:
        """Send it."""
        return self._client.start(request, self._stream_of(self._api, record, answered), may_wait)

    def read(self) -> None:
        """Read all that has arrived."""
        self._client.read()
