"""Translates requests of Ollama's API to chats and completions. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from headrace.gateway.chat.conversation import can_switch_reasoning
from headrace.gateway.chat.request import Chat, ChatMessage, Completion
from headrace.gateway.checks import invalid, unsupported
from headrace.gateway.field_names import FieldNames
from headrace.gateway.hints import ignored
from headrace.gateway.images.given import image_of_base64, part_of
from headrace.gateway.ollama.types import (
    Duration,
    Format,
    OllamaChat,
    OllamaGenerate,
    OllamaMessage,
    OllamaOptions,
    Think,
)
from headrace.gateway.text.chat_template import ChatTemplate

_DURATION = re.compile(r"[+-]?(0|((\d++\.?\d*+|\.\d++)(ns|us|µs|μs|ms|s|m|h))+)")
_PART_OF_DURATION = re.compile(r"([\d.]+)([^\d.]+)")
_SECONDS_IN = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_REPEAT_LAST_N = 64  # Ollama's default
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
# Options that a chat has under the same name.
_SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)
_OPTIONS = [
    *((name, f"options.{name}") for name in (*_SAME, "seed", "stop")),
    ("max_tokens", "options.num_predict"),
    ("repetition_penalty", "options.repeat_penalty"),
    (r"response_format(?:\.\w+)*", "format"),
    ("reasoning_effort", "think"),
    (r"(messages\[\d+\])\.reasoning_content", r"\1.thinking"),
    (r"(messages\[\d+\])\.content(?=\[)", r"\1.images"),
    (r"messages\.content\.image_url", "messages.images"),
]
CHAT_NAMES = FieldNames(_OPTIONS)
"""The names of a chat's fields here."""


def check_fields(request: msgspec.Struct, *, unloads: bool = False) -> None:
    """Raise `StatusError` for values that contradict each other or are not supported. `unloads`: `keep_alive` has its
    effect, unless it means forever."""
    keep_alive = getattr(request, "keep_alive", None)
    if isinstance(keep_alive, str) and _DURATION.fullmatch(keep_alive) is None:
        raise invalid("keep_alive", "keep_alive must be seconds, or a duration such as 5m or 1h30m")
    if keep_alive is not None and not (unloads and seconds_of(keep_alive) >= 0):
        ignored("keep_alive", "the operator decides how long a model stays loaded")
    if getattr(request, "top_logprobs", None) and not getattr(request, "logprobs", None):
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    options = getattr(request, "options", None)
    if isinstance(options, OllamaOptions) and options.repeat_last_n not in (None, -1, 0, _REPEAT_LAST_N):
        name = "options.repeat_last_n"
        raise unsupported(name, f"{name} must be -1 or 0: penalties consider the whole prompt and answer, or nothing")


def is_zero(duration: Duration | None) -> bool:
    """Whether a checked duration is 0."""
    if isinstance(duration, str):
        return not any(digit in duration for digit in "123456789")
    return duration == 0


def seconds_of(duration: Duration) -> float:
    """The seconds of a checked duration, such as 5m or 1h30m. Negative ones mean forever."""
    if not isinstance(duration, str):
        return duration
    seconds = sum(float(number) * _SECONDS_IN[unit] for number, unit in _PART_OF_DURATION.findall(duration))
    return -seconds if duration.startswith("-") else seconds


def chat_of(request: OllamaChat, model: str, effort: str | None) -> Chat:
    """The chat of a checked request with messages. Raises `StatusError`."""
    messages = [_chat_message(i, message) for i, message in enumerate(request.messages or ())]
    last = messages[-1]
    return Chat(
        messages=messages,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        continue_final_message=(last.role == "assistant" and not last.tool_calls) or None,
        **_chat_fields(request, model, effort),
    )


def prompted_chat_of(request: OllamaGenerate, model: str, effort: str | None) -> tuple[Chat, FieldNames]:
    """The chat of a checked request with a prompt for the model's template, and the names of its fields."""
    content = _with_images("images", request.images, request.prompt or "")
    turns = [("prompt", ChatMessage(role="user", content=content))]
    if request.system:
        turns.insert(0, ("system", ChatMessage(role="system", content=request.system)))
    names = [(rf"messages\[{i}\](?:\.\w+)?", name) for i, (name, _) in enumerate(turns)]
    names.insert(0, (rf"messages\[{len(turns) - 1}\]\.content(?=\[)", "images"))
    chat = Chat(messages=[message for _, message in turns], **_chat_fields(request, model, effort))
    return chat, FieldNames([*names, *_OPTIONS])


