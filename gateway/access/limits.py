"""Rate limits of keys: requests and tokens per minute, concurrent requests (pure; the caller passes the clock).

A rate of N per minute is a leaky bucket that holds N and drains N in 60 s. An idle key may spend N at once, then one
every 60/N s; it never waits for the end of a window. Levels are integers, so nothing is rounded, and a refusal gives
the exact time at which the same request will fit:

    level    in 1/60,000,000 of what is counted
    drains   N levels each microsecond
    full     at N * 60,000,000, below 2^53 for every limit that a key may have: Redis computes with doubles and still
             decides the same (see `quota`)

A request may use more than was charged for it. The level then exceeds the limit, and has to drain below it first.
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


class LimitState(NamedTuple):
    """The state of a limit for its caller: the limit, how much remains, and the time until it is full again."""

    limit: int
    remaining: int
    reset_us: int


class Answer(NamedTuple):
    """The answer to taking a cost. If `wait_us` is 0, the cost was taken. Otherwise nothing was taken, and the same
    cost fits after `wait_us` microseconds."""

    wait_us: int
    state: LimitState


def drained(bucket: Bucket, limit: int, now_us: int) -> int:
    """The level now. If the clock went back, nothing drains."""
    return max(0, bucket.level - limit * max(0, now_us - bucket.at_us))


def take(bucket: Bucket, limit: int, cost: int, now_us: int, *, anyway: bool = False) -> tuple[Bucket, Answer]:
    """Add `cost` to the bucket, if there is room or with `anyway`; a negative cost is removed. Returns the new bucket
    and the answer.

    A cost over the limit never fits; the caller must check that.
    """
    level = drained(bucket, limit, now_us)
    full = limit * LEVELS
    over = level + cost * LEVELS - full
    wait_us = 0
    if over > 0 and not anyway:
        wait_us = -(-over // limit)
    else:
        level = min(max(0, level + cost * LEVELS), MAX_LEVEL)
    return Bucket(level, now_us), Answer(wait_us, state_at(level, limit))


def state_at(level: int, limit: int) -> LimitState:
    """The state of a limit at this level."""
    return LimitState(limit, max(0, limit * LEVELS - level) // LEVELS, -(-level // limit))


class Entry(NamedTuple):
    """Whether a request is admitted. `is_at_max_concurrent`: the key already has its maximum of concurrent requests.

    `state` is that of its requests per minute, None without such a limit.
    """

    wait_us: int
    is_at_max_concurrent: bool
    state: LimitState | None

    @property
    def is_in(self) -> bool:
        """Whether the request is admitted."""
        return not self.wait_us and not self.is_at_max_concurrent


@dataclass(slots=True)
class _Account:
    requests: Bucket = _EMPTY
    tokens: Bucket = _EMPTY
    inside: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; `None` means no limit."""

    key_id: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


class LocalLimits:
    """The limits as one process knows them. `now_us` is a clock in microseconds that does not go back."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._accounts: dict[str, _Account] = {}

    def enter(self, key: KeyLimits, request: str, *, anyway: bool = False) -> Entry:
        """Admit a request, if its key has room. A refused request does not count."""
        account = self._account(key.key_id)
        if key.max_concurrent is not None and len(account.inside) >= key.max_concurrent and not anyway:
            return Entry(0, True, self._state(account, key))
        state = None
        if key.requests_per_minute is not None:
            account.requests, answer = take(account.requests, key.requests_per_minute, 1, self._now_us(), anyway=anyway)
            state = answer.state
            if answer.wait_us:
                return Entry(answer.wait_us, False, state)
        account.inside.add(request)
        return Entry(0, False, state)

    def take_tokens(self, key: KeyLimits, cost: int, *, anyway: bool = False) -> Answer:
        """Count tokens if there is room, or in any case with `anyway`. The key must have such a limit."""
        assert key.tokens_per_minute is not None
        account = self._account(key.key_id)
        account.tokens, answer = take(account.tokens, key.tokens_per_minute, cost, self._now_us(), anyway=anyway)
        return answer

    def leave(self, key: KeyLimits, request: str) -> None:
        """Record that an admitted request has ended."""
        account = self._accounts.get(key.key_id)
        if account is not None:
            account.inside.discard(request)

    def retain(self, key_ids: Collection[str]) -> None:
        """Forget all keys except these, and except keys with running requests."""
        for key_id in [one for one, account in self._accounts.items() if one not in key_ids and not account.inside]:
            del self._accounts[key_id]

    def _account(self, key_id: str) -> _Account:
        return self._accounts.setdefault(key_id, _Account())

    def _state(self, account: _Account, key: KeyLimits) -> LimitState | None:
        limit = key.requests_per_minute
        return None if limit is None else state_at(drained(account.requests, limit, self._now_us()), limit)
