"""Prompt lookup: proposes the tokens that followed the same text earlier in the prompt, the answer or the caller's
prediction.

An index maps each sequence of n tokens, for each n of `SIZES`, to the position after it. New tokens are added as they
come, so a step costs the same after a long prompt. The prompt itself is indexed part by part, one part a step. Once a
place to copy from is found, it is followed as long as it is right.

    x y z | a b c d e f g ...  | x y a b c     the last three tokens were seen before: d e f g may follow
            ^^^^^                    ^^^^^

A token has an entry for each size. Entries in dicts take some 110 bytes, so only those of the latest tokens are there.
Earlier ones are in sorted arrays and take 12 bytes.

Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.worker.speculation.proposer import NO_DRAFT, Draft, Source

# Lengths of the runs of tokens that are looked up, the longest first.
SIZES = (6, 3, 2, 1)
# Drafts are classified by the number of equal tokens before them, which is 0 at the beginning of a prediction.
LEVELS = (1, 2, 3, 4, 6, 9, 16)
_LONGEST_MATCH = LEVELS[-1]
_MOST_INDEXED = 4096  # tokens a step, some 4 ms
_MOST_IN_DICTS = 8192  # tokens
_FEW = 16  # so many keys Python computes faster than NumPy
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class _Places(NamedTuple):
    """Sorted keys, and the position after each. Of equal keys, the last has the latest position."""

    keys: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint32]

    @staticmethod
    def of(latest: dict[int, int]) -> _Places:
        """The entries of a dict."""
        keys = np.fromiter(latest, np.uint64, len(latest))
        positions = np.fromiter(latest.values(), np.uint32, len(latest))
        return _Places(keys, positions).in_order()

    def followed_by(self, later: _Places) -> _Places:
        """These entries and later ones."""
        return _Places(
            np.concatenate((self.keys, later.keys)), np.concatenate((self.positions, later.positions))
        ).in_order()

    def in_order(self) -> _Places:
        """The same entries, sorted. Takes linear time if the keys are two sorted runs."""
        order = np.argsort(self.keys, kind="stable")
        return _Places(self.keys[order], self.positions[order])

    def find(self, key: int) -> int:
        """The latest position after this key, or -1."""
        at = int(np.searchsorted(self.keys, np.uint64(key), "right")) - 1
        return int(self.positions[at]) if at >= 0 and int(self.keys[at]) == key else -1


class _Index:
    """The latest position after each key of one size."""

    __slots__ = ("earlier", "latest")

    def __init__(self) -> None:
        self.latest: dict[int, int] = {}
        self.earlier: list[_Places] = []
        """Each at least twice as long as the next one, so there are few."""

    def find(self, key: int) -> int:
        """The latest position after this key, or -1."""
        found = self.latest.get(key, -1)
        if found < 0:
            for places in reversed(self.earlier):
                found = places.find(key)
                if found >= 0:
                    break
        return found

    def pack(self) -> None:
        """Move all entries into the arrays."""
        earlier = self.earlier
        earlier.append(_Places.of(self.latest))
        self.latest = {}
        while len(earlier) > 1 and len(earlier[-2].keys) < 2 * len(earlier[-1].keys):
            later = earlier.pop()
            earlier[-1] = earlier[-1].followed_by(later)


class History:
    """The tokens of one request. `prediction` comes before its own tokens."""

    __slots__ = ("_at", "_indexes", "_length", "_num_indexed", "_num_packed", "_offset", "_tokens")

    def __init__(self, prediction: Sequence[int], prompt: Sequence[int]) -> None:
        """Begin without any token of the answer."""
        self._tokens = array("I", prediction)
        self._offset = len(self._tokens)
        self._indexes = tuple(_Index() for _ in SIZES)
        self._at = 0 if self._offset else -1
        self._length = 0
        self._tokens.extend(prompt)
        self._num_indexed = self._num_packed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add what is new in `token_ids`, all tokens of the request's prompt and answer."""
        for token_id in token_ids[len(self._tokens) - self._offset :]:
            self._add(token_id)
        self._index()
        if self._length < SIZES[0]:
            self._look_up()

    def draft(self, most: int) -> Draft:
        """Up to `most` tokens that may follow. If the copied text ends with the latest token, it is repeated."""
        if self._at < 0 or most < 1:
            return NO_DRAFT
        tokens = self._tokens[self._at : self._at + most]
        period = len(self._tokens) - self._at
        while len(tokens) < most:
            tokens.append(tokens[len(tokens) - period])
        tokens = _before_images(tokens)
        if self._at < self._offset:
            return Draft(tokens[: self._offset - self._at], Source.PREDICTION, self._level)
        return Draft(tokens, Source.NGRAM, self._level)

    @property
    def _level(self) -> int:
        return sum(self._length >= length for length in LEVELS)

    def _add(self, token_id: int) -> None:
        if self._at >= 0 and self._tokens[self._at] == token_id:
            self._at += 1
            self._length = min(self._length + 1, _LONGEST_MATCH)
            if self._at == self._offset:
                self._at = -1
                self._length = 0  # the prediction ends here
        else:
            self._at = -1
            self._length = 0
        self._tokens.append(token_id)

    def _index(self) -> None:
        """Index the next tokens, in their order."""
        begin, end = self._num_indexed, min(len(self._tokens), self._num_indexed + _MOST_INDEXED)
        for size, index in zip(SIZES, self._indexes, strict=True):
            first = max(begin, size)
            if first < end:
                keys = _keys(self._tokens[first - size : end - 1], size)
                index.latest.update(zip(keys, range(first, end), strict=True))
        self._num_indexed = end
        if end - self._num_packed >= _MOST_IN_DICTS:
            self._num_packed = end
            for index in self._indexes:
                index.pack()

    def _look_up(self) -> None:
        """Find the latest place where the last tokens occurred before, unless the current place has as many equal
        tokens."""
        tokens = self._tokens
        for size, index in zip(SIZES, self._indexes, strict=True):
            if size <= self._length or len(tokens) < size:
                return
            at = index.find(_key(tokens[-size:]))
            if at >= 0 and (at != self._offset or not self._offset):  # nothing follows a prediction
                length = _num_common(tokens, at)
                if length > self._length:
                    self._at = at
                    self._length = length
                    return


def _before_images(tokens: array[int]) -> array[int]:
    """The tokens before the first one of an image, which no answer has."""
    if max(tokens) < FIRST_PSEUDO_TOKEN:
        return tokens
    return tokens[: next(at for at, token_id in enumerate(tokens) if token_id >= FIRST_PSEUDO_TOKEN)]


def _num_common(tokens: array[int], at: int) -> int:
    """The number of tokens before `at` that equal the last ones."""
    length = 0
    while length < min(at, _LONGEST_MATCH) and tokens[at - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def _key(tokens: Sequence[int]) -> int:
    key = 0
    for token_id in tokens:
        key = (key * _FACTOR + token_id + 1) & _MASK
    return key


def _keys(tokens: array[int], size: int) -> list[int]:
    """The keys of all sequences of `size` tokens."""
    count = len(tokens) - size + 1
    if count < _FEW:
        return [_key(tokens[begin : begin + size]) for begin in range(count)]
    values = np.frombuffer(tokens, np.uint32).astype(np.uint64)
    keys = np.zeros(count, np.uint64)
    for place in range(size):
        keys = keys * np.uint64(_FACTOR) + values[place : place + count] + np.uint64(1)
    return keys.tolist()
