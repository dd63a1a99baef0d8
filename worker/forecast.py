"""When a new request would get its first token, and whether that is too late to take it in.

The wait is that for a seat in the batch, as requests end, plus the prompts still to be computed and its own at the
learned rate. It is an estimate from above: short prompts go before long ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from headrace.protos.status import Reason, StatusError
from headrace.worker.mailbox import LoadReport

# Half the weight of what is known of the rate at which requests end is this young.
_HALF_LIFE_S = 10.0
_MIN_RETRY_S = 0.1


class Forecast:
    """Predicts from load reports. Lives on the event loop; `max_ttft_s` is the longest wait that anyone is given."""

    def __init__(self, max_num_seqs: int, max_ttft_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_ttft_s = max_ttft_s
        self._clock = clock
        self._report = LoadReport()
        self._reported_s = clock()
        self._ended_per_s = 0.0
        self._num_submitted = 0
        self._num_submitted_tokens = 0

    def observe(self, report: LoadReport) -> None:
        """Take in the state after a step; what was submitted before it is part of it."""
        now = self._clock()
        passed_s = now - self._reported_s
        if passed_s > 0 and self._report.num_running:
            ended = _num_ended(report) - _num_ended(self._report)
            weight = 1 - 0.5 ** (passed_s / _HALF_LIFE_S)
            self._ended_per_s += weight * (ended / passed_s - self._ended_per_s)
        self._report = report
        self._reported_s = now
        self._num_submitted = self._num_submitted_tokens = 0

    def submitted(self, num_tokens: int) -> None:
        """A request was handed to the engine after the latest report."""
        self._num_submitted += 1
        self._num_submitted_tokens += num_tokens

    def ttft_s(self, num_tokens: int) -> float:
        """Seconds to the first token of a new request with this many tokens to compute; 0 while nothing is learned."""
        report = self._report
        if not report.prefill_tokens_per_s:
            return 0.0
        ahead = report.num_uncached_tokens + self._num_submitted_tokens
        prefill_s = (ahead + num_tokens) / report.prefill_tokens_per_s
        queued = report.num_running + report.num_waiting + self._num_submitted + 1 - self._max_num_seqs
        seat_s = queued / self._ended_per_s if queued > 0 and self._ended_per_s > 0 else 0.0
        return prefill_s + seat_s

    def check(self, num_tokens: int, deadline_s: float | None) -> None:
        """Refuse, with a time to come back, a request that would wait longer than it may or than anyone may."""
        predicted_s = self.ttft_s(num_tokens)
        bound_s = self._max_ttft_s if deadline_s is None else min(deadline_s, self._max_ttft_s)
        if predicted_s <= bound_s:
            return
        whose = "this worker lets anyone wait" if bound_s == self._max_ttft_s else "the request's deadline allows"
        raise StatusError(
            Reason.QUEUE_FULL,
            f"the first token would come after about {predicted_s:.1f} s, later than {whose} ({bound_s:.1f} s); "
            "try again later",
            retry_after_s=max(_MIN_RETRY_S, math.ceil(10 * (predicted_s - bound_s)) / 10),
        )


def _num_ended(report: LoadReport) -> int:
    counters = report.counters
    return sum(counters.get(f"requests_{how}", 0) for how in ("finished", "cancelled", "failed"))
