"""Ends of the graphs of stages, which return hidden states instead of logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.model.batch import Sums
from headrace.worker.model.lm_head import InputTensors
from headrace.worker.model.sampled_rows import states_of_rows
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.reduction import FloatArray

_ROWS = "rows"
LongArray = npt.NDArray[np.int64]


class StatesEnd:
    """The hidden states of all tokens; with `of_rows`, only those of the requested rows."""

    def __init__(self, *, of_rows: bool) -> None:
        self.vocab_size = 0
        self._of_rows = of_rows

    def replace(self, model: ov.Model, *, is_bfloat16: bool) -> None:
        """See `GraphEnd`."""
        (result,) = model.get_results()
        if self._of_rows:
            rows = opset13.parameter([-1], np.int64, _ROWS)
            rows.output(0).get_tensor().set_names({_ROWS})
            model.add_parameters([rows])
            states = states_of_rows(result.input_value(0), rows.output(0), model)
            result.input(0).replace_source_output(states)
            model.validate_nodes_and_infer_types()

    def prepare(self, _compiled: ov.CompiledModel, /) -> None:
        """See `GraphEnd`."""

    def open(self, request: ov.InferRequest) -> StatesRequest:
        """See `GraphEnd`."""
        return StatesRequest(request, of_rows=self._of_rows)


class StatesRequest:
    """An inference request of a graph that ends with hidden states, which it returns as the values of `Logits`."""

    def __init__(self, request: ov.InferRequest, *, of_rows: bool) -> None:
        self._request = request
        self._inputs = InputTensors(request)
        self._of_rows = of_rows
        self._num_rows = 0

    def bind(self, rows: LongArray, _inverse_temperatures: FloatArray, _sums: Sums, *, least: int = 0) -> None:
        """Set the rows of the next run; see `HeadRequest`."""
        self._num_rows = len(rows)
        if self._of_rows:
            missing = max(0, least - len(rows)) if len(rows) else 0
            self._inputs.set(_ROWS, np.pad(rows, (0, missing)))

    def run(self) -> None:
        """Run the graph."""
        self._request.infer()

    def logits(self) -> Logits:
        """The hidden states of the last run, as a view that the next run overwrites: `[tokens or rows, numbers]`."""
        values: Any = self._request.get_output_tensor(0).data
        flat: FloatArray = values.reshape(len(values), math.prod(values.shape[1:]))
        return Logits(flat[: self._num_rows] if self._of_rows else flat)
