"""Small requests beside a load, one after the other, to measure how much the load delays others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from headrace.bench.apis import Prompt
from headrace.bench.record import Record
from headrace.bench.sender import Sender, ask

_PROMPT = Prompt([{"role": "user", "content": "Hi"}], 1)


class Probes:
    """Asks for one token `rate` times a second at most; never, if `rate` is 0. --max-concurrency does not hold them
    back."""

    def __init__(self, sender: Sender, rate: float, now: Callable[[], float]) -> None:
        self._sender = sender
        self._rate = rate
        self._now = now
        self._records: list[Record] = []

    def asked(self) -> Coroutine[Any, Any, None] | None:
        """The coroutine that sends the probes while it runs; None if none are sent."""
        return self._ask() if self._rate else None

    async def _ask(self) -> None:
        request = self._sender.prepared(_PROMPT)
        while True:
            record = Record(len(self._records), 1, 1)
            record.sent_s = record.ended_s = self._now()
            await ask(self._sender, request, record)
            self._records.append(record)
            await asyncio.sleep(1 / self._rate)

    def figures(self) -> dict[str, Any]:
        """Counts and latencies, by their keys in the JSON of `vllm bench serve`; empty if no probe was answered."""
        took_s = np.array([record.latency_s for record in self._records if record.succeeded])
        if not len(took_s):
            return {}
        return {
            "probe_completed": len(took_s),
            "probe_failed": len(self._records) - len(took_s),
            "probe_median_e2el_ms": float(np.median(took_s)) * 1000,
            "probe_p99_e2el_ms": float(np.percentile(took_s, 99)) * 1000,
            "probe_max_e2el_ms": float(took_s.max()) * 1000,
        }
