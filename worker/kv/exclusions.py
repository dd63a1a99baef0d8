"""All combinations that are not possible: of flags of the worker with each other, and of flags with properties of a
model. The only such table.

Each row is one sentence: an error, or a warning if the flag has no effect. `docs/reference/exclusions.md` is written
from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from headrace.common.model_files.heads import HeadsKind, heads_kind
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.kv.layers import LayerGroup, LayerKind, group_of

log = logging.getLogger("headrace.worker")


class Setting(NamedTuple):
    """A flag as documents name it, and how the user has given it; None if it is off."""

    name: str
    given: Callable[[WorkerConfig], str | None]


class Property(NamedTuple):
    """A property of a model other than its groups of layers."""

    name: str


Other: TypeAlias = Setting | LayerKind | Property


class Exclusion(NamedTuple):
    """`setting` is not possible with another setting, or with a model that has layers of a kind, or a property. Unless
    it `is_refused`, it has no effect there. `why` completes the sentence after a colon."""

    setting: Setting
    other: Other
    why: str
    is_refused: bool = True


def _flag(name: str, field: str) -> Setting:
    """A flag that is off while this field of the configuration is empty."""
    return Setting(name, lambda config: name if getattr(config, field) else None)


def _heads(name: str, *kinds: HeadsKind) -> Setting:
    """The setting `name`, which is on if --draft-model has heads of one of these kinds."""

    def given(config: WorkerConfig) -> str | None:
        directory = config.draft_model
        return name if directory is not None and heads_kind(directory) in kinds else None

    return Setting(name, given)


def _role(config: WorkerConfig) -> str | None:
    return None if config.role == "both" else f"--role {config.role}"


KV_DISK = _flag("--kv-disk", "kv_disk")
KV_MEMORY = _flag("--kv-memory", "kv_memory")
ROLE = Setting("--role", _role)


def _ranks(config: WorkerConfig) -> str | None:
    return None if config.tensor_parallel == 1 else f"--tensor-parallel {config.tensor_parallel}"


TENSOR_PARALLEL = Setting("--tensor-parallel", _ranks)


def _speculation(config: WorkerConfig) -> str | None:
    return None if config.speculation in (None, "off") else f"--speculation {config.speculation}"


SPECULATION = Setting("--speculation", _speculation)
PIPELINE = Setting("--pipeline", lambda config: None if config.pipeline == 1 else f"--pipeline {config.pipeline}")
ADAPTERS = _flag("--max-adapters", "max_adapters")
MEMORY_NODE = Setting("--memory-node", lambda config: None if config.memory_node is None else "--memory-node")
DECODE_GRAPH = _flag("--decode-graph on", "decode_graph")
DRAFT_MODEL = _flag("--draft-model", "draft_model")
TRIM = _flag("--window-cache trim", "trims_windows")
EVICTION = _flag("--cache-eviction", "cache_eviction")
EAGLE3 = _heads("--speculation eagle3", HeadsKind.EAGLE3)
MTP = _heads("--speculation mtp", HeadsKind.MTP)
MEDUSA_BRANCHES = _heads("the branch of Medusa's drafts", HeadsKind.MEDUSA)
ALIBI = Property("ALiBi")
IMAGES = Property("images")
RECURRENT_DRAFTS = Property("recurrent layers in the draft model")

_STATES_STAY = "a block is of no use without the state of its recurrent layers, and states stay in memory"
_ONE_STEP = "drafts are made for one step at a time, and a pipeline computes several"
_UNNUMBERED = "the heads name the layers that they read by number, and the graph numbers only those with attention"


EXCLUSIONS = (
    Exclusion(TENSOR_PARALLEL, EVICTION, "each rank would evict other tokens, by the scores of its own heads"),
    Exclusion(TENSOR_PARALLEL, DECODE_GRAPH, "ranks compute all decode steps with one graph"),
    Exclusion(TENSOR_PARALLEL, MEMORY_NODE, "each rank takes the memory of the node of its CPUs"),
    Exclusion(PIPELINE, KV_DISK, "a block has parts on other hosts"),
    Exclusion(PIPELINE, KV_MEMORY, "the memory of the other stages ends with them"),
    Exclusion(PIPELINE, ROLE, "a block has parts on other hosts"),
    Exclusion(PIPELINE, ADAPTERS, "the weights of adapters are not sent to the other stages"),
    Exclusion(PIPELINE, SPECULATION, _ONE_STEP),
    Exclusion(PIPELINE, DRAFT_MODEL, _ONE_STEP),
    Exclusion(PIPELINE, EVICTION, "the scores of its layers are on several hosts"),
    Exclusion(PIPELINE, DECODE_GRAPH, "every stage has a single graph"),
    Exclusion(PIPELINE, TRIM, "windows would need slots on all stages"),
    Exclusion(PIPELINE, LayerKind.RECURRENT, "their states would be on several hosts"),
    Exclusion(PIPELINE, IMAGES, "later stages would need the states of images too"),
    Exclusion(EVICTION, DRAFT_MODEL, "a draft model and heads read all tokens of a request"),
    Exclusion(EVICTION, LayerKind.WINDOW, "a window would slide over the wrong tokens"),
    Exclusion(EVICTION, LayerKind.RECURRENT, "the states of its recurrent layers remember all tokens"),
    Exclusion(EVICTION, ALIBI, "tokens after a gap would have the wrong distance"),
    Exclusion(KV_DISK, LayerKind.RECURRENT, _STATES_STAY),
    Exclusion(ROLE, LayerKind.RECURRENT, _STATES_STAY),
    Exclusion(DECODE_GRAPH, LayerKind.RECURRENT, "the two graphs would need states of different precisions"),
    Exclusion(DRAFT_MODEL, RECURRENT_DRAFTS, "its states cannot be cut back when a draft is rejected"),
    Exclusion(EAGLE3, LayerKind.RECURRENT, _UNNUMBERED),
    Exclusion(MTP, LayerKind.RECURRENT, "layers of such models that predict more tokens have another form"),
    Exclusion(MEDUSA_BRANCHES, LayerKind.RECURRENT, "a branch would need states of its own", is_refused=False),
    Exclusion(KV_MEMORY, LayerKind.RECURRENT, _STATES_STAY, is_refused=False),
    Exclusion(TRIM, LayerKind.RECURRENT, "its other layers keep whole blocks beside the states", is_refused=False),
)


def refuse_flags(config: WorkerConfig) -> None:
    """Raise ConfigurationError for flags that exclude one another, and log which have no effect."""
    for row in EXCLUSIONS:
        if isinstance(row.other, Setting):
            first, second = row.setting.given(config), row.other.given(config)
            if first is None or second is None:
                continue
            if row.is_refused:
                raise ConfigurationError(f"{first} is not possible with {second}: {row.why}; leave out one of them")
            log.warning("%s has no effect with %s: %s", first, second, row.why)


def refuse_for_model(config: WorkerConfig, groups: Sequence[LayerGroup]) -> None:
    """Raise ConfigurationError for flags that a model with these layers cannot have, and log which have no effect."""
    for row in EXCLUSIONS:
        if isinstance(row.other, LayerKind) and group_of(groups, row.other) is not None:
            given = row.setting.given(config)
            if given is not None and row.is_refused:
                raise impossible(row.setting, row.other, given)
            if given is not None:
                log.warning("%s has no effect on a model that has %s layers: %s", given, row.other.value, row.why)


def impossible(setting: Setting, other: LayerKind | Property, given: str = "") -> ConfigurationError:
    """The error for the setting `given`, which cannot be combined with this property of the model or this other
    setting."""
    why = next(row.why for row in EXCLUSIONS if (row.setting, row.other) == (setting, other))
    what = f"{other.value} layers" if isinstance(other, LayerKind) else other.name
    return ConfigurationError(
        f"{given or setting.name} is not possible with a model that has {what}: {why}; leave the flag out"
    )
