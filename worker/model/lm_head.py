"""Replaces the end of a model's graph: logits of the sampled rows only, and the summary that sampling reads.

    hidden states of rows -> MatMul -> logits, maxima of runs             in the model's own graph
                                      | if a step draws
                                      +-> sums                            in a second graph
                                      +-> sums at temperature 1           in the same, if needed

The sums are in a second graph, because a graph cannot skip work. It runs after the model's graph in steps that need
sums, and reads the logits where they were written.

Writing to memory outside the caches costs more than the arithmetic. So bfloat16 logits stay bfloat16 (converting all of
them would take 2 % of a step), and the sums are computed for a few rows at a time, whose float32 values stay in the
caches. The model's graph computes exactly the sampled rows.

`sampling.reduction` defines runs. If the vocabulary does not divide into runs, or if the model applies more than one
product to make its logits, there are only logits. docs/decisions/sampling.md#reading-logits has the measurements.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

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
from headrace.worker.sampling.row_sums import RowSums, maxima_of, without_lowest

# Up to this many logits, numpy is faster than starting a graph: 3 rows of 49k, 1 of 152k. It adds in another order.
_MOST_FOR_NUMPY = 160_000
# The CPU plugin keeps nodes with this attribute in bfloat16 after the last product. It converts others to float32, with
# a copy of all logits for each.
_STAYS_BFLOAT16 = "enforceBF16evenForGraphTail"
_Number = TypeVar("_Number", bound=np.generic)
_NO_TEMPERATURES = np.zeros(0, np.float32)


def replace_head(model: ov.Model, *, is_bfloat16: bool, run: int | None = None) -> bool:
    """Give a model with PagedAttention an input `rows` `i64[n]`, and the outputs `logits` of these rows and `maxima` of
    their runs.

    Returns False if there are only logits. `is_bfloat16`: the model computes in bfloat16. `run` is the length of runs,
    0 for none; by default it is that of the vocabulary. ConfigurationError if the end of the graph is not of a known
    form.
    """
    result = model.get_results()[0]
    node = result.input_value(0).get_node()
    is_product = node.get_type_name() == "MatMul"
    while node.get_type_name() != "MatMul":
        node = _computed_input(node).get_node()
    if is_constant(node.input_value(0)):
        raise _unknown_end(
            node, "multiplies the weights with the hidden states instead of the hidden states with the weights"
        )
    rows = _parameter("rows", [-1], np.int64)
    model.add_parameters([rows.get_node()])
    hidden = states_of_rows(node.input_value(0), rows, model)
    vocab_size = int(node.output(0).get_partial_shape()[-1].get_length())
    run = run_length(vocab_size) if run is None else run
    has_runs = is_product and run > 0
    if has_runs:
        attributes = node.get_attributes()
        logits = opset13.matmul(hidden, node.input_value(1), attributes["transpose_a"], attributes["transpose_b"])
        if is_bfloat16:
            logits = opset13.convert(logits, "bf16")
            logits.rt_info[_STAYS_BFLOAT16] = "YES"
        model.remove_result(result)
        outputs = {"logits": logits.output(0), "maxima": maxima_of(logits.output(0), vocab_size, run)}
        model.add_results([_result(name, output) for name, output in outputs.items()])
    else:
        node.input(0).replace_source_output(hidden)
        result.output(0).get_tensor().set_names({"logits"})
    model.validate_nodes_and_infer_types()
    return has_runs


def _computed_input(node: ov.Node) -> ov.Output:
    """The input of a node that is not constant, such as the one that a scale multiplies."""
    for value in node.input_values():
        if not is_constant(value):
            return value
    raise _unknown_end(node, "does not depend on a product with the vocabulary's weights")


def _unknown_end(node: ov.Node, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"the end of the model's graph, which computes logits, has an unknown form: {node.get_type_name()} "
        f"{node.get_friendly_name()!r} {problem}; export the model again, for instance with optimum-intel, or serve "
        "another model"
    )


class InputTensors:
    """The inputs of an inference request that change with each step. The arrays own the tensors' memory."""

    def __init__(self, request: ov.InferRequest) -> None:
        self._request = request
        self._arrays: dict[str, npt.NDArray[np.generic]] = {}

    def set(self, name: str, values: npt.NDArray[np.generic], kind: ov.Type | None = None) -> None:
        """Set an input. `kind` is the type of its numbers, which defaults to that of the array; the bits of bfloat16
        are uint16. If the shape is that of the previous step, as in successive decode steps, the tensor is reused. This
        takes a tenth of the time of binding a new one."""
        kept = self._arrays.get(name)
        if kept is not None and kept.shape == values.shape:
            kept[...] = values
            return
        kept = self._arrays[name] = values.copy()
        if kind is None:
            tensor = ov.Tensor(kept, shared_memory=True)
        else:
            tensor = ov.Tensor(kept, ov.Shape(kept.shape), kind)
        self._request.set_tensor(name, tensor)


class EndRequest(Protocol):
    """The end of a graph for one of its inference requests: `bind` rows, `run`, then read `logits`; see
    `HeadRequest`."""

    def bind(
        self, rows: npt.NDArray[np.int64], inverse_temperatures: FloatArray, sums: Sums, /, *, least: int = 0
    ) -> None:
        """Set the rows of the next run."""
        ...

    def run(self) -> None:
        """Run the graph."""
        ...

    def logits(self) -> Logits:
        """The results of the last run, as views that the next run overwrites."""
        ...


