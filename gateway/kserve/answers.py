"""Answers of KServe's protocol as tensors, whole and in parts (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from headrace.gateway.chat.choice import Ending, Piece, TokenLogprob, WholeChoice
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import LEAST_LOGPROB
from headrace.gateway.edge.failures import ErrorShape, Failure
from headrace.gateway.edge.wire import Shape, encode
from headrace.gateway.kserve.requests import OPTIONAL_OUTPUTS, SAMPLING, TEXT_INPUT, TEXT_OUTPUT, VERSION, Inference
from headrace.gateway.kserve.tensors import Tensor

PLATFORM = "headrace_openvino"
EXTENSIONS = ("binary_tensor_data", "generate")
_TYPES = {
    TEXT_OUTPUT: "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}


class KserveError(Shape):
    """The shape of failures in KServe's protocol."""

    error: str


class KserveServer(Shape, kw_only=True):
    """Metadata of the server."""

    name: Literal["headrace"] = "headrace"
    version: str
    extensions: Sequence[str] = EXTENSIONS


class KserveTensor(Shape):
    """A tensor that a model takes or gives."""

    name: str
    datatype: str
    shape: Sequence[int]


class KserveModel(Shape, kw_only=True):
    """A model and its tensors."""

    name: str
    versions: Sequence[str] = (VERSION,)
    platform: str = PLATFORM
    inputs: list[KserveTensor]
    outputs: list[KserveTensor]


class KserveReady(Shape):
    """The response for a model that is ready."""

    name: str
    ready: bool


class KserveResult(Shape):
    """An output tensor. Its elements are in `data`, or in the binary data after the JSON."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Sequence[Any] | UnsetType = UNSET
    parameters: dict[str, int] | UnsetType = UNSET


class KserveInferAnswer(Shape, kw_only=True):
    """The tensors of an answer."""

    model_name: str
    model_version: str = VERSION
    outputs: list[KserveResult]
    id: str | UnsetType = UNSET


class KserveGenerateAnswer(Shape, kw_only=True):
    """An answer of `generate`; of several texts, each member is a list."""

    model_name: str
    model_version: str = VERSION
    id: str | UnsetType = UNSET
    text_output: str | list[str]
    finish_reason: str | list[str] | UnsetType = UNSET
    cumulative_logprob: float | list[float] | UnsetType = UNSET
    num_input_tokens: int | list[int] | UnsetType = UNSET
    num_output_tokens: int | list[int] | UnsetType = UNSET


class _KserveErrors(ErrorShape):
    """The format of all errors of this protocol over HTTP."""

    kind = KserveError

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        return encode(KserveError(failure.message))


KSERVE_ERRORS = _KserveErrors()


def model_metadata(name: str) -> KserveModel:
    """The input and output tensors of a model. Only the text input is required."""
    flags = ("stream", "exclude_input_in_output", *OPTIONAL_OUTPUTS.values())
    inputs = [
        KserveTensor(TEXT_INPUT, "BYTES", (-1,)),
        KserveTensor(SAMPLING, "BYTES", (1,)),
        *(KserveTensor(flag, "BOOL", (1,)) for flag in flags),
    ]
    outputs = [KserveTensor(name, datatype, (-1,)) for name, datatype in _TYPES.items()]
    return KserveModel(name=name, inputs=inputs, outputs=outputs)


def whole(inference: Inference, choices: Sequence[WholeChoice], num_prompt_tokens: Sequence[int]) -> list[Tensor]:
    """The tensors of a whole answer, with an element for each text. Raises `StatusError` if one of them failed."""
    rows = []
    for text, choice, num_tokens in zip(inference.texts, choices, num_prompt_tokens, strict=True):
        ending = choice.ending
        assert ending is not None
        if ending.error is not None:
            raise ending.error
        prefix = text if inference.prefixed else ""
        rows.append(_row(prefix + choice.text, ending, _sum(choice.logprobs), num_tokens, ending.num_generated_tokens))
    return _tensors(inference, rows)


class Parts:
    """Makes the parts of a streamed answer."""

    def __init__(self, inference: Inference, num_prompt_tokens: int) -> None:
        self._inference = inference
        self._num_prompt_tokens = num_prompt_tokens
        self._logprob = 0.0
        self._num_tokens = 0

    def push(self, piece: Piece) -> list[Tensor]:
        """The tensors of a piece; empty if it has nothing to show. Token counts are for the piece, the log-probability
        for the answer so far."""
        self._logprob += _sum(piece.logprobs)
        self._num_tokens += piece.num_tokens
        if not piece.text and piece.ending is None:
            return []
        row = _row(piece.text, piece.ending, self._logprob, self._num_prompt_tokens, self._num_tokens)
        self._num_tokens = 0
        return _tensors(self._inference, [row])


def _row(
    text: str, ending: Ending | None, logprob: float, num_input_tokens: int, num_output_tokens: int
) -> Mapping[str, Any]:
    return {
        TEXT_OUTPUT: text,
        "finish_reason": "" if ending is None else ending.reason,
        "cumulative_logprob": logprob,
        "num_input_tokens": num_input_tokens,
        "num_output_tokens": num_output_tokens,
    }


def _tensors(inference: Inference, rows: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [Tensor(name, _TYPES[name], (len(rows),), [row[name] for row in rows]) for name in inference.outputs]


def _sum(logprobs: Sequence[TokenLogprob]) -> float:
    return sum(max(one.logprob, LEAST_LOGPROB) for one in logprobs)


def generated(model: str, request_id: str | None, tensors: Sequence[Tensor]) -> KserveGenerateAnswer:
    """Tensors in the format of `generate`: a tensor with one element becomes that element."""
    values: dict[str, Any] = {one.name: one.values[0] if len(one.values) == 1 else list(one.values) for one in tensors}
    return KserveGenerateAnswer(model_name=model, id=UNSET if request_id is None else request_id, **values)


class GenerateStream:
    """Events of a stream of `generate_stream`."""

    def __init__(self, model: str, request_id: str | None, parts: Parts) -> None:
        self._model = model
        self._request_id = request_id
        self._parts = parts

    def piece(self, index: int, piece: Piece) -> bytes:
        """The event of a piece; none if it shows nothing."""
        tensors = self._parts.push(piece)
        if not tensors:
            return b""
        return b"data: " + encode(generated(self._model, self._request_id, tensors)) + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        """Write nothing: the last piece was the last event."""
        return b""
