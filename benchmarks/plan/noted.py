"""The token ids of requests, from answers of a headrace that was asked for them (`return_token_ids`).

Answers are kept as they came and read after the run, so that the client is not busy with it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from benchmarks.plan.comparison import Tokens
from headrace.bench.apis import Api
from headrace.bench.record import Record
from headrace.bench.stream import Stream

ASKED = {"return_token_ids": True}
"""The field of a request's body that asks for them."""


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] = []


_DECODER = msgspec.json.Decoder(_Event)


class _NotedStream(Stream):
    def __init__(self, api: Api, record: Record, answered: Callable[[], None], pieces: list[bytes]) -> None:
        super().__init__(api, record, answered)
        self._pieces = pieces

    def received(self, piece: bytes, now_s: float) -> None:
        super().received(piece, now_s)
        self._pieces.append(piece)


class Notes:
    """The answers to all requests since the last `clear`."""

    def __init__(self) -> None:
        # Records are kept, so that no later one has the id of an earlier one.
        self._kept: dict[int, tuple[Record, list[bytes]]] = {}

    def stream(self, api: Api, record: Record, answered: Callable[[], None]) -> Stream:
        """What reads an answer into its record, and keeps it."""
        pieces: list[bytes] = []
        self._kept[id(record)] = record, pieces
        return _NotedStream(api, record, answered, pieces)

    def tokens(self, record: Record) -> Tokens:
        """The tokens of a request's prompt and answer."""
        _, pieces = self._kept[id(record)]
        prompt: list[int] = []
        answer: list[int] = []
        for line in b"".join(pieces).splitlines():
            payload = line.removeprefix(b"data:").strip()
            if not payload.startswith(b"{"):
                continue
            event = _DECODER.decode(payload)
            prompt += event.prompt_token_ids
            for choice in event.choices:
                prompt += choice.prompt_token_ids
                answer += choice.token_ids
        return Tokens(prompt, answer)

    def clear(self) -> None:
        """Forget all answers."""
        self._kept.clear()
