"""The command lines of the processes on one node. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.serving.placement import WorkerPlace
from headrace.cli.serving.plan import ProcessSpec, base_url, kv_cache_shares
from headrace.common import worker_flags
from headrace.common.model_files.task import task_of
from headrace.ray.places import Claim
from headrace.ray.settings import ROUTER_DRAIN_S, Fleet, Model, checked_flags


@dataclass(frozen=True, slots=True)
class Node:
    """A Ray node: its id, its name in Ray, its address, and how many of a resource it has."""

    node_id: str
    name: str
    host: str
    num_places: int = 0

    def at(self, port: int) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def worker_spec(
    fleet: Fleet,
    model: Model,
    found: tuple[Path, str],
    node: Node,
    claim: Claim,
    places: Sequence[WorkerPlace],
    ports: tuple[int, int],
) -> ProcessSpec:
    """A worker at the claimed ones of the host's `places`, with the ports of its service and of its metrics. `found` is
    the model's directory and name. The actor registers it with routers, because these may move."""
    directory, name = found
    is_encoder = bool(task_of(directory))
    address = node.at(ports[0])
    argv = [sys.executable, "-m", "headrace.worker", "--model", str(directory), "--name", model.name or name]
    argv += ["--worker-id", worker_id(node, claim), "--listen", address, "--metrics", node.at(ports[1])]
    flags = checked_flags(model.flags, "flags")
    # Each rank of a divided model has threads and memory of its own.
    num_ranks = 1 if is_encoder else int(flags.get("tensor_parallel") or 1)
    argv += ["--threads", str(max(1, claim.num_threads // num_ranks)), "--drain-timeout", str(fleet.worker_drain_s)]
    argv += [] if claim.memory_node is None or num_ranks > 1 else ["--memory-node", str(claim.memory_node)]
    argv += worker_flags.arguments({}, flags, is_encoder=False)
    if not is_encoder and "kv_cache_gb" not in flags and len(places) > len(claim.places):
        argv += kv_cache_shares(claim.places[0], places, float(len(claim.places)))
    argv += [*_membership(fleet), *model.worker_args]
    # A file in memory, which the worker's next process in this actor finds.
    has_memory = not is_encoder and "--kv-memory" not in model.worker_args
    memory = "--kv-memory" if has_memory else None
    return ProcessSpec("worker", "worker", tuple(argv), address, claim.cpus, memory_flag=memory)


def worker_id(node: Node, claim: Claim) -> str:
    """The name of the worker at these places. A later worker at the same places has the same name."""
    return f"{node.name}/numa-{'+'.join(map(str, claim.numbers))}"


def front_specs(fleet: Fleet, node: Node, ports: tuple[int, int, int]) -> tuple[ProcessSpec, ProcessSpec]:
    """A gateway and its router, with the ports of the gateway, of the router and of the router's metrics."""
    router = node.at(ports[1])
    python = [sys.executable, "-m"]
    argv = [*python, "headrace.router", "--listen", router, "--metrics", node.at(ports[2])]
    argv += ["--drain-timeout", str(ROUTER_DRAIN_S), *_membership(fleet), *fleet.router_args]
    gateway = [*python, "headrace.gateway", "--host", gateway_host(fleet, node), "--port", str(ports[0])]
    gateway += ["--router", router, "--drain-timeout", str(fleet.gateway_drain_s)]
    gateway += [*_files(fleet), *fleet.gateway_args]
    return (
        ProcessSpec("gateway", "gateway", tuple(gateway), gateway_url(fleet, node, ports[0])),
        ProcessSpec("router", "router", tuple(argv), router, stop_phase=1),
    )


def gateway_host(fleet: Fleet, node: Node) -> str:
    """The address on which the gateway listens."""
    return fleet.host or node.host


def gateway_url(fleet: Fleet, node: Node, port: int) -> str:
    """The URL under which others reach the gateway, without /v1."""
    is_tls = any(argument.split("=")[0] == "--tls-cert" for argument in fleet.gateway_args)
    return base_url(node.host, port, "https" if is_tls else "http")


def _membership(fleet: Fleet) -> list[str]:
    """Flags of routers and workers. Without files they take calls from the whole network, as Ray's processes do."""
    return _files(fleet) or ["--insecure"]


def _files(fleet: Fleet) -> list[str]:
    files = {"--tls-dir": fleet.tls_dir, "--join-token-file": fleet.join_token_file}
    return [part for flag, path in files.items() if path is not None for part in (flag, path)]
