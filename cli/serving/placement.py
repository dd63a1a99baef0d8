"""Decides which cores and which NUMA node each worker of this host gets. Pure.

By default, each node gets one worker with a thread per physical core. SMT siblings stay idle, because they share the
execution units that the kernels keep busy. On a large node, one or two cores are left for the worker's event loop, the
gateway and the router. The cores of a node without memory go to the nearest node with memory. A CPU quota limits the
number of threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.cli.serving.topology import Core, Node, Topology
from headrace.common.commands import CommandError

# (minimum cores of a worker, cores that it leaves free)
_RESERVED_FROM = ((16, 2), (8, 1))


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker's place: its affinity mask `cpus`, the number of compute threads, and the NUMA node of its memory. A
    worker that divides its model among `num_ranks` processes also has `other_nodes`, and as many threads in each."""

    node: int
    cpus: tuple[int, ...]
    num_threads: int
    num_ranks: int = 1
    other_nodes: tuple[int, ...] = ()

    @property
    def nodes(self) -> tuple[int, ...]:
        """All NUMA nodes of its memory, ascending."""
        return (self.node, *self.other_nodes)


def place_workers(
    topology: Topology, num_workers: int | None = None, num_threads: int | None = None, num_ranks: int = 1
) -> tuple[WorkerPlace, ...]:
    """Choose places for `num_workers` workers (default: one for each node with memory and cores) with `num_threads`
    threads each (default: as many as cores and quota allow). If models are divided among `num_ranks` ranks, each worker
    has the places of so many, by default whole nodes, and the threads are those of a rank. Raises CommandError if they
    do not fit."""
    shares = _cores_by_memory_node(topology)
    if num_workers is None:
        num_workers = max(1, _default_workers(topology, len(shares)) // num_ranks)
    num_workers *= num_ranks
    places = []
    nodes = sorted(shares)
    for position, node in enumerate(nodes):
        here = len(range(position, num_workers, len(nodes)))
        places += [_place(node, cores) for cores in _split(shares[node], here)]
    if topology.quota_cpus is not None:
        each = max(1, int(topology.quota_cpus / num_workers))
        places = [WorkerPlace(place.node, place.cpus, min(place.num_threads, each)) for place in places]
    if num_threads is not None:
        most = min(len(place.cpus) for place in places)
        if num_threads > most:
            raise CommandError(
                f"{num_workers} worker{'s' * (num_workers > 1)} of {num_threads} threads cannot run on the "
                f"{len(topology.cores)} cores that are usable here; choose --threads from 1 to {most}, or omit the flag"
            )
        places = [WorkerPlace(place.node, place.cpus, num_threads) for place in places]
    return tuple(places) if num_ranks == 1 else _in_groups(places, num_ranks)


def told_of_sharing(topology: Topology, places: Sequence[WorkerPlace]) -> str:
    """A sentence with the remedy if some of a model's workers share a core, or have less than one CPU of a quota. Empty
    if none do."""
    num_processes = sum(place.num_ranks for place in places)
    num_cores = len({cpu for place in places for cpu in place.cpus})
    if topology.quota_cpus is not None and num_processes > max(1.0, topology.quota_cpus):
        usable = f"a quota of {topology.quota_cpus:g} CPUs applies here"
    elif sum(len(place.cpus) for place in places) > num_cores:
        usable = f"{num_cores} cores are usable here"
    else:
        return ""
    return (
        f"{len(places)} workers are so many that some share a core and slow one another down, because {usable}; choose "
        "fewer workers"
    )


def _in_groups(places: Sequence[WorkerPlace], num_ranks: int) -> tuple[WorkerPlace, ...]:
    """Places of workers, each with those of `num_ranks` ranks that follow one another."""
    found = []
    for start in range(0, len(places), num_ranks):
        ranks = places[start : start + num_ranks]
        nodes = sorted({place.node for place in ranks})
        cpus = tuple(sorted({cpu for place in ranks for cpu in place.cpus}))
        if len(cpus) < num_ranks or any(
            sum(place.node == node for place in ranks) * len(nodes) != num_ranks for node in nodes
        ):
            raise CommandError(
                f"--tensor-parallel {num_ranks} does not fit this machine: each rank needs whole NUMA nodes or an "
                "equal part of one, and a core; choose another number (headrace topology shows the nodes)"
            )
        num_threads = min(place.num_threads for place in ranks)
        found.append(WorkerPlace(nodes[0], cpus, num_threads, num_ranks, tuple(nodes[1:])))
    return tuple(found)


def _default_workers(topology: Topology, num_nodes: int) -> int:
    if topology.quota_cpus is None:
        return num_nodes
    return max(1, min(num_nodes, int(topology.quota_cpus)))


def nodes_with_cores(topology: Topology) -> list[Node]:
    """The nodes by whose memory workers are placed, ascending."""
    numbers = _cores_by_memory_node(topology)
    return [node for node in topology.nodes if node.number in numbers]


def _cores_by_memory_node(topology: Topology) -> dict[int, list[Core]]:
    """Node -> cores that use its memory. A core uses its own node, or the nearest node with memory."""
    with_memory = [node.number for node in topology.nodes if node.memory_bytes > 0] or [topology.nodes[0].number]
    shares: dict[int, list[Core]] = {}
    for node in topology.nodes:
        cores = topology.cores_of(node.number)
        if cores:
            far = len(topology.nodes) * 1000
            nearest = min(with_memory, key=lambda number: (node.distances.get(number, far), number))
            target = node.number if node.number in with_memory else nearest
            shares.setdefault(target, []).extend(cores)
    return shares


def _split(cores: list[Core], parts: int) -> list[list[Core]]:
    """Split the cores into consecutive parts whose sizes differ by at most one. If there are more parts than cores,
    each part has one core, and parts share cores."""
    if parts > len(cores):
        return [[cores[index % len(cores)]] for index in range(parts)]
    bounds = [len(cores) * index // parts for index in range(parts + 1)] if parts else [0]
    return [cores[start:end] for start, end in itertools.pairwise(bounds)]


def _place(node: int, cores: list[Core]) -> WorkerPlace:
    reserved = next((count for least, count in _RESERVED_FROM if len(cores) >= least), 0)
    return WorkerPlace(node, tuple(sorted(core.cpus[0] for core in cores)), len(cores) - reserved)


def share_cores(topology: Topology, wanted: Sequence[int | None]) -> list[Topology]:
    """Divide the cores among models. A model with a number in `wanted` gets this many for itself, in the order of the
    machine. The models with None share the rest. Raises CommandError if the cores do not suffice."""
    reserved = sum(number or 0 for number in wanted)
    num_cores = len(topology.cores)
    if reserved > num_cores:
        raise CommandError(f"the models ask for {reserved} cores together (`cores`), and {num_cores} are usable here")
    if reserved == num_cores and None in wanted:
        raise CommandError(
            f"`cores` of some models take all {num_cores} cores, and none is left for the other models; take fewer, or "
            "give each model a number"
        )
    in_order = [core for node in topology.nodes for core in topology.cores_of(node.number)]
    taken = 0
    found = []
    for number in wanted:
        own = in_order[reserved:] if number is None else in_order[taken : taken + number]
        found.append(_with_cores(topology, own))
        taken += number or 0
    return found


def _with_cores(topology: Topology, cores: Sequence[Core]) -> Topology:
    """The machine with only some of its cores, and with their part of a quota."""
    if len(cores) == len(topology.cores):
        return topology
    quota = None if topology.quota_cpus is None else topology.quota_cpus * len(cores) / len(topology.cores)
    return replace(topology, cores=tuple(cores), quota_cpus=quota)
