"""Reads the machine's topology from the kernel; `placement` decides how to use it.

Sources: /sys/devices/system/cpu/cpu*/topology and cache (Documentation/admin-guide/cputopology.rst),
/sys/devices/system/node (Documentation/ABI/stable/sysfs-devices-node), cgroup v1 and v2 CPU controllers and cpusets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its usable CPUs (SMT siblings, ascending), socket, NUMA node, and cache group, which is the
    lowest CPU that shares its last-level cache."""

    cpus: tuple[int, ...]
    socket: int
    node: int
    cache_group: int


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node. `distances` lists the distance to each node by number; 10 means local."""

    number: int
    memory_bytes: int
    distances: dict[int, int]


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores and nodes that this process may use. `quota_cpus` is the CPU quota of the cgroups, in CPUs; None means
    no limit. `cpu_flags` are the kernel's names of the CPU's features."""

    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    quota_cpus: float | None
    cpu_flags: frozenset[str] = frozenset()

    def cores_of(self, node: int) -> tuple[Core, ...]:
        """The cores of a node; those that share a cache are adjacent."""
        return tuple(core for core in self.cores if core.node == node)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse a list such as `0-2,8` into ascending numbers."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format numbers as a list such as `0-2,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def read_topology(root: Path = Path("/"), affinity: Collection[int] | None = None) -> Topology:
    """Read the machine's topology. `affinity` defaults to this process's mask. `root` is "/" except in tests."""
    usable = set(os.sched_getaffinity(0) if affinity is None else affinity)
    cpuset = _cpuset(root)
    usable &= set(cpuset) if cpuset else usable
    nodes, node_of = _read_nodes(root)
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(usable):
        place = root / _CPUS / f"cpu{cpu}"
        siblings = parse_cpu_list(_read(place / "topology/thread_siblings_list") or str(cpu))
        cores[siblings] = Core(
            cpus=tuple(sibling for sibling in siblings if sibling in usable),
            socket=int(_read(place / "topology/physical_package_id") or 0),
            node=node_of.get(cpu, nodes[0].number),
            cache_group=_cache_group(place, cpu),
        )
    ordered = sorted(cores.values(), key=lambda core: (core.node, core.cache_group, core.cpus))
    return Topology(tuple(ordered), nodes, _quota_cpus(root), _cpu_flags(root))


def _cpu_flags(root: Path) -> frozenset[str]:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_nodes(root: Path) -> tuple[tuple[Node, ...], dict[int, int]]:
    """The nodes sorted by number, and the node of each CPU. A machine without NUMA information has one node."""
    nodes: list[Node] = []
    node_of: dict[int, int] = {}
    numbers = sorted(
        int(path.name.removeprefix("node"))
        for path in (root / _NODES).glob("node[0-9]*")
        if path.name.removeprefix("node").isdecimal()
    )
    for number in numbers:
        place = root / _NODES / f"node{number}"
        total = re.search(r"MemTotal:\s*(\d+) kB", _read(place / "meminfo") or "")
        distances = [int(value) for value in (_read(place / "distance") or "").split()]
        nodes.append(Node(number, int(total[1]) * 1024 if total else 0, dict(zip(numbers, distances, strict=False))))
        node_of |= dict.fromkeys(parse_cpu_list(_read(place / "cpulist") or ""), number)
    if not nodes:
        total = re.search(r"MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo") or "")
        nodes.append(Node(0, int(total[1]) * 1024 if total else 0, {0: 10}))
    return tuple(nodes), node_of


def _cache_group(place: Path, cpu: int) -> int:
    """The lowest CPU that shares the last-level cache with this one."""
    shared: dict[int, tuple[int, ...]] = {}
    for index in place.glob("cache/index*"):
        level = _read(index / "level")
        if level is not None:
            shared[int(level)] = parse_cpu_list(_read(index / "shared_cpu_list") or str(cpu))
    return min(shared[max(shared)]) if shared else 0


def _cgroup_places(root: Path, controller: str) -> list[Path]:
    """The directories of this process's cgroup and its ancestors for a controller, v1 or v2."""
    places: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [root / "sys/fs/cgroup"]
        elif controller in controllers.split(","):
            bases = [root / "sys/fs/cgroup" / name for name in (controllers, controller)]
        else:
            continue
        for base in bases:
            directory = base / path.lstrip("/")
            # Inside a container, the path may be the host's. Then only the container's root exists.
            directory = directory if directory.is_dir() else base
            places += [place for place in (directory, *directory.parents) if place.is_relative_to(base)]
    return places


def _quota_cpus(root: Path) -> float | None:
    """The tightest CPU quota, in CPUs."""
    quotas = []
    for place in _cgroup_places(root, "cpu"):
        limit, period = (_read(place / "cpu.max") or "max 0").split()
        if limit == "max":
            limit = _read(place / "cpu.cfs_quota_us") or "-1"
            period = _read(place / "cpu.cfs_period_us") or "0"
        if int(limit) > 0 and int(period) > 0:
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def _cpuset(root: Path) -> tuple[int, ...]:
    """The CPUs that the nearest cpuset allows; empty if no cpuset limits them."""
    for place in _cgroup_places(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            text = _read(place / name)
            if text:
                return parse_cpu_list(text)
    return ()
