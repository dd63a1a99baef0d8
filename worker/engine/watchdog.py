"""Detects an engine that is stuck: there is work, and no step ends.

A stuck worker must not look alive, because its streams would then wait forever. While it is stuck, it sends nothing to
watchers, so that routers resume its streams elsewhere; it reports NOT_SERVING and refuses new requests. If a step ends
after all, the worker serves again. If none ends for several times as long, the process exits, to be restarted.

The limit is a time, but at least many times the expected time of a step, because large models on few cores take seconds
for one. Time in which the watchdog itself did not run does not count, because the whole process stood still then.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

log = logging.getLogger(__name__)

# EX_SOFTWARE of sysexits.h. Status 2 would mean wrong flags.
EXIT_ENGINE_FAILED = 70
# The process exits after this time even if the log cannot be written.
_LAST_WORDS_S = 3.0
# A step may take this many times as long as expected.
EXPECTED_STEPS = 20
# The limit is at most this many times the configured one, because expectations may be wrong.
_MOST_BOUNDS = 10
# The process exits after this many times the limit.
GIVE_UP_AFTER = 10
# Time between two checks, and the longest time between two checks that counts, in seconds.
LOOK_INTERVAL_S = 0.5
_MOST_BETWEEN_LOOKS_S = 2 * LOOK_INTERVAL_S


def end_process(why: str, error: BaseException | None = None) -> None:
    """Log the reason and exit with EXIT_ENGINE_FAILED. May be called from any thread; does not return."""
    in_any_case = threading.Timer(_LAST_WORDS_S, os._exit, (EXIT_ENGINE_FAILED,))
    in_any_case.daemon = True
    in_any_case.start()
    try:
        log.critical("%s; the process exits and has to be restarted", why, exc_info=error)
        sys.stderr.flush()
    finally:
        os._exit(EXIT_ENGINE_FAILED)


class Watched(Protocol):
    """The parts of the engine thread that the watchdog reads."""

    num_turns: int
    is_idle: bool

    @property
    def longest_expected_step_s(self) -> float:
        """The maximum expected time of the current step, in seconds."""
        ...


class Verdict(enum.Enum):
    """The result of a check: the engine works, is stuck, or has been stuck for so long that the process must end."""

    ALIVE = enum.auto()
    STUCK = enum.auto()
    LOST = enum.auto()


class Watchdog:
    """Checks the engine thread. Pure: the caller passes the time."""

    def __init__(self, watched: Watched, stuck_after_s: float) -> None:
        self.still_s = 0.0
        """Seconds since a step ended."""
        self._watched = watched
        self._stuck_after_s = stuck_after_s
        self._num_turns = -1
        self._looked_s = 0.0

    @property
    def bound_s(self) -> float:
        """The time after which the current step counts as stuck."""
        expected_s = EXPECTED_STEPS * self._watched.longest_expected_step_s
        return min(max(self._stuck_after_s, expected_s), _MOST_BOUNDS * self._stuck_after_s)

    def look(self, now_s: float) -> Verdict:
        """The state of the engine at `now_s`, a monotonic time."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if self._watched.is_idle or self._watched.num_turns != self._num_turns:
            self._num_turns = self._watched.num_turns
            self.still_s = 0.0
            return Verdict.ALIVE
        self.still_s += min(passed_s, _MOST_BETWEEN_LOOKS_S)
        bound_s = self.bound_s
        if self.still_s < bound_s:
            return Verdict.ALIVE
        return Verdict.STUCK if self.still_s < GIVE_UP_AFTER * bound_s else Verdict.LOST


async def watch_engine(
    watchdog: Watchdog,
    on_stuck: Callable[[str], Awaitable[None]],
    on_recovered: Callable[[], Awaitable[None]],
    on_lost: Callable[[str], None],
    interval_s: float = LOOK_INTERVAL_S,
) -> None:
    """Check forever. Calls `on_stuck` with the reason when the engine becomes stuck, `on_recovered` when a step ends
    after that, and `on_lost` when it has been stuck for too long."""
    is_stuck = False
    while True:
        await asyncio.sleep(interval_s)
        verdict = watchdog.look(time.monotonic())
        why = f"the engine has work and has ended no step for {watchdog.still_s:.0f} s"
        if verdict is Verdict.LOST:
            on_lost(why)
        elif verdict is Verdict.STUCK and not is_stuck:
            log.error("%s: the worker counts as stuck until one ends", why)
            await on_stuck(why)
        elif verdict is Verdict.ALIVE and is_stuck:
            log.warning("a step of the engine has ended: the worker serves again")
            await on_recovered()
        is_stuck = verdict is not Verdict.ALIVE
