"""Which ranks have which heads, columns and tokens of the vocabulary. Pure.

An array of owners has a number for each position along an axis: bit r is set if rank r has the position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Owners = npt.NDArray[np.int64]


class Share(NamedTuple):
    """How a value is divided: along which axis, and which ranks have each position of the axis."""

    axis: int
    owners: Owners


class HeadOwners(NamedTuple):
    """The owners of heads: each query head has one; a KV head has several if there are fewer KV heads than ranks."""

    queries: Owners
    keys: Owners


def owners_of_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadOwners | None:
    """Divide heads so that each rank has all KV heads that its query heads read, and equally many queries for each.
    None if there are too few heads."""
    shared = num_heads // num_kv_heads
    if num_kv_heads >= num_ranks:
        keys = owners_of_parts(num_kv_heads, num_ranks)
        return HeadOwners(np.repeat(keys, shared), keys)
    queries: list[Owners] = []
    keys = np.zeros(num_kv_heads, np.int64)
    for head in range(num_kv_heads):
        first, end = (num_ranks * place // num_kv_heads for place in (head, head + 1))
        if end - first > shared:
            return None
        queries.append(owners_of_parts(shared, end - first) << first)
        keys[head] = sum(1 << rank for rank in range(first, end))
    return HeadOwners(np.concatenate(queries), keys)


def owners_of_parts(length: int, num_ranks: int, unit: int = 1) -> Owners:
    """Divide positions among ranks, in order and in whole units, as equally as these allow."""
    num_units = length // unit
    ends = [unit * (num_units * (rank + 1) // num_ranks) for rank in range(num_ranks)]
    sizes = np.diff([0, *ends[:-1], length])
    return np.repeat(np.int64(1) << np.arange(num_ranks, dtype=np.int64), sizes)


def has_one_owner(owners: Owners) -> bool:
    """Whether each position belongs to exactly one rank, so that sums over ranks count it once."""
    return bool(((owners > 0) & (owners & (owners - 1) == 0)).all())


def positions_of(owners: Owners, rank: int) -> npt.NDArray[np.int64]:
    """The positions that a rank has, rising: i64 `[positions]`."""
    return np.flatnonzero(owners & (1 << rank)).astype(np.int64)


def reshaped(share: Share, source: Sequence[int | None], target: Sequence[int | None]) -> Share | None:
    """The share of a value after a reshape from the dimensions `source` to `target`; unknown dimensions are None.
    Returns None if the result is not divided along a single axis."""
    before, behind = source[: share.axis], source[share.axis + 1 :]
    if any(size is None for size in behind):
        is_same = None not in before and [*before, share.owners.size] == list(target[: share.axis + 1])
        return share if is_same else None
    low = math.prod(size for size in behind if size is not None)
    high = low * share.owners.size
    pieces: list[tuple[int, int]] = []
    stride = first = 1
    for axis in reversed(range(len(target))):
        if stride >= high:
            break
        length = target[axis]
        size = high // stride if length is None else length
        if stride * size > low:
            first = first if pieces else stride
            pieces.append((axis, size))
        stride *= size
    if not pieces or low % first or stride % high:
        return None
    expanded = np.tile(np.repeat(share.owners, low // first), stride // high)
    values = expanded.reshape([size for _, size in reversed(pieces)])
    for place, (axis, size) in enumerate(reversed(pieces)):
        along = np.moveaxis(values, place, 0).reshape(size, -1)
        if size > 1 and (along == along[:, :1]).all():
            return Share(axis, along[:, 0].copy())
    return None
