"""The sampling of a generation: checked values of the caller, and the message for the worker (pure).

Both HTTP and gRPC make a `Sampling`. `protos/sampling_fields` defines ranges and defaults of its
numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.gateway.checks import check_range, invalid
from headrace.gateway.hints import ignored
from headrace.gateway.text.breakers import NO_BREAKERS, Breakers
from headrace.protos.cache_eviction import longest_context_of, rule_for
from headrace.protos.inference_pb2 import BeamSearch, CacheEviction, SamplingParams, ThinkingBudget, TokenSequence
from headrace.protos.sampling_fields import NUMBERS, SamplingNumbers
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard

if TYPE_CHECKING:
    from headrace.gateway.structure.fields import Structure

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 4096
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 64
_LARGE_FIELDS = (
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "dry_breaker_token_ids",
    "dry_breakers",
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to stop; None for the model's default."""

    numbers: SamplingNumbers = field(default_factory=SamplingNumbers)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    choices_field: str = "n"
    """The field of the request that says how many answers there are."""
    """Name of the field in which the caller gave max_tokens."""
    least_max_tokens: int = 1
    """The minimum of max_tokens: 0 if the prompt alone is a valid answer."""
    shortens_max_tokens: bool = False
    """A max_tokens that is over the room in the context means the room, as for servers that clamp it."""
    default_max_tokens: int | None = None
    """Default length of the answer; None: that of the model's card, or the rest of the context."""
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    """The stop string or token that ends the text is part of it."""
    skip_special_tokens: bool = True
    """Special tokens are not part of the text."""
    logprobs: int | None = None
    """Number of alternatives to report at each position; None: no log-probabilities at all."""
    lists_hidden_end: bool = False
    """Report log-probabilities of every generated token, including those after the end of the text."""
    prompt_logprobs: int | None = None
    """The same as `logprobs`, for the tokens of the prompt."""
    samplers: tuple[str, ...] = ()
    """The order of the filters; empty for the usual one."""
    dry_sequence_breakers: Sequence[str] | None = None
    """Texts at which DRY begins anew; None: the usual ones."""
    dry_breakers: Breakers = NO_BREAKERS
    """The same in the model's tokens."""
    bad_words: Sequence[Sequence[int]] = ()
    """Sequences of tokens that are never completed."""
    thinking_budget: ThinkingBudget | None = None
    """Ends reasoning; None: it may be as long as the answer."""
    structure: Structure | None = None
    """The constraint of the whole answer; None: any text."""
    beam_search: BeamSearch | None = None
    """A search for the most probable answers; None: one token is chosen after the other."""
    cache_eviction: CacheEviction | None = None
    """Which KV blocks the request evicts; None: the server's default."""


