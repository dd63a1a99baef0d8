"""Messages of KServe's protocol over gRPC: requests to inferences, tensors to responses (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.gateway.checks import invalid, unsupported
from headrace.gateway.kserve.requests import VERSION, Inference, inference_of, merged, parameters_of, values_of
from headrace.gateway.kserve.tensors import Tensor, check_type, checked, decoded, encoded, text_of
from headrace.protos.kserve_pb2 import InferParameter, ModelInferRequest, ModelInferResponse

FINAL_ASKED = "triton_enable_empty_final_response"
FINAL = "triton_final_response"
# Datatype -> the list of `InferTensorContents` that has its elements.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def inference_of_message(request: ModelInferRequest) -> Inference:
    """Translate a message to an inference. Raises `StatusError`."""
    parameters = _values(request.parameters)
    parameters.pop(FINAL_ASKED, None)
    for tensor, of_tensor in (*((i.name, i.parameters) for i in request.inputs), *_of_outputs(request)):
        for name in of_tensor:
            raise unsupported(f"{tensor}.parameters", f"{tensor}: the parameter {name[:64]} is not supported")
    values = merged(values_of(_tensors(request)), parameters_of(parameters))
    return inference_of(values, [output.name for output in request.outputs])


def _of_outputs(request: ModelInferRequest) -> Iterable[tuple[str, Mapping[str, InferParameter]]]:
    return ((output.name, output.parameters) for output in request.outputs)


def wants_final(request: ModelInferRequest) -> bool:
    """Whether a stream shall have an empty last response."""
    return bool(_values(request.parameters).get(FINAL_ASKED))


def response_of(
    model: str, request_id: str, tensors: Sequence[Tensor], final: bool | None = None
) -> ModelInferResponse:
    """The response with these tensors. It includes `final` unless that is None."""
    response = ModelInferResponse(model_name=model, model_version=VERSION, id=request_id)
    if final is not None:
        response.parameters[FINAL].bool_param = final
    for tensor in tensors:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(encoded(tensor))
    return response


def _tensors(request: ModelInferRequest) -> list[Tensor]:
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        problem = f"raw_input_contents has {len(raws)} entries for {len(request.inputs)} inputs"
        raise invalid("raw_input_contents", problem)
    tensors = []
    for i, one in enumerate(request.inputs):
        check_type(one.name, one.datatype)
        values: Sequence[Any]
        if raws:
            values = decoded(one.name, one.datatype, raws[i])
        else:
            values = list(getattr(one.contents, _CONTENTS[one.datatype]))
            if one.datatype == "BYTES":
                values = [text_of(one.name, raw) for raw in values]
        tensors.append(checked(one.name, one.datatype, list(one.shape), values))
    return tensors


def _values(parameters: Mapping[str, InferParameter]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            found[name] = getattr(parameter, kind)
    return found
