"""Whole answers in OpenAI's format, and the parts that streams share with them (pure).

The concatenation of a stream equals the whole answer: both are made of the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.gateway.chat.choice import Ending, Piece, WholeChoice
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs_value
from headrace.gateway.chat.output import ToolCall, WholeChat
from headrace.gateway.edge.failures import error_value, failure_of
from headrace.gateway.edge.wire import encode
from headrace.gateway.text.listing import ListedModel
from headrace.protos.tasks import NAMES
from headrace.protos.worker_pb2 import ModelCard


class Identity(msgspec.Struct, frozen=True):
    """The fields that all chunks of an answer share."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def identity(kind: str, request_id: str, created_s: int, card: ModelCard) -> Identity:
    """Identity of an answer; `kind` is `chatcmpl` or `cmpl`."""
    return Identity(f"{kind}-{request_id}", created_s, card.name, f"fp_{card.fingerprint[:12]}")


def usage_value(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    cached: dict[str, Any] = {"cached_tokens": usage.num_cached_tokens}
    elsewhere = usage.num_disk_tokens + usage.num_peer_tokens
    if elsewhere:
        memory = max(0, usage.num_cached_tokens - elsewhere)
        tiers = {"memory": memory, "disk": usage.num_disk_tokens, "peers": usage.num_peer_tokens}
        cached["cached_tokens_by_tier"] = tiers
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_generated_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        "prompt_tokens_details": cached,
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "accepted_prediction_tokens": usage.num_accepted_tokens,
            "rejected_prediction_tokens": usage.num_rejected_tokens,
        },
    }


def ending_value(ending: Ending) -> dict[str, Any]:
    """The fields of a choice about its end; `error` only if it failed."""
    value: dict[str, Any] = {"finish_reason": ending.reason, "stop_reason": ending.stop_reason}
    return value if ending.error is None else {**value, "error": error_value(failure_of(ending.error))}


@dataclass(frozen=True, slots=True)
class Shown:
    """Options for parts of an answer in addition to its text and log-probabilities. Sequences have one entry per
    choice."""

    usage: bool = False
    """A stream ends with the usage."""
    running_usage: bool = False
    """Every chunk of it has the usage so far."""
    num_prompt_tokens: int = 0
    """Log-probabilities of all prompts."""
    prompts: Sequence[Sequence[int]] = ()
    """Tokens of the prompts."""
    token_ids: bool = False
    """The tokens of prompts and answers."""
    echoes: Sequence[str] = ()
    """Prompts, if the choices begin with them; else empty."""
    prompt_logprobs: int | None = None
    """Alternatives at each token of the prompts; None for no such list."""
    pads: bool = False
    """Chunks of a stream have padding that hides the length of their text."""
    reasoning: bool = True
    """The reasoning before a chat's answer."""


def whole_chat(
    who: Identity,
    choices: Sequence[WholeChat],
    logprobs: ChatLogprobs | None,
    usage: Usage,
    shown: Shown,
    token_bytes: Sequence[bytes],
) -> bytes:
    """Body of a chat's answer."""
    values = []
    for index, choice in enumerate(choices):
        assert choice.ending is not None
        value = {
            "index": index,
            "message": message_value(choice, shows_reasoning=shown.reasoning),
            "logprobs": None if logprobs is None else logprobs.value(choice.logprobs),
            **ending_value(choice.ending),
        }
        values.append({**value, "token_ids": choice.token_ids} if shown.token_ids else value)
    of_prompt: dict[str, Any] = {}
    if shown.prompt_logprobs is not None:
        known = choices[0].prompt_logprobs
        of_prompt["prompt_logprobs"] = prompt_logprobs_value(known, shown.prompt_logprobs, token_bytes)
    if shown.token_ids:
        of_prompt["prompt_token_ids"] = list(shown.prompts[0])
    return _whole(who, "chat.completion", values, usage, of_prompt)


def message_value(choice: WholeChat, *, shows_reasoning: bool = True) -> dict[str, Any]:
    """The message of a chat's choice. It has reasoning and calls only if there are any."""
    calls = [call_value(call) for call in choice.calls]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not choice.content else choice.content,
        "refusal": None,
        "annotations": [],
    }
    if choice.reasoning and shows_reasoning:
        message["reasoning_content"] = choice.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def call_value(call: ToolCall) -> dict[str, Any]:
    """A call of a message."""
    if call.is_custom:
        return {"id": call.call_id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def whole_completion(
    who: Identity,
    choices: Sequence[WholeChoice],
    logprobs: CompletionLogprobs | None,
    usage: Usage,
    shown: Shown,
    token_bytes: Sequence[bytes],
) -> bytes:
    """Body of a completion's answer."""
    values = []
    for index, choice in enumerate(choices):
        assert choice.ending is not None
        value: dict[str, Any] = {
            "index": index,
            "text": shown.echoes[index] + choice.text if shown.echoes else choice.text,
            "logprobs": None if logprobs is None else completion_logprobs_value(logprobs, shown, index, choice),
            **ending_value(choice.ending),
        }
        if shown.prompt_logprobs is not None:
            known = choice.prompt_logprobs
            value["prompt_logprobs"] = prompt_logprobs_value(known, shown.prompt_logprobs, token_bytes)
        if shown.token_ids:
            value["token_ids"] = choice.token_ids
            value["prompt_token_ids"] = list(shown.prompts[index])
        values.append(value)
    return _whole(who, "text_completion", values, usage)


def completion_logprobs_value(
    logprobs: CompletionLogprobs, shown: Shown, index: int, part: WholeChoice | Piece, is_first: bool = True
) -> dict[str, Any]:
    """The `logprobs` of a completion or of a piece of it, including those of an echoed prompt."""
    if not shown.echoes:
        return logprobs.value(part.logprobs)
    if not is_first:
        return logprobs.value(part.logprobs, shown.echoes[index])
    return logprobs.value(part.logprobs, shown.echoes[index], shown.prompts[index][0], part.prompt_logprobs)


def _whole(
    who: Identity, kind: str, choices: list[dict[str, Any]], usage: Usage, of_prompt: dict[str, Any] | None = None
) -> bytes:
    return encode(
        {
            "id": who.id,
            "object": kind,
            "created": who.created,
            "model": who.model,
            "system_fingerprint": who.system_fingerprint,
            "choices": choices,
            "usage": usage_value(usage),
            **(of_prompt or {}),
        }
    )


def model_value(model: ListedModel) -> dict[str, Any]:
    """A model as GET /v1/models shows it, for clients of OpenAI and of Anthropic. Most values of a model that was not
    loaded yet are null."""
    card = model.card
    created_s = 0 if card is None else card.created_s
    return {
        "id": model.name,
        "object": "model",
        "created": created_s,
        "owned_by": "headrace",
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z"),
        "root": model.alias_of or model.name,
        "parent": None if card is None else card.parent or None,
        "max_model_len": None if card is None else card.max_context_tokens,
        "task": NAMES[model.task],
        "dimensions": None if card is None else card.dimensions or None,
        "state": model.state,
        "problem": model.problem or None,
    }
