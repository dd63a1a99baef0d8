"""The memory that the processes of a group share: a step for all ranks, their sums, their logits and their times.

Rank 0 makes two files without names. The others inherit their descriptors, so nothing is left when the last process has
ended. Pages take memory only once they are written, so each part is as large as it may ever have to be.

    group     | sums | counters of steps | times f64 [ranks, 2] | step |
    logits    | values | maxima | sums | sums at temperature 1 |  twice, for the steps whose logits are kept
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.worker.model.batch import Batch, StateInputs, Sums
from headrace.worker.model.step_images import StepImages
from headrace.worker.ranks import counters, shared_sums
from headrace.worker.ranks.counters import Counters
from headrace.worker.ranks.shared_sums import SharedSums
from headrace.worker.request.step import BlockCopy
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.reduction import Reduction

# Numbers of a sum that are added at a time.
SUM_CAPACITY = 1 << 20
STEP_BYTES = 256 << 20
_ALIGNMENT = 64
# The arrays of a batch that a rank needs.
_ARRAYS = (
    *("input_ids", "position_ids", "past_lens", "subsequence_begins", "block_indices", "block_indices_begins"),
    *("max_context_len", "sampled_tokens_indices", "inverse_temperatures"),
)
# Those that only some steps have.
_OPTIONAL = ("part_slots", "adapter_slots", "hidden")
# Begins the names of those for its images, and for the states of recurrent layers.
_IMAGES, _STATES = "images.", "states."


class StepTooLargeError(Exception):
    """A step does not fit into the memory of the group."""


class LogitsShape(msgspec.Struct, frozen=True):
    """The largest number of rows of a step, the size of the whole vocabulary, and its number of runs, 0 without any."""

    rows: int
    vocab_size: int
    num_runs: int


class Step(NamedTuple):
    """A step as ranks compute it, and which of the two places its logits go to. By then, rank 0 has sent `num_moves`
    files for adapters over the socket to each rank, which takes those that it has not taken yet."""

    batch: Batch
    place: int
    num_moves: int = 0


class _Array(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The contents of the memory of a step. A head without arrays means that the warm-up has ended."""

    arrays: list[_Array]
    copies: list[tuple[int, int]]
    part_copies: list[tuple[int, int]]
    sums: int
    least_rows: int
    place: int
    num_moves: int


class GroupMemory:
    """One rank's view of the memory in `descriptor`, which `make` has created for `num_ranks` ranks. A rank that waits
    long for others calls `is_alive`."""

    def __init__(self, descriptor: int, rank: int, num_ranks: int, is_alive: Callable[[], bool] = lambda: True) -> None:
        ends = _ends_of(num_ranks)
        self._memory = memoryview(mmap.mmap(descriptor, ends[-1]))
        self.sums = SharedSums(self._memory[: ends[0]], rank, num_ranks, SUM_CAPACITY, is_alive)
        self.steps = Counters(self._memory[ends[0] : ends[1]], rank, is_alive)
        """Counts the steps: those that rank 0 has announced, and those that each other rank has computed."""
        self._times = np.frombuffer(self._memory[ends[1] : ends[2]], np.float64)[: 2 * num_ranks].reshape(-1, 2)
        self._step = self._memory[ends[2] :]
        self._rank = rank

    @staticmethod
    def make(num_ranks: int) -> int:
        """Make the file. Returns its descriptor."""
        return _new_file("headrace-group", _ends_of(num_ranks)[-1])

    def times_of(self, rank: int) -> tuple[float, float]:
        """Seconds that a rank has spent on its steps, and within them on waiting for others."""
        step_s, waited_s = self._times[rank].tolist()
        return step_s, waited_s

    def note_step(self, seconds: float) -> None:
        """Add a step to the times of this rank."""
        self._times[self._rank, 0] += seconds
        self._times[self._rank, 1] = self.sums.waited_s + self.steps.waited_s

    def write_step(self, batch: Batch | None, place: int, num_moves: int = 0) -> None:
        """Write a step (see `Step`). None tells the ranks that the warm-up has ended. All ranks must have completed the
        previous step. StepTooLargeError if the step does not fit."""
        arrays: list[_Array] = []
        # Arrays begin behind the head, whose size is known last.
        first = STEP_BYTES // 4
        end = first
        for name, array in _arrays_of(batch).items() if batch is not None else ():
            values: npt.NDArray[Any] = np.ascontiguousarray(array)
            if end + values.nbytes > STEP_BYTES:
                raise StepTooLargeError(f"the arrays of a step take more than {STEP_BYTES - first} bytes")
            np.frombuffer(self._step, values.dtype, values.size, end)[:] = values.reshape(-1)
            arrays.append(_Array(name, values.dtype.str, np.shape(array), end))
            end += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
        if batch is None:
            made = _Head([], [], [], 0, 0, place, num_moves)
        else:
            copies, part_copies = _pairs(batch.copies), _pairs(batch.part_copies)
            made = _Head(arrays, copies, part_copies, batch.sums.value, batch.least_rows, place, num_moves)
        head = msgspec.msgpack.encode(made)
        if len(head) + 8 > first:
            raise StepTooLargeError(f"the copies of a step take more than {first} bytes")
        self._step[:8] = len(head).to_bytes(8, "little")
        self._step[8 : 8 + len(head)] = head

    def read_step(self) -> Step | None:
        """The step, whose arrays are views; None if the warm-up has ended."""
        size = int.from_bytes(self._step[:8], "little")
        head = msgspec.msgpack.decode(self._step[8 : 8 + size], type=_Head)
        if not head.arrays:
            return None
        fields: dict[str, Any] = {
            array.name: np.frombuffer(
                self._step, np.dtype(array.dtype), int(np.prod(array.shape, dtype=np.int64)), array.offset
            ).reshape(array.shape)
            for array in head.arrays
        }
        of_images = {name: fields.pop(_IMAGES + name, None) for name in StepImages._fields}
        images = StepImages(**of_images) if of_images["rows"] is not None else None
        of_states = {name: fields.pop(_STATES + name, None) for name in StateInputs._fields}
        states = StateInputs(**of_states) if of_states["past_lens"] is not None else None
        batch = Batch(
            **fields,
            sampled=(),
            ahead=None,
            later=(),
            beams=(),
            copies=_copies(head.copies),
            part_copies=_copies(head.part_copies),
            prompts=(),
            sums=Sums(head.sums),
            states=states,
            images=images,
            least_rows=head.least_rows,
        )
        return Step(batch, head.place, head.num_moves)


