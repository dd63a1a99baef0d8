"""The tensors of a GGUF file, read on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import ReaderTensor
from gguf.quants import dequantize

from headrace.cli.gguf.weights import Weights, read_weights


class Matrices(Mapping[str, Weights]):
    """The matrices by name. A matrix is read at each request and not kept: the graph has a copy."""

    def __init__(self, tensors: Mapping[str, ReaderTensor]) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 2}

    def __getitem__(self, name: str) -> Weights:
        tensor = self._tensors[name]
        return read_weights(tensor.tensor_type, tensor.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def vectors_of(tensors: Mapping[str, ReaderTensor]) -> dict[str, npt.NDArray[Any]]:
    """Norms, biases and factors by name, in f32."""
    return {
        name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for name, tensor in tensors.items()
        if len(tensor.shape) == 1
    }
