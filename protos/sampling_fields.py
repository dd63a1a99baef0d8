"""The numbers that say how tokens are chosen: name, type, range, default and meaning of each, once for all processes.

A field of `SamplingNumbers` has the same name in requests of the HTTP APIs, in `TextParams` and in `SamplingParams`.
From `NUMBERS` follow the checks of gateway and worker, the OpenAPI document, docs/reference/fields.md and the
translation between all of these. To add one, add it here, to both messages in the .proto files, to the worker's
`SamplingParams`, and to its sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import msgspec

LEAST_TOP_P = 2.0**-60
"""Keeps only the most probable token, which a top_p of 0 means to callers. Workers take no 0."""


@dataclass(frozen=True, slots=True)
class Number:
    """A numeric sampling field: its range, its meaning and default, and its value in `SamplingParams`."""

    least: float
    greatest: float
    values: str
    """The range in words, in Markdown."""
    meaning: str = ""
    """In Markdown."""
    default: float | None = None
    """What an absent field means; None if that depends on the request."""
    open_below: bool = False
    """Whether the least itself is excluded."""
    open_below_on_wire: bool = False
    """The same for `SamplingParams`."""
    wire: Callable[[Any], Any] | None = None
    """From the caller's value to that in `SamplingParams`; None: the same."""

    def on_wire(self, value: float) -> Any:
        """The value in `SamplingParams`."""
        return value if self.wire is None else self.wire(value)


def _top_p_on_wire(value: float) -> float:
    return max(value, LEAST_TOP_P)


def _top_k_on_wire(value: int) -> int:
    return max(value, 0)


def _seed_on_wire(value: int) -> int:
    return value % 2**64


class SamplingNumbers(msgspec.Struct, kw_only=True):
    """The fields as callers give them; None if they are absent."""

    temperature: Annotated[float | None, Number(0.0, 2.0, "0 to 2", "0 is greedy", 1.0)] = None
    top_p: Annotated[
        float | None,
        Number(
            0.0,
            1.0,
            "0 to 1",
            "Keeps the smallest set of tokens with this total probability. 0 keeps only the most probable token",
            1.0,
            open_below_on_wire=True,
            wire=_top_p_on_wire,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Number(
            -1,
            2**31 - 1,
            "-1 or more",
            "Keeps this many of the most probable tokens. -1 and 0 keep all",
            0,
            wire=_top_k_on_wire,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Number(
            0.0, 1.0, "0 to 1", "Removes tokens that are less probable than this share of the most probable one", 0.0
        ),
    ] = None
    top_n_sigma: Annotated[
        float | None,
        Number(
            -1.0,
            1000.0,
            "-1 to 1000",
            "Removes tokens whose logit is more than this many standard deviations of all logits below the best, before"
            " the other filters. 0 and less remove none",
            0.0,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Number(-(2**63), 2**64 - 1, "64 bits", "Choice i of n uses `seed` + i", wire=_seed_on_wire),
    ] = None
    presence_penalty: Annotated[
        float | None,
        Number(-2.0, 2.0, "-2 to 2", "Subtracted from the logit of tokens that the answer has already", 0.0),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        Number(-2.0, 2.0, "-2 to 2", "The same, for each time that the answer has the token", 0.0),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Number(
            0.0,
            100.0,
            "over 0, to 100",
            "Divides positive logits, and multiplies negative ones, of tokens in prompt and answer",
            1.0,
            open_below=True,
            open_below_on_wire=True,
        ),
    ] = None


def _numbers() -> Mapping[str, Number]:
    hints = get_type_hints(SamplingNumbers, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in SamplingNumbers.__struct_fields__}


NUMBERS: Mapping[str, Number] = _numbers()
"""Every field by its name, in order."""


def numbers_of(request: object) -> SamplingNumbers:
    """These fields of a request that has them under these names."""
    return SamplingNumbers(**{name: getattr(request, name) for name in NUMBERS})
