"""The dimensions of a model that determine its memory, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
# With `u8`, the numbers of a head take one byte each in the cache, and 8 for their scale and zero point.
_SCALE_BYTES = 8


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`kv_heads` of `head_size` numbers each in every layer; `context_tokens` is 0 if it is not known."""

    layers: int
    kv_heads: int
    head_size: int
    context_tokens: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token in the cache, with the default precision u8."""
        return 2 * self.layers * self.kv_heads * (self.head_size + _SCALE_BYTES)


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config.json describes, or None if values are missing."""
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        layers, heads = _first(source, _LAYERS), _first(source, _HEADS)
        hidden, head_size = _first(source, _HIDDEN), _first(source, ("head_dim",))
        if layers and (rank := _first(source, ("kv_lora_rank",))):
            # One latent head (`cli/export/further_types.py`), whose keys have a rotated part too.
            return ModelShape(layers, 1, rank + _first(source, ("qk_rope_head_dim",)) // 2, _first(source, _CONTEXT))
        if layers and heads and (hidden or head_size):
            kv_heads = 1 if source.get("multi_query") is True else _first(source, ("num_key_value_heads",)) or heads
            return ModelShape(layers, kv_heads, head_size or hidden // heads, _first(source, _CONTEXT))
    return None


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of the values that is a number above 0, else 0."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
