"""Takes the settings of Ray Serve LLM (`LLMConfig`): its applications need only another import path. Pure.

What changes answers or the size of the fleet is applied, or refused by name. What cannot be noticed in an answer, such
as the memory of GPUs, is a hint, which is named once in the log and not applied.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headrace.common.worker_flags import WORKER_FLAGS
from headrace.ray.settings import Fleet, Model, Scaling, SettingsError, fleet_of

log = logging.getLogger("ray.serve")

# vLLM's names -> ours
_RENAMED = {"max_model_len": "max_context_tokens", "tensor_parallel_size": "tensor_parallel"}
# What makes an answer neither right nor wrong on CPUs.
_HINTS = frozenset(
    {
        "block_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "dtype",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "pipeline_parallel_size",
        "swap_space",
        "trust_remote_code",
    }
)
_AUTOSCALING = {
    "min_replicas": "min_workers",
    "max_replicas": "max_workers",
}
_DELAYS = {"upscale_delay_s": "up_delay_s", "downscale_delay_s": "down_delay_s"}
_AUTOSCALING_HINTS = frozenset(
    {"initial_replicas", "look_back_period_s", "metrics_interval_s", "target_ongoing_requests"}
)
_CONFIG_HINTS = frozenset({"accelerator_type", "experimental_configs", "llm_engine", "log_engine_metrics"})


def fleet_of_llm_configs(args: Mapping[str, Any]) -> Fleet:
    """The fleet of `{"llm_configs": [...]}`, with the options of `Fleet` beside them. Raises SettingsError."""
    options = {name: value for name, value in args.items() if name != "llm_configs"}
    configs = args.get("llm_configs")
    if not isinstance(configs, list) or not configs:
        raise SettingsError("llm_configs must be a list of at least one configuration")
    return fleet_of({**options, "models": [_model_of(_mapping(one), n) for n, one in enumerate(configs)]})


def _mapping(config: Any) -> Mapping[str, Any]:
    """The fields of a configuration, which Python users may give as the object of Ray Serve LLM."""
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "model_dump"):
        given: Mapping[str, Any] = config.model_dump(exclude_unset=True)
        return given
    raise SettingsError(f"llm_configs has a {type(config).__name__}; write a mapping")


def _model_of(config: Mapping[str, Any], number: int) -> Model:
    where = f"llm_configs[{number}]"
    found: dict[str, Any] = {}
    for name, value in config.items():
        match name:
            case "model_loading_config":
                found |= _loading(value, f"{where}.{name}")
            case "deployment_config":
                found |= _deployment(value, f"{where}.{name}")
            case "engine_kwargs":
                found |= _engine(value, f"{where}.{name}")
            case _ if name in _CONFIG_HINTS or value is None:
                _hint(f"{where}.{name}", value)
            case _:
                raise SettingsError(f"{where}.{name} is not taken here; leave it out")
    if "model" not in found:
        raise SettingsError(f"{where}.model_loading_config.model_id is missing; name the model")
    return Model(**found)


def _loading(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    unknown = set(given) - {"model_id", "model_source"}
    if unknown:
        raise SettingsError(f"{where}.{min(unknown)} is not taken here; there are model_id and model_source")
    source = given.get("model_source")
    if source is not None and not isinstance(source, str):
        raise SettingsError(f"{where}.model_source must be a name or a directory; pull from a bucket before")
    name = given.get("model_id")
    return {"model": source or name, "name": name} if source or name else {}


def _deployment(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == "num_replicas" and isinstance(value, int):
            found["min_workers"] = found["max_workers"] = value
        elif name == "autoscaling_config":
            found |= _autoscaling(value or {}, f"{where}.{name}")
        elif name in ("max_ongoing_requests", "graceful_shutdown_timeout_s", "health_check_period_s"):
            _hint(f"{where}.{name}", value)
        else:
            raise SettingsError(f"{where}.{name} is not taken here; there are num_replicas and autoscaling_config")
    return found


def _autoscaling(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {ours: given[theirs] for theirs, ours in _AUTOSCALING.items() if given.get(theirs) is not None}
    delays = {ours: given[theirs] for theirs, ours in _DELAYS.items() if given.get(theirs) is not None}
    for name in set(given) - _AUTOSCALING.keys() - _DELAYS.keys():
        if name not in _AUTOSCALING_HINTS:
            raise SettingsError(f"{where}.{name} is not taken here; there are {', '.join((*_AUTOSCALING, *_DELAYS))}")
        _hint(f"{where}.{name}", given[name])
    return {**found, **({"scaling": Scaling(**delays)} if delays else {})}


def _engine(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    found: dict[str, Any] = {"flags": flags}
    known = {flag.option for flag in WORKER_FLAGS}
    for name, value in given.items():
        if (ours := _RENAMED.get(name, name)) in known:
            flags[ours] = value
        elif name in _HINTS:
            _hint(f"{where}.{name}", value)
        else:
            raise SettingsError(
                f"{where}.{name} is no flag of headrace's workers; there are {', '.join(sorted({*known, *_RENAMED}))}"
            )
    return found


def _hint(where: str, value: Any) -> None:
    if value is not None:
        log.info("%s (%r) is not applied: it has no meaning on CPUs", where, value)
