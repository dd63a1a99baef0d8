"""What was achieved of pinning threads and memory, read back from the kernel: not what was asked for.

Sources: /proc/self/task/*/status (Cpus_allowed_list of every thread, OpenVINO's own included), /proc/self/numa_maps
(the memory policy in force, and pages by node) and /proc/self/smaps (huge pages); see proc(5).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.worker.host.numa import memory_node_of, parse_list

MIN_INTERVAL_S = 10.0
# The kernel walks the page tables of all that is resident: some 5 ms for each GiB of small pages. At most this part of
# the time goes into it.
_SHARE_OF_TIME = 0.002


@dataclass(frozen=True, slots=True)
class Binding:
    """CPUs that any thread may run on, ascending; the policy as the kernel writes it (`default`, `prefer:0`, ...),
    empty if it tells none; resident bytes by NUMA node: all, those that are of no file, of these the KV cache; of the
    cache the bytes in huge pages. `numa_node` is the one with memory that is nearest to all CPUs, if there is one."""

    numa_node: int | None
    cpus: tuple[int, ...]
    num_threads: int
    memory_policy: str
    resident_bytes: dict[int, int] = field(default_factory=dict)
    anonymous_bytes: dict[int, int] = field(default_factory=dict)
    kv_bytes: dict[int, int] = field(default_factory=dict)
    kv_huge_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """Addresses of the KV cache: `size_bytes` from `address` on."""

    address: int
    size_bytes: int

    def __contains__(self, address: int) -> bool:
        return self.address <= address < self.address + self.size_bytes


def read_binding(kv_cache: Region, root: Path = Path("/")) -> Binding:
    """Read what the kernel says of this process now. `root` is "/" but in tests."""
    process = root / "proc/self"
    cpus, num_threads = _cpus_of_threads(process)
    pages = _numa_maps(_lines(process / "numa_maps"), kv_cache)
    return Binding(
        numa_node=memory_node_of(cpus, root),
        cpus=tuple(sorted(cpus)),
        num_threads=num_threads,
        memory_policy=pages.policy,
        resident_bytes=pages.resident_bytes,
        anonymous_bytes=pages.anonymous_bytes,
        kv_bytes=pages.kv_bytes,
        kv_huge_bytes=_huge_bytes(_lines(process / "smaps"), kv_cache),
    )


async def keep_binding_known(kv_cache: Region, tell: Callable[[Binding], None]) -> None:
    """Read the binding again and again, in a thread, until cancelled: as the cache fills, more of it is resident."""
    while True:
        started_s = time.monotonic()
        tell(await asyncio.to_thread(read_binding, kv_cache))
        await asyncio.sleep(max(MIN_INTERVAL_S, (time.monotonic() - started_s) / _SHARE_OF_TIME))


def _cpus_of_threads(process: Path) -> tuple[frozenset[int], int]:
    cpus: frozenset[int] = frozenset()
    num_threads = 0
    for thread in (process / "task").glob("*/status"):
        for line in _lines(thread):
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
        # The first mapping is the program's, which has no policy of its own: this is the one in force.
        pages.policy = pages.policy or policy
        found = dict(word.split("=", 1) for word in words if "=" in word)
        page_bytes = int(found.get("kernelpagesize_kB", 4)) * 1024
        sums = [pages.resident_bytes]
        if "file" not in found:
            sums.append(pages.anonymous_bytes)
        if int(address, 16) in kv_cache:
            sums.append(pages.kv_bytes)
        for name, count in found.items():
            if name[0] == "N" and name[1:].isdecimal():
                for by_node in sums:
                    by_node[int(name[1:])] = by_node.get(int(name[1:]), 0) + int(count) * page_bytes
    return pages


def _huge_bytes(lines: Iterable[str], kv_cache: Region) -> int:
    """Bytes in transparent huge pages of the mappings that lie in `kv_cache`."""
    total = 0
    inside = False
    for line in lines:
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            inside = int(name.partition("-")[0], 16) in kv_cache
        elif inside and name == "AnonHugePages:":
            total += int(value.split()[0]) * 1024
    return total


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        # A thread that has ended, or a kernel without NUMA.
        return []
