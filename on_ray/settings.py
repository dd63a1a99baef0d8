"""The settings of a fleet on Ray, as Python, YAML and `headrace ray up` give them. Pure.

Fleet(models=[Model("smollm2-135m", max_workers=4, flags={"kv_cache_gb": 8})], gateways=2)
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from headrace.common.worker_flags import AUTO_RANKS, TENSOR_PARALLEL, WORKER_FLAGS

WORKER_DRAIN_S = 30.0
GATEWAY_DRAIN_S = 60.0
ROUTER_DRAIN_S = 5.0
RESOURCE = "numa"


class SettingsError(ValueError):
    """A setting is wrong. The message names it, and the remedy."""


class Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the number of a model's workers changes: it follows the number that routers want, and is higher while a
    value exceeds its target. Delays are in seconds."""

    queue_wait_s: float = 2.0
    """Expected wait of a request that arrives, before its prompt is computed."""
    kv_pressure: float = 0.9
    """Part of the KV blocks that requests use."""
    up_delay_s: float = 5.0
    down_delay_s: float = 300.0


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and its workers. Each worker takes `num_places` of the resource `resource`, one for each NUMA node."""

    model: str
    """Name or directory, as `headrace serve` takes it. Every node must be able to pull it, or have it."""
    name: str | None = None
    """Name in requests."""
    min_workers: int = 1
    """With 0, the first request after a pause waits until a worker has started."""
    max_workers: int | None = None
    """Default: `min_workers`."""
    numa_nodes: int | None = None
    """NUMA nodes of one worker, on one host: the bundles of its placement group. Default: one for each rank, if `flags`
    divide the model (`tensor_parallel`), else one."""
    cpus: float = 0.0
    """CPUs that a worker also takes of Ray's count, for clusters that run other work on the same nodes."""
    resource: str = RESOURCE
    surge_percent: int = 0
    """Workers beyond the number, in per cent, that an update may start before it stops old ones. They need NUMA nodes
    that are free."""
    flags: dict[str, Any] = {}
    """Options of `headrace serve` for workers, by their names in Python: `kv_cache_gb`, `max_num_seqs`."""
    worker_args: tuple[str, ...] = ()
    """Further arguments of `headrace worker`."""
    scaling: Scaling = Scaling()

    @property
    def num_places(self) -> int:
        """The number of NUMA nodes of one worker."""
        return self.numa_nodes or int(self.flags.get(TENSOR_PARALLEL.option) or 1)

    @property
    def most_workers(self) -> int:
        """The largest number of workers."""
        return self.min_workers if self.max_workers is None else self.max_workers


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models, and gateways with a router beside each."""

    models: tuple[Model, ...]
    gateways: int = 1
    host: str | None = None
    """Address on which gateways listen. Default: the address that the node has in Ray."""
    port: int = 0
    """Port of the gateways; 0 for any free one. With a port, a node has at most one gateway."""
    gateway_cpus: float = 0.1
    """CPUs that a gateway takes of Ray's count. Above 0, none runs on a head that has no CPUs."""
    worker_drain_s: float = WORKER_DRAIN_S
    gateway_drain_s: float = GATEWAY_DRAIN_S
    gateway_args: tuple[str, ...] = ()
    """Further arguments of `headrace gateway`."""
    router_args: tuple[str, ...] = ()
    join_token_file: str | None = None
    tls_dir: str | None = None
    """Files on every node by which processes know each other. Without them, they trust the network, as Ray does."""


