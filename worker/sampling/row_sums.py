"""Sums of weights, computed by OpenVINO: a graph of a few nodes, with as many threads as the model has.

The end of the model's graph uses it for the rows of a step (worker/model/lm_head.py), and the sampler for all others,
such as those of prompts. benchmarks.engine.overhead measures the cost of sampling with it.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.sampling.reduction import FloatArray, Reducer, Reduction, run_length

# Logits that are summed at a time: 21 rows of 49k, 6 of 152k. Their float32 values stay in the caches.
_LOGITS_AT_ONCE = 1 << 20


class RowSums:
    """Computes sums of weights, a few rows at a time, for a vocabulary that divides into runs."""

    def __init__(
        self, vocab_size: int, element_type: ov.Type, threads: int, *, run: int | None = None, most_outputs: int = 2
    ) -> None:
        """`element_type` is that of the logits and maxima. Runs have the length `run`, by default that of this
        vocabulary. `read` can give up to `most_outputs` arrays."""
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        run = run or run_length(vocab_size)
        graphs = [_graph(vocab_size, element_type, run, 1 + number) for number in range(most_outputs)]
        self._requests = [ov.Core().compile_model(graph, "CPU", properties).create_infer_request() for graph in graphs]
        self._most_rows = max(1, _LOGITS_AT_ONCE // vocab_size)

    def read(
        self, logits: ov.Tensor, maxima: ov.Tensor, inverse_temperatures: FloatArray, *, num_outputs: int
    ) -> list[FloatArray]:
        """The sums `[n, runs]` of the first n rows at `inverse_temperatures` `[n]`; those at temperature 1 are a second
        output. `logits` are `[rows, 1, vocab]`, `maxima` `[rows, runs, 1]`."""
        num_rows = len(inverse_temperatures)
        given = [np.empty((num_rows, maxima.shape[1]), np.float32) for _ in range(num_outputs)]
        if not num_rows:
            return given
        request = self._requests[num_outputs - 1]
        # Parts have the same size, because OpenVINO prepares a graph again if shapes change. The last part may overlap.
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


def reducer_for(vocab_size: int, threads: int) -> Reducer | None:
    """A reducer that uses OpenVINO, or None if only numpy can do it: the vocabulary does not divide into runs."""
    if not run_length(vocab_size):
        return None
    row_sums = RowSums(vocab_size, ov.Type.f32, threads, most_outputs=1)

    def reduce(logits: FloatArray, inverse_temperatures: FloatArray) -> Reduction:
        maxima = logits.reshape(len(logits), -1, run_length(vocab_size)).max(axis=2)
        # A run without an allowed token has weights of 0, not of exp(-inf + inf).
        finite = np.maximum(maxima, np.finfo(np.float32).min)
        values, highest = (ov.Tensor(array, shared_memory=True) for array in (logits[:, None], finite[..., None]))
        (sums,) = row_sums.read(values, highest, inverse_temperatures, num_outputs=1)
        return Reduction(maxima, sums)

    return reduce


def maxima_of(logits: ov.Output, vocab_size: int, run: int) -> ov.Output:
    """The node with the maximum of each run of `run` tokens, `[n, runs, 1]`, of logits `[n, ..., vocab]`."""
    return opset13.reduce_max(_in_runs(logits, vocab_size, run), _within(), keep_dims=True).output(0)


def without_lowest(maxima: FloatArray) -> FloatArray:
    """Replace the lowest float, which is OpenVINO's maximum of only -inf, by -inf."""
    is_lowest = maxima == np.finfo(np.float32).min
    return np.where(is_lowest, -np.inf, maxima) if is_lowest.any() else maxima


def _graph(vocab_size: int, element_type: ov.Type, run: int, num_outputs: int) -> ov.Model:
    """logits `[n, 1, vocab]`, maxima `[n, runs, 1]`, inverse temperatures `[n, 1, 1]` -> sums `[n, runs]` at these
    temperatures, and at temperature 1."""
    logits = opset13.parameter([-1, 1, vocab_size], element_type, "logits")
    maxima = opset13.parameter([-1, vocab_size // run, 1], element_type, "maxima")
    inverse_temperatures = opset13.parameter([-1, 1, 1], np.float32, "inverse_temperatures")
    in_runs = opset13.convert(_in_runs(logits.output(0), vocab_size, run), "f32")
    exponents = opset13.subtract(in_runs, opset13.convert(maxima, "f32"))
    at_temperatures = (opset13.multiply(exponents, inverse_temperatures), exponents)
    sums = [opset13.reduce_sum(opset13.exp(each), _within(), keep_dims=False) for each in at_temperatures[:num_outputs]]
    return ov.Model([each.output(0) for each in sums], [logits, maxima, inverse_temperatures], "row_sums")


def _in_runs(logits: ov.Output, vocab_size: int, run: int) -> ov.Output:
    """Logits `[n, ..., vocab]` in runs, `[n, runs, run]`."""
    shape = opset13.constant(np.array([0, vocab_size // run, run]))
    return opset13.reshape(logits, shape, special_zero=True).output(0)


def _within() -> ov.Node:
    """The axis of the tokens in a run."""
    return opset13.constant(np.array([2]))


def _rows_of(tensor: ov.Tensor, rows: slice) -> ov.Tensor:
    """Some rows of a tensor, which owns their memory."""
    values = tensor.data[rows]
    return ov.Tensor(values, ov.Shape(values.shape), tensor.element_type)
