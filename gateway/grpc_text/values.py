"""Translates the Text service's messages: requests to chats and completions, pieces of answers to messages (pure).

HTTP and gRPC give the same chats and completions, so all checks, plans and answers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict

from headrace.common.vision.family import Detail
from headrace.gateway.cache_eviction import CacheEvictionFields
from headrace.gateway.chat.choice import Piece, TokenLogprob
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import token_bytes_of
from headrace.gateway.chat.output import ChatPiece, new_call_id
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta
from headrace.gateway.chat.request import Chat, ChatMessage, Completion, Tokenization
from headrace.gateway.checks import invalid, json_of, unsupported
from headrace.gateway.field_names import FieldNames
from headrace.gateway.images.given import GivenImage, image_of_url, part_of
from headrace.protos import text_pb2
from headrace.protos.cache_eviction import AGGREGATION_MODES, SIZES
from headrace.protos.inference_pb2 import (
    IMAGE_DETAIL_HIGH,
    IMAGE_DETAIL_LOW,
    IMAGE_DETAIL_UNSPECIFIED,
    CacheEviction,
    Constraint,
)
from headrace.protos.sampling_fields import NUMBERS

_R = TypeVar("_R", text_pb2.ChatResponse, text_pb2.CompleteResponse)
_JSON_KINDS = {"json_schema": "json", "json_object": "json_object", "regex": "regex", "grammar": "grammar"}
_MODES = {
    text_pb2.CHAT_TOOL_MODE_AUTO: "auto",
    text_pb2.CHAT_TOOL_MODE_REQUIRED: "required",
    text_pb2.CHAT_TOOL_MODE_NONE: "none",
}
_DETAILS = {
    IMAGE_DETAIL_UNSPECIFIED: Detail.AUTO,
    IMAGE_DETAIL_LOW: Detail.LOW,
    IMAGE_DETAIL_HIGH: Detail.HIGH,
}
# Named as in TextParams.
_SAME = (
    *NUMBERS,
    "max_tokens",
    "min_tokens",
    "n",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)

FIELD_NAMES = FieldNames(
    [
        (r"structured_outputs\.json_object", "constraint.json_object"),
        (r"structured_outputs\.json", "constraint.json_schema"),
        (r"structured_outputs\.(\w+)", r"constraint.\1"),
        (r"(messages\[\d+\])\.content(?=\[)", r"\1.parts"),
        (r"(tools\[\d+\])\.function", r"\1"),
        (r"(tool_calls\[\d+\])\.function", r"\1"),
        ("include_stop_str_in_output", "include_stop"),
        ("top_logprobs", "logprobs"),
    ]
)
"""The names of a chat's fields in this service."""


def chat_request(message: text_pb2.ChatRequest) -> Chat:
    """The chat of a message. Raises `StatusError`."""
    params = message.params
    if params.HasField("prompt_logprobs"):
        raise unsupported(
            "prompt_logprobs", "prompt_logprobs is not supported for chats; complete their tokens instead"
        )
    has_logprobs = params.HasField("logprobs")
    return Chat(
        messages=[_chat_message(i, one) for i, one in enumerate(message.messages)],
        logprobs=has_logprobs or None,
        top_logprobs=params.logprobs if has_logprobs else None,
        chat_template=_given(message, "chat_template"),
        chat_template_kwargs=_variables(message),
        tools=_tools(message.tools),
        tool_choice=_tool_choice(message),
        parallel_tool_calls=_given(message, "parallel_tool_calls"),
        reasoning_effort=_given(message, "reasoning_effort"),
        add_generation_prompt=_given(message, "add_generation_prompt"),
        continue_final_message=message.continue_final_message or None,
        **_common(message.model, params),
    )


