"""Requests whose workers were lost while they ran. This prevents one request from ending a whole fleet.

When a worker dies, all its requests are resumed elsewhere. If one of them is the cause, the next worker dies too, and
so on. Therefore a request that has lost too many workers in a row is refused:

    lost a worker  -->  resumed  -->  a token: the count begins anew
                                 -->  lost the next one  -->  2 workers that died and had nothing else to do, or
                                                              `max_losses` in all: refused for `REMEMBER_S`

A worker that only fell silent counts among all, but never as one that died. It reports from another thread than the
one that computes, so its host is the more likely cause of its silence.

Losses count by content: the prompt and its parameters without ids and seed. So the choices of one prompt count
together, and a retry by the client costs no further worker.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from headrace.protos.status import Reason, StatusError

MAX_LOSSES_ALONE = 2
REMEMBER_S = 600.0
MAX_REMEMBERED = 4096


class Running(Protocol):
    """A request that runs at a worker, as far as suspicion needs it."""

    @property
    def digest(self) -> bytes:
        """A hash of its content."""
        ...

    @property
    def has_progressed(self) -> bool:
        """Whether its worker has sent a token."""
        ...


@dataclass(slots=True)
class _Losses:
    """The workers that a content has lost in a row without a token. `num_alone` died and had nothing else."""

    last_s: float = 0.0
    num_alone: int = 0
    lives: set[Hashable] = field(default_factory=set)


class Suspects:
    """The contents that have lost workers, of one router. For one event loop."""

    def __init__(self, max_losses: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_losses = max_losses
        self._clock = clock
        self._running: dict[Hashable, dict[Running, None]] = {}
        self._died_alone: OrderedDict[Hashable, bool] = OrderedDict()
        self._losses: OrderedDict[bytes, _Losses] = OrderedDict()

    @contextmanager
    def running(self, life: Hashable, request: Running) -> Iterator[None]:
        """Context manager: the request is at a worker. `life` identifies the worker between two of its starts, and is
        never used for another one."""
        here = self._running.setdefault(life, {})
        here[request] = None
        try:
            yield
        finally:
            del here[request]
            if not here:
                self._running.pop(life, None)

    def lost(self, life: Hashable, request: Running, num_reported: int = 0, *, has_died: bool = True) -> None:
        """Record that a worker was lost while it had the request: it has died, or was silent for too long.
        `num_reported` is the number of requests that it had reported, including those of other routers."""
        if life not in self._died_alone:
            here = self._running.get(life, {})
            is_alone = num_reported <= len(here) and all(one.digest == request.digest for one in here)
            self._died_alone[life] = is_alone and has_died
            _bound(self._died_alone)
        losses = self._losses.setdefault(request.digest, _Losses())
        if life in losses.lives:
            return  # lost by another choice of the same prompt
        if request.has_progressed:
            losses.lives.clear()
            losses.num_alone = 0
        losses.lives.add(life)
        losses.num_alone += self._died_alone[life]
        losses.last_s = self._clock()
        self._losses.move_to_end(request.digest)
        _bound(self._losses)

    def answered(self, request: Running) -> None:
        """Record that a request was answered completely, so its content is harmless."""
        if self._losses:
            self._losses.pop(request.digest, None)

    def check(self, request: Running) -> None:
        """Raise StatusError (INTERNAL) if the content has lost too many workers."""
        while self._losses and self._clock() - next(iter(self._losses.values())).last_s > REMEMBER_S:
            self._losses.popitem(last=False)
        losses = self._losses.get(request.digest) if self._losses else None
        if losses is None or (losses.num_alone < MAX_LOSSES_ALONE and len(losses.lives) < self._max_losses):
            return
        raise StatusError(
            Reason.INTERNAL,
            f"{len(losses.lives)} workers were lost one after the other while they computed this request, without a "
            f"token from any; it may be the cause, so it is refused for {REMEMBER_S / 60:g} minutes",
        )


def _bound(remembered: OrderedDict[Hashable, bool] | OrderedDict[bytes, _Losses]) -> None:
    while len(remembered) > MAX_REMEMBERED:
        remembered.popitem(last=False)
