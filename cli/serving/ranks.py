"""Chooses the number of ranks among which a model is divided: the meaning of `--tensor-parallel auto` on this machine.

A worker of one node has no one to wait for, so workers of one node each have the most throughput. A model is divided
only if it does not fit into the memory of a node, or if its tokens would take longer than --target-tpot-ms, as far as
`headrace bench calibrate` has measured it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace.cli.hosting.finding import find_model
from headrace.cli.hosting.settings import ModelSettings
from headrace.cli.models.requirements import worker_bytes
from headrace.cli.serving.placement import nodes_with_cores
from headrace.cli.serving.plan import num_stages
from headrace.cli.serving.topology import Topology
from headrace.common.commands import CommandError
from headrace.common.host_memory import GIB
from headrace.common.model_files.networks import weights_in
from headrace.common.model_files.task import task_of
from headrace.common.worker_flags import AUTO_RANKS

# The part of a node's memory that the weights may take. The rest is for the KV cache.
_WEIGHTS_SHARE = 0.7
# Norms, embeddings and routers of experts are repeated in each rank.
_REPEATED = 1.1


class Choice(NamedTuple):
    """The number of ranks, and a sentence that says why."""

    num_ranks: int
    why: str


@dataclass(frozen=True)
class Ranks:
    """Chooses the number of ranks for each model of a host. `given` is the flag for all models: a number, "auto", or
    None for whole models. Models have adapters if the flags say so. `tell` gets the reason of each choice that is made
    automatically; such a model is downloaded if it is missing. The layers of models are divided among `pipeline`
    stages, of which one is here; None: all are here."""

    given: int | str | None = None
    target_ms: float | None = None
    has_adapters: bool = False
    offline: bool = False
    tell: Callable[[str], None] = lambda _: None
    pipeline: int | None = None

    def of(self, model: ModelSettings, machine: Topology) -> int:
        """The number for a model on this machine: its own if it has one. CommandError if the model is unknown."""
        wanted = model.options.worker.get("tensor_parallel") or self.given or 1
        if wanted != AUTO_RANKS:
            return int(wanted)
        directory, found_name = find_model(model.model, offline=self.offline)
        name = model.name or found_name
        if task_of(directory):
            return 1
        stages = num_stages(model.options.worker, {"pipeline": self.pipeline})
        num_bytes = sum(file.stat().st_size for file in weights_in(directory)) // stages
        own = model.options.worker
        choice = chosen(
            machine,
            num_bytes,
            has_adapters=any((self.has_adapters, model.adapters, model.max_adapters, own.get("max_adapters"))),
            token_ms=_token_ms(found_name, machine),
            target_ms=self.target_ms,
        )
        self.tell(f"{name}: --tensor-parallel {choice.num_ranks}, because {choice.why}")
        return choice.num_ranks


def chosen(
    machine: Topology,
    weight_bytes: int,
    *,
    has_adapters: bool = False,
    token_ms: float | None = None,
    target_ms: float | None = None,
) -> Choice:
    """Choose the number of ranks for a model with `weight_bytes` of weights. Adapters need a second copy of them.
    `token_ms` is the measured time of a token of a single stream on one node, if known. Raises CommandError if the
    model does not fit into all nodes together. Pure."""
    limits = most_weights(machine)
    if len(limits) == 1:
        return Choice(1, "this machine has one NUMA node")
    taken_bytes = (1 + has_adapters) * weight_bytes
    size = f"its weights take {taken_bytes / GIB:.1f} GiB{' with the second copy for adapters' if has_adapters else ''}"
    fits = [number for number, most in limits.items() if taken_bytes <= most]
    if not fits:
        most = list(limits.values())[-1]
        raise CommandError(
            f"--tensor-parallel auto: {size}, and all NUMA nodes of this machine together have room for "
            f"{most / GIB:.1f} GiB beside a KV cache; choose a smaller model or quantisation, or give a number"
        )
    if fits[0] > 1:
        return Choice(fits[0], f"{size}, and a NUMA node has room for {limits[1] / GIB:.1f} GiB beside a KV cache")
    if token_ms is not None and target_ms is not None and token_ms > target_ms:
        # Not all of a step gets shorter, so two nodes take more than half of the time of one.
        enough = next((number for number in limits if token_ms / number < target_ms), list(limits)[-1])
        return Choice(
            enough, f"a token takes {token_ms:.0f} ms on one node, as calibrated, and --target-tpot-ms is {target_ms:g}"
        )
    return Choice(1, "it fits into a NUMA node, and workers of one node each have the most throughput")


def most_weights(machine: Topology) -> dict[int, int]:
    """For each number of ranks that uses all nodes of this machine, ascending: the largest size in bytes of the weights
    that fit beside a KV cache. A single node counts only as one rank. Pure."""
    nodes = nodes_with_cores(machine)
    room = _WEIGHTS_SHARE * min(node.memory_bytes for node in nodes) - worker_bytes(0)
    per_byte = (worker_bytes(GIB) - worker_bytes(0)) / GIB
    of_rank = max(0.0, room / per_byte)
    return {
        number: int(of_rank * number / (_REPEATED if number > 1 else 1.0))
        for number in range(1, len(nodes) + 1)
        if len(nodes) % number == 0
    }


def describe_limits(machine: Topology) -> str:
    """Lines that state the sizes of weights for which each number of ranks is chosen."""
    return ", ".join(
        f"{number} rank{'s' if number > 1 else ''} up to {most / GIB:.1f} GiB"
        for number, most in most_weights(machine).items()
    )


def _token_ms(model: str, machine: Topology) -> float | None:
    """The time of a token of a single stream on one node, from the calibration in the cache; None without a calibration
    for this kind of machine."""
    # Imported late: this takes a while.
    from headrace.bench import calibration as files
    from headrace.bench.calibration import this_host

    path: Path = files.usual_path(model)
    if not path.exists():
        return None
    try:
        found = files.read(path)
    except files.CalibrationError:
        return None
    layout = found.layout
    is_whole = not any(flag.startswith("--tensor-parallel") for flag in layout.serve_flags)
    if found.host.cpu != this_host().cpu or not is_whole or layout.workers < len(nodes_with_cores(machine)):
        return None
    return found.decode_ms(1)
