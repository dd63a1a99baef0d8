"""Admission control: authentication, rate limits and concurrency limits of all requests, over HTTP and gRPC.

    request -> key known? (401) -> within its key's rate limits? (429) -> handler
                                       prompt known -> within its token limit? (429) -> generation -> settled

Without keys, all callers are admitted. The limits of the gateway itself apply to all.

A request is charged before generation: for the tokens of its prompts, and for `max_tokens` times the number of answers
if it has `max_tokens`. When it ends, the charge is corrected to the tokens of prompts and answers, or to nothing if
there was no answer. Without `max_tokens`, answers are charged only at the end, and can use up the key's next minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.common.stores.api_keys import ApiKey
from headrace.gateway.access.keys import KeyRing
from headrace.gateway.access.limits import Answer, Entry, KeyLimits, LimitState, LocalLimits
from headrace.protos.status import Reason, StatusError

CONCURRENCY_RETRY_S = 1.0
_BEARER = "bearer "
_MAX_ECHO_CHARS = 100

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class AdmissionBounds:
    """Limits of the gateway itself, for all callers together; times in seconds."""

    max_requests: int = 4096
    """Requests at a time."""
    request_timeout_s: float = 3600.0
    """From a request's arrival to the end of its answer."""
    early_headers_s: float | None = None
    """Time after which the response to a streaming request begins even without a token; None: never."""
    open_metrics: bool = False
    """Whether metrics may be read without a key."""
    wants_certificate: bool = False
    """Whether clients need a certificate, except for health."""


class Limits(Protocol):
    """Counts the usage of keys, for this gateway alone or shared with other gateways."""

    async def enter(self, key: KeyLimits, request: str) -> Entry:
        """Admit a request, if there is room."""

    async def take_tokens(self, key: KeyLimits, cost: int) -> Answer:
        """Count tokens, if there is room."""

    def settle(self, key: KeyLimits, delta: int) -> None:
        """Count tokens, or give them back if negative, even without room."""

    def leave(self, key: KeyLimits, request: str) -> None:
        """Note that an admitted request has ended."""

    def retain(self, key_ids: Collection[str]) -> None:
        """Forget all keys but these."""


class OwnLimits:
    """`LocalLimits` behind the interface of `Limits`."""

    def __init__(self, local: LocalLimits) -> None:
        self._local = local

    async def enter(self, key: KeyLimits, request: str) -> Entry:
        """As `Limits.enter`."""
        return self._local.enter(key, request)

    async def take_tokens(self, key: KeyLimits, cost: int) -> Answer:
        """As `Limits.take_tokens`."""
        return self._local.take_tokens(key, cost)

    def settle(self, key: KeyLimits, delta: int) -> None:
        """As `Limits.settle`."""
        if key.tokens_per_minute is not None and delta:
            self._local.take_tokens(key, delta, anyway=True)

    def leave(self, key: KeyLimits, request: str) -> None:
        """As `Limits.leave`."""
        self._local.leave(key, request)

    def retain(self, key_ids: Collection[str]) -> None:
        """As `Limits.retain`."""
        self._local.retain(key_ids)


class Authorization:
    """The permissions and limits of a key for one request, and the usage of the request."""

    def __init__(self, key: ApiKey, name: str, limits: Limits) -> None:
        self.key = key
        self._name = name
        self._limits = limits
        self._of_key = KeyLimits(key.id, key.requests_per_minute, key.tokens_per_minute, key.max_concurrent)
        self._num_holders = 0
        self._requests: LimitState | None = None
        self._tokens: LimitState | None = None

    async def enter(self) -> None:
        """Count the request until `leave`. Raises StatusError (QUOTA)."""
        entry = await self._limits.enter(self._of_key, self._name)
        self._requests = entry.state
        if entry.is_at_max_concurrent:
            problem = f"this key may have {self.key.max_concurrent} requests at a time, and all are in use"
            raise StatusError(Reason.QUOTA, problem, retry_after_s=CONCURRENCY_RETRY_S)
        if entry.wait_us:
            problem = f"this key may make {self.key.requests_per_minute} requests a minute"
            raise _too_soon(problem, entry.wait_us)
        self._num_holders = 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager: the request counts until it exits, even if its exchange has ended."""
        self._num_holders += 1
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Release a hold on the request. It ends with the last one."""
        self._num_holders -= 1
        if self._num_holders == 0:
            self._limits.leave(self._of_key, self._name)

    def check(self, model: str, priority: int) -> None:
        """Check that the key allows a model and a priority. Raises StatusError (PERMISSION_DENIED)."""
        if not self.may_use(model):
            problem = f"this key is not for model {model[:_MAX_ECHO_CHARS]!r}"
            raise StatusError(Reason.PERMISSION_DENIED, problem, field="model")
        if priority > self.key.max_priority:
            problem = f"this key may ask for a priority of at most {self.key.max_priority}, not {priority}"
            raise StatusError(Reason.PERMISSION_DENIED, problem, field="priority")

    def may_use(self, model: str) -> bool:
        """Whether the key allows a model."""
        return not self.key.models or model in self.key.models

    async def take_tokens(self, num_tokens: int) -> None:
        """Count tokens. Raises StatusError: QUOTA if they exceed the limit now, INVALID_FIELD if they always would."""
        limit = self.key.tokens_per_minute
        if limit is None:
            return
        if num_tokens > limit:
            problem = f"this request may take {num_tokens} tokens, and its key has {limit} a minute"
            remedy = "shorten the prompt, or ask for less with max_tokens"
            raise StatusError(Reason.INVALID_FIELD, f"{problem}: {remedy}", field="max_tokens")
        answer = await self._limits.take_tokens(self._of_key, num_tokens)
        self._tokens = answer.state
        if answer.wait_us:
            problem = f"this key may use {limit} tokens a minute, and this request may take {num_tokens}"
            raise _too_soon(problem, answer.wait_us)

    def settle(self, delta: int) -> None:
        """Correct the count by `delta` tokens, negative if fewer were used than taken."""
        self._limits.settle(self._of_key, delta)

    def headers(self) -> Headers:
        """The rate limit headers of a response, as OpenAI has them."""
        found: Headers = []
        for kind, state in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if state is not None:
                found += [
                    (b"x-ratelimit-limit-" + kind, b"%d" % state.limit),
                    (b"x-ratelimit-remaining-" + kind, b"%d" % state.remaining),
                    (b"x-ratelimit-reset-" + kind, duration_of(state.reset_us).encode()),
                ]
        return found


