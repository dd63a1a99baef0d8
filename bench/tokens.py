"""Counts tokens: with a model's own tokenizer, by the server's /tokenize, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace.bench.connection import Client, ExchangeError
from headrace.common.model_files.cache import find_directory

if TYPE_CHECKING:
    from headrace.gateway.text.tokenizer import Tokenizer

_AT_ONCE = 16


class Counter(Protocol):
    """Counts the tokens of texts."""

    name: str
    """What counts, for the results."""
    is_exact: bool
    """False if the numbers are guesses."""

    async def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, with those that the model expects around it. Raises ExchangeError."""


class OwnTokenizer:
    """A tokenizer of a model directory."""

    is_exact = True

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name = f"tokenizer {name}"
        self._tokenizer = tokenizer

    async def count(self, texts: Sequence[str]) -> list[int]:
        """Counts at once, in this process."""
        return [len(ids) for ids in self._tokenizer.encode_many(texts, add_special_tokens=True)]


class ServerTokenizer:
    """The server's POST /tokenize, as vLLM and headrace have it."""

    is_exact = True

    def __init__(self, client: Client, model: str) -> None:
        self.name = "/tokenize of the server"
        self._client = client
        self._model = model
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def count(self, texts: Sequence[str]) -> list[int]:
        """One call a text, a few at a time."""
        return list(await asyncio.gather(*(self._one(text) for text in texts)))

    async def _one(self, text: str) -> int:
        body = msgspec.json.encode({"model": self._model, "prompt": text, "add_special_tokens": True})
        async with self._gate:
            status, raw = await self._client.call("POST", "/tokenize", body)
        if status != 200:
            raise ExchangeError(f"HTTP {status}", "the server's /tokenize refused a text")
        try:
            return len(msgspec.json.decode(raw, type=_Tokens).tokens)
        except msgspec.DecodeError as error:
            raise ExchangeError("malformed", f"the server's /tokenize gave no tokens: {error}") from None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class WordCounter:
    """Takes each word for a token, where nothing better is known."""

    name = "one token a word (a guess)"
    is_exact = False

    async def count(self, texts: Sequence[str]) -> list[int]:
        """Words of each text."""
        return [len(text.split()) for text in texts]


def own_tokenizer(model: str) -> OwnTokenizer:
    """The tokenizer of a model in the cache or of a directory. Raises ValueError with the remedy if there is none."""
    directory, name = find_directory(model)
    names = [f"openvino_{part}.{suffix}" for part in ("tokenizer", "detokenizer") for suffix in ("xml", "bin")]
    try:
        files = {file: (Path(directory) / file).read_bytes() for file in names}
    except OSError:
        raise ValueError(
            f"--tokenizer {model}: {directory} has no openvino_tokenizer.xml; give a model of `headrace models list` "
            "or its directory, or leave the option out: the server's /tokenize then counts"
        ) from None
    from headrace.gateway.text.tokenizer import load_tokenizer
    from headrace.gateway.upstream.bundle import BundleError

    try:
        return OwnTokenizer(name, load_tokenizer(files))
    except BundleError as error:
        raise ValueError(f"--tokenizer {model}: {error}") from None


async def counter_for(client: Client, model: str, tokenizer: str | None) -> Counter:
    """The best counter that there is: the tokenizer that was asked for, the server's, or a guess. Raises ValueError."""
    if tokenizer is not None:
        return own_tokenizer(tokenizer)
    server = ServerTokenizer(client, model)
    try:
        await server.count(["a"])
    except ExchangeError:
        return WordCounter()
    return server
