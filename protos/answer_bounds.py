"""Rules shared by gateway, router and worker: when an answer is complete, which prompts leave room for one, and how
large a request may be. Pure.

An answer with all its tokens needs no worker to finish. If a worker, a router or a connection is lost at that point,
the process that has the tokens creates the final message by the worker's own rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.protos.cache_eviction import longest_context_of
from headrace.protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Finish,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
)
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard

MAX_REQUEST_BYTES = 32 * 1024 * 1024
"""Of a request on the wire, which is one message: prompt, parameters and images."""
# Bytes of a request in addition to its tokens: a grammar has at most 256 KiB, and the other fields are small.
_OTHER_REQUEST_BYTES = 1 << 20
# Maximum bytes on the wire of a token id and of an entry of logit_bias. allowed_token_ids may also name every token.
_TOKEN_BYTES = 5
_BIAS_BYTES = 14


def check_context(
    num_prompt_tokens: int,
    num_resumed_tokens: int,
    max_context_tokens: int,
    *,
    encodes: bool = False,
    longest: int = 0,
) -> None:
    """Raise StatusError (CONTEXT_TOO_LONG) if a prompt leaves no room for an answer, or less than was generated. A
    model that `encodes` prompts needs room for the prompt only. Prompt and answer may have `longest` tokens together,
    if that is more."""
    if encodes:
        if num_prompt_tokens > max_context_tokens:
            problem = f"the text has {num_prompt_tokens} tokens, and this model takes at most {max_context_tokens}"
            raise StatusError(Reason.CONTEXT_TOO_LONG, f"{problem}; shorten or split it", field="token_ids")
        return
    if num_prompt_tokens < max_context_tokens < longest:
        max_context_tokens = longest
    room = max_context_tokens - num_prompt_tokens
    if room < 1 or num_resumed_tokens > room:
        raise StatusError(
            Reason.CONTEXT_TOO_LONG,
            f"This model's maximum context length is {max_context_tokens} tokens, but the request has "
            f"{num_prompt_tokens + num_resumed_tokens} and asks for at least one more",
            field="token_ids",
        )


def max_image_bytes(card: ModelCard) -> int:
    """Upper bound of the size of all images of a request in bytes, for this model: what its message holds beside the
    longest prompt, and at least half of the message."""
    left = MAX_REQUEST_BYTES - _max_prompt_bytes(card) - _OTHER_REQUEST_BYTES
    return min(card.images.max_images * card.images.max_bytes, max(left, MAX_REQUEST_BYTES // 2))


def max_request_bytes(card: ModelCard) -> int:
    """Upper bound of a valid request's size in bytes for this model. Larger requests are refused unread."""
    of_vocabulary = (_TOKEN_BYTES + _BIAS_BYTES) * card.vocab_size
    return _max_prompt_bytes(card) + of_vocabulary + max_image_bytes(card) + _OTHER_REQUEST_BYTES


def _max_prompt_bytes(card: ModelCard) -> int:
    return _TOKEN_BYTES * max(card.max_context_tokens, card.max_evicting_context_tokens)


@dataclass(frozen=True, slots=True)
class Ends:
    """The conditions that end an answer: a stop token, or `max_tokens` generated tokens. None means no known limit."""

    stop_token_ids: frozenset[int]
    max_tokens: int | None

    def reason(self, num_tokens: int, last: int | None) -> tuple[int, int | None] | None:
        """Why an answer of `num_tokens` tokens, the last of them `last`, is complete: FINISH_REASON_*, and the stop
        token if one ended it. None if the answer is not complete."""
        if last is not None and last in self.stop_token_ids:
            return FINISH_REASON_STOP, last
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            return FINISH_REASON_LENGTH, None
        return None


def ends_of(sampling: SamplingParams, card: ModelCard, num_prompt_tokens: int) -> Ends:
    """The conditions that end the answer to a prompt. A card without a context length sets no limit."""
    limits = [sampling.max_tokens] if sampling.HasField("max_tokens") else []
    if card.max_context_tokens:
        limits.append(longest_context_of(card, sampling) - num_prompt_tokens)
    stop_token_ids = stop_tokens(sampling, sampling.stop_token_ids, card.eos_token_ids)
    return Ends(stop_token_ids, min(limits) if limits else None)


def stop_tokens(sampling: SamplingParams, own: Iterable[int], eos: Iterable[int]) -> frozenset[int]:
    """The tokens that end an answer: the request's `own`, and the model's `eos` unless the request ignores them. A
    constrained answer never ignores them, because it must be able to end."""
    ends_at_eos = sampling.HasField("constraint") or not sampling.ignore_eos
    return frozenset(own).union(eos) if ends_at_eos else frozenset(own)


def closing_message(
    request: GenerateRequest, num_prompt_tokens: int, token_ids: Sequence[int], num_cached_tokens: int, card: ModelCard
) -> GenerateResponse | None:
    """The final message if the generated tokens are a complete answer, otherwise None.

    An answer is complete but unfinished if a process died between its last token and the final message.
    """
    if not token_ids:
        return None
    found = ends_of(request.sampling, card, num_prompt_tokens).reason(len(token_ids), token_ids[-1])
    if found is None:
        return None
    reason, stop_token_id = found
    finish = Finish(
        reason=reason,  # type: ignore[arg-type]
        stop_token_id=stop_token_id,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        num_generated_tokens=len(token_ids),
    )
    return GenerateResponse(start_pos=len(token_ids), finish=finish)
