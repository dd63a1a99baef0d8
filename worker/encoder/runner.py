"""Computes batches of texts with OpenVINO: several at the same time, each on its own cores.

With short texts, cores that share a batch spend most of their time waiting for each other. So each stream has one core
on small hosts, and four on large ones, where a text on one core would take long. There is one more batch than streams,
so that a stream can begin its next batch at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov

from headrace.common.model_files.networks import TEXT_NETWORK
from headrace.common.model_files.task import HIDDEN_OUTPUTS, SCORES_OUTPUT
from headrace.protos.inference_pb2 import TASK_RANK
from headrace.worker.config import ConfigurationError
from headrace.worker.encoder.files import EncoderFiles
from headrace.worker.encoder.pooling import Floats, activated, normalized, pooled
from headrace.worker.kv.fetch import nobody
from headrace.worker.model.paging import read_network, reason_of
from headrace.worker.request.request import Request

_KNOWN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_CORES_OF_A_STREAM = 4


def num_streams_for(threads: int) -> int:
    """Number of batches that are computed at the same time on some cores."""
    return min(threads, max(_CORES_OF_A_STREAM, threads // _CORES_OF_A_STREAM))


class EncoderRunner:
    """A compiled encoder. `dimensions` is the length of its vectors. When a batch ends, its place is put into `ended`,
    and `on_end` is called, from any thread."""

    def __init__(
        self,
        model_dir: Path,
        files: EncoderFiles,
        *,
        threads: int,
        execution_mode: str,
        on_end: Callable[[], None] = nobody,
    ) -> None:
        self.ended: deque[int] = deque()
        self._on_end = on_end
        self.num_streams = num_streams_for(threads)
        self.num_places = self.num_streams + 1
        self._files = files
        core = ov.Core()
        core.set_property("CPU", {"EXECUTION_MODE_HINT": execution_mode.upper()})
        model = read_encoder(core, model_dir, files)
        self._output, self.dimensions = _output_of(model, files)
        self._inputs = {_name_of(port): port.element_type.to_dtype() for port in model.inputs}
        properties = {
            "NUM_STREAMS": str(self.num_streams),
            "INFERENCE_NUM_THREADS": threads,
            "EXECUTION_MODE_HINT": execution_mode.upper(),
        }
        try:
            compiled = core.compile_model(model, "CPU", properties)
            self._requests = [compiled.create_infer_request() for _ in range(self.num_places)]
        except RuntimeError as error:
            raise ConfigurationError(f"OpenVINO cannot compile the model: {reason_of(error)}") from error
        self.precision = str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        self._lengths: list[npt.NDArray[np.intp]] = [np.zeros(0, np.intp)] * self.num_places
        for place, request in enumerate(self._requests):
            request.set_callback(self._note_end, place)

    def begin(self, place: int, batch: Sequence[Request]) -> None:
        """Begin a batch at a free place."""
        lengths = np.array([request.num_tokens for request in batch], np.intp)
        self._lengths[place] = lengths
        shape = len(batch), int(lengths.max())
        token_ids = np.full(shape, self._files.pad_token_id, self._inputs["input_ids"])
        for i, request in enumerate(batch):
            token_ids[i, : request.num_tokens] = np.frombuffer(request.token_ids, np.uint32)
        positions = np.arange(shape[1])
        inputs = {"input_ids": token_ids}
        if "attention_mask" in self._inputs:
            inputs["attention_mask"] = (positions < lengths[:, None]).astype(self._inputs["attention_mask"])
        if "position_ids" in self._inputs:
            inputs["position_ids"] = np.broadcast_to(positions, shape).astype(self._inputs["position_ids"])
        if "token_type_ids" in self._inputs:
            firsts = [request.num_first_text_tokens or request.num_tokens for request in batch]
            is_second = (positions >= np.array(firsts)[:, None]) & (positions < lengths[:, None])
            inputs["token_type_ids"] = is_second.astype(self._inputs["token_type_ids"])
        self._requests[place].start_async(inputs, share_inputs=False)

    def result(self, place: int) -> Floats:
        """The vectors `[n, dimensions]` of the batch that has ended at a place. Raises RuntimeError if the batch
        failed."""
        request, files = self._requests[place], self._files
        request.wait()
        output: Floats = request.get_output_tensor(self._output).data
        if files.task == TASK_RANK:
            return activated(np.array(output, np.float32), files.activation)
        vectors = pooled(output, self._lengths[place], files.pooling)
        return normalized(vectors) if files.normalizes else vectors

    def encode(self, batch: Sequence[Request]) -> Floats:
        """Compute one batch and wait for it. Returns its vectors `[n, dimensions]`. For the warm-up, when nothing else
        runs."""
        self.begin(0, batch)
        vectors = self.result(0)
        self.ended.clear()
        return vectors

    def _note_end(self, place: int) -> None:
        self.ended.append(place)
        self._on_end()


def read_encoder(core: ov.Core, model_dir: Path, files: EncoderFiles) -> ov.Model:
    """Read the network and check its inputs and outputs, without compiling it. Raises ConfigurationError if it cannot
    be served."""
    model = read_network(core, model_dir / TEXT_NETWORK)
    names = [_name_of(port) for port in model.inputs]
    unknown = [name for name in names if name not in _KNOWN_INPUTS]
    if unknown or "input_ids" not in names:
        raise ConfigurationError(
            f"the model in {model_dir} cannot be served: it takes {', '.join(names)}, and an encoder of texts takes "
            f"input_ids and of the others only {', '.join(_KNOWN_INPUTS[1:])}"
        )
    _output_of(model, files)
    return model


def _name_of(port: ov.Output) -> str:
    """The name of an input. OpenVINO's own converter also gives some inputs a number as a name."""
    known = port.get_names().intersection(_KNOWN_INPUTS)
    return known.pop() if known else str(port.any_name)


def _output_of(model: ov.Model, files: EncoderFiles) -> tuple[int, int]:
    """The index of the output with the result, and the length of its vectors. Raises ConfigurationError."""
    wanted = (SCORES_OUTPUT,) if files.task == TASK_RANK else HIDDEN_OUTPUTS
    for number, port in enumerate(model.outputs):
        if port.get_names().intersection(wanted):
            last = port.partial_shape[port.partial_shape.rank.get_length() - 1]
            if not last.is_static:
                raise ConfigurationError(f"the output {port.any_name} of the model has no fixed length of its vectors")
            length = int(last.get_length())
            if files.task == TASK_RANK and length != 1:
                raise ConfigurationError(f"the model sorts texts into {length} classes; a reranker gives one score")
            return number, length
    raise ConfigurationError(f"the model has no output {' or '.join(wanted)}")
