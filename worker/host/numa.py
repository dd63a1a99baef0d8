"""Decides where the worker's threads run and which NUMA node its memory comes from, before OpenVINO is imported.

Threads run on the CPUs of the affinity mask with which the worker was started. OpenVINO reads the mask when it is
imported. Memory comes from the node of these CPUs, or from the nearest node with memory
(Documentation/admin-guide/mm/numa_memory_policy.rst). `binding` reads back the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.common.kernel_files import ROOT, cpu_quota, format_list, parse_list, read_text
from headrace.worker.config import ConfigurationError

log = logging.getLogger(__name__)

_NODES = "sys/devices/system/node"
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_MPOL_MF_MOVE = 2
# set_mempolicy(2) and mbind(2) have no wrappers in C libraries, so they are called by number.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MBIND = {"x86_64": 237, "aarch64": 235}
_MASK_BITS = ctypes.sizeof(ctypes.c_ulong) * 8
_MAX_NODES = 1024
# Larger than the address space of a process, unless it asks for addresses above.
_ALL_BYTES = 1 << 48


def usable_cpus() -> frozenset[int]:
    """CPUs of this process's affinity mask, which cpusets and taskset may restrict."""
    return frozenset(os.sched_getaffinity(0))


def num_threads_for(asked: int | None, root: Path = ROOT) -> int:
    """Number of threads to compute with: `asked`, or the number of usable CPUs, or of those in the CPU quota of the
    cgroup if it is smaller. Remaining CPUs are left to the event loop.

    ConfigurationError if there are fewer CPUs than that, because threads that share a core only wait for each other.
    """
    num_cpus = len(usable_cpus())
    if asked is None:
        quota = cpu_quota(root)
        return num_cpus if quota is None else max(1, min(num_cpus, int(quota)))
    if not 1 <= asked <= num_cpus:
        raise ConfigurationError(
            f"{asked} threads were asked for (--threads) but {num_cpus} CPUs are usable here; ask for 1 to {num_cpus}"
        )
    return asked


def memory_nodes(root: Path = ROOT) -> tuple[int, ...]:
    """NUMA nodes with memory, ascending; empty if the kernel has no NUMA."""
    return tuple(sorted(parse_list(read_text(root / _NODES / "has_memory"))))


def memory_node_of(cpus: frozenset[int], root: Path = ROOT) -> int | None:
    """The node with memory that is nearest to all of `cpus`; a node with its own memory is nearest to its CPUs. None if
    the CPUs have different nearest nodes, or if the kernel has no NUMA."""
    with_memory = memory_nodes(root)
    nearest = set()
    for place in sorted((root / _NODES).glob("node[0-9]*")):
        if cpus & parse_list(read_text(place / "cpulist")):
            nearest.add(_nearest(int(place.name.removeprefix("node")), place, with_memory))
    return nearest.pop() if len(nearest) == 1 else None


def bind_memory(node: int | None, root: Path = ROOT, *, is_inherited: bool = False) -> int | None:
    """Prefer `node` for the memory of this thread and of all threads that it starts, and move to it what this process
    has allocated so far. None means the node of the usable CPUs.

    Must be called by the main thread before it starts others. Does nothing if there is only one node, if the CPUs are
    on several nodes, or if a memory policy is already set (numactl, systemd). With `is_inherited`, a preferred node
    that is set is that of the process which has started this one, and is replaced. If the kernel does not permit it (a
    container without CAP_SYS_NICE), logs a warning: pages then come from the node of the thread that touches them
    first, which is the same node while it has room. Returns the preferred node, or None if there is none.
    ConfigurationError if the given `node` has no memory.
    """
    with_memory = memory_nodes(root)
    if node is not None and with_memory and node not in with_memory:
        raise ConfigurationError(
            f"node {node} was asked for (--memory-node) but the nodes with memory are "
            f"{format_list(with_memory)}; headrace topology shows them"
        )
    policy = _policy_in_force(root)
    if len(with_memory) < 2 or (policy != "default" and not (is_inherited and policy.startswith("prefer:"))):
        return None
    if node is None:
        node = memory_node_of(usable_cpus(), root)
    if node is None:
        log.warning(
            "the usable CPUs are on several NUMA nodes, so memory is bound to none; start one worker for each node"
        )
        return None
    try:
        _prefer(node)
    except OSError as error:
        log.warning(
            "memory could not be bound to node %d (%s; a container needs CAP_SYS_NICE for it): it comes from the node "
            "of the thread that touches it first",
            node,
            error.strerror,
        )
        return node
    try:
        if _has_allocated_elsewhere(node, root):
            _move_allocated()
    except OSError as error:
        log.warning("what was allocated first may be on another node than %d: %s", node, error.strerror)
    return node


