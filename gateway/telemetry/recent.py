"""The last minutes, hour and day of a gateway for the console: figures by interval, bounded, without a timer (pure).

Each figure belongs to the interval of its time; intervals without events do not exist. Intervals are numbered by the
clock, so a reader can ask for the new ones only. Figures are counted in the shortest intervals. When one of them is
over, it is added to the longer ones.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.protos.status import Reason

INTERVAL_S = 2.0
NUM_INTERVALS = 150
RANGES: Mapping[int, int] = {2: NUM_INTERVALS, 30: 120, 300: 288}
"""How many intervals are kept, by their length in seconds: five minutes, an hour, a day."""
MAX_SAMPLES = 256
"""Maximum number of times to the first token that one interval keeps of a model; the latest ones, if there are more."""
MAX_MODELS = 32
"""Maximum number of models that one interval tells apart. The others are counted together, under `OTHERS`."""
OTHERS = ""

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


def _no_times() -> array[float]:
    return array("f")


@dataclass(slots=True)
class Figures:
    """The figures of one model within an interval."""

    num_tokens: int = 0
    """Delivered to callers."""
    num_prompt_tokens: int = 0
    """Of choices that ended."""
    num_cached_tokens: int = 0
    ttft_ms: array[float] = field(default_factory=_no_times)
    num_first_tokens: int = 0

    def first_token(self, ms: float) -> None:
        """Count an answer's first token, which came after so many milliseconds. The last `MAX_SAMPLES` of the times are
        kept."""
        if len(self.ttft_ms) < MAX_SAMPLES:
            self.ttft_ms.append(ms)
        else:
            self.ttft_ms[self.num_first_tokens % MAX_SAMPLES] = ms
        self.num_first_tokens += 1

    def add(self, other: Figures) -> None:
        """Add the figures of another interval."""
        self.num_tokens += other.num_tokens
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_cached_tokens += other.num_cached_tokens
        for ms in other.ttft_ms:
            self.first_token(ms)


@dataclass(slots=True)
class Interval:
    """The counts within one interval."""

    number: int
    num_answered: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    """Because of a limit, for lack of capacity, or because the request was wrong."""
    num_failed: int = 0
    """By a fault of the fleet: see `FAULTS`."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Requests that were refused or failed, by outcome."""
    models: dict[str, Figures] = field(default_factory=dict)

    def of_model(self, name: str) -> Figures:
        """The figures of a model, to be added to."""
        found = self.models.get(name)
        if found is None:
            name = name if len(self.models) < MAX_MODELS else OTHERS
            found = self.models.setdefault(name, Figures())
        return found

    def figures(self, model: str | None = None) -> Figures:
        """The figures of a model; without a name, those of all models together."""
        if model is not None:
            return self.models.get(model, Figures())
        every = list(self.models.values())
        return Figures(
            sum(one.num_tokens for one in every),
            sum(one.num_prompt_tokens for one in every),
            sum(one.num_cached_tokens for one in every),
            array("f", (ms for one in every for ms in one.ttft_ms)),
            sum(one.num_first_tokens for one in every),
        )

    def add(self, other: Interval) -> None:
        """Add a shorter interval."""
        self.num_answered += other.num_answered
        self.num_cancelled += other.num_cancelled
        self.num_refused += other.num_refused
        self.num_failed += other.num_failed
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        for name, figures in other.models.items():
            self.of_model(name).add(figures)


class Recent:
    """The latest intervals of each length in `RANGES`. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # One more than is shown, because the current one is not complete.
        self._intervals = {length_s: deque[Interval](maxlen=count + 1) for length_s, count in RANGES.items()}
        self._added = -1
        """Number of the latest interval that the longer ones have."""

    @property
    def number(self) -> int:
        """Number of the current interval."""
        return self.number_of(int(INTERVAL_S))

    def number_of(self, length_s: int) -> int:
        """Number of the current interval of this length."""
        return int(self._clock() / length_s)

    def delivered(self, model: str, num_tokens: int) -> None:
        """Count tokens that go to a caller."""
        self._present().of_model(model).num_tokens += num_tokens

    def first_token(self, model: str, since_arrival_s: float) -> None:
        """Record the time to a first token."""
        self._present().of_model(model).first_token(since_arrival_s * 1e3)

    def prompt(self, model: str, num_tokens: int, num_cached_tokens: int) -> None:
        """Count the tokens of a prompt, and how many of them were found in a prefix cache."""
        figures = self._present().of_model(model)
        figures.num_prompt_tokens += num_tokens
        figures.num_cached_tokens += num_cached_tokens

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

    def complete(self, since: int = 0, length_s: int = int(INTERVAL_S)) -> Sequence[Interval]:
        """Intervals of this length that are over, from number `since` on, oldest first; those without events are
        missing."""
        shortest = self._intervals[int(INTERVAL_S)]
        if shortest and shortest[-1].number < self.number:
            self._pass_on(shortest[-1])
        present = self.number_of(length_s)
        least = max(since, present - RANGES[length_s])
        return [one for one in self._intervals[length_s] if least <= one.number < present]

    def _present(self) -> Interval:
        number = self.number
        shortest = self._intervals[int(INTERVAL_S)]
        if not shortest or shortest[-1].number != number:
            if shortest:
                self._pass_on(shortest[-1])
            shortest.append(Interval(number))
        return shortest[-1]

    def _pass_on(self, interval: Interval) -> None:
        """Add an interval that is over to the longer ones, once."""
        if interval.number == self._added:
            return
        self._added = interval.number
        for length_s, kept in self._intervals.items():
            if length_s == INTERVAL_S:
                continue
            number = int(interval.number * INTERVAL_S / length_s)
            if not kept or kept[-1].number != number:
                kept.append(Interval(number))
            kept[-1].add(interval)


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that `share` (0 to 1) of all values do not exceed; None if there are none."""
    in_order = sorted(values)
    if not in_order:
        return None
    return in_order[max(0, math.ceil(share * len(in_order)) - 1)]
