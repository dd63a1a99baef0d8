"""The memory that processes of this host can still allocate, within the limits of their cgroups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from headrace.common.kernel_files import ROOT, cgroup_places

GIB = 1 << 30
# Without a limit, cgroup v1 reports a number near 2^63.
_NO_LIMIT = 1 << 60
# The files with the limit and the usage, and the line with reclaimable pages, in cgroups v2 and v1.
_NAMES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = ROOT) -> int:
    """Bytes that this process can still allocate: MemAvailable, or less if a cgroup has a tighter limit.

    In a cgroup (v1 or v2), this is its limit minus its usage, without reclaimable file pages. `root` is "/" except in
    tests. Raises ValueError if the kernel does not report it.
    """
    available = _mem_available(root / "proc/meminfo")
    for limit, used in _cgroup_limits(root):
        available = min(available, max(limit - used, 0))
    return available


def node_bytes(root: Path = ROOT) -> int:
    """The memory of the largest NUMA node, or less if a cgroup has a tighter limit; 0 if the kernel does not report it.
    Unlike `available_bytes`, it does not depend on what runs."""
    files = [*(root / "sys/devices/system/node").glob("node[0-9]*/meminfo"), root / "proc/meminfo"]
    totals = []
    for path in files[:-1] or files:
        try:
            totals += [int(number) * 1024 for number in re.findall(r"MemTotal:\s*(\d+) kB", path.read_text())]
        except OSError:
            continue
    limits = [limit for limit, _used in _cgroup_limits(root)]
    return min([max(totals, default=0), *limits])


def _mem_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo} has no MemAvailable; set the size of the KV cache with --kv-cache-gb")


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit and the usage without reclaimable pages, for this process's cgroup and each of its ancestors."""
    for place in cgroup_places(root, "memory"):
        for names in _NAMES:
            if limit := _limit_of(place, *names):
                yield limit


def _limit_of(place: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> tuple[int, int] | None:
    try:
        raw = (place / limit_name).read_text().strip()
        if raw == "max" or int(raw) >= _NO_LIMIT:
            return None
        used = int((place / usage_name).read_text())
        for line in (place / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name == reclaimable_name:
                used -= int(value)
        return int(raw), max(used, 0)
    except (OSError, ValueError):
        return None
