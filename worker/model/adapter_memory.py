"""The memory of the adapters' weights: the inputs that `adapter_graph` gives a model, with a slot for each adapter.

A step reads the slots up to the highest one that it uses, so its inputs are the beginnings of these arrays. A step
copies nothing. A slot that no running request uses may be written while a step is computed, because no token's result
comes from it. The arrays lie in a file in memory, so that another process can write them.

Each rank of a divided model has arrays of its own, in a file of its own. A and B are cut as the weights of their layer:
B with its outputs, A with its inputs. Rank 0 writes the slots of all ranks.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.host.numa import prefer_if_possible

if TYPE_CHECKING:
    import openvino as ov

FloatArray = npt.NDArray[np.float32]
BfloatArray = npt.NDArray[np.uint16]
"""The bits of bfloat16 numbers."""
Positions = npt.NDArray[np.int64]
_Arrays = dict[str, BfloatArray | FloatArray]
# Ranks of a slot are a multiple of this, so that adapters of similar rank use the same kernels.
RANK_STEP = 8
# Each array begins at a multiple of this, in bytes.
_ALIGNMENT = 64
_FROM_LAYER = re.compile(r"(?:^|\.)((?:layers|h|blocks|block)\.\d+\..+)$")


class Linear(NamedTuple):
    """A linear layer: its name (see `name_from_layer`), its product's friendly name, and its sizes."""

    name: str
    product: str
    num_inputs: int
    num_outputs: int


def name_from_layer(module: str) -> str:
    """The name of a module from its layer on: `layers.0.self_attn.q_proj`. The whole name if it is in no layer."""
    found = _FROM_LAYER.search(module)
    return found.group(1) if found else module


class AdaptedGroup(NamedTuple):
    """Linear layers of the same states. `input_a` is the input for the A of all, `inputs_b` those for each one's B."""

    linears: Sequence[Linear]
    input_a: str
    inputs_b: Sequence[str]


class LowRank(NamedTuple):
    """The matrices that an adapter adds to one linear layer: `a` `[rank, inputs]` and `b` `[outputs, rank]`, scaled."""

    a: FloatArray | BfloatArray
    b: FloatArray | BfloatArray


class Cut(NamedTuple):
    """The part of a linear layer that one rank of a divided model has: the indices of its inputs and outputs,
    ascending. None stands for all of them."""

    inputs: Positions | None = None
    outputs: Positions | None = None

    def of_linear(self, linear: Linear) -> Linear:
        """The layer as this rank has it."""
        inputs = linear.num_inputs if self.inputs is None else self.inputs.size
        outputs = linear.num_outputs if self.outputs is None else self.outputs.size
        return linear._replace(num_inputs=inputs, num_outputs=outputs)

    def of_weights(self, weights: LowRank) -> LowRank:
        """The rank's part of what an adapter adds to the layer."""
        a, b = weights
        return LowRank(a if self.inputs is None else a[:, self.inputs], b if self.outputs is None else b[self.outputs])


class AdapterPart(NamedTuple):
    """The adapter weights that one rank of a divided model has. `cuts` has the parts of divided linear layers, by the
    friendly names of their products; other layers are whole. `node` is the NUMA node that its memory prefers; None for
    the writer's node."""

    cuts: Mapping[str, Cut]
    node: int | None = None

    def cut_of(self, linear: Linear) -> Cut:
        """The part of a layer that the rank has."""
        return self.cuts.get(linear.product, _ALL)


_ALL = Cut()
UNDIVIDED = (AdapterPart({}),)


