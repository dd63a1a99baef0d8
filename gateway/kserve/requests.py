"""Translates requests of KServe's protocol to completions, whatever the form of their values (pure).

Every name: docs/reference/http-api.md.

A value is a tensor by its own name, a parameter of the request, or in the JSON text of `sampling_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.chat.fields import NEUTRAL_FIELDS, REFUSED
from headrace.gateway.chat.request import COMPLETION_MAX_TOKENS, Chat, ChatMessage, Completion, SamplingFields
from headrace.gateway.checks import invalid, is_one_of, json_of, unsupported
from headrace.gateway.edge.wire import convert
from headrace.gateway.field_names import FieldNames
from headrace.gateway.hints import ignored
from headrace.gateway.images.given import GivenImage, image_of_base64, part_of
from headrace.gateway.kserve.tensors import Tensor
from headrace.protos.status import Reason, StatusError

VERSION = "1"
TEXT_INPUT = "text_input"
TEXT_OUTPUT = "text_output"
IMAGE_INPUT = "image"
SAMPLING = "sampling_parameters"
# Outputs besides the text, and the input that asks for each.
OPTIONAL_OUTPUTS = {
    "finish_reason": "return_finish_reason",
    "cumulative_logprob": "return_cumulative_logprob",
    "num_input_tokens": "return_num_input_tokens",
    "num_output_tokens": "return_num_output_tokens",
}
FLAGS = ("stream", "exclude_input_in_output", *OPTIONAL_OUTPUTS.values())
_LISTS = frozenset(
    {"stop", "stop_words", "bad_words", "stop_token_ids", "allowed_token_ids", "samplers", "dry_sequence_breakers"}
)
_OBJECTS = frozenset({"response_format", "structured_outputs", "logit_bias"})
_SCHEMAS = ("guided_json", "json_schema")
_ALIASES = {"stop_words": "stop", "random_seed": "seed"}
# Triton's parameters that have no meaning here, with their neutral values; other values are refused.
_OF_SCHEDULERS = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")

NAMES = FieldNames(
    [
        (r"messages\[0\]\.content(?=\[)", IMAGE_INPUT),
        (r"(?:prompt|messages)", TEXT_INPUT),
        (r"(?:top_)?logprobs", "return_cumulative_logprob"),
    ]
)
"""The names of a completion's fields here."""


class KserveParameters(SamplingFields, kw_only=True):
    """Sampling parameters, with the names of completions. Numbers may be texts."""

    max_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: dict[str, Any] | None = None


_KNOWN = frozenset({*KserveParameters.__struct_fields__, *FLAGS, *_ALIASES, TEXT_INPUT, IMAGE_INPUT, SAMPLING})


@dataclass(frozen=True, slots=True)
class Inference:
    """A request, checked."""

    texts: Sequence[str]
    streams: bool
    parameters: KserveParameters
    outputs: Sequence[str]
    """Names of the tensors of the answer."""
    prefixed: bool
    """Whether a text begins with its prompt."""
    images: Sequence[GivenImage] = ()
    """The images before the only text."""

    def chat(self, model: str) -> Chat:
        """A request with images as a chat with a model."""
        given = {name: getattr(self.parameters, name) for name in self.parameters.__struct_fields__}
        given["max_tokens"] = COMPLETION_MAX_TOKENS if given["max_tokens"] is None else given["max_tokens"]
        parts = [*map(part_of, self.images), {"type": "text", "text": self.texts[0]}]
        logprobs = "cumulative_logprob" in self.outputs
        message = ChatMessage(role="user", content=parts)
        return Chat(messages=[message], model=model, stream=self.streams, logprobs=logprobs, **given)

    def completion(self, model: str) -> Completion:
        """The request as a completion of a model."""
        given = {name: getattr(self.parameters, name) for name in self.parameters.__struct_fields__}
        logprobs = 0 if "cumulative_logprob" in self.outputs else None
        return Completion(prompt=list(self.texts), model=model, stream=self.streams, logprobs=logprobs, **given)


