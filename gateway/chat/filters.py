"""The order of samplers that a request wants, and the texts at which its repetitions begin anew (pure).

Names, letters and rules are those of llama.cpp's server: a sampler that is not named has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from headrace.gateway.checks import invalid
from headrace.protos.sampling_fields import FILTERS, SamplingNumbers

MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 40
_OF_LOGITS = ("penalties", "dry")
_OTHER_NAMES = {
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "typ_p": "typical_p",
    "typ-p": "typical_p",
    "typ": "typical_p",
    "typical": "typical_p",
    "typical-p": "typical_p",
    "min-p": "min_p",
    "top-n-sigma": "top_n_sigma",
    "temp": "temperature",
}
_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typical_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
# What each sampler's numbers are without effect.
_NEUTRAL: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    "dry": {"dry_multiplier": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typical_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
}
SAMPLERS = (*_OF_LOGITS, *FILTERS)
"""All names, in the order in which samplers are applied unless a request has another."""


class Order(NamedTuple):
    """The samplers of a request. `filters` is their order; empty if it is the usual one."""

    names: Sequence[str]
    filters: tuple[str, ...]


def order_of(given: Sequence[str] | str | None) -> Order | None:
    """The order of the field `samplers`: names, or letters in one text. None without it. Raises `StatusError`."""
    if given is None or given == "":
        return None
    names = [_LETTERS.get(letter, letter) for letter in given] if isinstance(given, str) else list(given)
    names = [_OTHER_NAMES.get(name, name) for name in names]
    for name in names:
        if name not in SAMPLERS:
            raise invalid("samplers", f"samplers: '{name[:32]}' is not one of {', '.join(SAMPLERS)}")
    if len(set(names)) < len(names):
        raise invalid("samplers", "samplers must name each sampler once")
    first = [name for name in SAMPLERS[: len(_OF_LOGITS)] if name in names]
    if names[: len(first)] != first:
        raise invalid("samplers", "samplers must begin with penalties, then dry, if they are named: they change logits")
    filters = tuple(names[len(first) :])
    return Order(names, filters if filters != tuple(name for name in FILTERS if name in filters) else ())


def without_others(numbers: SamplingNumbers, order: Order) -> SamplingNumbers:
    """The numbers with neutral values for the samplers that the order does not name."""
    changes: dict[str, Any] = {}
    for name in SAMPLERS:
        if name not in order.names:
            changes |= _NEUTRAL[name]
    return replace(numbers, **changes)


def check_breakers(breakers: Iterable[str] | None) -> None:
    """Raise `StatusError` for texts that cannot be sequence breakers."""
    given = list(breakers or ())
    if len(given) > MAX_BREAKERS:
        raise invalid("dry_sequence_breakers", f"dry_sequence_breakers takes at most {MAX_BREAKERS} texts")
    if any(len(text) > MAX_BREAKER_CHARS for text in given):
        problem = f"dry_sequence_breakers: a text must have at most {MAX_BREAKER_CHARS} characters"
        raise invalid("dry_sequence_breakers", problem)
