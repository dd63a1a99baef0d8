"""Reads GGUF files with the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# The matrices of a layer, and their modules in transformers.
MODULES = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
}
# Architectures that have these matrices, so that their adapters can be read.
ADAPTED = ("llama", "qwen2", "qwen3")
# Those in which rotated pairs are neighbours in rows of queries and keys.
INTERLEAVED = ("llama", "granite", "granitemoe", "smollm3", "glm4")
# Arrays of more numbers, such as those of a vocabulary, are read where they are needed.
_LONGEST_ARRAY = 1024


# The beginnings of the package's own errors. Other errors are Python's, which do not describe the file.
_OWN_ERRORS = ("GGUF magic", "Sorry, file appears")


class GgufError(Exception):
    """Why a file cannot be read, in one sentence."""


def open_gguf(path: Path) -> Any:
    """A GGUFReader. GgufError if the file is damaged."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise _unreadable(error) from None


def metadata_of(reader: Any) -> dict[str, Any]:
    """The file's key-value pairs. The length of an array is KEY.count; the array itself is there if it is a short one
    of numbers. GgufError."""
    from gguf import GGUFValueType

    metadata: dict[str, Any] = {}
    try:
        for key, field in reader.fields.items():
            if field.types and field.types[0] == GGUFValueType.ARRAY:
                metadata[f"{key}.count"] = len(field.data)
                if field.types[-1] != GGUFValueType.STRING and len(field.data) <= _LONGEST_ARRAY:
                    metadata[key] = field.contents()
            else:
                metadata[key] = field.contents()
    except (ValueError, IndexError, KeyError) as error:
        raise _unreadable(error) from None
    return metadata


def halves_of_pairs(rows: int, head_size: int, rotated: int | None = None) -> npt.NDArray[Any]:
    """The order of rows, i64 `[rows]`, that puts the first numbers of all rotated pairs of a head before the second
    ones. The first `rotated` numbers of a head are in pairs, or all of them."""
    order = np.arange(rows).reshape(-1, head_size)
    pairs = order[:, :rotated].reshape(len(order), -1, 2)
    order[:, :rotated] = pairs.swapaxes(1, 2).reshape(len(order), -1)
    return order.reshape(-1)


def _unreadable(error: Exception) -> GgufError:
    says_why = isinstance(error, OSError) or str(error).startswith(_OWN_ERRORS)
    return GgufError(f"it is no readable GGUF file ({error if says_why else 'it is damaged or cut off'})")