def values_of(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Values of the inputs by name; the text is a list. Raises `StatusError`."""
    values: dict[str, Any] = {}
    for tensor in tensors:
        if tensor.name == SAMPLING:
            for name, value in _json_object(tensor.name, _single(tensor)).items():
                _put(values, name, value)
        elif tensor.name == TEXT_INPUT:
            if tensor.datatype != "BYTES":
                raise invalid(TEXT_INPUT, f"{TEXT_INPUT} must have the datatype BYTES")
            _put(values, TEXT_INPUT, list(tensor.values))
        elif tensor.name == IMAGE_INPUT:
            if tensor.datatype != "BYTES":
                raise invalid(IMAGE_INPUT, f"{IMAGE_INPUT} must have the datatype BYTES: files as base64")
            _put(values, IMAGE_INPUT, list(tensor.values))
        elif tensor.name not in _KNOWN:
            raise invalid("inputs", f"inputs: the model has no input '{tensor.name[:64]}'")
        else:
            _put(values, tensor.name, list(tensor.values) if tensor.name in _LISTS else _single(tensor))
    return values


def merged(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all sources. Raises `StatusError` for a name that occurs twice."""
    values: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            _put(values, name, value)
    return values


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request, without those for Triton's scheduler. Raises `StatusError` if the latter are not
    0."""
    for name in _OF_SCHEDULERS:
        if parameters.get(name) is not None and not is_one_of(parameters[name], (0, False, "")):
            instead = "; use the deadline of the call, or x-request-timeout" if name == "timeout" else "; leave it out"
            raise unsupported(f"parameters.{name}", f"parameters.{name} is not supported{instead}")
    return {name: value for name, value in parameters.items() if name not in _OF_SCHEDULERS}


def inference_of(values: Mapping[str, Any], outputs: Sequence[str] = (), streams: bool | None = None) -> Inference:
    """Build an inference from values. `outputs` names the requested tensors; `streams` is the default of `stream`.
    Raises `StatusError`."""
    rest = dict(values)
    texts = _texts(rest.pop(TEXT_INPUT, None))
    images = _images(rest.pop(IMAGE_INPUT, None))
    if images and len(texts) != 1:
        raise unsupported(IMAGE_INPUT, f"{IMAGE_INPUT}: images go with one text, and here are {len(texts)}")
    flags = {name: _flag(name, rest.pop(name, None)) for name in FLAGS}
    said = flags["stream"]
    is_stream = bool(streams) if said is None else said
    if is_stream and len(texts) != 1:
        raise unsupported(TEXT_INPUT, f"{TEXT_INPUT}: a stream answers one text, and here are {len(texts)}")
    excludes = flags["exclude_input_in_output"]
    if is_stream and excludes is False:
        name = "exclude_input_in_output"
        raise unsupported(name, f"{name} must be true for a stream, which has no prompt in its parts")
    for name in [name for name in _ALIASES if name in rest]:
        _put(rest, _ALIASES[name], rest.pop(name))
    for name in ("stop", "bad_words"):
        rest[name] = _without_empty(rest.get(name))
    for name in _OBJECTS & rest.keys():
        if isinstance(rest[name], str):
            rest[name] = _json_object(name, rest[name])
    eviction = rest.get("cache_eviction")
    if isinstance(eviction, str) and eviction not in ("true", "false"):
        rest["cache_eviction"] = _json_object("cache_eviction", eviction)
    for name in _SCHEMAS:
        # A number would be converted to a boolean, which is a schema.
        if isinstance(rest.get(name), int) and not isinstance(rest[name], bool):
            raise invalid(name, f"{name} must be a JSON schema, an object or its text")
    for name in rest.keys() - set(KserveParameters.__struct_fields__):
        if name in NEUTRAL_FIELDS and not is_one_of(rest[name], (None, *NEUTRAL_FIELDS[name])):
            instead = REFUSED[name].instead if name in REFUSED else "use /v1/completions or /v1/chat/completions"
            raise unsupported(name, f"{name} is not supported; {instead}")
        ignored(name, "there is no such parameter", is_known=False)
    parameters = convert({name: value for name, value in rest.items() if value is not None}, KserveParameters)
    asked = [name for name, flag in OPTIONAL_OUTPUTS.items() if flags[flag]]
    for name in outputs:
        if name != TEXT_OUTPUT and name not in OPTIONAL_OUTPUTS:
            known = ", ".join((TEXT_OUTPUT, *OPTIONAL_OUTPUTS))
            raise invalid("outputs", f"outputs: there is no output '{name[:64]}'; there are {known}")
    shown = tuple(dict.fromkeys(outputs)) or (TEXT_OUTPUT, *asked)
    return Inference(texts, is_stream, parameters, shown, not is_stream and not excludes, images)


def check_version(model: str, version: str) -> None:
    """Raise `StatusError` unless this is the version that all models have."""
    if version not in ("", VERSION):
        problem = f"the model '{model[:100]}' has the version {VERSION} only"
        raise StatusError(Reason.NOT_FOUND, problem, field="model_version")


def _flag(name: str, value: Any) -> bool | None:
    return None if value is None else convert(value, bool, name)


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        raise invalid(TEXT_INPUT, f"{TEXT_INPUT} is required")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise invalid(TEXT_INPUT, f"{TEXT_INPUT} must be one or more texts")
    return texts


def _images(value: Any) -> list[GivenImage]:
    given = value if isinstance(value, list) else [] if value is None else [value]
    return [image_of_base64(f"{IMAGE_INPUT}[{i}]", one) for i, one in enumerate(given)]


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    if name in values:
        raise invalid(name, f"{name} is given twice")
    values[name] = value


def _single(tensor: Tensor) -> Any:
    if len(tensor.values) != 1:
        raise invalid(tensor.name, f"{tensor.name} must have one element, and has {len(tensor.values)}")
    return tensor.values[0]


def _json_object(name: str, text: Any) -> dict[str, Any]:
    value = json_of(name, text) if isinstance(text, str) else None
    if not isinstance(value, dict):
        raise invalid(name, f"{name} must be the text of a JSON object")
    return value


def _without_empty(value: Any) -> Any:
    """Remove the empty text, which Triton's clients send for no text."""
    if value == "":
        return None
    return [value] if isinstance(value, str) else None if value == [""] else value
