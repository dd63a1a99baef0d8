"""From a GenerateRequest on the wire to a Request for the engine, or a StatusError that names the field. Pure."""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from headrace.protos.block_hash import root_hash
from headrace.protos.status import Reason, StatusError
from headrace.worker.grammar import ConstraintSource
from headrace.worker.request import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from headrace.protos import inference_pb2

_Number = TypeVar("_Number", int, float)

MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 256
MAX_CONSTRAINT_BYTES = 256 << 10
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model allows. `max_context_tokens` is already no more than the whole KV cache holds."""

    model: str
    fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]


def admit(message: inference_pb2.GenerateRequest, limits: ModelLimits, *, request_id: str, arrival_s: float) -> Request:
    """Validate all fields and make the request."""
    if message.model and message.model != limits.model:
        raise StatusError(
            Reason.MODEL_NOT_FOUND, f"this worker serves {limits.model!r}, not {message.model[:100]!r}", field="model"
        )
    if message.adapter:
        raise StatusError(Reason.UNSUPPORTED, "this worker serves no adapters; leave adapter empty", field="adapter")
    prompt = _token_ids(message.token_ids, "token_ids", limits)
    if not prompt:
        raise _invalid("token_ids", "must have at least one token")
    resume = _token_ids(message.resume_token_ids, "resume_token_ids", limits)
    room = limits.max_context_tokens - len(prompt)
    if room < 1 or len(resume) > room:
        raise StatusError(
            Reason.CONTEXT_TOO_LONG,
            f"This model's maximum context length is {limits.max_context_tokens} tokens, but the request has "
            f"{len(prompt) + len(resume)} and asks for at least one more",
            field="token_ids",
        )
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=_sampling(message.sampling, limits, room),
        root_hash=root_hash(limits.fingerprint, message.adapter, message.cache_salt),
        resume_token_ids=resume,
        priority=message.priority,
        arrival_s=arrival_s,
    )


def already_finished(request: Request) -> tuple[FinishReason, int | None] | None:
    """Why a resumed request needs nothing more, with the stop token if that is why; None if it does."""
    sampling = request.sampling
    if not request.resume_token_ids:
        return None
    last = request.resume_token_ids[-1]
    if last in sampling.stop_token_ids:
        return FinishReason.STOP, last
    if request.num_generated_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH, None
    return None


def constraint_of(message: inference_pb2.SamplingParams) -> ConstraintSource | None:
    """The constraint that a request asks for; checked for its form and size, not for what it says."""
    if not message.HasField("constraint"):
        return None
    kind = message.constraint.WhichOneof("kind")
    if kind is None:
        raise _invalid("sampling.constraint", "must be one of json_schema, json_object, regex, choice and grammar")
    if kind == "json_object":
        return ConstraintSource(kind)
    source = ConstraintSource(kind, (getattr(message.constraint, kind),))
    if kind == "choice":
        source = ConstraintSource(kind, tuple(message.constraint.choice.texts))
        if len(source.texts) > MAX_CHOICES:
            raise _invalid(source.field, f"may have at most {MAX_CHOICES} texts")
    if not source.texts or not all(source.texts):
        raise _invalid(source.field, "must not be empty")
    if sum(len(text.encode()) for text in source.texts) > MAX_CONSTRAINT_BYTES:
        raise _invalid(source.field, f"may have at most {MAX_CONSTRAINT_BYTES} bytes")
    return source


def _token_ids(values: Sequence[int], field: str, limits: ModelLimits) -> array[int]:
    token_ids = array("I", values)
    if token_ids and max(token_ids) >= limits.vocab_size:
        raise _invalid(field, f"has token {max(token_ids)}; the vocabulary has {limits.vocab_size}")
    return token_ids


def _sampling(message: inference_pb2.SamplingParams, limits: ModelLimits, room: int) -> SamplingParams:
    stop = frozenset(_listed(message.stop_token_ids, "stop_token_ids", MAX_STOP_TOKENS, limits))
    # A constrained answer must be able to end, whatever the caller ignores; where, its grammar says.
    ends_at_eos = message.HasField("constraint") or not message.ignore_eos
    if message.HasField("constraint") and message.allowed_token_ids:
        raise _invalid("sampling.allowed_token_ids", "cannot be combined with a constraint; write it into the grammar")
    return SamplingParams(
        max_tokens=min(_number(message, "max_tokens", room, 1, math.inf), room),
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        temperature=_number(message, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(message, "top_p", 1.0, 0.0, 1.0, lowest_excluded=True),
        top_k=message.top_k,
        min_p=_number(message, "min_p", 0.0, 0.0, 1.0),
        min_tokens=message.min_tokens,
        stop_token_ids=stop | limits.eos_token_ids if ends_at_eos else stop,
        presence_penalty=_number(message, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(message, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=_number(message, "repetition_penalty", 1.0, 0.0, 100.0, lowest_excluded=True),
        logit_bias=_logit_bias(message, limits),
        num_logprobs=_num_top(message, "logprobs"),
        num_prompt_logprobs=_num_top(message, "prompt_logprobs"),
        allowed_token_ids=_listed(message.allowed_token_ids, "allowed_token_ids", limits.vocab_size, limits),
        bad_words=_bad_words(message, limits),
    )


def _number(
    message: inference_pb2.SamplingParams,
    name: str,
    default: _Number,
    lowest: float,
    highest: float,
    *,
    lowest_excluded: bool = False,
) -> _Number:
    if not message.HasField(name):
        return default
    value: _Number = getattr(message, name)
    if not lowest <= value <= highest or (lowest_excluded and value == lowest):
        bounds = f"over {lowest:g}" if lowest_excluded else f"at least {lowest:g}"
        bounds += "" if highest == math.inf else f" and at most {highest:g}"
        raise _invalid(f"sampling.{name}", f"must be {bounds}, not {value:g}")
    return value


def _num_top(message: inference_pb2.SamplingParams, name: str) -> int | None:
    if not message.HasField(name):
        return None
    value: int = getattr(message, name)
    if value > MAX_LOGPROBS:
        raise _invalid(f"sampling.{name}", f"must be 0 to {MAX_LOGPROBS}, not {value}")
    return value


def _listed(values: Sequence[int], name: str, most: int, limits: ModelLimits) -> tuple[int, ...]:
    if len(values) > most:
        raise _invalid(f"sampling.{name}", f"may have at most {most} tokens")
    return tuple(dict.fromkeys(_token_ids(values, f"sampling.{name}", limits)))


def _logit_bias(message: inference_pb2.SamplingParams, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    for token_id, bias in message.logit_bias.items():
        if token_id >= limits.vocab_size:
            raise _invalid("sampling.logit_bias", f"has token {token_id}; the vocabulary has {limits.vocab_size}")
        if not -100.0 <= bias <= 100.0:
            raise _invalid("sampling.logit_bias", f"must be -100 to 100, not {bias:g}")
    return tuple(message.logit_bias.items())


def _bad_words(message: inference_pb2.SamplingParams, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    if len(message.bad_words) > MAX_BAD_WORDS:
        raise _invalid("sampling.bad_words", f"may have at most {MAX_BAD_WORDS} sequences")
    words = [tuple(_token_ids(word.token_ids, "sampling.bad_words", limits)) for word in message.bad_words]
    if not all(words):
        raise _invalid("sampling.bad_words", "must not have an empty sequence")
    return tuple(words)


def _invalid(field: str, problem: str) -> StatusError:
    return StatusError(Reason.INVALID_FIELD, f"{field} {problem}", field=field)
