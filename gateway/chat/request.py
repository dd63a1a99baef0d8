"""Chats and completions with their sampling, independent of the protocol (pure).

Each protocol decodes and checks its own format and translates it to these values. Errors use the names of fields in
this module, which are OpenAI's names. A protocol with other names translates them (`field_names`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from headrace.gateway.cache_eviction import CacheEvictionFields, eviction_rule
from headrace.gateway.chat.beams import beam_search_of
from headrace.gateway.chat.filters import check_breakers, order_of, without_others
from headrace.gateway.chat.sampling import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_CHOICES, MAX_LOGPROBS, Sampling
from headrace.gateway.checks import check_range, invalid, texts_or_tokens, unsupported
from headrace.gateway.hints import ignored
from headrace.gateway.structure.fields import ConstraintFields
from headrace.protos.inference_pb2 import BeamSearch
from headrace.protos.sampling_fields import numbers_of

COMPLETION_MAX_TOKENS = 16
MAX_KEY_CHARS = 512
MAX_PROMPTS = 256
VERBOSITIES = ("low", "medium", "high")


class AnswerFields(ConstraintFields, kw_only=True):
    """Fields that all protocols share by name and meaning; None if the caller omits them."""

    samplers: list[str] | str | None = None
    dry_sequence_breakers: list[str] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    cache_eviction: CacheEvictionFields | bool | None = None


class SamplingFields(AnswerFields, kw_only=True):
    """Fields that OpenAI's endpoints share: chats, completions and responses."""

    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    prompt_cache_key: str | None = None


class Generation(SamplingFields, kw_only=True):
    """The common part of chats and completions."""

    shortens_max_tokens: ClassVar[bool] = False
    """A max_tokens that is over the room in the context means the room."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None

    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    response_format: dict[str, Any] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn. Content is a text or a list of parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    thinking: Any = None
    """What other servers call `reasoning_content`."""
    refusal: str | None = None
    function_call: dict[str, Any] | None = None
    """The one call of the API before `tool_calls`; a message of the role `function` has its result."""
    audio: Any = None


class Chat(Generation, kw_only=True):
    """A conversation that the model continues."""

    shortens_max_tokens: ClassVar[bool] = True

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    """From -1, which means no limit, to 2**31 - 1."""
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class Completion(Generation, kw_only=True):
    """A request to continue one or more prompts.

    `prompt` is a text, a list of texts, a list of token ids, or a list of such lists.
    """

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    logprobs: int | None = None
    echo: bool | None = None


class Tokenization(msgspec.Struct, kw_only=True):
    """A text to be tokenized, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


# --- checking -------------------------------------------------------------------------------------------------------


def check_chat(request: Chat) -> None:
    """Raise `StatusError` for unsupported or contradictory fields; `check_sampling` checks ranges."""
    _check_common(request)
    if request.verbosity not in (None, *VERBOSITIES):
        raise invalid("verbosity", f"verbosity must be one of {', '.join(VERBOSITIES)}")
    predicted_text(request)
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        check_range("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)


def predicted_text(request: Chat) -> str:
    """The text that the caller expects the answer to have; empty if there is none. Raises `StatusError`."""
    prediction = request.prediction
    if prediction is None:
        return ""
    if prediction.get("type") != "content":
        raise invalid("prediction.type", 'prediction.type must be "content"')
    content = prediction.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid("prediction.content", "prediction.content must be a text or a list of parts of type text")
    for i, part in enumerate(parts):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(
                f"prediction.content[{i}]", f"prediction.content[{i}] must be a part of type text with a text"
            )
    return "".join(part["text"] for part in parts)


def check_completion(request: Completion) -> None:
    """Raise `StatusError` for unsupported or contradictory fields; `check_sampling` checks ranges."""
    _check_common(request)
    if request.logprobs is not None:
        check_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)


