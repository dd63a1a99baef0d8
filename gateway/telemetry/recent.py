"""The last minutes of a gateway for the console: figures by interval, bounded, without a timer (pure).

Each figure belongs to the interval of its time; intervals without events do not exist. Intervals are numbered by the
clock, so a reader can ask for the new ones only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.protos.status import Reason

INTERVAL_S = 2.0
NUM_INTERVALS = 150
MAX_SAMPLES = 256
"""Maximum number of times to the first token that one interval keeps; the latest ones, if there are more."""

GENERATING = frozenset(
    (
        *("chat", "completions", "responses", "messages", "ollama_chat", "ollama_generate", "tgi_generate"),
        *("kserve_infer", "kserve_generate", "grpc_chat", "grpc_complete", "grpc_kserve_infer", "grpc_kserve_stream"),
    )
)
"""Endpoints whose requests count: those that generate."""
FAULTS = frozenset(
    reason.name.lower()
    for reason in (
        Reason.INTERNAL,
        Reason.WORKER_LOST,
        Reason.MODEL_CHANGED,
        Reason.NO_CAPACITY,
        Reason.DRAINING,
        Reason.DEADLINE,
    )
)
"""Outcomes that are faults of the fleet, independent of the request."""
GIVEN_UP = frozenset({"cancelled", "client_deadline"})
"""Outcomes that the caller decided: it disconnected, or its own time limit passed."""


@dataclass(slots=True)
class Interval:
    """The counts within one `INTERVAL_S`."""

    number: int
    num_tokens: int = 0
    """Delivered to callers."""
    num_prompt_tokens: int = 0
    """Of choices that ended."""
    num_cached_tokens: int = 0
    num_answered: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    """Because of a limit, for lack of capacity, or because the request was wrong."""
    num_failed: int = 0
    """By a fault of the fleet: see `FAULTS`."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Requests that were refused or failed, by outcome."""
    ttft_ms: list[float] = field(default_factory=list)
    num_first_tokens: int = 0


class Recent:
    """Intervals of the last `NUM_INTERVALS` times `INTERVAL_S`. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # One more than is shown, because the current one is not complete.
        self._intervals: deque[Interval] = deque(maxlen=NUM_INTERVALS + 1)

    @property
    def number(self) -> int:
        """Number of the current interval."""
        return int(self._clock() / INTERVAL_S)

    def delivered(self, num_tokens: int) -> None:
        """Count tokens that go to a caller."""
        self._present().num_tokens += num_tokens

    def first_token(self, since_arrival_s: float) -> None:
        """Record the time to a first token."""
        interval = self._present()
        if len(interval.ttft_ms) < MAX_SAMPLES:
            interval.ttft_ms.append(since_arrival_s * 1e3)
        else:
            interval.ttft_ms[interval.num_first_tokens % MAX_SAMPLES] = since_arrival_s * 1e3
        interval.num_first_tokens += 1

    def prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count the tokens of a prompt, and how many of them were found in a prefix cache."""
        interval = self._present()
        interval.num_prompt_tokens += num_tokens
        interval.num_cached_tokens += num_cached_tokens

    def request_ended(self, endpoint: str, outcome: str) -> None:
        """Count a request by its outcome, as `Metrics` names it, if the endpoint is one that generates."""
        if endpoint not in GENERATING:
            return
        interval = self._present()
        if outcome == "ok":
            interval.num_answered += 1
            return
        if outcome in GIVEN_UP:
            interval.num_cancelled += 1
            return
        if outcome in FAULTS:
            interval.num_failed += 1
        else:
            interval.num_refused += 1
        interval.reasons[outcome] = interval.reasons.get(outcome, 0) + 1

    def complete(self, since: int = 0) -> Sequence[Interval]:
        """Intervals that are over, from number `since` on, oldest first; those without events are missing."""
        present = self.number
        least = max(since, present - NUM_INTERVALS)
        return [one for one in self._intervals if least <= one.number < present]

    def _present(self) -> Interval:
        number = self.number
        if not self._intervals or self._intervals[-1].number != number:
            self._intervals.append(Interval(number))
        return self._intervals[-1]


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that `share` (0 to 1) of all values do not exceed; None if there are none."""
    in_order = sorted(values)
    if not in_order:
        return None
    return in_order[max(0, math.ceil(share * len(in_order)) - 1)]