class ContextTooLongError(StatusError):
    """The prompt, or prompt and answer, do not fit into the context. In OpenAI's words, which clients match."""

    def __init__(
        self, max_context_tokens: int, num_prompt_tokens: int, num_answer_tokens: int, field: str | None = None
    ) -> None:
        """`num_answer_tokens` is what the caller asks for; 0: anything. `field` has the prompt."""
        self.max_context_tokens = max_context_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.num_answer_tokens = num_answer_tokens
        start = f"This model's maximum context length is {max_context_tokens} tokens"
        if num_answer_tokens and num_prompt_tokens < max_context_tokens:
            problem = (
                f"{start}. However, you requested {num_prompt_tokens + num_answer_tokens} tokens"
                f" ({num_prompt_tokens} in the prompt, {num_answer_tokens} in the completion). Please reduce the length"
                " of the prompt or of the completion."
            )
        else:
            problem = (
                f"{start}. However, your prompt resulted in {num_prompt_tokens} tokens. Please reduce the length of the"
                " prompt."
            )
        super().__init__(Reason.CONTEXT_TOO_LONG, problem, field=field)

    def of_field(self, field: str) -> ContextTooLongError:
        """The same error, about a prompt in this field."""
        return ContextTooLongError(self.max_context_tokens, self.num_prompt_tokens, self.num_answer_tokens, field=field)


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise `StatusError` (INVALID_FIELD, with the field) for a value out of its range."""
    for name, number in NUMBERS.items():
        value = getattr(sampling.numbers, name)
        if value is not None:
            check_range(name, value, number.least, number.greatest, number.open_below)
    if sampling.min_tokens is not None:
        check_range("min_tokens", sampling.min_tokens, 0, 2**31 - 1)
    if sampling.max_tokens is not None:
        check_range(sampling.max_tokens_field, sampling.max_tokens, sampling.least_max_tokens, 2**31 - 1)
        if sampling.min_tokens is not None and sampling.min_tokens > sampling.max_tokens:
            raise invalid("min_tokens", f"min_tokens must be at most {sampling.max_tokens_field}")
    _check_stop(sampling)
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
    if sampling.structure is not None and sampling.allowed_token_ids:
        raise invalid("allowed_token_ids", f"allowed_token_ids and {sampling.structure.field} exclude each other")
    _check_token_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size, vocab_size)
    _check_token_ids("logit_bias", sampling.logit_bias, vocab_size, MAX_LOGIT_BIASES)
    for bias in sampling.logit_bias.values():
        check_range("logit_bias", bias, -100.0, 100.0)


def sampling_params(
    sampling: Sampling, card: ModelCard, num_prompt_tokens: int, seed: int, max_tokens_limit: int = 0
) -> SamplingParams:
    """The message for the worker: the caller's values, and the model card's defaults for the rest.

    `seed` is used if the caller gave none. Raises `StatusError` (CONTEXT_TOO_LONG) if the prompt leaves no room, or
    less than the caller's max_tokens. A default of max_tokens is shortened to the room that is left, and to the
    operator's `max_tokens_limit`, if it is not 0; the caller's max_tokens over that limit is refused.
    """
    params = SamplingParams()
    params.CopyFrom(card.default_sampling)
    params.ClearField("logprobs")
    params.ClearField("prompt_logprobs")
    params.seed = seed
    if sampling.beam_search is not None:
        for name in NUMBERS:
            params.ClearField(name)
        params.seed = seed
        params.beam_search.CopyFrom(sampling.beam_search)
    for name, number in NUMBERS.items():
        value = getattr(sampling.numbers, name)
        if value is not None:
            setattr(params, name, number.on_wire(value))
    for name in ("min_tokens", "logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None:
            setattr(params, name, value)
    if sampling.ignore_eos:
        params.ignore_eos = True
    if sampling.structure is not None:
        params.constraint.CopyFrom(sampling.structure.constraint)
    params.stop_token_ids.extend(sampling.stop_token_ids)
    params.allowed_token_ids.extend(sampling.allowed_token_ids)
    for token_id, bias in sampling.logit_bias.items():
        params.logit_bias[token_id] = bias
    params.bad_words.extend(TokenSequence(token_ids=word) for word in sampling.bad_words)
    params.MergeFrom(SamplingParams(samplers=[f"SAMPLER_{name.upper()}" for name in sampling.samplers]))
    if sampling.thinking_budget is not None:
        params.thinking_budget.CopyFrom(sampling.thinking_budget)
    params.dry_breaker_token_ids.extend(sampling.dry_breakers.token_ids)
    params.dry_breakers.extend(TokenSequence(token_ids=one) for one in sampling.dry_breakers.sequences)
    if sampling.cache_eviction is not None:
        params.cache_eviction.CopyFrom(sampling.cache_eviction)
        rule_for(card, params)
    longest = card.max_context_tokens
    if num_prompt_tokens < longest:
        longest = longest_context_of(card, params)
    if max_tokens_limit and sampling.max_tokens is not None and sampling.max_tokens > max_tokens_limit:
        problem = f"must be at most {max_tokens_limit}, the limit that this model's operator has set"
        raise invalid(sampling.max_tokens_field, f"{sampling.max_tokens_field} {problem}")
    params.max_tokens = _max_tokens(sampling, params, longest, num_prompt_tokens)
    if max_tokens_limit:
        params.max_tokens = min(params.max_tokens, max_tokens_limit)
    if params.min_tokens > params.max_tokens:
        if sampling.min_tokens is not None:
            raise invalid("min_tokens", f"min_tokens must be at most the answer's {params.max_tokens} tokens")
        params.min_tokens = params.max_tokens
    return params


def take_large_fields(params: SamplingParams) -> SamplingParams:
    """Move the fields that may be large out of `params`. Merging the two restores it. An empty constraint remains as a
    marker."""
    large = SamplingParams()
    for name in _LARGE_FIELDS:
        getattr(large, name).MergeFrom(getattr(params, name))
        params.ClearField(name)
    if params.HasField("constraint"):
        large.constraint.CopyFrom(params.constraint)
        params.constraint.Clear()
        params.constraint.SetInParent()
    return large


def shortest(value: float) -> float:
    """The shortest decimal that rounds to a 32-bit number: 0.7, not 0.699999988."""
    for num_digits in range(1, 10):
        rounded = float(f"{value:.{num_digits}g}")
        if struct.pack("f", rounded) == struct.pack("f", value):
            return rounded
    return value


def _max_tokens(sampling: Sampling, defaults: SamplingParams, max_context_tokens: int, num_prompt_tokens: int) -> int:
    room = max_context_tokens - num_prompt_tokens
    if sampling.max_tokens is not None:
        wanted = max(sampling.max_tokens, 1)  # a worker computes a prompt only in order to sample a token
        if wanted > room >= 1 and sampling.shortens_max_tokens:
            why = "it is over the tokens that the prompt leaves of the context, so it means these"
            ignored(sampling.max_tokens_field, why, value=f">{room}")
            return room
        if wanted > room:
            raise ContextTooLongError(max_context_tokens, num_prompt_tokens, wanted)
        return wanted
    if room < 1:
        raise ContextTooLongError(max_context_tokens, num_prompt_tokens, 0)
    default = sampling.default_max_tokens
    if default is None and defaults.HasField("max_tokens"):
        default = defaults.max_tokens
    return room if default is None else min(default, room)


def _check_stop(sampling: Sampling) -> None:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"stop takes at most {MAX_STOP_STRINGS} texts")
    if any(len(stop) > MAX_STOP_CHARS for stop in sampling.stop):
        raise invalid("stop", f"stop: a text must have at most {MAX_STOP_CHARS} characters")


def _check_token_ids(name: str, token_ids: Sequence[int] | Mapping[int, float], vocab_size: int, most: int) -> None:
    if len(token_ids) > most:
        raise invalid(name, f"{name} takes at most {most} tokens")
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(name, f"{name}: {token_id} is not a token of this model, whose vocabulary has {vocab_size}")
