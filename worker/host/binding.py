"""The actual placement of threads and memory, read from the kernel.

Sources: /proc/self/task/*/status (Cpus_allowed_list of every thread, including OpenVINO's), /proc/self/numa_maps (the
memory policy, and pages by node) and /proc/self/smaps (huge pages); see proc(5).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headrace.common.kernel_files import format_list, parse_list, read_text
from headrace.protos import worker_pb2
from headrace.worker.host.numa import memory_node_of

MIN_INTERVAL_S = 10.0
# The kernel walks the page tables of all resident memory, which takes about 5 ms for each GiB of small pages. At most
# this share of the time is spent on it.
_SHARE_OF_TIME = 0.002


# In /proc/self/smaps: of private memory, of files in memory, of hugetlbfs.
_HUGE = {"AnonHugePages:", "ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"}


@dataclass(frozen=True, slots=True)
class Binding:
    """The placement of a worker's threads and memory.

    `numa_node` is the node with memory that is nearest to all CPUs, or None if they have different ones. `cpus` are
    those on which any thread may run, ascending. `memory_policy` is as the kernel writes it (`default`, `prefer:0`,
    ...), or empty if unknown. Resident bytes are by NUMA node: all, anonymous ones, and of these the KV cache.
    `kv_huge_bytes` of the KV cache are in huge pages.
    """

    numa_node: int | None
    cpus: tuple[int, ...]
    num_threads: int
    memory_policy: str
    resident_bytes: dict[int, int] = field(default_factory=dict)
    anonymous_bytes: dict[int, int] = field(default_factory=dict)
    kv_bytes: dict[int, int] = field(default_factory=dict)
    kv_huge_bytes: int = 0


class RankReport(NamedTuple):
    """A rank of a divided model: its CPUs and their NUMA node, and the seconds that it has spent since the start: on
    steps, and within them on waiting for other ranks."""

    cpus: frozenset[int]
    numa_node: int | None
    step_s: float
    waited_s: float


def rank_message(rank: RankReport) -> worker_pb2.Rank:
    """The message that tells others of a rank."""
    return worker_pb2.Rank(
        numa_node=rank.numa_node, cpus=format_list(rank.cpus), step_seconds=rank.step_s, wait_seconds=rank.waited_s
    )


def rank_of(message: worker_pb2.Rank) -> RankReport:
    """The opposite of `rank_message`."""
    node = message.numa_node if message.HasField("numa_node") else None
    return RankReport(parse_list(message.cpus), node, message.step_seconds, message.wait_seconds)


class StageReport(NamedTuple):
    """A stage of a pipeline: where it is reached (empty for the worker's own), its layers, and the seconds since the
    start in which it has computed, and in which it has waited for other stages or the network while steps were on their
    way; and its ranks, if it divides its layers."""

    address: str
    first_layer: int
    num_layers: int
    computed_s: float
    waited_s: float
    ranks: Sequence[RankReport] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """The memory of the KV cache: `size_bytes` at `address`."""

    address: int
    size_bytes: int

    def __contains__(self, address: int) -> bool:
        return self.address <= address < self.address + self.size_bytes


def read_binding(kv_cache: Region, root: Path = Path("/")) -> Binding:
    """Read the binding of this process. `root` is "/" except in tests."""
    process = root / "proc/self"
    cpus, num_threads = _cpus_of_threads(process)
    pages = _numa_maps(read_text(process / "numa_maps").splitlines(), kv_cache)
    return Binding(
        numa_node=memory_node_of(cpus, root),
        cpus=tuple(sorted(cpus)),
        num_threads=num_threads,
        memory_policy=pages.policy,
        resident_bytes=pages.resident_bytes,
        anonymous_bytes=pages.anonymous_bytes,
        kv_bytes=pages.kv_bytes,
        kv_huge_bytes=_huge_bytes(read_text(process / "smaps").splitlines(), kv_cache),
    )


async def keep_binding_known(kv_cache: Region, tell: Callable[[Binding], None]) -> None:
    """Read the binding periodically, in a thread, until cancelled. More of the cache becomes resident as it fills. The
    first reading is after one interval."""
    took_s = 0.0
    while True:
        await asyncio.sleep(max(MIN_INTERVAL_S, took_s / _SHARE_OF_TIME))
        started_s = time.monotonic()
        tell(await asyncio.to_thread(read_binding, kv_cache))
        took_s = time.monotonic() - started_s


def _cpus_of_threads(process: Path) -> tuple[frozenset[int], int]:
    cpus: frozenset[int] = frozenset()
    num_threads = 0
    for thread in (process / "task").glob("*/status"):
        for line in read_text(thread).splitlines():
            if line.startswith("Cpus_allowed_list:"):
                cpus |= parse_list(line.partition(":")[2])
                num_threads += 1
    return cpus, num_threads


@dataclass(slots=True)
class _Pages:
    """The sums of /proc/self/numa_maps."""

    policy: str = ""
    resident_bytes: dict[int, int] = field(default_factory=dict)
    anonymous_bytes: dict[int, int] = field(default_factory=dict)
    kv_bytes: dict[int, int] = field(default_factory=dict)


def _numa_maps(lines: Iterable[str], kv_cache: Region) -> _Pages:
    pages = _Pages()
    for line in lines:
        address, policy, *words = line.split()
        # The first mapping, that of the program, has no policy of its own, so it shows the policy of the process.
        pages.policy = pages.policy or policy
        found = dict(word.split("=", 1) for word in words if "=" in word)
        page_bytes = int(found.get("kernelpagesize_kB", 4)) * 1024
        sums = [pages.resident_bytes]
        is_kv_cache = int(address, 16) in kv_cache
        # A KV cache that outlives the worker is a file in memory.
        if "file" not in found or is_kv_cache:
            sums.append(pages.anonymous_bytes)
        if is_kv_cache:
            sums.append(pages.kv_bytes)
        for name, count in found.items():
            if name[0] == "N" and name[1:].isdecimal():
                for by_node in sums:
                    by_node[int(name[1:])] = by_node.get(int(name[1:]), 0) + int(count) * page_bytes
    return pages


def _huge_bytes(lines: Iterable[str], kv_cache: Region) -> int:
    """Bytes in huge pages of the mappings that lie in `kv_cache`."""
    total = 0
    inside = False
    for line in lines:
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            inside = int(name.partition("-")[0], 16) in kv_cache
        elif inside and name in _HUGE:
            total += int(value.split()[0]) * 1024
    return total