def completion_of(request: OllamaGenerate, model: str) -> Completion:
    """The completion of a checked request whose prompt is used without a template. Raises `StatusError`."""
    is_alone = request.raw or request.suffix
    names = ("system", "context", "think", "images", "chat_template")
    for name in names if is_alone else ("system", "think", "images"):
        if getattr(request, name):
            why = "raw takes the prompt as it is" if request.raw else "the model has no chat template"
            why = "it does not go with suffix" if request.suffix else why
            raise unsupported(name, f"{name} is not supported: {why}; leave it out")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    prompt, suffix = request.prompt or "", request.suffix or None
    return _OllamaCompletion(prompt=prompt, suffix=suffix, logprobs=logprobs, **_common(request, model))


class _OllamaCompletion(Completion, kw_only=True):
    """A completion that ends where the context does."""

    shortens_max_tokens: ClassVar[bool] = True


def effort_of(think: Think | None, template: ChatTemplate, reasons: bool) -> str | None:
    """The reasoning effort that `think` requests; None if the model's default is the requested behaviour.

    `reasons` is whether the format of the model's reasoning is known. Raises `StatusError` if the model
    cannot leave it out.
    """
    if think is None:
        return None
    can_switch = can_switch_reasoning(template)
    if think is False:
        if reasons and not can_switch:
            raise unsupported("think", "think cannot be false: the model's chat template has no switch for reasoning")
        return "none" if can_switch else None
    if not can_switch and not reasons:
        ignored("think", "the model does not reason")
    if not can_switch:
        return None
    return "medium" if think is True else _EFFORTS[think]


def _chat_fields(request: OllamaChat | OllamaGenerate, model: str, effort: str | None) -> dict[str, Any]:
    fields = _common(request, model)
    if request.logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return {**fields, "reasoning_effort": effort, "chat_template": request.chat_template}


def _common(request: OllamaChat | OllamaGenerate, model: str) -> dict[str, Any]:
    options = request.options or OllamaOptions()
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAME}
    repeat_penalty = options.repeat_penalty
    if options.repeat_last_n == 0:  # no token counts as a repetition
        repeat_penalty = 1.0
        fields["presence_penalty"] = 0.0
        fields["frequency_penalty"] = 0.0
    if options.repeat_last_n == _REPEAT_LAST_N:
        ignored("options.repeat_last_n", "penalties consider the whole prompt and answer")
    unlimited = options.num_predict is not None and options.num_predict <= 0
    return {
        **fields,
        "model": model,
        "repetition_penalty": repeat_penalty,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop or None,
        "max_tokens": None if unlimited else options.num_predict,
        "response_format": _response_format(request.format),
    }


def _response_format(form: Format | None) -> dict[str, Any] | None:
    if form is None or form == "":
        return None
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    if form != "json":
        raise invalid("format", 'format must be "json" or a JSON schema, an object')
    return {"type": "json_object"}


def _chat_message(position: int, message: OllamaMessage) -> ChatMessage:
    where = f"messages[{position}]"
    calls = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls or ())]
    return ChatMessage(
        role=message.role,
        content=_with_images(f"{where}.images", message.images, message.content or ""),
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
        tool_calls=calls or None,
        reasoning_content=message.thinking,
    )


def _with_images(name: str, images: Sequence[Any] | None, text: str) -> str | list[dict[str, Any]]:
    """The content of a message with these images before its text. `name` is their field. Raises `StatusError`."""
    if not images:
        return text
    parts = [part_of(image_of_base64(f"{name}[{i}]", image)) for i, image in enumerate(images)]
    return [*parts, *([{"type": "text", "text": text}] if text else [])]


def _call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}.function", f"{where}.function needs a name and arguments")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.function.arguments", f"{where}.function.arguments must be an object")
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return made if call.get("id") is None else {**made, "id": call["id"]}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool without fields that are null, and with the type that may be left out."""
    return {"type": "function", **{name: value for name, value in tool.items() if value is not None}}