def completion_request(message: text_pb2.CompleteRequest) -> Completion:
    """The completion of a message. Raises `StatusError`."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise invalid("text", "give either text or token_ids")
    prompt: str | list[str | int | list[int]] = message.text if kind == "text" else list(message.token_ids.ids)
    params = message.params
    common = _common(message.model, params)
    return Completion(prompt=prompt, logprobs=_given(params, "logprobs"), **common)


def tokenize_request(message: text_pb2.TokenizeRequest) -> Tokenization:
    """Translate a message to a tokenize request."""
    return Tokenization(
        model=message.model or None,
        prompt=_given(message, "text"),
        messages=[_chat_message(i, one) for i, one in enumerate(message.messages)] or None,
        add_special_tokens=_given(message, "add_special_tokens"),
        chat_template=_given(message, "chat_template"),
        chat_template_kwargs=_variables(message),
        tools=_tools(message.tools),
    )


def _given(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _variables(message: Any) -> dict[str, Any] | None:
    if not message.HasField("chat_template_kwargs"):
        return None
    try:
        return MessageToDict(message.chat_template_kwargs)
    except ValueError as error:  # JSON has neither
        problem = "chat_template_kwargs: a number must not be NaN or infinite"
        raise invalid("chat_template_kwargs", problem) from error


def _common(model: str, params: text_pb2.TextParams) -> dict[str, Any]:
    return {
        "model": model or None,
        **{name: _given(params, name) for name in _SAME},
        "ignore_eos": params.ignore_eos,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": dict(params.logit_bias),
        "allowed_token_ids": list(params.allowed_token_ids),
        "include_stop_str_in_output": params.include_stop,
        "bad_words": list(params.bad_words),
        "samplers": list(params.samplers) or None,
        "dry_sequence_breakers": list(params.dry_sequence_breakers) or None,
        "structured_outputs": _structured(params.constraint) if params.HasField("constraint") else None,
        "prompt_cache_key": params.prompt_cache_key,
        "cache_salt": params.cache_salt,
        "priority": params.priority,
        "cache_eviction": _eviction(params.cache_eviction) if params.HasField("cache_eviction") else None,
    }


def _eviction(rule: CacheEviction) -> CacheEvictionFields | bool:
    if rule.HasField("max_cache_size") and not rule.max_cache_size:
        return False
    modes = {value: name for name, value in AGGREGATION_MODES.items()}
    if rule.aggregation_mode and rule.aggregation_mode not in modes:
        problem = f"{rule.aggregation_mode} is no mode; it must be {' or '.join(AGGREGATION_MODES)}"
        raise invalid("cache_eviction.aggregation_mode", f"cache_eviction.aggregation_mode: {problem}")
    sizes = {name: _given(rule, name) for name in SIZES}
    return CacheEvictionFields(**sizes, aggregation_mode=modes.get(rule.aggregation_mode))


def _structured(constraint: Constraint) -> dict[str, Any]:
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise invalid("constraint", "constraint must be one of json_schema, json_object, regex, choice and grammar")
    if kind == "choice":
        return {"choice": list(constraint.choice.texts)}
    return {_JSON_KINDS[kind]: True if kind == "json_object" else getattr(constraint, kind)}


def _chat_message(position: int, message: text_pb2.ChatMessage) -> ChatMessage:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return ChatMessage(
        role=message.role,
        content=_parts(f"messages[{position}]", message) or message.content or (None if calls else ""),
        name=message.name or None,
        reasoning_content=message.reasoning_content or None,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id or None,
    )


def _parts(where: str, message: text_pb2.ChatMessage) -> list[dict[str, Any]]:
    """The parts of a message; none if it has only a text."""
    if message.parts and message.content:
        raise invalid(f"{where}.content", f"{where}.content must be empty beside parts")
    found = []
    for position, part in enumerate(message.parts):
        name = f"{where}.parts[{position}]"
        kind = part.WhichOneof("kind")
        if kind is None:
            raise invalid(name, f"{name} must have a text or an image")
        found.append({"type": "text", "text": part.text} if kind == "text" else part_of(_image(name, part.image)))
    return found


def _image(name: str, image: text_pb2.ChatImage) -> GivenImage:
    if image.detail not in _DETAILS:
        raise invalid(f"{name}.image.detail", f"{name}.image.detail: {image.detail} is no detail")
    detail = _DETAILS[image.detail]
    source = image.WhichOneof("source")
    if source is None:
        raise invalid(f"{name}.image", f"{name}.image must have data or a url")
    if source == "url":
        return image_of_url(f"{name}.image.url", image.url, detail)
    return GivenImage(data=image.data, detail=detail)


def _tools(tools: Sequence[text_pb2.ChatTool]) -> list[dict[str, Any]] | None:
    found = []
    for position, tool in enumerate(tools):
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        if tool.parameters:
            function["parameters"] = json_of(f"tools[{position}].parameters", tool.parameters)
        if tool.strict:
            function["strict"] = True
        found.append({"type": "function", "function": function})
    return found or None


def _tool_choice(message: text_pb2.ChatRequest) -> str | dict[str, Any] | None:
    choice = message.tool_choice
    if choice.WhichOneof("kind") == "tool":
        return {"type": "function", "function": {"name": choice.tool}}
    if choice.mode not in (*_MODES, text_pb2.CHAT_TOOL_MODE_UNSPECIFIED):
        problem = f"tool_choice.mode: {choice.mode} is no mode; it must be auto, required or none"
        raise invalid("tool_choice.mode", problem)
    return _MODES.get(choice.mode)


class Answers:
    """Makes the messages of one request's answers."""

    def __init__(
        self, request_id: str, params: text_pb2.TextParams, token_bytes: Sequence[bytes], num_id_chars: int = 24
    ) -> None:
        """`num_id_chars` is the length of the ids of tool calls."""
        self._request_id = request_id
        self._shows_tokens = params.return_token_ids
        self._token_bytes = token_bytes
        self._num_id_chars = num_id_chars

    def chat(self, index: int, piece: ChatPiece, usage: Usage | None) -> text_pb2.ChatResponse | None:
        """The message for a piece of a chat; None if it shows nothing. `usage` comes with the very last piece."""
        message = text_pb2.ChatResponse()
        for delta in piece.deltas:
            match delta:
                case ContentDelta(text):
                    message.content += text
                case ReasoningDelta(text):
                    message.reasoning_content += text
                case CallDelta(call, name):
                    message.tool_calls.add(index=call, id=new_call_id(self._num_id_chars), name=name)
                case ArgumentsDelta(call, text):
                    if not message.tool_calls or message.tool_calls[-1].index != call:
                        message.tool_calls.add(index=call)
                    message.tool_calls[-1].arguments += text
        return self._finished(message, index, piece, usage)

    def completion(self, index: int, piece: Piece, usage: Usage | None) -> text_pb2.CompleteResponse | None:
        """The message for a piece of a completion; None if it shows nothing. `usage` comes with the very last piece."""
        message = text_pb2.CompleteResponse(text=piece.text)
        message.prompt_logprobs.extend(self._logprobs(piece.prompt_logprobs))
        return self._finished(message, index, piece, usage)

    def _finished(self, message: _R, index: int, piece: ChatPiece | Piece, usage: Usage | None) -> _R | None:
        message.logprobs.extend(self._logprobs(piece.logprobs))
        if self._shows_tokens:
            message.token_ids.extend(piece.token_ids)
        if piece.ending is not None:
            message.finish_reason = piece.ending.reason
            if usage is not None:
                message.usage.CopyFrom(_usage(usage))
        elif not message.ByteSize():
            return None
        message.index = index
        message.request_id = self._request_id
        return message

    def _logprobs(self, logprobs: Iterable[TokenLogprob]) -> Iterable[text_pb2.TextLogprob]:
        for one in logprobs:
            message = text_pb2.TextLogprob(
                token_id=one.token_id, token=token_bytes_of(self._token_bytes, one.token_id), logprob=one.logprob
            )
            for token_id, logprob in one.top:
                token = token_bytes_of(self._token_bytes, token_id)
                message.top.add(token_id=token_id, token=token, logprob=logprob)
            yield message


def _usage(usage: Usage) -> text_pb2.TextUsage:
    return text_pb2.TextUsage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_generated_tokens,
        cached_tokens=usage.num_cached_tokens,
        reasoning_tokens=usage.num_reasoning_tokens,
        image_tokens=usage.num_image_tokens,
    )
