"""Beam search in chats and completions: which requests use it, and which fields it excludes (pure).

The fields are those of vLLM and of OpenVINO Model Server. With vLLM, `use_beam_search` asks for it. With OpenVINO Model
Server, a `best_of` over 1 does, which here means independent answers unless a field says that beams are meant.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Protocol

from headrace.gateway.chat.sampling import Sampling
from headrace.gateway.checks import check_range, unsupported
from headrace.protos.inference_pb2 import (
    EARLY_STOPPING_ALWAYS,
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_UNSPECIFIED,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    BeamSearch,
    EarlyStopping,
    GenerateResponse,
)
from headrace.protos.sampling_fields import NUMBERS
from headrace.protos.status import StatusError

MOST_LENGTH_PENALTY = 10.0
_STOPPING: dict[bool | str, EarlyStopping] = {
    False: EARLY_STOPPING_UNSPECIFIED,
    True: EARLY_STOPPING_ALWAYS,
    "never": EARLY_STOPPING_NEVER,
}
_WHY = "has no effect on a beam search, which compares the model's own log-probabilities; leave it out"


class BeamFields(Protocol):
    """The fields of a request; None if they are absent."""

    n: int | None
    best_of: int | None
    use_beam_search: bool | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None


def beam_search_of(request: BeamFields) -> BeamSearch | None:
    """The beam search that a request asks for. Raises `StatusError` for fields of one without the other."""
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    stopping = request.early_stopping or False
    check_range("length_penalty", penalty, -MOST_LENGTH_PENALTY, MOST_LENGTH_PENALTY)
    others = {"length_penalty": penalty != 1.0, "early_stopping": stopping is not False}
    asks = request.use_beam_search
    if asks is None:
        asks = (request.best_of or 1) > 1 and any(others.values())
    if not asks:
        for name, has_effect in others.items():
            if has_effect:
                raise unsupported(name, f"{name} belongs to beam search; set use_beam_search to true, or leave it out")
        return None
    width = request.best_of or request.n or 1
    return BeamSearch(width=width, length_penalty=penalty, early_stopping=_STOPPING[stopping])


def add_stop_texts(search: BeamSearch, sampling: Sampling, shown_ids: Collection[int]) -> None:
    """Let the beams end where `Choice` will cut their answers. `shown_ids` are special tokens that it reads as text."""
    if sampling.stop:
        search.stop.extend(sampling.stop)
        search.shown_token_ids.extend(sorted(shown_ids))
        search.shows_special_tokens = not sampling.skip_special_tokens


def answers_of(message: GenerateResponse) -> list[GenerateResponse]:
    """The answers that a beam search has found, each as if it were one generation; empty but for its last message."""
    answers = []
    for hypothesis in message.hypotheses:
        answer = GenerateResponse(
            token_ids=hypothesis.token_ids,
            logprobs=hypothesis.logprobs,
            num_cached_tokens=message.num_cached_tokens,
            num_disk_tokens=message.num_disk_tokens,
            num_peer_tokens=message.num_peer_tokens,
            prompt_logprobs=message.prompt_logprobs,
        )
        if hypothesis.HasField("stop_token_id"):
            answer.finish.reason = FINISH_REASON_STOP
            answer.finish.stop_token_id = hypothesis.stop_token_id
        else:
            answer.finish.reason = FINISH_REASON_LENGTH
        answers.append(answer)
    return answers


def in_callers_names(error: StatusError, sampling: Sampling) -> StatusError:
    """Replace the field names in a worker's error about a beam search by the names that callers use."""
    names = {
        "sampling.beam_search.width": sampling.choices_field,
        "sampling.beam_search.stop": "stop",
        "sampling.beam_search": "use_beam_search",
        "sampling.max_tokens": sampling.max_tokens_field,
        "sampling.logprobs": "logprobs",
    }
    field = error.field or ""
    if field not in names:
        return error
    message = error.message.replace(field, names[field])
    return StatusError(error.reason, message, field=names[field], retry_after_s=error.retry_after_s)


def check_beside_beams(sampling: Sampling) -> None:
    """Raise `StatusError` for a field that has no effect on a beam search."""
    for name in ("logit_bias", "allowed_token_ids", "bad_words", "samplers"):
        if getattr(sampling, name):
            raise unsupported(name, f"{name} {_WHY}")
    for name, number in NUMBERS.items():
        value = getattr(sampling.numbers, name)
        is_greedy = name == "temperature" and value == 0.0
        if name != "seed" and value is not None and number.on_wire(value) != number.default and not is_greedy:
            raise unsupported(name, f"{name} {_WHY}")
    if sampling.structure is not None:
        raise unsupported(sampling.structure.field, f"{sampling.structure.field} {_WHY}")
    if sampling.thinking_budget is not None:
        raise unsupported("thinking_token_budget", f"thinking_token_budget {_WHY}")
    if sampling.cache_eviction is not None and sampling.cache_eviction.max_cache_size:
        raise unsupported("cache_eviction", "cache_eviction is not available in a beam search; leave it out")
