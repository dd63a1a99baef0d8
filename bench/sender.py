"""Sends requests of one API over one client, and completes their records."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from headrace.bench.apis import Api, Options, Prompt
from headrace.bench.connection import Client, ExchangeError
from headrace.bench.record import Record
from headrace.bench.stream import Stream
from headrace.bench.target import with_body


class HttpSender:
    """See `load.Sender`. Conversations ask one of `models`, in turn or at random, or the one of `options` if there are
    none. Requests carry an id that begins with `id_prefix`, if it is not empty. `stream_of` makes what reads an answer
    into its record."""

    def __init__(
        self,
        client: Client,
        api: Api,
        options: Options,
        models: Sequence[str] = (),
        id_prefix: str = "",
        chance: random.Random | None = None,
        stream_of: Callable[[Api, Record], Stream] = Stream,
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

    async def send(self, request: bytes, record: Record) -> None:
        """Send it and read the whole answer."""
        stream = self._stream_of(self._api, record)
        try:
            await self._client.exchange(request, stream)
        except ExchangeError as error:
            if not record.error_kind:
                record.error_kind, record.error = error.kind, str(error)
        else:
            stream.ended()
