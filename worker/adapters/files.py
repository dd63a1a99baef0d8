"""An adapter as it is in its files, checked against the model that it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.worker.model.adapter_memory import BfloatArray, FloatArray, Linear, LowRank, floats_of

MAX_RANK = 256
# The exponent of a bfloat16 number; all its bits are set if the number is not finite.
_EXPONENT = np.uint16(0x7F80)


class AdapterError(Exception):
    """An adapter cannot be used. The text is a sentence that says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter: its weights by name of the linear layer, scaled, and the SHA-256 of its files, hex."""

    sha256: str
    weights: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The highest rank of its layers, which decides whether it fits into a slot."""
        return max(len(low_rank.a) for low_rank in self.weights.values())

    @property
    def num_bytes(self) -> int:
        """The bytes that its weights take in float32."""
        return sum(4 * (low_rank.a.size + low_rank.b.size) for low_rank in self.weights.values())


def check(weights: Mapping[str, LowRank], linears: Sequence[Linear], path: Path) -> None:
    """Raise AdapterError if the weights do not fit these layers."""
    known = {linear.name: linear for linear in linears}
    if not weights:
        raise AdapterError(f"{path} has no LoRA weights")
    for name, (a, b) in weights.items():
        linear = known.get(name)
        if linear is None:
            raise AdapterError(
                f"{path} adapts {name}, which is no linear layer of this model; it was made for another model, or it "
                "adapts embeddings or the vocabulary, which is not supported"
            )
        if not 0 < len(a) <= MAX_RANK:
            raise AdapterError(f"{path} has rank {len(a)} for {name}; ranks from 1 to {MAX_RANK} are supported")
        if (a.shape[1], b.shape[0]) != (linear.num_inputs, linear.num_outputs) or b.shape[1] != len(a):
            raise AdapterError(
                f"{path} has weights of shapes {list(a.shape)} and {list(b.shape)} for {name}, which has "
                f"{linear.num_inputs} inputs and {linear.num_outputs} outputs; it was made for another model"
            )
        if not (_is_finite(a) and _is_finite(b)):
            raise AdapterError(f"{path} has weights for {name} that are not finite numbers; it is damaged")


def scaled(values: FloatArray | BfloatArray, factor: float) -> FloatArray | BfloatArray:
    """The values times a factor. A factor of 1 does not change their bits."""
    return values if factor == 1.0 else floats_of(values) * np.float32(factor)


def _is_finite(values: FloatArray | BfloatArray) -> bool:
    if values.dtype == np.uint16:
        return bool((np.bitwise_and(values, _EXPONENT) != _EXPONENT).all())
    return bool(np.isfinite(values).all())
