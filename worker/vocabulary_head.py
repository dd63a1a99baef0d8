"""The end of a model's graph, made anew: logits of the sampled rows only, and what sampling reads of all of them.

    hidden states of rows -> MatMul -> logits, maxima of runs             in the model's own graph
                                      | if a step draws
                                      +-> sums                            a graph of its own
                                      +-> sums at temperature 1           the same, with these

The exponentials that sums take are a graph beside the model's, run behind it in the steps that need them: a graph has
no way to leave out work for nothing. It reads the logits where they were written.

What is written to memory that is in no cache costs more than the arithmetic. So bfloat16 logits are given as such
(OpenVINO would widen all of them, for 2 % of a step), and rows are weighed in parts, whose float32 stays in the caches.

How runs are defined says `logits`; where a vocabulary has none, or where a model does more to its logits than one
product, there is nothing but logits. docs/decisions/0024 has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.batch import Sums
from headrace.worker.logits import FloatArray, Logits, Reduction, float_of, run_length
from headrace.worker.sampled_rows import states_of_rows
from headrace.worker.vocabulary_reducer import compile_beside, runs_of, sums_of, without_lowest

# Logits of the rows that are weighed at a time, when a batch is full: 16 rows of 49k, 8 of 152k.
_FULL_BATCH, _PART = 64, 1 << 20
# By this name the CPU plugin knows nodes behind the last product that may still be bfloat16; others it makes float32,
# with a copy of all logits for each.
_STAYS_BFLOAT16 = "enforceBF16evenForGraphTail"
_Number = TypeVar("_Number", bound=np.generic)
_NO_TEMPERATURES = np.zeros(0, np.float32)


def replace_head(model: ov.Model, *, is_bfloat16: bool) -> bool:
    """Let a model with PagedAttention take `rows` `i64[n]`, and give `logits` of these rows of the step and their
    `maxima`; false if there are only logits. `is_bfloat16` says in what the model computes."""
    result = model.get_results()[0]
    node = result.input_value(0).get_node()
    is_product = node.get_type_name() == "MatMul"
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    rows = _parameter("rows", [-1], np.int64)
    model.add_parameters([rows.get_node()])
    hidden = states_of_rows(node.input_value(0), rows, model)
    vocab_size = int(node.output(0).get_partial_shape()[-1].get_length())
    has_runs = is_product and run_length(vocab_size) > 0
    if has_runs:
        attributes = node.get_attributes()
        logits = opset13.matmul(hidden, node.input_value(1), attributes["transpose_a"], attributes["transpose_b"])
        if is_bfloat16:
            logits = opset13.convert(logits, "bf16")
            logits.rt_info[_STAYS_BFLOAT16] = "YES"
        _, maxima = runs_of(logits.output(0), vocab_size)
        model.remove_result(result)
        model.add_results([_result("logits", logits.output(0)), _result("maxima", maxima)])
    else:
        node.input(0).replace_source_output(hidden)
        result.output(0).get_tensor().set_names({"logits"})
    model.validate_nodes_and_infer_types()
    return has_runs


class RowSums:
    """Compiled graphs that sum up the weights of rows of logits. Rows are a multiple of `num_parts`."""

    def __init__(self, vocab_size: int, element_type: ov.Type, threads: int) -> None:
        self.num_parts = 2 ** math.ceil(math.log2(max(1, _FULL_BATCH * vocab_size / _PART)))
        self._compiled = {
            sums: compile_beside(self._graph(vocab_size, element_type, sums), threads)
            for sums in (Sums.DRAWN, Sums.DRAWN_AND_MODEL)
        }

    def create_requests(self) -> dict[Sums, ov.InferRequest]:
        """A request for each graph: `logits`, `maxima` and `inverse_temperatures` `[n, 1, 1]` give `sums`, and the
        second `model_sums` too."""
        return {sums: compiled.create_infer_request() for sums, compiled in self._compiled.items()}

    def _graph(self, vocab_size: int, element_type: ov.Type, sums: Sums) -> ov.Model:
        num_runs = vocab_size // run_length(vocab_size)
        logits = _parameter("logits", [-1, 1, vocab_size], element_type)
        maxima = _parameter("maxima", [-1, num_runs, 1], element_type)
        inverse_temperatures = _parameter("inverse_temperatures", [-1, 1, 1], np.float32)
        shape = opset13.constant(np.array([0, num_runs, run_length(vocab_size)]))
        in_runs = opset13.reshape(logits, shape, special_zero=True).output(0)
        parts = [[opset13.convert(part, "f32").output(0) for part in self._divided(of)] for of in (in_runs, maxima)]
        at_temperatures = map(sums_of, *parts, self._divided(inverse_temperatures))
        results = [_result("sums", opset13.concat(list(at_temperatures), 0).output(0))]
        if sums is Sums.DRAWN_AND_MODEL:
            at_one = map(sums_of, *parts, [None] * self.num_parts)
            results.append(_result("model_sums", opset13.concat(list(at_one), 0).output(0)))
        return ov.Model(results, [port.get_node() for port in (logits, maxima, inverse_temperatures)], "row_sums")

    def _divided(self, rows: ov.Output) -> Sequence[ov.Output]:
        outputs: Sequence[ov.Output] = opset13.split(rows, opset13.constant(np.int64(0)), self.num_parts).outputs()
        return outputs


class InputTensors:
    """Inputs of an inference request that change from step to step. The arrays kept here own the tensors' memory."""

    def __init__(self, request: ov.InferRequest) -> None:
        self._request = request
        self._arrays: dict[str, npt.NDArray[np.generic]] = {}

    def set(self, name: str, values: npt.NDArray[np.generic]) -> None:
        """Write into the tensor of the step before if the shape is the same, as in a run of decode steps: a tenth of
        the cost of binding a new one."""
        kept = self._arrays.get(name)
        if kept is not None and kept.shape == values.shape:
            kept[...] = values
            return
        self._arrays[name] = values.copy()
        self._request.set_tensor(name, ov.Tensor(self._arrays[name], shared_memory=True))


