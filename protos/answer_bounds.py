"""When an answer is complete, and which prompts leave room for one: rules that gateway, router and worker share. Pure.

An answer whose tokens are complete needs no worker any more, only the message with its finish. Whoever holds the tokens
when a worker, a router or a connection is lost makes that message by the same rule as the worker would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

# Bytes of a request besides those of its tokens: a grammar has at most 256 KiB, and what remains is small.
_OTHER_REQUEST_BYTES = 1 << 20
# Bytes of a token id on the wire, and of an entry of logit_bias; allowed_token_ids may name each token besides.
_TOKEN_BYTES = 5
_BIAS_BYTES = 14


def check_context(num_prompt_tokens: int, num_resumed_tokens: int, max_context_tokens: int) -> None:
    """Raise StatusError (CONTEXT_TOO_LONG) if a prompt leaves no room for an answer, or less than was generated."""
    room = max_context_tokens - num_prompt_tokens
    if room < 1 or num_resumed_tokens > room:
        raise StatusError(
            Reason.CONTEXT_TOO_LONG,
            f"This model's maximum context length is {max_context_tokens} tokens, but the request has "
            f"{num_prompt_tokens + num_resumed_tokens} and asks for at least one more",
            field="token_ids",
        )


def max_request_bytes(card: ModelCard) -> int:
    """Bytes on the wire that no valid request for this model exceeds, so that others are refused unread."""
    of_vocabulary = (_TOKEN_BYTES + _BIAS_BYTES) * card.vocab_size
    return _TOKEN_BYTES * card.max_context_tokens + of_vocabulary + _OTHER_REQUEST_BYTES


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends an answer: a stop token as its last, or `max_tokens` generated tokens. None: no such bound is known."""

    stop_token_ids: frozenset[int]
    max_tokens: int | None

    def reason(self, num_tokens: int, last: int | None) -> tuple[int, int | None] | None:
        """Why an answer of that many tokens is complete: FINISH_REASON_*, and the stop token if it was one. None if it
        is not. `last` is its last token."""
        if last is not None and last in self.stop_token_ids:
            return FINISH_REASON_STOP, last
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            return FINISH_REASON_LENGTH, None
        return None


def ends_of(sampling: SamplingParams, card: ModelCard, num_prompt_tokens: int) -> Ends:
    """What ends the answer to a prompt. A card without a context length bounds nothing."""
    limits = [sampling.max_tokens] if sampling.HasField("max_tokens") else []
    if card.max_context_tokens:
        limits.append(card.max_context_tokens - num_prompt_tokens)
    stop_token_ids = stop_tokens(sampling, sampling.stop_token_ids, card.eos_token_ids)
    return Ends(stop_token_ids, min(limits) if limits else None)


def stop_tokens(sampling: SamplingParams, own: Iterable[int], eos: Iterable[int]) -> frozenset[int]:
    """The tokens that end an answer: the request's `own`, and the model's `eos` unless the request ignores them. A
    constrained answer must be able to end, whatever the request ignores."""
    ends_at_eos = sampling.HasField("constraint") or not sampling.ignore_eos
    return frozenset(own).union(eos) if ends_at_eos else frozenset(own)


def closing_message(
    request: GenerateRequest, num_prompt_tokens: int, token_ids: Sequence[int], num_cached_tokens: int, card: ModelCard
) -> GenerateResponse | None:
    """The message with the finish, if the generated tokens are a complete answer already; else None.

    This happens if a process died between the last token and the finish: no worker could add anything.
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
