"""The OpenAI wire: requests to checked values, values to prepared bytes (pure).

A parameter that this server knows but cannot honour is refused with its name; unknown ones are ignored, as OpenAI does.
An explicit null is the same as leaving the field out. docs/protocol.md has the table of fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from headrace.gateway.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    Sampling,
    check_range,
    invalid,
)
from headrace.gateway.sampling_fields import SamplingFields
from headrace.gateway.structure import structure_of
from headrace.protos.status import Reason, StatusError

COMPLETION_MAX_TOKENS = 16
MAX_KEY_CHARS = 512
MAX_PROMPTS = 256

_T = TypeVar("_T")


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream has besides its chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """Fields that chats and completions share. Those of type Any are known but honoured in their neutral value only."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None

    best_of: int | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    diversity_penalty: Any = None
    logits_processors: Any = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Any = None
    structured_outputs: dict[str, Any] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn. Content is a text or a list of parts, of which only texts are taken."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions. A list of prompts is one of texts, of tokens, or of lists of tokens."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ModelRequest(msgspec.Struct, kw_only=True):
    """Body of a request for what no model offers: only the model matters."""

    model: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: Any = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


# --- decoding -------------------------------------------------------------------------------------------------------

_AT_FIELD = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)")


def decode_body(raw: bytes, kind: type[_T]) -> _T:
    """The request in a body. Raises `StatusError` with the position of malformed JSON or the field of a wrong type."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    except msgspec.DecodeError as error:
        raise StatusError(Reason.INVALID_FIELD, f"the body is not valid JSON: {_position(raw, str(error))}") from error
    except UnicodeDecodeError as error:
        where = f"invalid UTF-8 in a string: {error.reason}"
        raise StatusError(Reason.INVALID_FIELD, f"the body is not valid JSON: {where}") from error
    except RecursionError as error:
        raise StatusError(Reason.INVALID_FIELD, "the body is nested too deeply") from error


def _wrong_type(message: str) -> StatusError:
    found = _AT_FIELD.match(message)
    assert found is not None
    path = (found["path"] or "").removeprefix("$").removeprefix(".")
    what = found["what"].replace("`", "'")
    missing = re.search(r"missing required field '([^']+)'", what)
    if missing is not None:
        path = f"{path}.{missing[1]}".removeprefix(".")
        return invalid(path, f"{path} is required")
    if path:
        return invalid(path, f"{path}: {what[:1].lower()}{what[1:]}")
    return StatusError(Reason.INVALID_FIELD, f"the body is not a request: {what[:1].lower()}{what[1:]}")


def _position(raw: bytes, message: str) -> str:
    """The decoder's message with the position of what is wrong."""
    if _BYTE.search(message):
        return message
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        return f"{error.msg} (byte {len(error.doc[: error.pos].encode())})"
    except (UnicodeDecodeError, RecursionError):
        return message
    return "a string has half of a surrogate pair"


# --- checking -------------------------------------------------------------------------------------------------------

# field -> values besides null that mean what this server does anyway; the fields are refused with others
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "diversity_penalty": (0, 0.0),
    "logits_processors": ([],),
    "guided_whitespace_pattern": (),
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
}


