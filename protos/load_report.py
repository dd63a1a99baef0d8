"""The load that a worker reports to routers: the numbers of the message Load, each declared once for worker, router and
simulator. Pure.

A new number of the engine's load is a field in worker.proto, one here with the same name and default 0, and an argument
where the worker makes its reports (worker/engine/thread.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from headrace.protos.worker_pb2 import Load


@dataclass(slots=True)
class LoadReport:
    """A worker's load; names and units as in worker.proto. All zero before the first report. Rates are 0 while they are
    unknown. Not to be changed: it is not frozen only because routers make thousands a second."""

    num_running: int = 0
    num_waiting: int = 0
    num_fetching: int = 0
    num_uncached_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_partial_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    max_num_seqs: int = 0
    num_arrived: int = 0
    arrived_tokens: int = 0
    arrived_blocks: int = 0
    transfer_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    num_disk_slots: int = 0
    num_disk_blocks: int = 0
    num_state_slots: int = 0
    num_saved_states: int = 0
    num_window_slots: int = 0
    num_held_window_slots: int = 0
    num_encoding: int = 0
    encoding_tokens: int = 0
    image_tokens_per_s: float = 0.0
    num_cached_images: int = 0
    image_cache_bytes: int = 0
    num_running_background: int = 0
    num_waiting_background: int = 0
    as_of_s: float = 0.0
    """When the numbers were current, on the reader's clock. The message has their age instead."""

    @classmethod
    def of(cls, message: Load, now_s: float) -> LoadReport:
        """The report in a message that has just arrived. Rates that one cannot divide by are 0."""
        numbers: list[Any] = list(_read(message))
        for position in _RATES:
            rate = numbers[position]
            numbers[position] = rate if math.isfinite(rate) and rate > 1e-6 else 0.0
        numbers.append(now_s - message.age_ms / 1000)
        return cls(*numbers)

    def numbers(self) -> dict[str, Any]:
        """The values of the report by the names of the fields of `Load`."""
        return {name: getattr(self, name) for name in _NAMES}

    @property
    def num_reusable_blocks(self) -> int:
        """Blocks whose content, or the beginning of it, the prefix cache can find."""
        return self.num_cached_blocks + self.num_partial_blocks

    def has_room(self, num_booked: int) -> bool:
        """Whether the worker takes another request, with `num_booked` requests that this report does not include: into
        its batch, or into the short queue that keeps the batch full. Requests in the background make room."""
        if not self.max_num_seqs:
            return True  # no report has arrived yet
        short_queue = 1 + self.max_num_seqs // 16
        # If requests wait although the batch has room, the pool is full, unless they wait for their own blocks.
        num_waiting = self.num_waiting - self.num_waiting_background
        if num_waiting - self.num_fetching - self.num_encoding >= short_queue:
            return False
        num_running = self.num_running - self.num_running_background
        return num_running + num_waiting + num_booked < self.max_num_seqs + short_queue

    def has_background_room(self, num_booked: int) -> bool:
        """Whether the worker takes another request in the background: with `num_booked` requests that this report does
        not include, at least half of its batch is empty."""
        return self.num_running + self.num_waiting + num_booked < max(1, self.max_num_seqs // 2)


def kv_use(num_blocks: int, num_free_blocks: int) -> float:
    """The part of the KV blocks that requests use, from 0 to 1: those with only reusable content count as free."""
    return (num_blocks - num_free_blocks) / num_blocks if num_blocks else 0.0


_IN_MESSAGE = [field for field in fields(LoadReport) if field.name != "as_of_s"]
_NAMES = tuple(field.name for field in _IN_MESSAGE)
_RATES = tuple(number for number, field in enumerate(_IN_MESSAGE) if field.type == "float")
_read = attrgetter(*_NAMES)
