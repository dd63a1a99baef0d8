"""Decides which models of a host to load and to unload. Pure: the caller gives the states and the time, and acts.

Requested models are loaded in the order of the requests, as long as they fit into the memory budget. To make room for
the first one that does not fit, the least recently used models are unloaded. If all are in use, it waits `patience_s`;
then models whose turn is over are unloaded. No other model takes memory before the first one.

Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from headrace.common.host_memory import GIB


class State(enum.Enum):
    """Whether a model is loaded. See host.proto."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as its router sees it: whether it accepts requests, whether it has any, and how many it has had."""

    is_ready: bool
    is_busy: bool = False
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class ModelView:
    """The state of a model for the decision.

    `num_bytes` is its memory when loaded, and `has_processes` says whether it takes that memory now. A pinned model is
    never unloaded to make room, and a busy one has requests. `wanted_since_s` is None if no request waits for the
    model. `idle_s` is the time without requests after which it is unloaded; None for never.
    """

    name: str
    state: State
    num_bytes: int = 0
    has_processes: bool = False
    is_pinned: bool = False
    is_busy: bool = False
    wanted_since_s: float | None = None
    loaded_s: float = 0.0
    last_used_s: float = 0.0
    idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """A model stays for `stay_s` after it was loaded, so that the requests that waited for it arrive. A request waits
    `patience_s` before a busy model is unloaded for it, and a busy model stays loaded for at least `turn_s`."""

    stay_s: float = 2.0
    patience_s: float = 5.0
    turn_s: float = 10.0


@dataclass(slots=True)
class Decisions:
    """Names of models to load now, and of models to unload or that can never be loaded, with the reasons."""

    load: list[str] = field(default_factory=list)
    unload: dict[str, str] = field(default_factory=dict)
    refuse: dict[str, str] = field(default_factory=dict)


def decide(models: Sequence[ModelView], budget_bytes: int | None, now_s: float, rules: Rules = Rules()) -> Decisions:
    """Decide what to do now. Without a budget, everything fits."""
    found = Decisions()
    for model in models:
        if _is_idle(model, now_s):
            found.unload[model.name] = f"it was not used for {now_s - model.last_used_s:.0f} s"
    used_bytes = sum(model.num_bytes for model in models if model.has_processes)
    if budget_bytes is not None and used_bytes > budget_bytes:
        # A model takes more memory than expected.
        for name in _victims(used_bytes - budget_bytes, models, found.unload, now_s, rules, waited_s=0.0):
            found.unload[name] = "the loaded models take more memory than the budget has"
    wanted = [model for model in models if model.wanted_since_s is not None and _can_be_loaded(model)]
    for model in sorted(wanted, key=lambda model: (not model.is_pinned, model.wanted_since_s or 0.0, model.name)):
        if budget_bytes is None or used_bytes + model.num_bytes <= budget_bytes:
            found.load.append(model.name)
            used_bytes += model.num_bytes
            continue
        if problem := _never_fits(model, models, budget_bytes):
            found.refuse[model.name] = problem
            continue
        missing_bytes = used_bytes + model.num_bytes - budget_bytes
        assert model.wanted_since_s is not None, "only wanted models are here"
        waited_s = now_s - model.wanted_since_s
        for name in _victims(missing_bytes, models, found.unload, now_s, rules, waited_s=waited_s):
            found.unload[name] = f"it makes room for {model.name}"
        break
    return found


def _can_be_loaded(model: ModelView) -> bool:
    return not model.has_processes and model.state in (State.UNLOADED, State.FAILED)


def _is_idle(model: ModelView, now_s: float) -> bool:
    """Whether a model has been unused for so long that it has to be unloaded."""
    if model.idle_s is None or model.is_pinned or model.is_busy or model.wanted_since_s is not None:
        return False
    return model.state is State.LOADED and now_s - model.last_used_s >= model.idle_s


def _never_fits(model: ModelView, models: Sequence[ModelView], budget_bytes: int) -> str:
    """Why the model does not fit even if all models that may be unloaded are; empty if it fits."""
    pinned_bytes = sum(other.num_bytes for other in models if other.is_pinned and other.name != model.name)
    if model.num_bytes + pinned_bytes <= budget_bytes:
        return ""
    beside = f" beside {pinned_bytes / GIB:.2f} GiB for pinned models" if pinned_bytes else ""
    return f"it needs {model.num_bytes / GIB:.2f} GiB of memory{beside}, and the budget is {budget_bytes / GIB:.2f} GiB"


def _victims(
    missing_bytes: int,
    models: Sequence[ModelView],
    leaving: Container[str],
    now_s: float,
    rules: Rules,
    *,
    waited_s: float,
) -> list[str]:
    """The models to unload for a model that has waited for this time, least recently used first; none if they would not
    suffice."""
    missing_bytes -= sum(other.num_bytes for other in models if other.state is State.UNLOADING or other.name in leaving)
    others = [
        other for other in models if other.state is State.LOADED and not other.is_pinned and other.name not in leaving
    ]
    stayed = [other for other in others if now_s - other.loaded_s >= rules.stay_s and not other.is_busy]
    candidates = sorted(stayed, key=lambda other: (other.last_used_s, other.name))
    if waited_s >= rules.patience_s:
        had_turn = [other for other in others if other.is_busy and now_s - other.loaded_s >= rules.turn_s]
        candidates += sorted(had_turn, key=lambda other: (other.loaded_s, other.name))
    chosen: list[str] = []
    for other in candidates:
        if missing_bytes <= 0:
            break
        chosen.append(other.name)
        missing_bytes -= other.num_bytes
    return chosen if missing_bytes <= 0 else []
