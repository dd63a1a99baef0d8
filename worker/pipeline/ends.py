"""Ends of the graphs of stages, which return hidden states instead of logits."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.model.batch import HiddenStates, Sums
from headrace.worker.model.lm_head import InputTensors, numbers_of
from headrace.worker.model.sampled_rows import states_of_rows
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.reduction import FloatArray

_ROWS = "rows"
LongArray = npt.NDArray[np.int64]


class StatesEnd:
    """The hidden states of all tokens; with `of_rows`, only those of the requested rows. With `bfloat16`, they are
    bfloat16, which loses nothing in a graph that is computed in it."""

    def __init__(self, *, of_rows: bool, bfloat16: bool = False) -> None:
        self.vocab_size = 0
        self._of_rows, self._bfloat16 = of_rows, bfloat16

    def replace(self, model: ov.Model, *, is_bfloat16: bool) -> None:
        """See `GraphEnd`."""
        (result,) = model.get_results()
        if self._of_rows:
            rows = opset13.parameter([-1], np.int64, _ROWS)
            rows.output(0).get_tensor().set_names({_ROWS})
            model.add_parameters([rows])
            states = states_of_rows(result.input_value(0), rows.output(0), model)
            result.input(0).replace_source_output(states)
        if self._bfloat16:
            # The CPU plugin computes the end of a graph in float32 unless its result is bfloat16.
            narrow = opset13.convert(result.input_value(0), "bf16")
            result.input(0).replace_source_output(narrow.output(0))
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
        values = numbers_of(self._request.get_output_tensor(0))
        flat: HiddenStates = values.reshape(len(values), math.prod(values.shape[1:]))
        return Logits(flat[: self._num_rows] if self._of_rows else flat)
