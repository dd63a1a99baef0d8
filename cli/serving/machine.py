"""`headrace topology`: shows the machine, and the cores that `headrace serve` would give each worker."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import click

from headrace.cli.serving.placement import WorkerPlace, place_workers, told_of_sharing
from headrace.cli.serving.ranks import describe_limits
from headrace.cli.serving.topology import Core, Topology, read_topology
from headrace.common.kernel_files import format_list
from headrace.common.worker_flags import AUTO_RANKS, TENSOR_PARALLEL


def describe_machine(topology: Topology) -> str:
    """Sockets, NUMA nodes, caches and cores, one line for each node."""
    return "\n".join(_lines(topology))


def _lines(topology: Topology) -> Iterator[str]:
    for socket in sorted({core.socket for core in topology.cores}):
        yield f"socket {socket}"
        for node in topology.nodes:
            cores = [core for core in topology.cores_of(node.number) if core.socket == socket]
            if cores:
                yield f"  node {node.number}  {node.memory_bytes / (1 << 30):.1f} GiB  {_cores_text(cores)}"
    for node in topology.nodes:
        if not topology.cores_of(node.number):
            yield f"node {node.number}  {node.memory_bytes / (1 << 30):.1f} GiB  no usable cores"
    if topology.quota_cpus is not None:
        yield f"quota {topology.quota_cpus:g} CPUs"
    if topology.cpu_flags:
        yield f"kernels {_kernels_text(topology.cpu_flags)}"


# CPU flag, name, and the largest number of tokens in a step for which prompts are exact in performance mode and in
# accuracy mode (docs/decisions/exactness.md#step-limits). None means any number. The best comes first.
_KERNELS: tuple[tuple[str, str, int | None, int | None], ...] = (
    ("amx_tile", "AMX", None, None),
    ("avx512f", "AVX-512", None, None),
    ("avx_vnni", "AVX2 with VNNI", None, 80),
    ("avx2", "AVX2", 80, 80),
)


def _kernels_text(flags: Collection[str]) -> str:
    for flag, name, performance, accuracy in _KERNELS:
        if flag not in flags:
            continue
        bounds = {"performance mode": performance, "accuracy mode": accuracy}
        limited = [mode for mode, bound in bounds.items() if bound is not None]
        if not limited:
            return f"{name}: prompts are exact"
        return f"{name}: in {' and '.join(limited)}, prompts are exact in steps of up to 80 tokens, the default"
    return "none; the fast kernels of OpenVINO need at least AVX2"


def _cores_text(cores: Sequence[Core]) -> str:
    groups: dict[int, list[Core]] = {}
    for core in cores:
        groups.setdefault(core.cache_group, []).append(core)
    caches = " | ".join(format_list(core.cpus[0] for core in group) for group in groups.values())
    siblings = format_list(cpu for core in cores for cpu in core.cpus[1:])
    return f"cores {caches}" + (f"  (SMT siblings {siblings})" if siblings else "")


def describe_plan(places: Sequence[WorkerPlace], kind: str = "worker") -> str:
    """One line for each worker, or for each process of another kind."""
    return "\n".join(
        f"{kind}-{index}  node {format_list(place.nodes)}  CPUs {format_list(place.cpus)}  computes with "
        f"{place.num_threads}" + (f" in each of {place.num_ranks} ranks" if place.num_ranks > 1 else "")
        for index, place in enumerate(places)
    )


@click.command()
@click.option("--workers", type=click.IntRange(1, 256), help="Number of workers.  [default: one for each NUMA node]")
@click.option("--threads", type=click.IntRange(1), help="Threads of each worker.  [default: its physical cores]")
@TENSOR_PARALLEL.serve_option()
def topology(workers: int | None, threads: int | None, tensor_parallel: int | str | None) -> None:
    """Show this machine's sockets, NUMA nodes and cores, and the workers that serve would start on them."""
    machine = read_topology()
    click.echo(describe_machine(machine))
    if tensor_parallel == AUTO_RANKS:
        click.echo(f"--tensor-parallel auto chooses by the model's weights: {describe_limits(machine)}")
        return
    places = place_workers(machine, workers, threads, int(tensor_parallel or 1))
    click.echo(describe_plan(places))
    if sharing := told_of_sharing(machine, places):
        click.echo(f"warning: {sharing}", err=True)
