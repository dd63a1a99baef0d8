"""What the graphs of stages end with: hidden states, instead of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.model.batch import Sums
from headrace.worker.model.lm_head import EndRequest, GraphEnd, InputTensors
from headrace.worker.model.sampled_rows import states_of_rows
from headrace.worker.pipeline.cutting import STATES
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.reduction import FloatArray

_ROWS = "rows"
LongArray = npt.NDArray[np.int64]


class StatesEnd:
    """Hidden states of all tokens, or with `of_rows` of the rows that are asked for."""

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

    def prepare(self, _compiled: ov.CompiledModel, _compile_other: Callable[[ov.Model], ov.CompiledModel], /) -> None:
        """See `GraphEnd`."""

    def open(self, request: ov.InferRequest) -> StatesRequest:
        """See `GraphEnd`."""
        return StatesRequest(request, of_rows=self._of_rows)


class StatesRequest:
    """A request of a graph that ends with hidden states. They are its values instead of logits."""

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
        """The hidden states of the last run: `[tokens or rows, numbers]`."""
        return Logits(self.states())

    def states(self) -> FloatArray:
        """The hidden states of the last run, as a view that the next run overwrites: `[tokens or rows, numbers]`."""
        values: Any = self._request.get_output_tensor(0).data
        flat: FloatArray = values.reshape(len(values), math.prod(values.shape[1:]))
        return flat[: self._num_rows] if self._of_rows else flat


class FirstEnd:
    """The end of stage 0: the hidden states of all tokens pass to the next stage, and a second graph, `head`, computes
    the logits of those that return. `usual` is the end of that graph."""

    def __init__(self, head: ov.Model, usual: GraphEnd) -> None:
        self.vocab_size = 0
        self._head, self._usual = head, usual
        self._states = StatesEnd(of_rows=False)
        self._compiled: ov.CompiledModel

    def replace(self, model: ov.Model, *, is_bfloat16: bool) -> None:
        """See `GraphEnd`."""
        self._states.replace(model, is_bfloat16=is_bfloat16)
        self._usual.replace(self._head, is_bfloat16=is_bfloat16)

    def prepare(self, _compiled: ov.CompiledModel, compile_other: Callable[[ov.Model], ov.CompiledModel], /) -> None:
        """See `GraphEnd`."""
        self._compiled = compile_other(self._head)
        self._usual.prepare(self._compiled, compile_other)
        self.vocab_size = self._usual.vocab_size

    def open(self, request: ov.InferRequest) -> FirstRequest:
        """See `GraphEnd`."""
        head = self._compiled.create_infer_request()
        return FirstRequest(self._states.open(request), head, self._usual.open(head))


class FirstRequest:
    """A request of stage 0, and of the graph that computes logits."""

    def __init__(self, layers: StatesRequest, head: ov.InferRequest, end: EndRequest) -> None:
        self._layers, self._head, self._end = layers, head, end
        port = next(port for port in head.model_inputs if STATES in port.get_names())
        self._shape = [1 if length.is_dynamic else length.get_length() for length in port.partial_shape]
        self.width = math.prod(self._shape[1:])
        """Numbers of the hidden states of a token."""
        self._kept: ov.Tensor | None = None

    def bind(self, _rows: LongArray, _inverse_temperatures: FloatArray, _sums: Sums, *, least: int = 0) -> None:
        """See `EndRequest`: rows are bound with the states that come back."""

    def run(self) -> None:
        """Compute the layers of this stage."""
        self._layers.run()

    def states(self) -> FloatArray:
        """The hidden states for the next stage: `[tokens, numbers]`."""
        return self._layers.states()

    def compute_logits(self, states: FloatArray, inverse_temperatures: FloatArray, sums: Sums, *, least: int) -> None:
        """Compute the logits of rows whose hidden states have come back: `[rows, numbers]`."""
        shaped = np.ascontiguousarray(states).reshape(len(states), *self._shape[1:])
        self._kept = ov.Tensor(shaped, shared_memory=True)
        self._head.set_tensor(STATES, self._kept)
        self._end.bind(np.arange(len(states)), inverse_temperatures, sums, least=least)
        self._end.run()

    def logits(self) -> Logits:
        """The logits that were computed last."""
        return self._end.logits()