class AdapterMemory:
    """Weights of `num_slots` adapters of up to `rank` ranks, zero at first, for each of the `parts` of a model: that of
    this process first. A slot takes memory once it is written. `fds` are the files of the weights of each part; other
    processes can use them to access the same weights."""

    def __init__(
        self,
        groups: Sequence[AdaptedGroup],
        num_slots: int,
        rank: int,
        *,
        is_bfloat16: bool,
        parts: Sequence[AdapterPart] = UNDIVIDED,
        fds: Sequence[int] = (),
    ) -> None:
        """Takes over `fds`; without them the memory is new. MemoryError if there is no address space for it."""
        self.num_slots = num_slots
        self.rank = -(-rank // RANK_STEP) * RANK_STEP
        self.groups = groups
        self.is_bfloat16 = is_bfloat16
        self.parts = parts
        self.fds: list[int] = []
        self._arrays: list[_Arrays] = []
        for index, part in enumerate(parts):
            fd = fds[index] if fds else os.memfd_create("adapters")
            weakref.finalize(self, os.close, fd)
            self.fds.append(fd)
            self._arrays.append(self._map(fd, part, is_new=not fds))

    def _map(self, fd: int, part: AdapterPart, *, is_new: bool) -> _Arrays:
        """The arrays of a part in its file."""
        shapes: dict[str, tuple[int, int, int]] = {}
        for group in self.groups:
            linears = [part.cut_of(linear).of_linear(linear) for linear in group.linears]
            shapes[group.input_a] = (self.num_slots, linears[0].num_inputs, len(linears) * self.rank)
            for linear, name in zip(linears, group.inputs_b, strict=True):
                shapes[name] = (self.num_slots, linear.num_outputs, self.rank)
        dtype: Any = np.uint16 if self.is_bfloat16 else np.float32
        sizes = [
            -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes.values()
        ]
        mapped = _mapped(fd, sum(sizes), is_new=is_new)
        if is_new and part.node is not None:
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            prefer_if_possible(address, sum(sizes), part.node, "adapters")
        arrays: _Arrays = {}
        begin = 0
        for (name, shape), size in zip(shapes.items(), sizes, strict=True):
            arrays[name] = np.frombuffer(mapped, dtype, math.prod(shape), begin).reshape(shape)
            begin += size
        return arrays

    @property
    def slot_bytes(self) -> int:
        """The bytes that a slot takes in all parts, for an adapter of any rank up to `rank`."""
        return sum(array.nbytes // self.num_slots for arrays in self._arrays for array in arrays.values())

    def write(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        """Put an adapter's weights, by name of the linear layer, into a slot. All other layers get zeros."""
        for part, arrays in zip(self.parts, self._arrays, strict=True):
            for group in self.groups:
                array_a = arrays[group.input_a][slot]
                for index, (linear, name) in enumerate(zip(group.linears, group.inputs_b, strict=True)):
                    of_a = array_a[:, index * self.rank : (index + 1) * self.rank]
                    of_b = arrays[name][slot]
                    found = weights.get(linear.name)
                    rank = 0 if found is None else len(found.a)
                    of_a[:, rank:] = 0
                    of_b[:, rank:] = 0
                    if found is not None:
                        own = part.cut_of(linear).of_weights(found)
                        of_a[:, :rank] = self._stored(own.a).T
                        of_b[:, :rank] = self._stored(own.b)

    def with_rank(self, rank: int, slots: Sequence[int]) -> AdapterMemory:
        """New memory with room for `rank` ranks, and a copy of these slots, which have no more."""
        copy = self._like(rank, ())
        self.copy_to(copy, slots)
        return copy

    def in_files(self, rank: int, fds: Sequence[int]) -> AdapterMemory:
        """The memory that another process has made with room for `rank` ranks, and otherwise like this. Takes over its
        files."""
        return self._like(rank, fds)

    def _like(self, rank: int, fds: Sequence[int]) -> AdapterMemory:
        return AdapterMemory(self.groups, self.num_slots, rank, is_bfloat16=self.is_bfloat16, parts=self.parts, fds=fds)

    def copy_to(self, copy: AdapterMemory, slots: Sequence[int]) -> None:
        """Copy these slots to memory of the same layers, which has room for their ranks."""
        rank = min(self.rank, copy.rank)
        for old, new in zip(self._arrays, copy._arrays, strict=True):
            for group in self.groups:
                shape = (*old[group.input_a].shape[:2], len(group.linears), -1)
                old_a, new_a = (arrays[group.input_a].reshape(shape) for arrays in (old, new))
                for slot in slots:
                    new_a[slot, ..., :rank] = old_a[slot, ..., :rank]
                    for name in group.inputs_b:
                        new[name][slot, :, :rank] = old[name][slot, :, :rank]

    def tensors(self, num_slots: int) -> dict[str, ov.Tensor]:
        """The model's inputs with the first slots, in this process's part. The arrays own the tensors' memory."""
        # The command imports this module before memory is bound, and importing OpenVINO starts threads.
        import openvino as ov

        kind = ov.Type.bf16 if self.is_bfloat16 else ov.Type.f32
        return {
            name: ov.Tensor(array[:num_slots].reshape(-1).view(np.uint8), ov.Shape([num_slots, *array.shape[1:]]), kind)
            for name, array in self._arrays[0].items()
        }

    def _stored(self, values: FloatArray | BfloatArray) -> BfloatArray | FloatArray:
        if self.is_bfloat16:
            return values if values.dtype == np.uint16 else bfloat16_of(values)  # type: ignore[arg-type]
        return floats_of(values)


def _mapped(fd: int, size: int, *, is_new: bool) -> mmap.mmap:
    try:
        if is_new:
            os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
    except OSError as error:
        raise MemoryError(f"no address space for {size} bytes") from error


def bfloat16_of(values: FloatArray) -> BfloatArray:
    """The bits of the nearest bfloat16 numbers; ties go to the even one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    # The upper half of each number.
    return rounded.view(np.uint16).reshape(*bits.shape, 2)[..., 1]


def floats_of(values: FloatArray | BfloatArray) -> FloatArray:
    """The values as float32, in the same shape: bits of bfloat16 are converted, float32 is returned as it is."""
    if values.dtype != np.uint16:
        return values  # type: ignore[return-value]
    floats = np.zeros(values.shape, np.float32)
    floats.view(np.uint16).reshape(*values.shape, 2)[..., 1] = values
    return floats


class AdapterRows(NamedTuple):
    """Which slot each token of a step uses; see `adapter_graph` for the shapes."""

    num_slots: int
    rows: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]


def rows_of(slots: npt.NDArray[np.int32], num_slots: int) -> AdapterRows:
    """The rows of tokens with these slots, -1 for none. At least one token has a slot; all are below `num_slots`."""
    counts = np.bincount(slots[slots >= 0], minlength=num_slots)
    length = _rounded(int(counts.max()))
    order = np.argsort(slots, kind="stable")[int((slots < 0).sum()) :]
    slot_of = slots[order]
    starts = np.cumsum(counts) - counts
    within = np.arange(len(order)) - starts[slot_of]
    rows = np.zeros((num_slots, length), np.int32)
    rows[slot_of, within] = order
    places = np.full(len(slots), num_slots * length, np.int32)
    places[order] = slot_of * length + within
    return AdapterRows(num_slots, rows, places)


def _rounded(length: int) -> int:
    """Round a row count up by at most an eighth, so that steps have fewer shapes, because each shape needs its own
    kernels."""
    step = max(4, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step
