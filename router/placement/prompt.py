"""A prompt in the form that placement needs: its tokens, and the hashes of its blocks.

Both are computed once for all requests that share the prompt. For a long prompt this takes tens of milliseconds. So
`prepare` computes them in slices and lets the event loop run in between. Without it, the first use computes all of them
at once.
"""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.protos.block_hash import block_hashes
from headrace.router.placement.candidates import Places

# Number of tokens that are copied or hashed at a time: about a millisecond.
_SLICE_TOKENS = 16_384


class Prompt:
    """The tokens of a prompt, in one or more parts."""

    def __init__(self, *parts: Sequence[int]) -> None:
        self._parts = parts
        self.num_tokens = sum(len(part) for part in parts)
        self._tokens: array[int] | None = None
        self._hashes: dict[tuple[int, int], list[int]] = {}
        self._lock = asyncio.Lock()
        self.num_copied_tokens = 0
        """Tokens that were copied so far, over all requests that share the prompt."""

    @property
    def is_long(self) -> bool:
        """Whether to call `prepare` before the first use."""
        return self.num_tokens > _SLICE_TOKENS

    async def prepare(self, chains: Iterable[tuple[int, int]]) -> None:
        """Compute tokens and hashes, without blocking the event loop for long. A chain is a root hash and a block
        size."""
        async with self._lock:
            for _ in self._copy():
                await asyncio.sleep(0)
            for root, block_size in chains:
                for _ in self._hash(root, block_size):
                    await asyncio.sleep(0)

    @property
    def tokens(self) -> array[int]:
        """All tokens. The caller must not change them."""
        _exhaust(self._copy())
        assert self._tokens is not None
        return self._tokens

    @functools.cached_property
    def image_places(self) -> Places:
        """The places of image tokens, rising: `[image tokens]`."""
        return np.flatnonzero(np.frombuffer(self.tokens, np.uint32) >= FIRST_PSEUDO_TOKEN)

    def hashes(self, root: int, block_size: int, behind: Sequence[int] = ()) -> list[int]:
        """The hashes of the full blocks of the prompt and of the tokens that follow it, `behind`. The caller must not
        change the list."""
        _exhaust(self._hash(root, block_size))
        hashes = self._hashes[root, block_size]
        if not behind:
            return hashes
        rest = self.tokens[len(hashes) * block_size :]
        rest.extend(behind)
        return hashes + block_hashes(hashes[-1] if hashes else root, rest, block_size)

    def _copy(self) -> Iterator[None]:
        """Make the tokens; yields between slices."""
        if self._tokens is not None:
            return
        tokens = array("I")
        for part in self._parts:
            for start in range(0, len(part), _SLICE_TOKENS):
                if tokens:
                    yield
                tokens.extend(part[start : start + _SLICE_TOKENS])
        self.num_copied_tokens += len(tokens)
        self._tokens = tokens
        self._parts = ()

    def _hash(self, root: int, block_size: int) -> Iterator[None]:
        """Make the hashes of one chain; yields between slices."""
        if (root, block_size) in self._hashes:
            return
        tokens = self.tokens
        hashes: list[int] = []
        stride = max(_SLICE_TOKENS // block_size, 1) * block_size
        for start in range(0, len(tokens), stride):
            if hashes:
                yield
            hashes += block_hashes(hashes[-1] if hashes else root, tokens[start : start + stride], block_size)
        self._hashes[root, block_size] = hashes


def _exhaust(steps: Iterator[None]) -> None:
    for _ in steps:
        pass
