"""How long tests wait for what should happen.

A bound in a test is what a wait needs on an idle machine of ordinary speed, with room. `patience` stretches it by how
slow this machine is: its speed, measured once for a session, and what else runs at the moment. A stretched bound delays
only a test that fails. Bounds that are the subject of a test are not stretched.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

# Of a machine on which every test passes with the bounds as they are written: CPU time of `_work`, in seconds.
_REFERENCE_S = 0.006
# A test that hangs should still end.
_MOST = 15.0
# Between two looks at a condition.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.2
# Set by the first process of a session for the others; also by hand, where a machine is slow in other ways.
_VARIABLE = "HEADRACE_TEST_SLOWNESS"


def patience(seconds: float) -> float:
    """A bound in seconds for this machine as it is now, from one for an idle machine."""
    return seconds * min(_MOST, session_slowness() * (1.0 + crowding()))


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait for something that happens in other processes, for `seconds` of an idle machine."""
    start_s, bound_s = time.monotonic(), 0.0
    while not condition():
        waited_s = time.monotonic() - start_s
        # The machine may have been fuller a moment ago.
        bound_s = max(bound_s, patience(seconds))
        assert waited_s < bound_s, f"not within {waited_s:.0f} s: {what}"
        # To look takes time of what is waited for, so it is done less often in a long wait.
        time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, waited_s / 20)))


@functools.cache
def session_slowness() -> float:
    """How many times longer than on the reference machine one thread computes here, at least 1. Other processes of the
    session take what the first one has measured."""
    told = os.environ.get(_VARIABLE)
    if told is None:
        told = os.environ[_VARIABLE] = f"{max(1.0, _cpu_time_s() / _REFERENCE_S):.2f}"
    return float(told)


def crowding() -> float:
    """Threads that want to run, for each CPU that this process may use; 0 where the system does not say."""
    try:
        average, _, _, running, _ = _load().split()
    except (OSError, ValueError):
        return 0.0
    # The average follows slowly, and what runs now may be about to end: the larger counts.
    wanting = max(float(average), float(running.partition("/")[0]) - 1.0)
    return wanting / len(os.sched_getaffinity(0))


def _load() -> str:
    with open("/proc/loadavg") as file:
        return file.read()


def _cpu_time_s() -> float:
    """CPU time of a piece of work, the median of several: what other processes take does not count."""
    return sorted(_work() for _ in range(5))[2]


def _work() -> float:
    start_s = time.thread_time()
    found: dict[int, str] = {}
    for number in range(40_000):
        found[number % 512] = str(number)
    return time.thread_time() - start_s