class AdmissionControl:
    """Admits requests. Without a key ring, it admits every request."""

    def __init__(
        self, bounds: AdmissionBounds = AdmissionBounds(), keys: KeyRing | None = None, limits: Limits | None = None
    ) -> None:
        self.bounds = bounds
        self._keys = keys
        self._limits = limits
        self._num_admitted = 0
        own = secrets.token_hex(8)
        self._names = (f"{own}-{number}" for number in itertools.count())  # unique among all gateways

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return self._keys is not None

    def identify(self, header: Callable[[str], str]) -> ApiKey | None:
        """The key of a request, from its headers; None if no keys are needed. Raises StatusError."""
        if self._keys is None:
            return None
        secret = secret_of(header)
        if not secret:
            problem = "no API key was given: send it as `Authorization: Bearer KEY`, or as `x-api-key`"
            raise StatusError(Reason.UNAUTHENTICATED, problem)
        return self._keys.find(secret)

    def authorize(self, key: ApiKey | None) -> Authorization | None:
        """The authorization of a request with this key; None without keys or limits. The request counts against the
        limits of the key only once it is `admitted`."""
        if key is None or self._limits is None:
            return None
        return Authorization(key, next(self._names), self._limits)

    def background(self, key_id: str) -> Authorization | None:
        """The authorization of a request that runs later for the key with this id; empty without keys. It is exempt
        from the key's limits of requests and tokens. Raises StatusError (UNAUTHENTICATED) if the key is not valid any
        more."""
        if self._keys is None or self._limits is None:
            return None
        key = self._keys.find_id(key_id)
        free = replace(key, requests_per_minute=None, tokens_per_minute=None, max_concurrent=None)
        return Authorization(free, next(self._names), self._limits)

    @asynccontextmanager
    async def admitted(
        self, authorization: Authorization | None, *, counted: bool, timeout_s: float | None = None
    ) -> AsyncIterator[None]:
        """Context manager: the request is admitted until it exits. Only `counted` requests count against limits.
        `timeout_s` is the caller's own limit.

        Raises StatusError: QUOTA beyond the limits of the key, QUEUE_FULL when the gateway is full, DEADLINE when the
        answer takes too long.
        """
        if counted and self._num_admitted >= self.bounds.max_requests:
            problem = f"the gateway has {self._num_admitted} requests at a time, its maximum"
            raise StatusError(Reason.QUEUE_FULL, problem, retry_after_s=CONCURRENCY_RETRY_S)
        self._num_admitted += counted
        try:
            async with self._timed(timeout_s):
                if authorization is None or not counted:
                    yield
                    return
                await authorization.enter()
                try:
                    yield
                finally:
                    authorization.leave()
        finally:
            self._num_admitted -= counted

    @asynccontextmanager
    async def _timed(self, own_s: float | None) -> AsyncIterator[None]:
        most_s = self.bounds.request_timeout_s
        bound_s = most_s if own_s is None else min(own_s, most_s)
        timeout = asyncio.timeout(bound_s)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            whose = "a request may take" if bound_s == most_s else "this request gave it"
            problem = f"the answer took longer than the {bound_s:g} s that {whose}"
            raise StatusError(Reason.DEADLINE, problem) from None


def secret_of(header: Callable[[str], str]) -> str:
    """The key in a request's headers, which `header` finds by lower-case name; empty if there is none."""
    authorization = header("authorization")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return header("x-api-key").strip()


def duration_of(microseconds: int) -> str:
    """A time in the format of OpenAI's headers: 0s, 20ms, 1.5s, 6m0s, 1h0m0s; rounded up to milliseconds."""
    ms = -(-microseconds // 1000)
    if ms < 1000:
        return f"{ms}ms" if ms else "0s"
    seconds, rest_ms = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{seconds}.{rest_ms:03}".rstrip("0").rstrip(".") + "s" if rest_ms else f"{seconds}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _too_soon(problem: str, wait_us: int) -> StatusError:
    wait_ms = math.ceil(wait_us / 1000)
    when = f"the same request may be made in {wait_ms / 1000:g} s"
    return StatusError(Reason.QUOTA, f"{problem}; {when}", retry_after_s=wait_ms / 1000)
