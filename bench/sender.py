"""Sends requests of one API over one client, and completes their records."""

from __future__ import annotations

from headrace.bench.apis import Api, Options, Prompt
from headrace.bench.connection import Client, ExchangeError
from headrace.bench.record import Record
from headrace.bench.stream import Stream


class HttpSender:
    """See `load.Sender`."""

    def __init__(self, client: Client, api: Api, options: Options) -> None:
        self._client = client
        self._api = api
        self._options = options
        self._path = api.path(options.model)

    def prepared(self, prompt: Prompt) -> bytes:
        """Head and body."""
        return self._client.target.request("POST", self._path, self._api.body(prompt, self._options))

    async def send(self, request: bytes, record: Record) -> None:
        """Send it and read the whole answer."""
        stream = Stream(self._api, record)
        try:
            await self._client.exchange(request, stream)
        except ExchangeError as error:
            if not record.error_kind:
                record.error_kind, record.error = error.kind, str(error)
        else:
            stream.ended()