def check_chat(request: ChatRequest) -> None:
    """Raise `StatusError` for what cannot be honoured or contradicts itself; ranges are `check_sampling`'s."""
    _check_common(request)
    structure_of(request)
    _refuse_unless_neutral(request, NEUTRAL_CHAT)
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        check_range("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)
    if request.max_completion_tokens is not None and request.max_tokens is not None:
        check_range("max_tokens", request.max_tokens, 1, 2**31 - 1)  # not used, but never nonsense


def check_completion(request: CompletionRequest) -> None:
    """Raise `StatusError` for what cannot be honoured or contradicts itself; ranges are `check_sampling`'s."""
    _check_common(request)
    if request.logprobs is not None:
        check_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if request.suffix:
        raise unsupported("suffix", "suffix is not supported: the model continues a prompt and fills no gaps")


def check_tokenize(request: TokenizeRequest) -> None:
    """Raise `StatusError` for what cannot be honoured."""
    _refuse_unless_neutral(request, {"chat_template": ()})


def _check_common(request: GenerationFields) -> None:
    _refuse_unless_neutral(request, NEUTRAL)
    _check_choices(request)
    _check_stream(request)
    _check_prompt(request)
    for name in ("prompt_cache_key", "cache_salt"):
        if len(getattr(request, name) or "") > MAX_KEY_CHARS:
            raise invalid(name, f"{name} must have at most {MAX_KEY_CHARS} characters")
    if request.priority is not None:
        check_range("priority", request.priority, -(2**31), 2**31 - 1)


def _check_choices(request: GenerationFields) -> None:
    n = 1 if request.n is None else request.n
    check_range("n", n, 1, MAX_CHOICES)
    if request.best_of is None:
        return
    check_range("best_of", request.best_of, 1, MAX_CHOICES)
    if request.best_of < n:
        raise invalid("best_of", "best_of must be at least n")
    if request.best_of > n and request.stream:
        raise unsupported("best_of", "best_of over n cannot be streamed: which answers are best shows when all ended")


def _check_stream(request: GenerationFields) -> None:
    options = request.stream_options
    if request.prompt_logprobs is not None:
        check_range("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
        if request.stream:
            raise unsupported("prompt_logprobs", "prompt_logprobs cannot be streamed; leave stream out")
    if options is None:
        return
    if not request.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    if options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise unsupported(name, f"{name} is not supported")
    if options.continuous_usage_stats and not options.include_usage:
        name = "stream_options.continuous_usage_stats"
        raise invalid(name, f"{name} needs include_usage to be true")


def _check_prompt(request: GenerationFields) -> None:
    keep = request.truncate_prompt_tokens
    if keep is not None and keep != -1:
        check_range("truncate_prompt_tokens", keep, 1, 2**31 - 1)
    words = request.bad_words or ()
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"bad_words takes at most {MAX_BAD_WORDS} texts")
    if any(not word.strip() or len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise invalid("bad_words", f"bad_words: a text must have 1 to {MAX_BAD_WORD_CHARS} characters, not only spaces")


def _refuse_unless_neutral(request: msgspec.Struct, neutral: dict[str, tuple[Any, ...]]) -> None:
    for name, values in neutral.items():
        value = getattr(request, name)
        if value is not None and value not in values:
            hint = f"; it may only be {json.dumps(values[0])}" if values else "; leave it out"
            raise unsupported(name, f"{name} is not supported yet{hint}")


def unsupported(name: str, message: str) -> StatusError:
    """The error for a field that is known and cannot be honoured."""
    return StatusError(Reason.UNSUPPORTED, message, field=name)


# --- values ---------------------------------------------------------------------------------------------------------


def sampling_of(request: ChatRequest | CompletionRequest) -> Sampling:
    """The sampling that a checked request asks for."""
    max_tokens, max_tokens_field, default_max_tokens = request.max_tokens, "max_tokens", None
    least_max_tokens, prompt_logprobs = 1, request.prompt_logprobs
    if isinstance(request, ChatRequest):
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        if request.max_completion_tokens is not None:
            max_tokens, max_tokens_field = request.max_completion_tokens, "max_completion_tokens"
    else:
        logprobs, default_max_tokens = request.logprobs, COMPLETION_MAX_TOKENS
        if request.echo:
            least_max_tokens = 0
            if logprobs is not None:
                prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    if logprobs is None and (request.best_of or 1) > (request.n or 1):
        logprobs = 0  # by which the best are told
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias or {},
        allowed_token_ids=request.allowed_token_ids or (),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        least_max_tokens=least_max_tokens,
        default_max_tokens=default_max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        stop_token_ids=request.stop_token_ids or (),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structure=structure_of(request),
    )


def prompts_of(request: CompletionRequest) -> Sequence[str | list[int]]:
    """The prompts of a completion, each a text or its tokens. Raises `StatusError`."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "prompt must not be empty")
    if all(isinstance(entry, int) for entry in prompt):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt takes at most {MAX_PROMPTS} prompts")
    if all(isinstance(entry, str) for entry in prompt) or all(isinstance(entry, list) for entry in prompt):
        return prompt  # type: ignore[return-value]
    raise invalid("prompt", "prompt must be a text, a list of texts, a list of tokens or a list of lists of tokens")
