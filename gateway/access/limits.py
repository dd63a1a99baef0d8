"""Limits of keys: how many requests and tokens a minute, how many requests at a time. Pure: the caller brings the time.

A rate of N a minute is a bucket that holds N and drains evenly, N in 60 s: whoever was idle may spend N at once, then
one each 60/N s, and never has to wait for the end of a window. Levels are whole numbers, so nothing is ever rounded,
and a refusal tells the exact moment from which the same request would have been taken:

    level    in 1/60,000,000 of what is counted
    drains   N levels each microsecond
    full     at N * 60,000,000, which is below 2^53 for every limit that a key may have: the same script of the same
             arithmetic in Redis, where numbers are doubles, decides the same (see `quota`)

What was used in the end may be more than what was taken; then the level is over full, and the debt drains first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

LEVELS = 60_000_000
"""Levels of one request or token; microseconds of a minute."""
MAX_LEVEL = 2**53 - 1


class Bucket(NamedTuple):
    """A level and its time, in microseconds of any clock."""

    level: int
    at_us: int


_EMPTY = Bucket(0, 0)


class Standing(NamedTuple):
    """What a caller is told of a limit: how much there is, how much of it is left, and when it is whole again."""

    limit: int
    remaining: int
    reset_us: int


class Answer(NamedTuple):
    """`wait_us` is 0 if it was taken; otherwise nothing was, and the same would be taken in so many microseconds."""

    wait_us: int
    standing: Standing


def drained(bucket: Bucket, limit: int, now_us: int) -> int:
    """The level now. A clock that went back drains nothing."""
    return max(0, bucket.level - limit * max(0, now_us - bucket.at_us))


def take(bucket: Bucket, limit: int, cost: int, now_us: int, *, anyway: bool = False) -> tuple[Bucket, Answer]:
    """The bucket with `cost` in it, if there is room or it is put in `anyway`; a negative cost is taken out.

    A cost over the limit never has room: the caller sees to it.
    """
    level = drained(bucket, limit, now_us)
    full = limit * LEVELS
    over = level + cost * LEVELS - full
    wait_us = 0
    if over > 0 and not anyway:
        wait_us = -(-over // limit)
    else:
        level = min(max(0, level + cost * LEVELS), MAX_LEVEL)
    return Bucket(level, now_us), Answer(wait_us, standing(level, limit))


def standing(level: int, limit: int) -> Standing:
    """What to tell of a level."""
    return Standing(limit, max(0, limit * LEVELS - level) // LEVELS, -(-level // limit))


class Entry(NamedTuple):
    """What was said to a request at the door. `is_crowded` means that the key has as many at a time as it may.

    `standing` is that of its requests a minute, None without such a limit.
    """

    wait_us: int
    is_crowded: bool
    standing: Standing | None

    @property
    def is_in(self) -> bool:
        """Whether it was let in."""
        return not self.wait_us and not self.is_crowded


@dataclass(slots=True)
class _Account:
    requests: Bucket = _EMPTY
    tokens: Bucket = _EMPTY
    inside: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; `None` is none."""

    key_id: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


class LocalLimits:
    """The limits as one process knows them. `now_us` is a clock in microseconds that does not go back."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._accounts: dict[str, _Account] = {}

    def enter(self, key: KeyLimits, visit: str, *, anyway: bool = False) -> Entry:
        """Let a request in, if its key has room; a refused one counts for nothing."""
        account = self._account(key.key_id)
        if key.max_concurrent is not None and len(account.inside) >= key.max_concurrent and not anyway:
            return Entry(0, True, self._standing(account, key))
        told = None
        if key.requests_per_minute is not None:
            account.requests, answer = take(account.requests, key.requests_per_minute, 1, self._now_us(), anyway=anyway)
            told = answer.standing
            if answer.wait_us:
                return Entry(answer.wait_us, False, told)
        account.inside.add(visit)
        return Entry(0, False, told)

    def take_tokens(self, key: KeyLimits, cost: int, *, anyway: bool = False) -> Answer:
        """Count tokens, if there is room or `anyway`. The key has such a limit."""
        assert key.tokens_per_minute is not None
        account = self._account(key.key_id)
        account.tokens, answer = take(account.tokens, key.tokens_per_minute, cost, self._now_us(), anyway=anyway)
        return answer

    def leave(self, key: KeyLimits, visit: str) -> None:
        """A request that was let in has ended."""
        account = self._accounts.get(key.key_id)
        if account is not None:
            account.inside.discard(visit)

    def num_inside(self, key: KeyLimits) -> int:
        """Requests of a key that were let in and have not ended."""
        account = self._accounts.get(key.key_id)
        return 0 if account is None else len(account.inside)

    def retain(self, key_ids: Collection[str]) -> None:
        """Forget all other keys that have nothing inside."""
        for key_id in [one for one, account in self._accounts.items() if one not in key_ids and not account.inside]:
            del self._accounts[key_id]

    def _account(self, key_id: str) -> _Account:
        return self._accounts.setdefault(key_id, _Account())

    def _standing(self, account: _Account, key: KeyLimits) -> Standing | None:
        limit = key.requests_per_minute
        return None if limit is None else standing(drained(account.requests, limit, self._now_us()), limit)
