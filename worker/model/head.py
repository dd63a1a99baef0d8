"""The end of a model's graph, made anew: logits of the sampled rows only, and what sampling reads of all of them.

    hidden states of rows -> MatMul -> logits, maxima of runs             in the model's own graph
                                      | if a step draws
                                      +-> sums                            a graph of its own
                                      +-> sums at temperature 1           the same, with these

The exponentials that sums take are a graph beside the model's, run behind it in the steps that need them: a graph has
no way to leave out work for nothing. It reads the logits where they were written.

Writing to memory that is in no cache costs more than the arithmetic. So bfloat16 logits stay bfloat16 (OpenVINO would
widen all of them, for 2 % of a step), and the sums take a few rows at a time, whose float32 stays in the caches. The
model's graph computes exactly the rows that are sampled, however they are drawn from.

How runs are defined says `logits`; where a vocabulary has none, or where a model does more to its logits than one
product, there is nothing but logits. docs/decisions/0024 has the measurements.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.config import ConfigurationError
from headrace.worker.model.batch import Sums
from headrace.worker.model.fused_projections import is_constant
from headrace.worker.model.sampled_rows import states_of_rows
from headrace.worker.sampling.logits import Logits, floats_of
from headrace.worker.sampling.reduction import FloatArray, Reduction, run_length, weigh_runs
from headrace.worker.sampling.vocabulary_reducer import compile_beside, runs_of, sums_of, without_lowest

# Logits that are weighed at a time: 21 rows of 49k, 6 of 152k.
_LOGITS_AT_ONCE = 1 << 20
# Up to so many logits, numpy weighs them before a graph has started: 3 rows of 49k, 1 of 152k.
_MOST_FOR_NUMPY = 160_000
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
        node = _computed_input(node).get_node()
    if is_constant(node.input_value(0)):
        raise _unknown_end(node, "multiplies its weights with the hidden states, and not these with the weights")
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


def _computed_input(node: ov.Node) -> ov.Output:
    """What a node at the end of the graph is computed of. A scale, say, may stand on either side of it."""
    for value in node.input_values():
        if not is_constant(value):
            return value
    raise _unknown_end(node, "depends on no product with the vocabulary's weights")


def _unknown_end(node: ov.Node, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"the end of the model's graph, from which logits come, is of an unknown kind: {node.get_type_name()} "
        f"{node.get_friendly_name()!r} {problem}; export the model anew, for instance with optimum-intel, or serve "
        "another one"
    )


class RowSums:
    """Compiled graphs that sum up the weights of rows of logits, a few rows at a time."""

    def __init__(self, vocab_size: int, element_type: ov.Type, threads: int) -> None:
        self._vocab_size = vocab_size
        self._most_rows = max(1, _LOGITS_AT_ONCE // vocab_size)
        self._requests = {
            sums: compile_beside(_sums_graph(vocab_size, element_type, sums), threads).create_infer_request()
            for sums in (Sums.DRAWN, Sums.DRAWN_AND_MODEL)
        }

    def read(
        self, sums: Sums, logits: ov.Tensor, maxima: ov.Tensor, inverse_temperatures: FloatArray
    ) -> list[FloatArray]:
        """The sums `[n, runs]` of the first n rows at `inverse_temperatures` `[n]`, and of DRAWN_AND_MODEL those at
        temperature 1 behind them. `logits` and `maxima` are what the model's graph gave."""
        num_rows = len(inverse_temperatures)
        num_outputs = 2 if sums is Sums.DRAWN_AND_MODEL else 1
        if 0 < num_rows * self._vocab_size <= _MOST_FOR_NUMPY:
            values, highest = (floats_of(_numbers(tensor)[:num_rows]) for tensor in (logits, maxima))
            temperatures = (inverse_temperatures, np.ones_like(inverse_temperatures))[:num_outputs]
            return [weigh_runs(values[:, 0], highest[..., 0], each) for each in temperatures]
        given = [np.empty((num_rows, maxima.shape[1]), np.float32) for _ in range(num_outputs)]
        if not num_rows:
            return given
        request = self._requests[sums]
        # Parts of one size: OpenVINO prepares a graph anew when its shapes change. The last part may begin early.
        size = -(-num_rows // -(-num_rows // self._most_rows))
        for begin in range(0, num_rows, size):
            rows = slice(min(begin, num_rows - size), min(begin + size, num_rows))
            request.set_input_tensor(0, _rows_of(logits, rows))
            request.set_input_tensor(1, _rows_of(maxima, rows))
            request.set_input_tensor(2, ov.Tensor(inverse_temperatures[rows, None, None], shared_memory=True))
            request.infer()
            for index, array in enumerate(given):
                array[rows] = request.get_output_tensor(index).data
        return given


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
        self._row_sums = row_sums
        self._wanted = Sums.NONE
        self._inverse_temperatures = _NO_TEMPERATURES
        self._sums: list[FloatArray] = []
        # To find a tensor by its name, OpenVINO looks at those of all inputs, the cache's too.
        names = [port.any_name for port in request.model_outputs]
        self._logits = names.index("logits")
        self._maxima = names.index("maxima") if row_sums is not None else -1

    def bind(
        self, rows: npt.NDArray[np.int64], inverse_temperatures: FloatArray, sums: Sums, *, least: int = 0
    ) -> None:
        """Let the next run give logits of `rows`, and where the model can, `sums` at `inverse_temperatures` `[rows]`.
        Without sums there may be fewer of these than rows. If any, `least` rows are computed."""
        self._wanted = sums
        self._num_rows = len(rows)
        self._inverse_temperatures = inverse_temperatures
        num_missing = max(0, least - len(rows)) if len(rows) else 0
        self._inputs.set("rows", _padded(rows, num_missing))

    def run(self) -> None:
        """Compute what was bound, here and in the rest of the model."""
        self._request.infer()
        self._sums = []
        if self._row_sums is not None and self._wanted is not Sums.NONE:
            logits, maxima = (self._request.get_output_tensor(output) for output in (self._logits, self._maxima))
            self._sums = self._row_sums.read(self._wanted, logits, maxima, self._inverse_temperatures)

    def logits(self) -> Logits:
        """What the last run gave: views that the next one overwrites."""
        values = self._read(self._logits).reshape(-1, self._vocab_size)
        if self._row_sums is None:
            return Logits(values)
        maxima = without_lowest(floats_of(self._read(self._maxima)))[..., 0]
        sums = self._sums[0] if self._sums else maxima[:, :0]
        return Logits(values, Reduction(maxima, sums), self._sums[1] if len(self._sums) > 1 else None)

    def _read(self, output: int) -> Any:
        return _numbers(self._request.get_output_tensor(output))[: self._num_rows]


def _numbers(tensor: ov.Tensor) -> Any:
    """A view of a tensor: float32, or the bits of bfloat16, for which numpy has no name."""
    values = tensor.data
    return values.view(np.uint16) if values.dtype == np.float16 else values


def _rows_of(tensor: ov.Tensor, rows: slice) -> ov.Tensor:
    """Some rows of a tensor, which owns their memory."""
    values = tensor.data[rows]
    return ov.Tensor(values, ov.Shape(values.shape), tensor.element_type)


def _sums_graph(vocab_size: int, element_type: ov.Type, sums: Sums) -> ov.Model:
    """`logits`, `maxima` and `inverse_temperatures` `[n, 1, 1]` -> `sums`, and of DRAWN_AND_MODEL `model_sums` too."""
    num_runs = vocab_size // run_length(vocab_size)
    logits = _parameter("logits", [-1, 1, vocab_size], element_type)
    maxima = _parameter("maxima", [-1, num_runs, 1], element_type)
    inverse_temperatures = _parameter("inverse_temperatures", [-1, 1, 1], np.float32)
    shape = opset13.constant(np.array([0, num_runs, run_length(vocab_size)]))
    in_runs = opset13.convert(opset13.reshape(logits, shape, special_zero=True), "f32").output(0)
    highest = opset13.convert(maxima, "f32").output(0)
    results = [_result("sums", sums_of(in_runs, highest, inverse_temperatures))]
    if sums is Sums.DRAWN_AND_MODEL:
        results.append(_result("model_sums", sums_of(in_runs, highest, None)))
    return ov.Model(results, [port.get_node() for port in (logits, maxima, inverse_temperatures)], "row_sums")


def _padded(values: npt.NDArray[_Number], num_missing: int) -> npt.NDArray[_Number]:
    return np.pad(values, (0, num_missing)) if num_missing else values


def _parameter(name: str, shape: list[int], dtype: Any) -> ov.Output:
    parameter = opset13.parameter(shape, dtype, name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter.output(0)


def _result(name: str, output: ov.Output) -> ov.Node:
    output.get_tensor().set_names({name})
    return opset13.result(output)
