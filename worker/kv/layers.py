"""The layers of a model as the KV cache sees them: groups of layers that keep the same kind of content, found in the
graph."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class LayerKind(enum.Enum):
    """The content that the layers of a group keep of a sequence: the keys and values of all tokens; those within a
    sliding window; or a state of fixed size."""

    FULL = "full attention"
    WINDOW = "sliding window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind. `block_bytes` are the bytes of all its layers in a KV block, or in a slot of states. `window`
    is the largest number of tokens that a query sees, its own included; 0 if it sees all. `names` are those of the
    layers' caches or tables of states."""

    kind: LayerKind
    block_bytes: int
    window: int = 0
    names: tuple[str, ...] = ()


def group_of(groups: Sequence[LayerGroup], kind: LayerKind) -> LayerGroup | None:
    """The group of this kind; None if the model has none."""
    return next((group for group in groups if group.kind is kind), None)
