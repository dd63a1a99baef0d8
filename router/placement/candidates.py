"""The loads and bookings of all workers in columns: one array for each quantity, with one element for each worker.

The policy evaluates a request at all workers of its model at once, by arithmetic on whole columns. A report or a
booking changes only the elements of one worker.

Pure. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.protos.load_report import LoadReport
from headrace.router.placement.bookings import Bookings

Values: TypeAlias = npt.NDArray[np.float64]
Places: TypeAlias = npt.NDArray[np.intp]

# The weight of a worker's own rates against the median of all workers.
OWN_SHARE = 0.1

_Value = TypeVar("_Value")


class Columns(NamedTuple, Generic[_Value]):
    """The load and the bookings of one worker (numbers), or of several workers (an array for each quantity). See
    `LoadReport` and `Candidate`. The rates of prefill and decode are raised to OWN_SHARE, as the policy needs them; 0
    means unknown."""

    running: _Value
    waiting: _Value
    uncached_tokens: _Value
    blocks: _Value
    free_blocks: _Value
    cached_blocks: _Value
    prefill_rate: _Value
    step_ms: _Value
    max_num_seqs: _Value
    as_of_s: _Value
    block_size: _Value
    booked_requests: _Value
    booked_tokens: _Value
    booked_blocks: _Value
    transfer_bytes_per_s: _Value
    disk_bytes_per_s: _Value
    encoding_tokens: _Value
    image_tokens_per_s: _Value


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that serves the request's model, as this router sees it.

    `num_booked_requests`, `num_booked_tokens` (uncached), `num_booked_blocks` and `num_booked_image_tokens` count the
    requests that the engine's numbers do not include yet: requests that have arrived at the worker, and requests that
    this router has just placed there.
    """

    worker_id: str
    load: LoadReport
    block_size: int
    num_booked_requests: int = 0
    num_booked_tokens: int = 0
    num_booked_blocks: int = 0
    num_booked_image_tokens: int = 0

    @classmethod
    def of(cls, worker_id: str, load: LoadReport, block_size: int, bookings: Bookings) -> Candidate:
        """A worker with this report and the bookings that the report does not include."""
        return cls(
            worker_id,
            load,
            block_size,
            load.num_arrived + bookings.num_pending,
            load.arrived_tokens + bookings.num_tokens,
            load.arrived_blocks + bookings.num_blocks,
            bookings.num_image_tokens,
        )

    def columns(self) -> Columns[float]:
        """The values of this worker, one for each column of `Candidates`."""
        load = self.load
        return Columns(
            running=load.num_running,
            waiting=load.num_waiting,
            uncached_tokens=load.num_uncached_tokens,
            blocks=load.num_blocks,
            free_blocks=load.num_free_blocks,
            cached_blocks=load.num_reusable_blocks,
            prefill_rate=load.prefill_tokens_per_s**OWN_SHARE,
            step_ms=load.decode_step_ms**OWN_SHARE,
            max_num_seqs=load.max_num_seqs,
            as_of_s=load.as_of_s,
            block_size=self.block_size,
            booked_requests=self.num_booked_requests,
            booked_tokens=self.num_booked_tokens,
            booked_blocks=self.num_booked_blocks,
            transfer_bytes_per_s=load.transfer_bytes_per_s,
            disk_bytes_per_s=load.disk_bytes_per_s,
            encoding_tokens=load.encoding_tokens + self.num_booked_image_tokens,
            image_tokens_per_s=load.image_tokens_per_s,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Workers that a request may go to. Each column has an element for each worker; `numbers` maps each name to its
    index."""

    worker_ids: Sequence[str]
    numbers: Mapping[str, int]
    columns: Columns[Values]

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Candidates:
        """The given workers, in the given order."""
        table = CandidateTable()
        for number, candidate in enumerate(candidates):
            table.put(number, candidate)
        worker_ids = [candidate.worker_id for candidate in candidates]
        numbers = {worker_id: number for number, worker_id in enumerate(worker_ids)}
        return cls(worker_ids, numbers, table.at(np.arange(len(worker_ids))))

    def __len__(self) -> int:
        """Number of workers."""
        return len(self.worker_ids)


class CandidateTable:
    """The columns, by slot. The owner of the table assigns the slots."""

    def __init__(self) -> None:
        self._values: Values = np.zeros((len(Columns._fields), 16))
        self._changed: dict[int, Callable[[], Candidate]] = {}

    def changed(self, slot: int, candidate: Callable[[], Candidate]) -> None:
        """Note that the load or the bookings of the worker at a slot have changed. They are read before the next use of
        the table: most requests change them several times and use it once."""
        self._changed[slot] = candidate

    def forget(self, slot: int) -> None:
        """Do not read what was noted as changed at this slot."""
        self._changed.pop(slot, None)

    def put(self, slot: int, candidate: Candidate) -> None:
        """Store the load and the bookings of the worker at a slot."""
        values = self._values
        if slot >= values.shape[1]:
            values = self._values = np.hstack([values, np.zeros((len(values), max(slot, values.shape[1])))])
        values[:, slot] = candidate.columns()

    def at(self, slots: Places) -> Columns[Values]:
        """A copy of the columns at these slots, in this order: each f64 `[slots]`."""
        while self._changed:
            slot, candidate = self._changed.popitem()
            self.put(slot, candidate())
        return Columns(*self._values.take(slots, axis=1))
