"""Requests of Text Generation Inference, and their translation to completions. Pure.

`fields` says what happens to every field.

https://huggingface.github.io/text-generation-inference
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.gateway.chat.request import Completion
from headrace.gateway.checks import invalid, unsupported
from headrace.gateway.field_names import FieldNames

DEFAULT_NEW_TOKENS = 100


class TgiGrammar(msgspec.Struct, kw_only=True):
    """A constraint on the answer: a JSON schema or a regular expression."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]


class TgiParameters(msgspec.Struct, kw_only=True):
    """Sampling parameters, and options for the answer."""

    adapter_id: str | None = None
    best_of: int | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: float | None = None
    grammar: TgiGrammar | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_n_tokens: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    typical_p: float | None = None


class TgiRequest(msgspec.Struct, kw_only=True):
    """Body of POST /generate, /generate_stream and /. `model` is needed where several models are served."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None
    model: str | None = None


_SAME = (
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "best_of",
)
NAMES = FieldNames(
    [
        *((name, f"parameters.{name}") for name in _SAME),
        ("prompt_logprobs", "parameters.decoder_input_details"),
        ("prompt", "inputs"),
        ("logprobs", "parameters.top_n_tokens"),
        ("max_tokens", "parameters.max_new_tokens"),
        ("truncate_prompt_tokens", "parameters.truncate"),
        ("guided_json", "parameters.grammar"),
        ("guided_regex", "parameters.grammar"),
    ]
)
"""The names of a completion's fields here."""


def completion_of(request: TgiRequest, streams: bool) -> Completion:
    """Translate a request to a completion. Raises `StatusError` for unsupported values."""
    parameters = request.parameters or TgiParameters()
    samples = _samples(parameters)
    _check_details(parameters, streams)
    if (parameters.best_of or 1) > 1 and not samples:
        raise invalid("best_of", "best_of over 1 needs do_sample to be true: greedy answers are all the same")
    if parameters.adapter_id and request.model:
        raise invalid("parameters.adapter_id", "parameters.adapter_id and model exclude each other; give one of them")
    shows_tokens = streams or parameters.details
    max_new_tokens = parameters.max_new_tokens
    return Completion(
        prompt=request.inputs,
        model=parameters.adapter_id or request.model,
        stream=streams,
        # For omitted parameters, the model's own defaults do not apply, because TGI has none.
        temperature=(1.0 if parameters.temperature is None else parameters.temperature) if samples else 0.0,
        top_k=parameters.top_k or 0,
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        min_p=0.0,
        typical_p=1.0 if parameters.typical_p is None else parameters.typical_p,
        repetition_penalty=1.0 if parameters.repetition_penalty is None else parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        presence_penalty=0.0,
        seed=parameters.seed,
        max_tokens=DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        stop=parameters.stop,
        include_stop_str_in_output=True,
        best_of=parameters.best_of,
        truncate_prompt_tokens=_truncate(parameters.truncate),
        logprobs=(parameters.top_n_tokens or 0) if shows_tokens else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        **_grammar_fields(parameters.grammar),
    )


def samples(request: TgiRequest) -> bool:
    """Whether the tokens of the answer are drawn, with a seed."""
    return _samples(request.parameters or TgiParameters())


def _samples(parameters: TgiParameters) -> bool:
    """Whether to sample. A parameter that shapes the distribution turns sampling on, as `do_sample` does."""
    shaped = parameters.temperature not in (None, 1.0) or parameters.top_p not in (None, 1.0)
    shaped = shaped or parameters.typical_p not in (None, 1.0)
    return bool(parameters.do_sample or shaped or parameters.top_k)


def _check_details(parameters: TgiParameters, streams: bool) -> None:
    for name in ("decoder_input_details", "top_n_tokens"):
        if getattr(parameters, name) and not parameters.details and not (streams and name == "top_n_tokens"):
            raise invalid(f"parameters.{name}", f"parameters.{name} needs details to be true")
    if parameters.decoder_input_details and streams:
        name = "parameters.decoder_input_details"
        raise unsupported(name, f"{name} cannot be streamed; use /generate")


def _truncate(num_tokens: int | None) -> int | None:
    if num_tokens is not None and num_tokens < 1:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1")
    return num_tokens


def _grammar_fields(grammar: TgiGrammar | None) -> dict[str, Any]:
    if grammar is None:
        return {}
    field = "parameters.grammar.value"
    if grammar.type == "regex":
        if not isinstance(grammar.value, str):
            raise invalid(field, f"{field} must be a text: a regular expression")
        return {"guided_regex": grammar.value}
    if grammar.type == "json":
        return {"guided_json": grammar.value}
    if not isinstance(grammar.value, dict) or "schema" not in grammar.value:
        raise invalid(field, f"{field} must be an object with a schema")
    return {"guided_json": grammar.value["schema"]}
