"""The models to serve, from the arguments of `headrace serve` or from a TOML file. Pure, except for reading the
file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace.common import worker_flags
from headrace.common.commands import CommandError


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of one model's workers, in place of those of `headrace serve`. None: that option applies, or its default.

    `kv_total_gb` is the size of the KV caches of all its workers together, in GiB. `pooling` and `normalizes` are for
    embedding models. `worker` has other options, by their names in `worker_flags`.
    """

    kv_total_gb: float | None = None
    pooling: str | None = None
    normalizes: bool | None = None
    worker: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRules:
    """What gateways apply to the requests of one model. See ServingRules in host.proto."""

    tool_parser: str = ""
    reasoning_parser: str = ""
    max_tokens_limit: int = 0
    best_of_limit: int = 0
    truncates_texts: bool = False
    max_documents: int = 0


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model as its user describes it. With None, an option of `headrace serve` or its default applies.

    `model` is a name, a hub's OWNER/NAME, a directory or a GGUF file. `cores` are reserved for the model's workers.
    `kv_share` is the share of its workers in the memory for KV caches, `kv_cache_gb` the size of each worker's cache.
    """

    model: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    workers: int | None = None
    threads: int | None = None
    cores: int | None = None
    kv_share: float | None = None
    kv_cache_gb: float | None = None
    max_context_tokens: int | None = None
    adapters: tuple[str, ...] | None = None
    max_adapters: int | None = None
    on_demand: bool = False
    """Whether it is loaded for the first request, and may be unloaded. Other models are loaded at the start and
    stay."""
    idle_s: float | None = None
    """Seconds without requests after which it is unloaded; None for never."""
    options: ModelOptions = field(default_factory=ModelOptions)
    rules: ModelRules = field(default_factory=ModelRules)


@dataclass(frozen=True, slots=True)
class AliasSettings:
    """A name for several models that share its requests by weight. `shadow` is the model that gets copies of some of
    them, with the percentage."""

    name: str
    models: tuple[tuple[str, float], ...]
    shadow: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The models of a host, in the order in which the user named them. `memory_gb` is their memory together, in GiB."""

    models: tuple[ModelSettings, ...]
    memory_gb: float | None = None
    aliases: tuple[AliasSettings, ...] = ()


_TEXTS = ("model", "name")
_LISTS = ("aliases", "adapters")
_COUNTS = {
    "workers": 1,
    "threads": 1,
    "cores": 1,
    **{flag.option: flag.least for flag in (worker_flags.MAX_CONTEXT_TOKENS, worker_flags.MAX_ADAPTERS)},
}
_OF_MODELS = ("kv_share", "kv_cache_gb", "idle_s")
_SIZES = (*_OF_MODELS, "memory_gb")
_SWITCHES = ("on_demand",)