class SharedLogits:
    """The logits of steps, in the memory of `descriptor`, which `make_logits` has created."""

    def __init__(self, descriptor: int, shape: LogitsShape) -> None:
        self._shape = shape
        self._memory = memoryview(mmap.mmap(descriptor, 2 * _bytes_of_place(shape)))

    def put(self, place: int, logits: Logits, first_token: int) -> None:
        """Write a rank's part, which begins with this token."""
        part = logits.values
        values, *runs = self._arrays(place, part.dtype, part.shape[0])
        values[:, first_token : first_token + part.shape[1]] = part
        for array, of_rank in zip(runs, _in_runs(logits), strict=True):
            if of_rank is not None and of_rank.shape[1]:
                # A run has equally many tokens everywhere.
                first = first_token * of_rank.shape[1] // part.shape[1]
                array[: len(of_rank), first : first + of_rank.shape[1]] = of_rank

    def whole(self, place: int, own: Logits) -> Logits:
        """The logits of all ranks, as views; `own` are those of this rank."""
        values, *runs = self._arrays(place, own.values.dtype, own.values.shape[0])
        maxima, sums, model_sums = (
            None if of_rank is None else array[: len(of_rank), : None if of_rank.shape[1] else 0]
            for array, of_rank in zip(runs, _in_runs(own), strict=True)
        )
        reduction = None if maxima is None or sums is None else Reduction(maxima, sums)
        return Logits(values, reduction, model_sums)

    def _arrays(self, place: int, dtype: np.dtype[Any], num_rows: int) -> list[npt.NDArray[Any]]:
        """Values, maxima, sums and sums at temperature 1 of some rows."""
        shape = self._shape
        if num_rows > shape.rows:
            raise StepTooLargeError(f"a step has {num_rows} rows of logits, and there is room for {shape.rows}")
        start = place * _bytes_of_place(shape)
        found: list[npt.NDArray[Any]] = [
            np.frombuffer(self._memory, dtype, num_rows * shape.vocab_size, start).reshape(num_rows, shape.vocab_size)
        ]
        start += 4 * shape.rows * shape.vocab_size
        for _ in range(3):
            numbers = np.frombuffer(self._memory, np.float32, num_rows * shape.num_runs, start)
            found.append(numbers.reshape(num_rows, shape.num_runs))
            start += 4 * shape.rows * shape.num_runs
        return found


def make_logits() -> int:
    """Create the file for logits, with size 0. Returns its descriptor."""
    return _new_file("headrace-logits", 0)


def give_room(descriptor: int, shape: LogitsShape) -> None:
    """Enlarge the file for logits, so that it has room for this shape."""
    os.ftruncate(descriptor, 2 * _bytes_of_place(shape))


def _arrays_of(batch: Batch) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {name: getattr(batch, name) for name in _ARRAYS}
    found |= {name: array for name in _OPTIONAL if (array := getattr(batch, name)) is not None}
    images = batch.images._asdict() if batch.images is not None else {}
    found |= {_IMAGES + name: array for name, array in images.items() if array is not None}
    states = batch.states._asdict() if batch.states is not None else {}
    return found | {_STATES + name: array for name, array in states.items()}


def _pairs(copies: Sequence[BlockCopy]) -> list[tuple[int, int]]:
    return [(copy.source, copy.destination) for copy in copies]


def _copies(pairs: Sequence[tuple[int, int]]) -> list[BlockCopy]:
    return [BlockCopy(*pair) for pair in pairs]


def _in_runs(logits: Logits) -> tuple[npt.NDArray[np.float32] | None, ...]:
    reduction = logits.reduction
    return (*(reduction if reduction is not None else (None, None)), logits.model_sums)


def _bytes_of_place(shape: LogitsShape) -> int:
    return 4 * shape.rows * (shape.vocab_size + 3 * shape.num_runs)


def _ends_of(num_ranks: int) -> list[int]:
    """The offsets at which the parts of the group's memory end."""
    sizes = (shared_sums.bytes_for(num_ranks, SUM_CAPACITY), counters.bytes_for(num_ranks), 16 * num_ranks, STEP_BYTES)
    ends: list[int] = []
    for size in sizes:
        ends.append((ends[-1] if ends else 0) + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return ends


def _new_file(name: str, num_bytes: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return descriptor
