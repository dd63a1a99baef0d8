"""What a study needs to know of a model's files: their size, and the size of a token in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.common.model_files.cache import find_directory

_NETWORK = "openvino_model.bin"
# A head's keys or values of a token at 8 bits have a scale and a zero point of 4 bytes each.
_SCALE_BYTES = 8


class ModelError(ValueError):
    """A model that the study cannot use; the message says what to change."""


class _Config(msgspec.Struct):
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class StudiedModel:
    """A model of the study. `elements_per_token` is the number of keys and values of a token in all layers, and
    `scales_per_token` that of the groups that share a scale if the cache has 8 bits. `max_tokens` is the longest
    sequence, 0 if the files do not say."""

    name: str
    directory: Path
    weight_bytes: int
    elements_per_token: int
    scales_per_token: int
    max_tokens: int

    def kv_bytes(self, tokens: int, bits: int = 8) -> int:
        """Bytes of a KV cache of so many tokens."""
        scales = self.scales_per_token * _SCALE_BYTES if bits == 8 else 0
        return tokens * (self.elements_per_token * bits // 8 + scales)


def read_model(model: str) -> StudiedModel:
    """The model in a directory or in the cache. Raises ModelError."""
    directory, name = find_directory(model)
    try:
        config = msgspec.json.decode((directory / "config.json").read_bytes(), type=_Config)
        weight_bytes = (directory / _NETWORK).stat().st_size
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise ModelError(
            f"--model {model}: {directory} has no {missing}; give a text model that `headrace models list` shows "
            f"(`headrace pull {model}` fetches one), or the directory of one"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"--model {model}: {directory} cannot be read: {error}") from None
    heads = config.num_key_value_heads or config.num_attention_heads
    head_size = config.head_dim or config.hidden_size // config.num_attention_heads
    groups = 2 * config.num_hidden_layers * heads
    return StudiedModel(
        name, directory.absolute(), weight_bytes, groups * head_size, groups, config.max_position_embeddings
    )