def read_settings(path: Path) -> HostSettings:
    """The models that a TOML file describes. Raises CommandError with the field and the remedy."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"--models {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"--models {path} is not TOML: {error}") from None
    try:
        return settings_of(content)
    except ValueError as error:
        raise CommandError(f"--models {path}: {error}") from None


def settings_of(content: Mapping[str, Any]) -> HostSettings:
    """The models that the content of such a file describes. Raises ValueError."""
    _check_names(content, ("models", "aliases", "memory_gb"), "the file")
    tables = content.get("models")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ValueError("it must have a table [[models]] for each model")
    models = tuple(_model(table, f"models[{number}]") for number, table in enumerate(tables))
    check_models(models)
    memory_gb = content.get("memory_gb")
    if memory_gb is not None:
        _value("memory_gb", memory_gb, "memory_gb")
    named = content.get("aliases", [])
    if not isinstance(named, list) or not all(isinstance(table, dict) for table in named):
        raise ValueError("aliases must be tables [[aliases]]")
    aliases = tuple(_alias(table, f"aliases[{number}]") for number, table in enumerate(named))
    return HostSettings(models, memory_gb, aliases)


def _alias(table: Mapping[str, Any], place: str) -> AliasSettings:
    _check_names(table, [field.name for field in fields(AliasSettings)], place)
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{place}.name must be a text")
    models = _weights(table.get("models"), f"{place}.models")
    if "shadow" not in table:
        return AliasSettings(name, models)
    shadow = _weights(table["shadow"], f"{place}.shadow")
    if len(shadow) > 1 or shadow[0][1] > 100:
        raise ValueError(f"{place}.shadow must be one model with a percentage of at most 100")
    return AliasSettings(name, models, shadow[0])


def _weights(value: Any, place: str) -> tuple[tuple[str, float], ...]:
    """Models with their weights."""
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{place} must have models with weights, such as {{ a = 90, b = 10 }}")
    for model, weight in value.items():
        if not _is_above_0(weight):
            raise ValueError(f"{place}.{model} must be a number above 0")
    return tuple(value.items())


def _model(table: Mapping[str, Any], place: str) -> ModelSettings:
    _check_names(table, [*_TEXTS, *_LISTS, *_COUNTS, *_OF_MODELS, *_SWITCHES], place)
    if "model" not in table:
        raise ValueError(f"{place} has no `model`; give a name, OWNER/NAME, a directory or a GGUF file")
    return ModelSettings(**{name: _value(name, value, f"{place}.{name}") for name, value in table.items()})


def _check_names(table: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for name in table:
        if name not in known:
            raise ValueError(f"{place} has an unknown field `{name}`; there are {', '.join(known)}")


def _value(name: str, value: Any, place: str) -> Any:
    if name in _TEXTS:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{place} must be a text")
    elif name in _LISTS:
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise ValueError(f"{place} must be a list of texts")
        return tuple(value)
    elif name in _COUNTS:
        least = _COUNTS[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{place} must be a whole number from {least}")
    elif name in _SIZES:
        if not _is_above_0(value):
            raise ValueError(f"{place} must be a number above 0")
        if name == "kv_share" and value > 1:
            raise ValueError(f"{place} must be at most 1, all of the memory for KV caches")
    elif name in _SWITCHES and not isinstance(value, bool):
        raise ValueError(f"{place} must be true or false")
    return value


def _is_above_0(value: Any) -> bool:
    # TOML has nan and inf.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def check_models(models: Sequence[ModelSettings]) -> None:
    """Raise ValueError if the models contradict each other."""
    for model in models:
        if model.kv_share is not None and model.kv_cache_gb is not None:
            raise ValueError(f"`kv_share` and `kv_cache_gb` of {model.model} exclude each other; leave out one of them")
        if model.idle_s is not None and not model.on_demand:
            raise ValueError(f"`idle_s` of {model.model} needs `on_demand = true`: other models are never unloaded")
    total = sum(model.kv_share or 0.0 for model in models)
    if total > 1 + 1e-9:
        raise ValueError(f"the values of `kv_share` add up to {total:g}; they must not exceed 1")


def check_names(named: Sequence[tuple[str, ModelSettings]], aliases: Sequence[AliasSettings] = ()) -> None:
    """Raise CommandError unless all names and aliases of models differ, and aliases refer to models. Each model comes
    with its name."""
    owners: dict[str, str] = {}
    for name, model in named:
        for word in (name, *model.aliases):
            if word in owners:
                raise CommandError(
                    f"{word!r} names both {owners[word]} and {model.model}; give each model a name and aliases of its "
                    "own (`name` and `aliases` in the file of --models)"
                )
            owners[word] = model.model
    names = {name for name, _ in named}
    for alias in aliases:
        if alias.name in owners:
            raise CommandError(f"the alias {alias.name!r} is also a name of {owners[alias.name]}; choose another")
        owners[alias.name] = "another alias"
        for model_name in (*(name for name, _ in alias.models), *([alias.shadow[0]] if alias.shadow else [])):
            if model_name not in names:
                known = ", ".join(sorted(names))
                raise CommandError(f"the alias {alias.name!r} refers to {model_name!r}, and the models are {known}")


def kv_shares(models: Sequence[ModelSettings], encoders: Sequence[bool]) -> list[float]:
    """The share of each model in the memory for KV caches. Models without a share or a size divide the rest equally.
    `encoders` are those that turn texts into vectors: they have no KV cache. ValueError if one of these has a share, or
    if nothing is left for the others."""
    for model, is_encoder in zip(models, encoders, strict=True):
        if is_encoder and model.kv_share is not None:
            problem = "an embedding or reranking model, which has no KV cache; leave it out"
            raise ValueError(f"`kv_share` is not possible with {model.model}: it is {problem}")
    rest = 1.0 - sum(model.kv_share or 0.0 for model in models)
    unsaid = [
        not is_encoder and model.kv_share is None and model.kv_cache_gb is None and model.options.kv_total_gb is None
        for model, is_encoder in zip(models, encoders, strict=True)
    ]
    if any(unsaid) and rest < 1e-9:
        raise ValueError(
            f"nothing is left of the KV caches for {models[unsaid.index(True)].model}; give the others a smaller "
            "`kv_share`"
        )
    return [
        model.kv_share if model.kv_share is not None else rest / sum(unsaid) if is_unsaid else 1.0
        for model, is_unsaid in zip(models, unsaid, strict=True)
    ]