class HeadRequest:
    """An inference request of a model with a new head: `bind` rows, `run`, and read `logits`. `row_sums` is None where
    the model gives nothing but logits."""

    def __init__(self, request: ov.InferRequest, row_sums: RowSums | None, vocab_size: int) -> None:
        self._request = request
        self._inputs = InputTensors(request)
        self._vocab_size = vocab_size
        self._num_rows = 0
        self._sums = Sums.NONE
        self._num_parts = 1 if row_sums is None else row_sums.num_parts
        self._sums_requests = None if row_sums is None else row_sums.create_requests()
        self._inverse_temperatures = _NO_TEMPERATURES
        # To find a tensor by its name, OpenVINO looks at those of all inputs, the cache's too.
        names = [port.any_name for port in request.model_outputs]
        self._logits = names.index("logits")
        self._maxima = names.index("maxima") if row_sums is not None else -1

    def bind(
        self, rows: npt.NDArray[np.int64], inverse_temperatures: FloatArray, sums: Sums, *, least: int = 0
    ) -> None:
        """Let the next run give logits of `rows`, and where the model can, `sums` at `inverse_temperatures` `[rows]`.
        Without sums there may be fewer of these than rows. If any, `least` rows are computed."""
        self._sums = Sums.NONE if self._sums_requests is None else sums
        self._num_rows = len(rows)
        num_missing = max(0, least - len(rows)) if len(rows) else 0
        if self._sums is not Sums.NONE:
            num_missing += -(len(rows) + num_missing) % self._num_parts
            self._inverse_temperatures = _padded(inverse_temperatures, num_missing)
        self._inputs.set("rows", _padded(rows, num_missing))

    def run(self) -> None:
        """Compute what was bound, here and in the rest of the model."""
        self._request.infer()
        if self._sums_requests is None or self._sums is Sums.NONE:
            return
        request = self._sums_requests[self._sums]
        for index, output in enumerate((self._logits, self._maxima)):
            request.set_input_tensor(index, self._request.get_output_tensor(output))
        temperatures = self._inverse_temperatures[:, None, None]
        request.set_input_tensor(2, ov.Tensor(temperatures, shared_memory=True))
        request.infer()

    def logits(self) -> Logits:
        """What the last run gave: views that the next one overwrites."""
        values = self._read(self._request, self._logits).reshape(-1, self._vocab_size)
        if self._sums_requests is None:
            return Logits(values)
        maxima = self._read(self._request, self._maxima)
        maxima = without_lowest(float_of(maxima) if maxima.dtype == np.uint16 else maxima)[..., 0]
        if self._sums is Sums.NONE:
            return Logits(values, Reduction(maxima, maxima[:, :0]))
        request = self._sums_requests[self._sums]
        reduction = Reduction(maxima, self._read(request, 0))
        has_model = self._sums is Sums.DRAWN_AND_MODEL
        return Logits(values, reduction, self._read(request, 1) if has_model else None)

    def _read(self, request: ov.InferRequest, output: int) -> Any:
        """float32, or the bits of bfloat16, for which numpy has no name."""
        values = request.get_output_tensor(output).data[: self._num_rows]
        return values.view(np.uint16) if values.dtype == np.float16 else values


def _padded(values: npt.NDArray[_Number], num_missing: int) -> npt.NDArray[_Number]:
    return np.pad(values, (0, num_missing)) if num_missing else values


def _parameter(name: str, shape: list[int], dtype: Any) -> ov.Output:
    parameter = opset13.parameter(shape, dtype, name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter.output(0)


def _result(name: str, output: ov.Output) -> ov.Node:
    output.get_tensor().set_names({name})
    return opset13.result(output)
