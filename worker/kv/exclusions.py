"""What cannot be combined: flags of the worker with one another, and with kinds of layers. The only such table.

Each row is refused with one sentence. `docs/reference/exclusions.md` is written from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.kv.layers import LayerGroup, LayerKind, group_of


class Setting(NamedTuple):
    """A flag as documents name it, and how the user has given it; None if it is off."""

    name: str
    given: Callable[[WorkerConfig], str | None]


class Exclusion(NamedTuple):
    """`setting` is not possible with another setting, or with a model that has layers of a kind. `why` completes the
    sentence after a colon."""

    setting: Setting
    other: Setting | LayerKind
    why: str


def _eviction(config: WorkerConfig) -> str | None:
    return None if config.cache_eviction in (None, "off") else "--cache-eviction"


KV_DISK = Setting("--kv-disk", lambda config: None if config.kv_disk is None else "--kv-disk")
ROLE = Setting("--role", lambda config: None if config.role == "both" else f"--role {config.role}")
DECODE_GRAPH = Setting("--decode-graph on", lambda config: "--decode-graph on" if config.decode_graph else None)
DRAFT_MODEL = Setting("--draft-model", lambda config: None if config.draft_model is None else "--draft-model")
TRIM = Setting("--window-cache trim", lambda config: "--window-cache trim" if config.trims_windows else None)
EVICTION = Setting("--cache-eviction", _eviction)

_STATES_STAY = "a block is of no use without the state of its recurrent layers, and states stay in memory"

EXCLUSIONS = (
    Exclusion(EVICTION, DRAFT_MODEL, "a draft model and heads read all tokens of a request"),
    Exclusion(EVICTION, TRIM, "a window would slide over the wrong tokens"),
    Exclusion(KV_DISK, LayerKind.RECURRENT, _STATES_STAY),
    Exclusion(ROLE, LayerKind.RECURRENT, _STATES_STAY),
    Exclusion(DECODE_GRAPH, LayerKind.RECURRENT, "the two graphs would need states of different precisions"),
)


def refuse_flags(config: WorkerConfig) -> None:
    """Raise ConfigurationError for flags that exclude one another."""
    for setting, other, why in EXCLUSIONS:
        if isinstance(other, Setting):
            first, second = setting.given(config), other.given(config)
            if first is not None and second is not None:
                raise ConfigurationError(f"{first} is not possible with {second}: {why}; leave out one of them")


def refuse_for_model(config: WorkerConfig, groups: Sequence[LayerGroup]) -> None:
    """Raise ConfigurationError for flags that a model with these layers cannot have."""
    for setting, other, why in EXCLUSIONS:
        if isinstance(other, LayerKind) and group_of(groups, other) is not None:
            given = setting.given(config)
            if given is not None:
                raise ConfigurationError(
                    f"{given} is not possible with a model that has {other.value} layers: {why}; leave the flag out"
                )
