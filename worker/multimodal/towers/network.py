"""A network of a vision tower, compiled by OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov

from headrace.worker.multimodal.towers.attention import attend_in_bfloat16
from headrace.worker.multimodal.towers.integer_products import integer_products
from headrace.worker.multimodal.towers.tower import TowerError

FloatArray = npt.NDArray[np.float32]


class Settings(NamedTuple):
    """How networks are compiled: for so many threads, in `accuracy` (float32) or `performance` mode."""

    threads: int
    execution_mode: str


class Network:
    """Runs a network. Its memory is that of its weights and of the intermediate results of one call."""

    def __init__(self, path: Path, settings: Settings, change: Callable[[ov.Model], None] = lambda _: None) -> None:
        """Read and compile a network; `change` changes its graph before. TowerError if that is not possible."""
        properties: dict[str, object] = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": settings.threads,
            "EXECUTION_MODE_HINT": settings.execution_mode.upper(),
        }
        core = ov.Core()
        try:
            model = core.read_model(path)
            change(model)
            in_integers = integer_products(core, model, settings.execution_mode)
            if in_integers:
                properties |= in_integers
                attend_in_bfloat16(model)
            self._request = core.compile_model(model, "CPU", properties).create_infer_request()
        except RuntimeError as error:
            raise TowerError(f"{path.name} cannot be compiled ({str(error).strip().splitlines()[-1][:300]})") from error

    def width_of(self, name: str) -> int:
        """The last dimension of an input."""
        (port,) = (port for port in self._request.model_inputs if name in port.get_names())
        return int(port.get_partial_shape()[-1].get_length())

    def __call__(self, **inputs: npt.NDArray[Any]) -> list[FloatArray]:
        """The outputs for these inputs, in the order of the graph. Their memory belongs to the caller."""
        self._request.infer({name: np.ascontiguousarray(values) for name, values in inputs.items()}, share_inputs=True)
        return [tensor.data.astype(np.float32) for tensor in self._request.output_tensors]
