"""The end of a model's graph, made anew: logits of the sampled rows only, and what sampling reads of all of them.

                            | rows.none            -> MatMul -> logits, maxima of runs
    hidden states [T, .] -> | rows.drawn           -> MatMul -> logits, maxima, sums
                            | rows.drawn_and_model -> MatMul -> logits, maxima, sums, sums at temperature 1

In a step one of the three gets rows, the others none and cost nothing: a graph has no other way to leave out work. They
share the weights of the vocabulary. So a step pays for the exponentials that its requests need, and they are taken
while the threads are awake and the logits in the caches.

What is written to memory that is in no cache costs more than the arithmetic. So bfloat16 logits are given as such
(OpenVINO would widen all of them, for 2 % of a step), and rows are weighed in parts, whose float32 stays in the caches.

How runs are defined says `logits`; where a vocabulary has none, or where a model does more to its logits than one
product, there is one way, and nothing but logits behind it. docs/decisions/0024 has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.batch import Sums
from headrace.worker.logits import FloatArray, Logits, Reduction, float_of, run_length
from headrace.worker.vocabulary_reducer import runs_of, sums_of, without_lowest

# Logits of the rows that are weighed at a time, when a batch is full: 16 rows of 49k, 8 of 152k.
_FULL_BATCH, _PART = 64, 1 << 20
# By this name the CPU plugin knows nodes behind the last product that may still be bfloat16; others it makes float32,
# with a copy of all logits for each.
_STAYS_BFLOAT16 = "enforceBF16evenForGraphTail"
_NO_ROWS = np.zeros(0, np.int64)
_NO_TEMPERATURES = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Head:
    """Names of the inputs and outputs of one way to the logits. With sums, its rows are a multiple of `num_parts`."""

    sums: Sums
    num_parts: int = 1

    @property
    def rows(self) -> str:
        """Input: `i64[n]`, the rows of the step whose logits are wanted."""
        return f"rows.{self.sums.name.lower()}"

    @property
    def inverse_temperatures(self) -> str:
        """Input: `f32[n, 1, 1]`."""
        return f"inverse_temperatures.{self.sums.name.lower()}"

    def output(self, name: str) -> str:
        """One of logits, maxima, sums, model_sums."""
        return f"{name}.{self.sums.name.lower()}"


def replace_head(model: ov.Model, *, is_bfloat16: bool) -> list[Head]:
    """Give a model with PagedAttention its heads: one for each of `Sums`, or only that for none. `is_bfloat16` says in
    what the model computes."""
    result = model.get_results()[0]
    node = result.input_value(0).get_node()
    is_product = node.get_type_name() == "MatMul"
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    if not is_product or not run_length(_vocab_size_of(node)):
        head = Head(Sums.NONE)
        rows = _parameter(model, head.rows, [-1], np.int64)
        node.input(0).replace_source_output(_rows_of(node.input_value(0), rows))
        result.output(0).get_tensor().set_names({head.output("logits")})
        model.validate_nodes_and_infer_types()
        return [head]
    num_parts = 2 ** math.ceil(math.log2(max(1, _FULL_BATCH * _vocab_size_of(node) / _PART)))
    heads = [Head(sums, 1 if sums is Sums.NONE else num_parts) for sums in Sums]
    for head in heads:
        _add_head(model, head, node, is_bfloat16=is_bfloat16)
    model.remove_result(result)
    model.validate_nodes_and_infer_types()
    return heads


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
    """The heads of an inference request: `bind` rows before it runs, read `logits` afterwards."""

    def __init__(self, request: ov.InferRequest, heads: list[Head], vocab_size: int) -> None:
        self._request = request
        self._heads = {head.sums: head for head in heads}
        self._has_runs = len(heads) > 1
        self._vocab_size = vocab_size
        self._inputs = InputTensors(request)
        self._active = self._heads[Sums.NONE]
        self._num_rows = 0
        for head in heads:
            self._set_inputs(head, _NO_ROWS, _NO_TEMPERATURES)

    def bind(self, rows: npt.NDArray[np.int64], inverse_temperatures: FloatArray, sums: Sums) -> None:
        """Let the next run give logits of `rows`, and where the model can, `sums` at `inverse_temperatures` `[rows]`.
        Without sums there may be fewer of these than rows."""
        head = self._heads[sums if self._has_runs else Sums.NONE]
        if head is not self._active:
            self._set_inputs(self._active, _NO_ROWS, _NO_TEMPERATURES)
            self._active = head
        self._num_rows = len(rows)
        padding = (0, -len(rows) % head.num_parts)
        if padding[1]:
            rows, inverse_temperatures = np.pad(rows, padding), np.pad(inverse_temperatures, padding)
        self._set_inputs(head, rows, inverse_temperatures)

    def logits(self) -> Logits:
        """What the last run gave: views that the next one overwrites."""
        head = self._active
        values = self._read(head, "logits").reshape(-1, self._vocab_size)
        if not self._has_runs:
            return Logits(values)
        maxima = self._read(head, "maxima")
        maxima = without_lowest(float_of(maxima) if maxima.dtype == np.uint16 else maxima)[..., 0]
        if head.sums is Sums.NONE:
            return Logits(values, Reduction(maxima, maxima[:, :0]))
        reduction = Reduction(maxima, self._read(head, "sums"))
        return Logits(values, reduction, self._read(head, "model_sums") if head.sums is Sums.DRAWN_AND_MODEL else None)

    def _read(self, head: Head, name: str) -> Any:
        """float32, or the bits of bfloat16, for which numpy has no name."""
        values = self._request.get_tensor(head.output(name)).data[: self._num_rows]
        return values.view(np.uint16) if values.dtype == np.float16 else values

    def _set_inputs(self, head: Head, rows: npt.NDArray[np.int64], inverse_temperatures: FloatArray) -> None:
        self._inputs.set(head.rows, rows)
        if head.sums is not Sums.NONE:
            self._inputs.set(head.inverse_temperatures, inverse_temperatures[:, None, None])


def _add_head(model: ov.Model, head: Head, product: ov.Node, *, is_bfloat16: bool) -> None:
    rows = _parameter(model, head.rows, [-1], np.int64)
    attributes = product.get_attributes()
    hidden = _rows_of(product.input_value(0), rows)
    logits = opset13.matmul(hidden, product.input_value(1), attributes["transpose_a"], attributes["transpose_b"])
    if is_bfloat16:
        logits = opset13.convert(logits, "bf16")
        logits.rt_info[_STAYS_BFLOAT16] = "YES"
    in_runs, maxima = runs_of(logits.output(0), _vocab_size_of(product))
    outputs = {"logits": logits.output(0), "maxima": maxima}
    if head.sums is not Sums.NONE:
        inverse_temperatures = _parameter(model, head.inverse_temperatures, [-1, 1, 1], np.float32)
        in_parts = _Parts(in_runs, maxima, head.num_parts)
        outputs["sums"] = in_parts.sums(inverse_temperatures)
        if head.sums is Sums.DRAWN_AND_MODEL:
            outputs["model_sums"] = in_parts.sums(None)
    for name, output in outputs.items():
        output.get_tensor().set_names({head.output(name)})
        model.add_results([opset13.result(output)])


class _Parts:
    """Logits in runs and their maxima, divided by rows and in float32."""

    def __init__(self, in_runs: ov.Output, maxima: ov.Output, num_parts: int) -> None:
        self._num_parts = num_parts
        self._in_runs = [opset13.convert(part, "f32").output(0) for part in self._divided(in_runs)]
        self._maxima = self._divided(opset13.convert(maxima, "f32").output(0))

    def sums(self, inverse_temperatures: ov.Output | None) -> ov.Output:
        """Sums of all rows, see `sums_of`."""
        divided: Sequence[ov.Output | None] = [None] * self._num_parts
        if inverse_temperatures is not None:
            divided = self._divided(inverse_temperatures)
        sums = [sums_of(*of_part) for of_part in zip(self._in_runs, self._maxima, divided, strict=True)]
        return opset13.concat(sums, 0).output(0)

    def _divided(self, rows: ov.Output) -> list[ov.Output]:
        return list(opset13.split(rows, opset13.constant(np.int64(0)), self._num_parts).outputs())


def _parameter(model: ov.Model, name: str, shape: list[int], dtype: type) -> ov.Output:
    parameter = opset13.parameter(shape, dtype, name)
    parameter.output(0).get_tensor().set_names({name})
    model.add_parameters([parameter])
    return parameter.output(0)


def _rows_of(hidden: ov.Output, rows: ov.Output) -> ov.Output:
    return opset13.gather(hidden, rows, opset13.constant(np.int64(0))).output(0)


def _vocab_size_of(product: ov.Node) -> int:
    return int(product.output(0).get_partial_shape()[-1].get_length())