class GraphEnd(Protocol):
    """The end of a graph, such as the product that gives logits. Call `replace` before the graph is compiled, `prepare`
    afterwards, then `open` for each inference request."""

    vocab_size: int
    """The number of logits of a row, known once it is prepared; 0 if there are none."""

    def replace(self, model: ov.Model, *, is_bfloat16: bool) -> None:
        """Give the model this end. ConfigurationError if its own is not of a known form."""
        ...

    def prepare(self, compiled: ov.CompiledModel, /) -> None:
        """Read the properties of the compiled model."""
        ...

    def open(self, request: ov.InferRequest) -> EndRequest:
        """The end of a request of the compiled model."""
        ...


class VocabularyHead:
    """The usual end of a graph: logits of the sampled rows, and what `replace_head` adds. Sums are computed on
    `threads` threads. `run` is as for `replace_head`, `same_sums` as for `HeadRequest`."""

    def __init__(self, threads: int, *, run: int | None = None, same_sums: bool = False) -> None:
        self.vocab_size = 0
        self._threads, self._run, self._same_sums = threads, run, same_sums
        self._has_runs = False
        self._row_sums: RowSums | None = None

    def replace(self, model: ov.Model, *, is_bfloat16: bool) -> None:
        """See `replace_head`."""
        self._has_runs = replace_head(model, is_bfloat16=is_bfloat16, run=self._run)

    def prepare(self, compiled: ov.CompiledModel) -> None:
        """See `GraphEnd`."""
        logits = compiled.output("logits")
        self.vocab_size = int(logits.partial_shape[2].get_length())
        if self._has_runs:
            self._row_sums = RowSums(self.vocab_size, logits.element_type, self._threads, run=self._run)

    def open(self, request: ov.InferRequest) -> HeadRequest:
        """See `GraphEnd`."""
        return HeadRequest(request, self._row_sums, self.vocab_size, same_sums=self._same_sums)


class HeadRequest:
    """An inference request of a model with a replaced head: `bind` rows, `run`, then read `logits`. `row_sums` is None
    if the model has only logits. With `same_sums`, the sums of a row do not depend on the number of rows."""

    def __init__(
        self, request: ov.InferRequest, row_sums: RowSums | None, vocab_size: int, *, same_sums: bool = False
    ) -> None:
        self._most_for_numpy = 0 if same_sums else _MOST_FOR_NUMPY
        self._request = request
        self._inputs = InputTensors(request)
        self._vocab_size = vocab_size
        self._num_rows = 0
        self._row_sums = row_sums
        self._wanted = Sums.NONE
        self._inverse_temperatures = _NO_TEMPERATURES
        self._sums: list[FloatArray] = []
        # Outputs are found by index, because OpenVINO searches the names of all inputs, including the KV cache.
        names = [port.any_name for port in request.model_outputs]
        self._logits = names.index("logits")
        self._maxima = names.index("maxima") if row_sums is not None else -1

    def bind(
        self, rows: npt.NDArray[np.int64], inverse_temperatures: FloatArray, sums: Sums, *, least: int = 0
    ) -> None:
        """Set the `rows` of the next run, and the `sums` to compute at `inverse_temperatures` `[rows]`. Without sums,
        there may be fewer temperatures than rows. If there are rows, at least `least` are computed."""
        self._wanted = sums
        self._num_rows = len(rows)
        self._inverse_temperatures = inverse_temperatures
        num_missing = max(0, least - len(rows)) if len(rows) else 0
        self._inputs.set("rows", _padded(rows, num_missing))

    def run(self) -> None:
        """Run the model, and the graph of sums if needed."""
        self._request.infer()
        self._sums = []
        if self._row_sums is None or self._wanted is Sums.NONE:
            return
        logits, maxima = (self._request.get_output_tensor(output) for output in (self._logits, self._maxima))
        temperatures = self._inverse_temperatures
        num_outputs = 2 if self._wanted is Sums.DRAWN_AND_MODEL else 1
        if 0 < len(temperatures) * self._vocab_size <= self._most_for_numpy:
            values, highest = (floats_of(numbers_of(tensor)[: len(temperatures)]) for tensor in (logits, maxima))
            for each in (temperatures, np.ones_like(temperatures))[:num_outputs]:
                self._sums.append(weigh_runs(values[:, 0], highest[..., 0], each))
        else:
            self._sums = self._row_sums.read(logits, maxima, temperatures, num_outputs=num_outputs)

    def logits(self) -> Logits:
        """The results of the last run, as views that the next run overwrites."""
        values = self._read(self._logits).reshape(-1, self._vocab_size)
        if self._row_sums is None:
            return Logits(values)
        maxima = without_lowest(floats_of(self._read(self._maxima)))[..., 0]
        sums = self._sums[0] if self._sums else maxima[:, :0]
        return Logits(values, Reduction(maxima, sums), self._sums[1] if len(self._sums) > 1 else None)

    def _read(self, output: int) -> Any:
        return numbers_of(self._request.get_output_tensor(output))[: self._num_rows]


def numbers_of(tensor: ov.Tensor) -> Any:
    """A view of a tensor: float32, or the bits of bfloat16 as uint16, because numpy does not have it."""
    values = tensor.data
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
