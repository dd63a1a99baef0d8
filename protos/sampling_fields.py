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
    typical_p: Annotated[
        float | None,
        Number(
            0.0,
            1.0,
            "0 to 1",
            "Locally typical sampling: keeps the tokens whose information is closest to the expected one, until they"
            " have this total probability. 1 keeps all",
            1.0,
        ),
    ] = None
    xtc_probability: Annotated[
        float | None,
        Number(
            0.0,
            1.0,
            "0 to 1",
            "Exclude top choices: with this probability, a token is drawn without those that reach `xtc_threshold`,"
            " except the least probable one of them",
            0.0,
        ),
    ] = None
    xtc_threshold: Annotated[
        float | None, Number(0.0, 1.0, "0 to 1", "See `xtc_probability`. Over 0.5 excludes nothing", 0.1)
    ] = None
    dynatemp_range: Annotated[
        float | None,
        Number(
            0.0,
            2.0,
            "0 to 2",
            "Dynamic temperature: between `temperature` - range and + range, by the entropy of the logits. 0: fixed",
            0.0,
        ),
    ] = None
    dynatemp_exponent: Annotated[
        float | None,
        Number(0.0, 100.0, "0 to 100", "Exponent of the entropy, as a share of the largest possible one", 1.0),
    ] = None
    mirostat: Annotated[
        int | None,
        Number(
            0,
            2,
            "0, 1, 2",
            "Mirostat, version 1 or 2: a filter that keeps the mean surprise of the tokens near `mirostat_tau`. It"
            " replaces all others but temperature. 0: off",
            0,
        ),
    ] = None
    mirostat_tau: Annotated[
        float | None, Number(0.0, 100.0, "0 to 100", "Target surprise in bits, for `mirostat`", 5.0)
    ] = None
    mirostat_eta: Annotated[float | None, Number(0.0, 10.0, "0 to 10", "How fast `mirostat` corrects itself", 0.1)] = (
        None
    )
    dry_multiplier: Annotated[
        float | None,
        Number(
            0.0,
            100.0,
            "0 to 100",
            "DRY: a token that would continue a repetition of n tokens of prompt and answer loses multiplier *"
            " `dry_base` ^ (n - `dry_allowed_length`) of its logit. 0: off",
            0.0,
        ),
    ] = None
    dry_base: Annotated[float | None, Number(1.0, 100.0, "1 to 100", "See `dry_multiplier`", 1.75)] = None
    dry_allowed_length: Annotated[
        int | None,
        Number(0, 2**31 - 1, "0 or more", "Shorter repetitions cost nothing; see `dry_multiplier`", 2),
    ] = None
    dry_penalty_last_n: Annotated[
        int | None,
        Number(-1, 2**31 - 1, "-1 or more", "How many of the last tokens DRY looks at. -1: all. 0: none", -1),
    ] = None


FILTERS = ("temperature", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc")
"""What reduces the tokens that may be drawn, in the order in which it is applied unless a request has another. Entry i
is the value i + 1 of the enum `Sampler`."""
DRY_BREAKERS = ("\n", ":", '"', "*")
"""Texts at which DRY begins anew, unless a request has others."""


def _numbers() -> Mapping[str, Number]:
    hints = get_type_hints(SamplingNumbers, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in SamplingNumbers.__struct_fields__}


NUMBERS: Mapping[str, Number] = _numbers()
"""Every field by its name, in order."""


def numbers_of(request: object) -> SamplingNumbers:
    """These fields of a request that has them under these names."""
    return SamplingNumbers(**{name: getattr(request, name) for name in NUMBERS})
