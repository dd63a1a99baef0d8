"""Makes a Ray Serve application of a fleet's settings: `serve.run(build_app(...))`, or the import path of a YAML file.

import_path: headrace.ray:build_app            args: {models: [{model: smollm2-135m, max_workers: 4}]}
import_path: headrace.ray:build_openai_app     args: {llm_configs: [...]}, as Ray Serve LLM takes it
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from headrace.common.version import headrace_version
from headrace.common.worker_flags import MAX_TTFT
from headrace.ray.actors import Directory, Front, Worker
from headrace.ray.llm_config import fleet_of_llm_configs
from headrace.ray.settings import ROUTER_DRAIN_S, WORKER_DRAIN_S, Fleet, Model, Scaling, fleet_of, name_of, workers_of

DIRECTORY = "fleet"
FRONT = "gateway"
# Health checks of actors: a process that cannot be helped in place is replaced after three of them.
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
# How often workers report the signal, and over which time its mean is taken.
_REPORT_S = 2.0
_LOOK_BACK_S = 6.0
# The defaults of `headrace router --scaling-window` and `--idle-after`.
WINDOW_S = 180.0
IDLE_AFTER_S = 300.0
# What Serve adds to the processes' own limits before it kills an actor.
_MARGIN_S = 15.0
_NO_LIMIT = 1 << 16


def build_app(settings: Mapping[str, Any] | Fleet) -> serve.Application:
    """The application of a fleet: `settings` are those of `Fleet`, or a `Fleet`. Raises SettingsError."""
    fleet = fleet_of(settings)
    directory = _deployment(Directory, {"name": DIRECTORY, **_of_all(5.0, cpus=fleet.gateway_cpus)}).bind()
    of_workers = settings_of_workers(fleet)
    workers = []
    for model in fleet.models:
        own = settings_of_worker(model)
        workers.append(
            _deployment(Worker, worker_options(fleet, model), of_workers, own).bind(of_workers, own, directory)
        )
    of_gateways = settings_of_gateways(fleet)
    return _deployment(Front, front_options(fleet), of_gateways).bind(of_gateways, directory, *workers)


def build_openai_app(settings: Mapping[str, Any]) -> serve.Application:
    """As `build_app`, from the settings of Ray Serve LLM, {"llm_configs": [...]}. Raises SettingsError."""
    return build_app(fleet_of_llm_configs(settings))


def settings_of_workers(fleet: Fleet) -> Fleet:
    """The settings that concern processes of workers. A change of others does not replace them."""
    return Fleet((), worker_drain_s=fleet.worker_drain_s, join_token_file=fleet.join_token_file, tls_dir=fleet.tls_dir)


def settings_of_worker(model: Model) -> Model:
    """As `settings_of_workers`, for one model: all settings except the number of workers and when it changes. Routers
    must know the name of a model that may have no workers before any worker has reported it."""
    name = name_of(model) if model.min_workers == 0 else model.name
    replace = msgspec.structs.replace
    return replace(model, name=name, min_workers=1, max_workers=None, surge_percent=0, scaling=Scaling())


def settings_of_gateways(fleet: Fleet) -> Fleet:
    """The settings of gateway and router processes. Routers decide to want fewer workers no later than these are
    stopped, hold the requests for models that may have no worker, and let requests wait as long as the most patient
    workers do."""
    window_s = max(1.0, min(model.scaling.down_delay_s for model in fleet.models))
    window = ("--scaling-window", str(window_s)) if window_s < WINDOW_S else ()
    on_demand = [model for model in fleet.models if model.min_workers == 0]
    idle_s = min((model.scaling.down_delay_s for model in on_demand), default=IDLE_AFTER_S)
    idle = ("--idle-after", str(idle_s)) if idle_s < IDLE_AFTER_S else ()
    named = tuple(part for model in on_demand for part in ("--on-demand", name_of(model)))
    most_s = max(float(model.flags.get(MAX_TTFT.option) or MAX_TTFT.default) for model in fleet.models)
    patience = ("--max-ttft", str(most_s)) if most_s != MAX_TTFT.default else ()
    args = (*window, *idle, *named, *patience, *fleet.router_args)
    return msgspec.structs.replace(fleet, models=(), gateways=1, worker_drain_s=WORKER_DRAIN_S, router_args=args)


def _deployment(kind: type, options: dict[str, Any], *settings: msgspec.Struct) -> Any:
    """A deployment whose version follows from the settings of its actors. `serve.run` would otherwise replace all of
    them, whatever has changed; what `serve deploy` replaces follows from its file."""
    made = serve.deployment(kind).options(**options)
    content = [headrace_version(), *map(msgspec.to_builtins, settings)]
    made._version = hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]
    return made


def worker_options(fleet: Fleet, model: Model) -> dict[str, Any]:
    """The options of the deployment of a model's workers. Each is a placement group on one host, with one bundle for
    each of its NUMA nodes."""
    bundle = {model.resource: 1.0, **({"CPU": model.cpus} if model.cpus else {})}
    options: dict[str, Any] = {
        "name": workers_of(name_of(model)),
        **_of_all(fleet.worker_drain_s, cpus=model.cpus),
        "placement_group_bundles": [bundle] * model.num_places,
        "placement_group_strategy": "STRICT_PACK",
        "max_surge_percent": model.surge_percent,
    }
    options["ray_actor_options"]["resources"] = {model.resource: 1.0}
    if model.min_workers == model.most_workers:
        return {**options, "num_replicas": model.min_workers}
    return {**options, "autoscaling_config": _autoscaling(model)}


def front_options(fleet: Fleet) -> dict[str, Any]:
    """The options of the deployment of gateways. In an update, new ones serve before old ones stop, unless they have
    the same port."""
    options = {"name": FRONT, "num_replicas": fleet.gateways, **_of_all(fleet.gateway_drain_s, cpus=fleet.gateway_cpus)}
    return options | ({"max_replicas_per_node": 1} if fleet.port else {"max_surge_percent": 100})


def _of_all(drain_s: float, *, cpus: float) -> dict[str, Any]:
    return {
        "ray_actor_options": {"num_cpus": cpus},
        "max_ongoing_requests": _NO_LIMIT,
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": 2 * drain_s + ROUTER_DRAIN_S + _MARGIN_S,
    }


def _autoscaling(model: Model) -> AutoscalingConfig:
    scaling = model.scaling
    how = {"queue_wait_s": scaling.queue_wait_s, "kv_pressure": scaling.kv_pressure, "least": min(1, model.min_workers)}
    return AutoscalingConfig(
        min_replicas=model.min_workers,
        max_replicas=model.most_workers,
        upscale_delay_s=scaling.up_delay_s,
        downscale_delay_s=scaling.down_delay_s,
        metrics_interval_s=_REPORT_S,
        look_back_period_s=_LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function="headrace.ray.scaling:SignalPolicy", policy_kwargs=how),
    )


def describes(fleet: Fleet) -> str:
    """One line about a fleet."""
    models = ", ".join(
        f"{name_of(model)} with {model.min_workers}"
        + (f" to {model.most_workers}" if model.most_workers > model.min_workers else "")
        + f" worker{'s' if model.most_workers > 1 else ''}"
        for model in fleet.models
    )
    return f"{models}; {fleet.gateways} gateway{'s' if fleet.gateways > 1 else ''}"
