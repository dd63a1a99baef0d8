"""Other names of models: one model, or several that share the requests by weight, and a model that gets copies. Pure.

    gpt-4o=a              another name
    gpt-4o=a:90,b:10      90 % of the requests go to a, 10 % to b

The choice depends only on the alias and on a key: that of a conversation (`prompt_cache_key`), or the id of the
request. So all gateways make the same choice, and the requests of a conversation stay with one model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Split:
    """The models among which the requests of one name are divided, each with its weight above 0."""

    models: tuple[tuple[str, float], ...]

    def choose(self, point: float) -> str:
        """The model at a point from 0 to 1, exclusive, on a line on which each model takes its share."""
        left = point * sum(weight for _, weight in self.models)
        for model, weight in self.models:
            left -= weight
            if left < 0:
                return model
        return self.models[-1][0]

    @property
    def first(self) -> str:
        """The model with the largest weight."""
        return max(self.models, key=lambda one: one[1])[0]


@dataclass(frozen=True, slots=True)
class Shadow:
    """A model that gets copies of a share of an alias's requests, from 0 to 1."""

    model: str
    share: float


class Aliases:
    """Maps names that callers use to names of models."""

    def __init__(self, splits: Mapping[str, Split] | None = None, shadows: Mapping[str, Shadow] | None = None) -> None:
        """The models of each alias, and the shadows of some aliases."""
        self._splits = dict(splits or {})
        self._shadows = dict(shadows or {})

    def __contains__(self, name: str) -> bool:
        """Whether a name is an alias."""
        return name in self._splits

    def model_of(self, name: str, key: str) -> str:
        """The model that a name stands for; the name itself if it is not an alias."""
        split = self._splits.get(name)
        if split is None:
            return name
        return split.models[0][0] if len(split.models) == 1 else split.choose(_point(f"split {name} {key}"))

    def shadow_of(self, name: str, key: str) -> str:
        """The model that gets a copy of a request for this name; empty for none."""
        shadow = self._shadows.get(name)
        return shadow.model if shadow is not None and _point(f"shadow {name} {key}") < shadow.share else ""

    @property
    def models(self) -> Collection[str]:
        """All models that aliases and shadows refer to."""
        own = {model for split in self._splits.values() for model, _ in split.models}
        return own | {shadow.model for shadow in self._shadows.values()}

    def items(self) -> Sequence[tuple[str, str]]:
        """All aliases, sorted, each with its model, or with that of the largest weight."""
        return sorted((alias, split.first) for alias, split in self._splits.items())


def _point(text: str) -> float:
    """A point from 0 to 1, exclusive. The points of different texts are evenly distributed."""
    return int.from_bytes(sha256(text.encode()).digest()[:6], "big") / (1 << 48)


def parse_aliases(texts: Sequence[str], shadows: Sequence[str] = ()) -> Aliases:
    """Aliases from texts of the form ALIAS=MODEL or ALIAS=MODEL:WEIGHT,MODEL:WEIGHT, and shadows from texts of the form
    ALIAS=MODEL:PERCENT. Raises ValueError."""
    splits: dict[str, Split] = {}
    for text in texts:
        alias, value = _halves(text, "ALIAS=MODEL")
        if alias in splits:
            raise ValueError(f"the alias {alias!r} is given twice")
        splits[alias] = _split(text, value)
    for alias, split in splits.items():
        for model, _ in split.models:
            if model in splits:
                raise ValueError(f"{alias}={model} refers to an alias; name the model itself")
    found: dict[str, Shadow] = {}
    for text in shadows:
        alias, value = _halves(text, "ALIAS=MODEL:PERCENT")
        model, percent = _weighted(value)
        if percent is None or not 0 < percent <= 100:
            raise ValueError(f"{text!r} needs a percentage above 0 and up to 100: ALIAS=MODEL:PERCENT")
        if alias not in splits or model in splits or alias in found:
            raise ValueError(f"{text!r} must give an alias, which has no other shadow, and the name of a model")
        found[alias] = Shadow(model, percent / 100)
    return Aliases(splits, found)


def _halves(text: str, form: str) -> tuple[str, str]:
    alias, _, value = text.partition("=")
    if not alias or not value:
        raise ValueError(f"{text!r} is not {form}")
    return alias, value


def _split(text: str, value: str) -> Split:
    parts = value.split(",")
    if len(parts) == 1:
        return Split(((value, 1.0),))
    models = [_weighted(part) for part in parts]
    if any(weight is None or not model for model, weight in models):
        raise ValueError(f"{text!r} needs a weight above 0 for each of several models: ALIAS=MODEL:90,MODEL:10")
    if len({model for model, _ in models}) < len(models):
        raise ValueError(f"{text!r} names a model twice")
    return Split(tuple((model, weight) for model, weight in models if weight is not None))


def _weighted(text: str) -> tuple[str, float | None]:
    """Model and weight of MODEL:WEIGHT. Without a weight above 0, the weight is None."""
    model, _, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        return text, None
    return model, weight if 0 < weight < math.inf else None