def _check_common(request: Generation) -> None:
    _check_choices(request)
    if request.max_completion_tokens is not None and request.max_tokens is not None:
        least = 0 if isinstance(request, Completion) and request.echo else 1
        check_range("max_tokens", request.max_tokens, least, 2**31 - 1)  # has no effect, but must be valid
    if request.prompt_logprobs is not None:
        check_range("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
        if request.stream:
            raise unsupported("prompt_logprobs", "prompt_logprobs cannot be streamed; leave stream out")
    _check_prompt(request)
    check_breakers(request.dry_sequence_breakers)
    for name in ("prompt_cache_key", "cache_salt"):
        if len(getattr(request, name) or "") > MAX_KEY_CHARS:
            raise invalid(name, f"{name} must have at most {MAX_KEY_CHARS} characters")
    if request.priority is not None:
        check_range("priority", request.priority, -(2**31), 2**31 - 1)


def _check_choices(request: Generation) -> None:
    n = 1 if request.n is None else request.n
    check_range("n", n, 1, MAX_CHOICES)
    _beam_search_of(request)
    if request.best_of is None:
        return
    check_range("best_of", request.best_of, 1, MAX_CHOICES)
    if request.best_of < n:
        raise invalid("best_of", "best_of must be at least n")
    if request.best_of > n and request.stream:
        raise unsupported(
            "best_of", "best_of over n cannot be streamed: the best answers are known only when all have ended"
        )


def _check_prompt(request: Generation) -> None:
    keep = request.truncate_prompt_tokens
    if keep is not None and keep != -1:
        check_range("truncate_prompt_tokens", keep, 1, 2**31 - 1)
    words = request.bad_words or ()
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"bad_words takes at most {MAX_BAD_WORDS} texts")
    if any(not word.strip() or len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise invalid("bad_words", f"bad_words: a text must have 1 to {MAX_BAD_WORD_CHARS} characters, not only spaces")


# --- values ---------------------------------------------------------------------------------------------------------


def sampling_of(request: Chat | Completion) -> Sampling:
    """The sampling of a checked request, without the constraint of its answer and the tokens of banned words."""
    max_tokens, max_tokens_field, default_max_tokens = request.max_tokens, "max_tokens", None
    least_max_tokens, prompt_logprobs = 1, request.prompt_logprobs
    if isinstance(request, Chat):
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    else:
        logprobs, default_max_tokens = request.logprobs, COMPLETION_MAX_TOKENS
        if request.echo:
            least_max_tokens = 0
            if logprobs is not None:
                prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    if request.max_completion_tokens is not None:
        max_tokens, max_tokens_field = request.max_completion_tokens, "max_completion_tokens"
    beam_search = _beam_search_of(request)
    if logprobs is None and beam_search is None and (request.best_of or 1) > (request.n or 1):
        logprobs = 0  # to rank the answers
    order, numbers = order_of(request.samplers), numbers_of(request)
    return Sampling(
        numbers=numbers if order is None else without_others(numbers, order),
        samplers=() if order is None else order.filters,
        dry_sequence_breakers=request.dry_sequence_breakers,
        logit_bias=request.logit_bias or {},
        allowed_token_ids=request.allowed_token_ids or (),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        choices_field="n" if request.best_of is None else "best_of",
        least_max_tokens=least_max_tokens,
        shortens_max_tokens=request.shortens_max_tokens,
        default_max_tokens=default_max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop=_stop_of(request),
        stop_token_ids=request.stop_token_ids or (),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        logprobs=logprobs,
        lists_hidden_end=isinstance(request, Completion),
        prompt_logprobs=prompt_logprobs,
        beam_search=beam_search,
        cache_eviction=eviction_rule(request.cache_eviction),
    )


def _beam_search_of(request: Generation) -> BeamSearch | None:
    if request.use_beam_search is None and request.length_penalty is None and request.early_stopping is None:
        return None
    return beam_search_of(request)


def _stop_of(request: Chat | Completion) -> Sequence[str]:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    found = tuple(filter(None, stop))
    if len(found) < len(stop):
        ignored("stop", "an empty text ends no answer")
    return found


def prompts_of(request: Completion) -> Sequence[str | list[int]]:
    """The prompts of a completion, each a text or its tokens. Raises `StatusError`."""
    prompts = texts_or_tokens("prompt", request.prompt)
    if not prompts:
        raise invalid("prompt", "prompt must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt takes at most {MAX_PROMPTS} prompts")
    return prompts
