"""Measures how fast this process multiplies. The layers of a pipeline are divided by these speeds."""

from __future__ import annotations

import time

import numpy as np
import openvino as ov
from openvino import opset13

# Of weights, in bytes: more than the caches of a few cores hold, as the weights of a model are.
_INPUTS, _OUTPUTS = 4096, 8192
_REPEATS = 30


def bytes_per_s(threads: int) -> float:
    """How many bytes of 8-bit weights a product of one row reads in a second with this many threads. Takes the best of
    several attempts, because other work during loading must not change the division of layers. Takes a few tenths of a
    second."""
    weights = np.full((_OUTPUTS, _INPUTS), 7, np.uint8)
    stored = opset13.convert(opset13.constant(weights), "f16")
    scales = opset13.constant(np.full((_OUTPUTS, 1), 0.01, np.float16))
    states = opset13.parameter([-1, _INPUTS], np.float32)
    decompressed = opset13.convert(opset13.multiply(stored, scales), "f32")
    model = ov.Model([opset13.result(opset13.matmul(states, decompressed, False, True))], [states], "speed")
    properties = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": "1", "PERFORMANCE_HINT": "LATENCY"}
    request = ov.Core().compile_model(model, "CPU", properties).create_infer_request()
    request.set_input_tensor(ov.Tensor(np.ones((1, _INPUTS), np.float32)))
    times = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        request.infer()
        times.append(time.perf_counter() - start_s)
    return weights.size / min(times)
