"""Reads the machine's topology from the kernel; `placement` decides how to use it.

Sources: /sys/devices/system/cpu/cpu*/topology and cache (Documentation/admin-guide/cputopology.rst),
/sys/devices/system/node (Documentation/ABI/stable/sysfs-devices-node), cgroup v1 and v2 CPU controllers and cpusets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from headrace.common.kernel_files import ROOT, cgroup_places, cpu_flags, cpu_quota, parse_list, read_text

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


def read_topology(root: Path = ROOT, affinity: Collection[int] | None = None) -> Topology:
    """Read the machine's topology. `affinity` defaults to this process's mask. `root` is "/" except in tests."""
    usable = set(os.sched_getaffinity(0) if affinity is None else affinity)
    usable &= _cpuset(root) or usable
    nodes, node_of = _read_nodes(root)
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(usable):
        place = root / _CPUS / f"cpu{cpu}"
        siblings = tuple(sorted(parse_list(read_text(place / "topology/thread_siblings_list") or str(cpu))))
        cores[siblings] = Core(
            cpus=tuple(sibling for sibling in siblings if sibling in usable),
            socket=int(read_text(place / "topology/physical_package_id") or 0),
            node=node_of.get(cpu, nodes[0].number),
            cache_group=_cache_group(place, cpu),
        )
    ordered = sorted(cores.values(), key=lambda core: (core.node, core.cache_group, core.cpus))
    return Topology(tuple(ordered), nodes, cpu_quota(root), cpu_flags(root))


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
        total = re.search(r"MemTotal:\s*(\d+) kB", read_text(place / "meminfo"))
        distances = [int(value) for value in (read_text(place / "distance")).split()]
        nodes.append(Node(number, int(total[1]) * 1024 if total else 0, dict(zip(numbers, distances, strict=False))))
        node_of |= dict.fromkeys(parse_list(read_text(place / "cpulist")), number)
    if not nodes:
        total = re.search(r"MemTotal:\s*(\d+) kB", read_text(root / "proc/meminfo"))
        nodes.append(Node(0, int(total[1]) * 1024 if total else 0, {0: 10}))
    return tuple(nodes), node_of


def _cache_group(place: Path, cpu: int) -> int:
    """The lowest CPU that shares the last-level cache with this one."""
    shared: dict[int, frozenset[int]] = {}
    for index in place.glob("cache/index*"):
        level = read_text(index / "level")
        if level:
            shared[int(level)] = parse_list(read_text(index / "shared_cpu_list") or str(cpu))
    return min(shared[max(shared)]) if shared else 0


def _cpuset(root: Path) -> frozenset[int]:
    """The CPUs that the nearest cpuset allows; empty if no cpuset limits them."""
    for place in cgroup_places(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            text = read_text(place / name)
            if text:
                return parse_list(text)
    return frozenset()
