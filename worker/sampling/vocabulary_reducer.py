"""A `Reducer` that uses OpenVINO: a graph of a few nodes, computed by all of the worker's threads.

benchmarks.overhead measures what sampling costs with it.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.sampling.reduction import FloatArray, Reducer, Reduction, run_length

# Rows at a time: few enough that intermediate results stay in the caches, and enough to spread the cost of a call.
_CHUNK = 16


class OpenVINOReducer:
    """A reducer for a vocabulary that divides into runs; see `run_length`."""

    def __init__(self, vocab_size: int, threads: int) -> None:
        self._length = run_length(vocab_size)
        self._infer = compile_beside(_graph(vocab_size), threads).create_infer_request()

    def reduce(self, logits: FloatArray, inverse_temperatures: FloatArray) -> Reduction:
        """See `Reducer.reduce`."""
        num_rows = len(logits)
        maxima = np.empty((num_rows, logits.shape[1] // self._length), np.float32)
        sums = np.empty_like(maxima)
        for first in range(0, num_rows, _CHUNK):
            rows = slice(first, min(first + _CHUNK, num_rows))
            self._infer.set_input_tensor(0, ov.Tensor(logits[rows], shared_memory=True))
            self._infer.set_input_tensor(1, ov.Tensor(inverse_temperatures[rows, None, None], shared_memory=True))
            self._infer.infer()
            maxima[rows] = self._infer.get_output_tensor(0).data
            sums[rows] = self._infer.get_output_tensor(1).data
        return Reduction(without_lowest(maxima), sums)


def reducer_for(vocab_size: int, threads: int) -> Reducer | None:
    """A reducer for the vocabulary, or None if only numpy can do it."""
    return OpenVINOReducer(vocab_size, threads) if run_length(vocab_size) else None


def compile_beside(graph: ov.Model, threads: int) -> ov.CompiledModel:
    """Compile a small graph that computes in float32, with as many threads as the model."""
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": "1",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    return ov.Core().compile_model(graph, "CPU", properties)


def without_lowest(maxima: FloatArray) -> FloatArray:
    """Replace the lowest float, which is OpenVINO's maximum of only -inf, by -inf."""
    is_lowest = maxima == np.finfo(np.float32).min
    return np.where(is_lowest, -np.inf, maxima) if is_lowest.any() else maxima


def runs_of(logits: ov.Output, vocab_size: int) -> tuple[ov.Output, ov.Output]:
    """From logits `[n, ..., vocab]`: the logits in runs, `[n, runs, length]`, and the maximum of each run,
    `[n, runs, 1]`."""
    length = run_length(vocab_size)
    shape = opset13.constant(np.array([0, vocab_size // length, length]))
    in_runs = opset13.reshape(logits, shape, special_zero=True)
    return in_runs.output(0), opset13.reduce_max(in_runs, _within(), keep_dims=True).output(0)


def sums_of(in_runs: ov.Output, maxima: ov.Output, inverse_temperatures: ov.Output | None) -> ov.Output:
    """The node with the sums `[n, runs]` of a `Reduction`, at temperature 1 or at inverse temperatures `[n, 1, 1]`."""
    exponents = opset13.subtract(in_runs, maxima)
    if inverse_temperatures is not None:
        exponents = opset13.multiply(exponents, inverse_temperatures)
    return opset13.reduce_sum(opset13.exp(exponents), _within(), keep_dims=False).output(0)


def _within() -> ov.Node:
    """The axis of the tokens in a run."""
    return opset13.constant(np.array([2]))


def _graph(vocab_size: int) -> ov.Model:
    """logits `[n, vocab]`, inverse temperatures `[n, 1, 1]` -> maxima `[n, runs]`, sums `[n, runs]`."""
    logits = opset13.parameter([-1, vocab_size], np.float32, "logits")
    inverse_temperatures = opset13.parameter([-1, 1, 1], np.float32, "inverse_temperatures")
    in_runs, maxima = runs_of(logits, vocab_size)
    outputs = [opset13.squeeze(maxima, _within()).output(0), sums_of(in_runs, maxima, inverse_temperatures)]
    return ov.Model(outputs, [logits, inverse_temperatures], "vocabulary_reducer")