def fleet_of(given: Mapping[str, Any] | Fleet) -> Fleet:
    """The checked settings. Raises SettingsError."""
    try:
        fleet = given if isinstance(given, Fleet) else msgspec.convert(dict(given), Fleet)
    except msgspec.ValidationError as error:
        raise SettingsError(f"the settings of the fleet are wrong: {error}") from None
    _check(bool(fleet.models), "models", "names no model; give at least one")
    _check(fleet.gateways >= 1, "gateways", f"is {fleet.gateways}; it must be at least 1")
    _check(0 <= fleet.port <= 65535, "port", f"is {fleet.port}; write 0 to 65535")
    for name in ("worker_drain_s", "gateway_drain_s", "gateway_cpus"):
        value = getattr(fleet, name)
        _check(math.isfinite(value) and value >= 0, name, f"is {value}; it must be a number of at least 0")
    for number, model in enumerate(fleet.models):
        _check_model(model, f"models[{number}]")
    names = [name_of(model) for model in fleet.models]
    twice = next((name for name in names if names.count(name) > 1), None)
    _check(twice is None, "models", f"has {twice!r} twice; give one of them another `name`")
    return fleet


def name_of(model: Model) -> str:
    """The name of the deployment of a model's workers: the model's name in requests, or the last part of its
    location."""
    return model.name or model.model.rstrip("/").rpartition("/")[2]


def workers_of(name: str) -> str:
    """The name of the deployment of the workers of a model of this name."""
    return f"worker-{re.sub('[^A-Za-z0-9._-]', '-', name)}"


def checked_flags(flags: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of workers, each with a value of its type. Raises SettingsError for one that does not exist or whose
    value is wrong."""
    known = {flag.option: flag for flag in WORKER_FLAGS}
    found: dict[str, Any] = {}
    for name, value in flags.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            raise SettingsError(f"{where}: workers have no flag {name!r}; {meant}")
        if value is None:
            continue
        kind = known[name].serve_type or known[name].type
        try:
            # Files need only exist on the nodes.
            found[name] = value if isinstance(kind, click.Path) else _converted(kind, value, known[name].is_repeated)
        except click.BadParameter as error:
            raise SettingsError(f"{where}.{name}: {error.message}") from None
        if found[name] == AUTO_RANKS and name == TENSOR_PARALLEL.option:
            raise SettingsError(f"{where}.{name}: give a number; Ray reserves NUMA nodes before it sees any")
    return found


def _converted(kind: click.ParamType[Any], value: Any, is_repeated: bool) -> Any:
    if is_repeated:
        return tuple(kind.convert(one, None, None) for one in value)
    return kind.convert(value, None, None)


def _check_model(model: Model, where: str) -> None:
    _check(bool(model.model), f"{where}.model", "is empty; name a model or its directory")
    _check(model.min_workers >= 0, f"{where}.min_workers", f"is {model.min_workers}; it must be at least 0")
    _check(
        model.max_workers is not None or model.min_workers > 0,
        f"{where}.max_workers",
        "is missing; without it there are as many as min_workers, which is 0",
    )
    is_possible = model.max_workers is None or model.max_workers >= 1
    _check(is_possible, f"{where}.max_workers", f"is {model.max_workers}; it must be at least 1")
    _check(
        model.most_workers >= model.min_workers,
        f"{where}.max_workers",
        f"is {model.max_workers}, less than min_workers ({model.min_workers})",
    )
    is_possible = model.numa_nodes is None or model.numa_nodes >= 1
    _check(is_possible, f"{where}.numa_nodes", f"is {model.numa_nodes}; it must be at least 1")
    _check(math.isfinite(model.cpus) and model.cpus >= 0, f"{where}.cpus", f"is {model.cpus}; it must be at least 0")
    _check(0 <= model.surge_percent <= 100, f"{where}.surge_percent", f"is {model.surge_percent}; write 0 to 100")
    scaling = model.scaling
    for name in ("queue_wait_s", "kv_pressure"):
        value = getattr(scaling, name)
        _check(math.isfinite(value) and value > 0, f"{where}.scaling.{name}", f"is {value}; it must be above 0")
    for name in ("up_delay_s", "down_delay_s"):
        value = getattr(scaling, name)
        _check(math.isfinite(value) and value >= 0, f"{where}.scaling.{name}", f"is {value}; it must be at least 0")
    checked_flags(model.flags, f"{where}.flags")


def _check(holds: bool, where: str, problem: str) -> None:
    if not holds:
        raise SettingsError(f"{where} {problem}")
