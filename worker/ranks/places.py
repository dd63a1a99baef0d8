"""Which CPUs the ranks of a divided model get. Pure, except that it reads the kernel's NUMA nodes."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path

from headrace.common.kernel_files import ROOT
from headrace.worker.config import ConfigurationError
from headrace.worker.host.numa import memory_node_of


def places_of(cpus: Collection[int], num_ranks: int, root: Path = ROOT) -> tuple[tuple[int, ...], ...]:
    """Divide the CPUs among ranks: whole NUMA nodes, or parts of one if there are more ranks than nodes. CPUs of a node
    without memory go with the nearest that has some. ConfigurationError if they cannot be divided so."""
    nodes: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        node = memory_node_of(frozenset({cpu}), root)
        nodes.setdefault(-1 if node is None else node, []).append(cpu)
    in_order = [nodes[node] for node in sorted(nodes)]
    num_nodes = len(in_order)
    if num_ranks >= num_nodes and num_ranks % num_nodes == 0:
        found = [part for node in in_order for part in _split(node, num_ranks // num_nodes)]
    elif num_nodes % num_ranks == 0:
        size = num_nodes // num_ranks
        found = [tuple(itertools.chain(*in_order[start : start + size])) for start in range(0, num_nodes, size)]
    else:
        raise ConfigurationError(
            f"--tensor-parallel {num_ranks} is not possible on CPUs of {num_nodes} NUMA nodes: each rank needs whole "
            "nodes or an equal part of one; choose another number, or start the worker on the CPUs of other nodes"
        )
    if not all(found):
        raise ConfigurationError(
            f"--tensor-parallel {num_ranks} needs a CPU for each rank, and {len(cpus)} are usable here; choose a "
            "smaller number"
        )
    return tuple(found)


def _split(cpus: list[int], parts: int) -> list[tuple[int, ...]]:
    bounds = [len(cpus) * part // parts for part in range(parts + 1)]
    return [tuple(cpus[start:end]) for start, end in itertools.pairwise(bounds)]