def unbind_memory() -> None:
    """Undo `bind_memory` for the memory that is still to come, also that of programs started from now on. Does nothing
    if the kernel does not permit it, because it has not permitted the other then."""
    with contextlib.suppress(OSError):
        _call(_SET_MEMPOLICY, ctypes.c_long(_MPOL_DEFAULT), None, ctypes.c_ulong(0))


def prefer_for(address: int, size_bytes: int, node: int) -> None:
    """Prefer `node` for the pages of a mapping, whichever process touches them first if it is of a shared file. OSError
    from the kernel; ENOSYS on an unknown architecture."""
    _call(_MBIND, ctypes.c_void_p(address), ctypes.c_ulong(size_bytes), *_preferred(node), ctypes.c_uint(0))


def prefer_if_possible(address: int, size_bytes: int, node: int, what: str) -> None:
    """As `prefer_for`, if the host has several nodes. If the kernel refuses, logs a warning that names
    `what`, the content of the mapping."""
    if len(memory_nodes()) > 1:
        try:
            prefer_for(address, size_bytes, node)
        except OSError as error:
            log.warning("%s may be on another node than %d: %s", what, node, error.strerror)


def _prefer(node: int) -> None:
    """set_mempolicy(MPOL_PREFERRED, {node}). OSError from the kernel; ENOSYS on an unknown architecture."""
    _call(_SET_MEMPOLICY, *_preferred(node))


def _move_allocated() -> None:
    """mbind(all memory, MPOL_DEFAULT, MPOL_MF_MOVE): moves the pages that no other process has to where new ones would
    come from. migrate_pages(2) would also move libraries away from other workers, if this process has CAP_SYS_NICE.
    OSError from the kernel; ENOSYS on an unknown architecture."""
    policy = ctypes.c_long(_MPOL_DEFAULT), None, ctypes.c_ulong(0)
    _call(_MBIND, None, ctypes.c_ulong(_ALL_BYTES), *policy, ctypes.c_uint(_MPOL_MF_MOVE))


def _preferred(node: int) -> tuple[Any, ...]:
    """Mode, mask and its size, as both calls of the kernel take them."""
    mask = (ctypes.c_ulong * (_MAX_NODES // _MASK_BITS))()
    mask[node // _MASK_BITS] = 1 << (node % _MASK_BITS)
    return ctypes.c_long(_MPOL_PREFERRED), mask, ctypes.c_ulong(_MAX_NODES + 1)


def _call(numbers: Mapping[str, int], *arguments: Any) -> None:
    number = numbers.get(platform.machine())
    if number is None:
        raise OSError(38, "not known on this architecture")
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _policy_in_force(root: Path) -> str:
    """The main thread's memory policy, as mappings without a policy of their own show it."""
    return next((line.split()[1] for line in _lines(root / "proc/self/numa_maps")), "default")


def _has_allocated_elsewhere(node: int, root: Path) -> bool:
    """Whether this process has anonymous pages on another node."""
    of_nodes = (re.findall(r" N(\d+)=", line) for line in _lines(root / "proc/self/numa_maps") if " anon=" in line)
    return any(int(number) != node for numbers in of_nodes for number in numbers)


def _nearest(node: int, place: Path, with_memory: tuple[int, ...]) -> int:
    """The node itself if it has memory, otherwise the nearest node with memory. Ties go to the lower number."""
    if node in with_memory or not with_memory:
        return node
    others = sorted(int(found.name.removeprefix("node")) for found in place.parent.glob("node[0-9]*"))
    distances = dict(zip(others, map(int, re.findall(r"\d+", read_text(place / "distance"))), strict=False))
    return min(with_memory, key=lambda other: (distances.get(other, 1 << 30), other))


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open() as file:
            yield from file
    except OSError:
        return
