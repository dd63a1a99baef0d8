"""Bodies of `infer` over HTTP: JSON, followed by the binary data of tensors that are not in the JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.gateway.checks import invalid, unsupported
from headrace.gateway.edge.wire import convert, decode_body, encode
from headrace.gateway.kserve.answers import KserveInferAnswer, KserveResult
from headrace.gateway.kserve.requests import (
    SAMPLING,
    Inference,
    inference_of,
    merged,
    parameters_of,
    values_of,
)
from headrace.gateway.kserve.tensors import Tensor, checked, decoded, encoded

LENGTH_HEADER = "inference-header-content-length"
MAX_NESTING = 8
_MOST_DIGITS = 18
_SIZE = "binary_data_size"
_BINARY = "binary_data"
_ALL_BINARY = "binary_data_output"


class KserveInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An input tensor. Its elements are in `data`, nested or flat, or in the binary data after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class KserveOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tensor that is requested."""

    name: str
    parameters: dict[str, Any] | None = None


class KserveInfer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v2/models/{name}/infer."""

    inputs: list[KserveInput]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[KserveOutput] | None = None


class KserveGenerate(msgspec.Struct, kw_only=True):
    """Body of POST /v2/models/{name}/generate and generate_stream. Parameters may also be at the top level."""

    text_input: str | list[str]
    id: str | None = None
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Infer:
    """A request of `infer`."""

    inference: Inference
    request_id: str | None
    binary: frozenset[str] | None
    """Outputs whose elements are to be bytes; None: all."""


def infer_of(body: bytes, header: str) -> Infer:
    """The request in a body; `header` is its `LENGTH_HEADER`. Raises `StatusError`."""
    size = len(body)
    if header:
        if not header.isdecimal() or len(header) > _MOST_DIGITS or int(header) > len(body):
            problem = f"{LENGTH_HEADER} must be the length of the JSON, at most that of the body"
            raise invalid(LENGTH_HEADER, problem)
        size = int(header)
    request = decode_body(body[:size], KserveInfer)
    parameters = dict(request.parameters or {})
    all_binary = _flag(f"parameters.{_ALL_BINARY}", parameters.pop(_ALL_BINARY, None))
    values = merged(values_of(_tensors(request.inputs, body[size:])), parameters_of(parameters))
    binary = set()
    for i, output in enumerate(request.outputs or ()):
        where = f"outputs[{i}].parameters"
        said = _only(where, output.parameters, _BINARY)
        if all_binary if said is None else _flag(f"{where}.{_BINARY}", said):
            binary.add(output.name)
    names = [output.name for output in request.outputs or ()]
    wanted = None if all_binary and not names else frozenset(binary)
    return Infer(inference_of(values, names), request.id, wanted)


def generate_of(body: bytes, streams: bool) -> tuple[Inference, str | None]:
    """The request of `generate` in a body, and its id. Raises `StatusError`."""
    beside = decode_body(body, dict[str, Any])
    request = convert(beside, KserveGenerate, strict=True)
    for name in ("id", "parameters"):
        beside.pop(name, None)
    values = merged(beside, parameters_of(request.parameters or {}))
    if isinstance(values.get(SAMPLING), str):
        text = Tensor(SAMPLING, "BYTES", (1,), [values.pop(SAMPLING)])
        values = merged(values, values_of([text]))
    return inference_of(values, streams=streams), request.id


def answer_of(model: str, infer: Infer, tensors: Sequence[Tensor]) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON if bytes follow."""
    described = []
    tail = []
    for tensor in tensors:
        value = KserveResult(tensor.name, tensor.datatype, tensor.shape)
        if infer.binary is None or tensor.name in infer.binary:
            tail.append(encoded(tensor))
            value.parameters = {_SIZE: len(tail[-1])}
        else:
            value.data = tensor.values
        described.append(value)
    request_id = msgspec.UNSET if infer.request_id is None else infer.request_id
    body = encode(KserveInferAnswer(model_name=model, outputs=described, id=request_id))
    return (body + b"".join(tail), len(body)) if tail else (body, None)


def _tensors(inputs: Sequence[KserveInput], tail: bytes) -> list[Tensor]:
    tensors = []
    pos = 0
    for i, one in enumerate(inputs):
        size = _only(f"inputs[{i}].parameters", one.parameters, _SIZE)
        if (size is None) == (one.data is None):
            raise invalid(f"inputs[{i}].data", f"inputs[{i}].data: give either data or parameters.{_SIZE}")
        if one.data is not None:
            values: Sequence[Any] = list(_flat(f"inputs[{i}].data", one.data, MAX_NESTING))
        else:
            if not isinstance(size, int) or isinstance(size, bool) or size < 0 or pos + size > len(tail):
                field = f"inputs[{i}].parameters.{_SIZE}"
                raise invalid(field, f"{field}: the body has fewer bytes than that")
            values = decoded(one.name, one.datatype, tail[pos : pos + size])
            pos += size
        tensors.append(checked(one.name, one.datatype, one.shape, values))
    if pos != len(tail):
        raise invalid("inputs", f"inputs: {len(tail) - pos} bytes behind the JSON belong to no input")
    return tensors


def _flat(where: str, data: Sequence[Any], depth: int) -> Iterator[Any]:
    if not depth:
        raise invalid(where, f"{where}: lists may be nested {MAX_NESTING} deep")
    for value in data:
        if isinstance(value, list):
            yield from _flat(where, value, depth - 1)
        else:
            yield value


def _only(where: str, parameters: Mapping[str, Any] | None, name: str) -> Any:
    """The one parameter that is known here."""
    for other in parameters or {}:
        if other != name:
            raise unsupported(f"{where}.{other[:64]}", f"{where}.{other[:64]} is not supported; leave it out")
    return (parameters or {}).get(name)


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"{name} must be true or false")
    return bool(value)
