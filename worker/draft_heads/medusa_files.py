"""Reads heads in the format of Medusa: config.json and *.safetensors in a directory.

    config.json                 medusa_num_heads, medusa_num_layers
    H.L.linear.weight, .bias    layer L of head H: states + silu(product)
    H.N.weight                  after the N layers of head H: [vocabulary, size]

vLLM's names work too: blocks.H.layers.L.weight, lm_heads.H.weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from headrace.common.model_files.heads import HEADS_CONFIG
from headrace.common.model_files.safetensors import FLOATS
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads.eagle_files import read_weights

_Array = npt.NDArray[Any]
_PREFIXES = re.compile(r"^(?:medusa_heads?\.|model\.)+")
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_OWN_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")


class MedusaHead(NamedTuple):
    """The weights of a head: of its layers, with biases or None, and of its logits."""

    layers: list[tuple[_Array, _Array | None]]
    logits: _Array


@dataclass(frozen=True, slots=True)
class MedusaFiles:
    """Heads as they are in the files. Head h proposes the token h + 1 places after the next. bfloat16 is stored as its
    bits."""

    path: Path
    size: int
    vocab_size: int
    heads: list[MedusaHead]


def read_medusa(path: Path) -> MedusaFiles:
    """Read heads. ConfigurationError if they are incomplete, damaged or of another kind."""
    try:
        config = json.loads((path / HEADS_CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path / HEADS_CONFIG} cannot be read as JSON ({error}); copy it again") from error
    num_heads = config.get("medusa_num_heads", config.get("num_heads"))
    num_layers = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    if not all(isinstance(number, int) and number > 0 for number in (num_heads, num_layers)):
        raise ConfigurationError(f"{path / HEADS_CONFIG} must have the numbers medusa_num_heads and medusa_num_layers")
    weights = _read_weights(path, num_layers)
    heads = [_head(weights, head, num_layers, path) for head in range(num_heads)]
    vocab_size, size = heads[0].logits.shape
    for number, head in enumerate(heads):
        shapes = {head.logits.shape: (vocab_size, size)}
        for matrix, bias in head.layers:
            shapes[matrix.shape] = (size, size)
            shapes |= {} if bias is None else {bias.shape: (size,)}
        if any(found != wanted for found, wanted in shapes.items()):
            raise ConfigurationError(
                f"head {number} in {path} has weights of shapes {sorted(map(list, shapes))}, and those of head 0 are "
                f"for states of size {size} and {vocab_size} tokens; copy the files again"
            )
    return MedusaFiles(path, size, vocab_size, heads)


def _read_weights(path: Path, num_layers: int) -> dict[str, _Array]:
    """The weights by their names in the format of Medusa."""
    found = read_weights(path, "medusa_lm_head.safetensors", ".pt", FLOATS)
    named = {}
    for name, values in found.items():
        plain = _PREFIXES.sub("", name)
        if match := _BLOCK.match(plain):
            plain = f"{match[1]}.{match[2]}.linear.{match[3]}"
        elif match := _OWN_HEAD.match(plain):
            plain = f"{match[1]}.{num_layers}.weight"
        named[plain] = values
    return named


def _head(weights: Mapping[str, _Array], head: int, num_layers: int, path: Path) -> MedusaHead:
    try:
        layers = [
            (weights[f"{head}.{layer}.linear.weight"], weights.get(f"{head}.{layer}.linear.bias"))
            for layer in range(num_layers)
        ]
        logits = weights[f"{head}.{num_layers}.weight"]
    except KeyError as error:
        raise ConfigurationError(f"the heads in {path} have no {error.args[0]}, which Medusa has") from None
    if logits.ndim != 2:
        raise ConfigurationError(f"the heads in {path} have {head}.{num_layers}.weight of {logits.ndim} dimensions")
    return MedusaHead(layers, logits)
