"""Computes heads in the format of Medusa with OpenVINO.

    last hidden state --> states + silu(product), for each layer --> logits of the token h + 1 places after the next

Each head has its own graph, so a short draft does not compute the later heads. Weights are 8-bit integers, as in
`eagle_graph`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.common.model_files.safetensors import floats
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads.eagle_graph import product
from headrace.worker.draft_heads.hidden_states import check_width, width_of
from headrace.worker.draft_heads.medusa_files import MedusaFiles, MedusaHead, read_medusa
from headrace.worker.model.batch import Batch
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.request.request import Request, TokenPath, row_after
from headrace.worker.sampling.logits import Logits

FloatArray = npt.NDArray[np.float32]
_OUTPUT = "last_states"


class MedusaHeads(NamedTuple):
    """Heads as read from their files, and the reader that adds hidden states to the outputs of the target's graph."""

    files: MedusaFiles
    reader: LastStates

    @classmethod
    def read(cls, path: Path) -> MedusaHeads:
        """Read the heads in a directory. ConfigurationError."""
        files = read_medusa(path)
        return cls(files, LastStates(files))

    def compile(self, target_dir: Path, threads: int, target: OpenVINOModelRunner) -> MedusaRunner:
        """Compile them for a model. ConfigurationError if they do not fit it."""
        vocab_size, block_size = target.vocab_size, target.block_size
        return MedusaRunner(self.files, self.reader, threads=threads, vocab_size=vocab_size, block_size=block_size)


class _Rows(NamedTuple):
    """The last hidden states `[rows, size]` of a request's rows: at position `first`, and after each token of the
    proposed `paths`."""

    first: int
    states: FloatArray
    paths: Sequence[TokenPath]

    def after(self, token_ids: Sequence[int]) -> FloatArray | None:
        """The state after these tokens, which follow `first`; None if the step did not compute it."""
        row = row_after(self.paths, token_ids)
        return None if row is None else np.asarray(self.states[row])


class LastStates:
    """Adds the last hidden states of sampled rows to the outputs of the target's graph, and keeps those of each
    request. See `headrace.worker.model.runner.StateReader`."""

    computes_all_states = False

    def __init__(self, files: MedusaFiles) -> None:
        self._files = files
        self._rows: WeakKeyDictionary[Request, _Rows] = WeakKeyDictionary()

    def prepare(self, model: ov.Model) -> None:
        """Does nothing: only the states of sampled rows are read."""

    def add_outputs(self, model: ov.Model) -> None:
        """Add an output with the input of the product that gives logits. ConfigurationError if the heads do not fit."""
        logits = next(result for result in model.get_results() if "logits" in result.output(0).get_names())
        node = logits.input_value(0).get_node()
        while node.get_type_name() != "MatMul":
            node = node.input_value(0).get_node()
        states = node.input_value(0)
        size = width_of(states)
        check_width(self._files.path, self._files.size, size)
        flat = opset13.reshape(states, opset13.constant(np.array([-1, size])), False)
        flat.output(0).get_tensor().set_names({_OUTPUT})
        model.add_results([opset13.result(flat)])

    def read(self, batch: Batch, request: ov.InferRequest) -> None:
        """Keep the states of the step that was just computed."""
        found = request.get_tensor(_OUTPUT).data
        rows: dict[Request, list[int]] = {}
        for row, sampled in enumerate((*batch.sampled, *batch.later)):
            rows.setdefault(sampled, []).append(row)
        for sampled, of_request in rows.items():
            self._rows[sampled] = _Rows(sampled.num_tokens - 1, found[of_request], sampled.paths)

    def of(self, request: Request) -> FloatArray | None:
        """The last hidden state `[size]` before the request's latest token; None if it is not known."""
        rows = self._rows.get(request)
        if rows is None or request.num_tokens < rows.first + 2:
            return None
        return rows.after(request.token_ids[rows.first + 1 : request.num_tokens - 1])


class MedusaRunner:
    """Compiled Medusa heads. They keep nothing of tokens, so blocks have no part for them."""

    block_bytes = 0

    def __init__(
        self, files: MedusaFiles, states: LastStates, *, threads: int, vocab_size: int, block_size: int
    ) -> None:
        """Compile `files` for a model with this many tokens and blocks. ConfigurationError if they do not fit it."""
        if files.vocab_size != vocab_size:
            raise ConfigurationError(
                f"the heads in {files.path} are for a vocabulary of {files.vocab_size} tokens, and this model has "
                f"{vocab_size}; name heads that were trained for this model"
            )
        core = ov.Core()
        properties = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": threads}
        self._requests = [
            core.compile_model(build_head(head), "CPU", properties).create_infer_request() for head in files.heads
        ]
        self.states = states
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.num_heads = len(files.heads)
        self.size = files.size
        self.infer_s = 0.0

    def allocate(self, num_blocks: int, *, huge_pages: bool = True) -> None:
        """Does nothing: they have no part in blocks."""

    def compute(self, head: int, states: FloatArray) -> Logits:
        """Logits `[rows, vocab_size]` of a head after these last hidden states `[rows, size]`."""
        start_s = time.perf_counter()
        found = self._requests[head].infer({0: states})[0]
        self.infer_s = time.perf_counter() - start_s
        return Logits(found)


def build_head(head: MedusaHead) -> ov.Model:
    """The graph of a head: states f32 [rows, size] to logits f32 [rows, vocabulary]."""
    states = opset13.parameter([-1, head.logits.shape[1]], np.float32, "states")
    found: ov.Output = states.output(0)
    for matrix, bias in head.layers:
        inner = product(found, matrix)
        if bias is not None:
            inner = opset13.add(inner, opset13.constant(floats(bias).reshape(1, -1))).output(0)
        found = opset13.add(found, opset13.swish(inner)).output(0)
    return ov.Model([opset13.result(product(found, head.logits))], [states], "medusa")
