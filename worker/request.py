"""A request as the engine sees it: tokens in, tokens out, and how far its KV cache has come.

There are no prefill and decode phases. A request has tokens (its prompt and what was generated so far) and
`num_computed_tokens` of them are in the KV cache; the engine lets the second number catch up with the first, and each
time it has, one more token is sampled:

    tokens    p p p p p p p p p p p p g g g
    computed  c c c c c c c c . . . . . . .
              |- 8 computed -| 7 to compute, then one more is sampled

Chunked prefill, prefix hits (start with more computed), preemption (start again with 0 computed and the generated
tokens kept) and resumption after a failure (start with generated tokens) are all this one thing.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.protos.status import StatusError

if TYPE_CHECKING:
    from headrace.worker.grammar import Constraint


# Beyond this, differences that float32 can hold near the best logit decide alone.
_MAX_INVERSE_TEMPERATURE = 1e6


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; fields and ranges are those of the message of the same name.

    `max_tokens` is never absent here: the service has capped it by the context. `stop_token_ids` includes the model's
    end-of-sequence tokens unless the caller ignores them; with a `constraint` always, for it must be able to end.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None

    inverse_temperature: float = field(init=False)
    is_greedy: bool = field(init=False)
    has_penalties: bool = field(init=False)
    has_edits: bool = field(init=False)
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        """What every step asks, answered once. `is_greedy`: the most probable token is always chosen. `has_penalties`:
        tokens that were seen are penalised. `has_edits`: logits are changed otherwise. `is_plain`: an argmax over the
        raw logits is all that is needed. `inverse_temperature`: what logits are multiplied with; 1 for greedy rows,
        from which nothing is drawn."""
        has_penalties = bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
        has_edits = bool(
            self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.constraint is not None
            or (self.min_tokens and self.stop_token_ids)
        )
        is_greedy = self.temperature == 0.0
        inverse = 1.0 if is_greedy else min(1.0 / self.temperature, _MAX_INVERSE_TEMPERATURE)
        object.__setattr__(self, "inverse_temperature", inverse)
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "has_penalties", has_penalties)
        object.__setattr__(self, "has_edits", has_edits)
        is_plain = is_greedy and self.num_logprobs is None and not has_penalties and not has_edits
        object.__setattr__(self, "is_plain", is_plain)


class FinishReason(enum.Enum):
    """Why a generation ended without an error."""

    STOP = enum.auto()
    LENGTH = enum.auto()


class RequestState(enum.Enum):
    """Where a request is. Only the scheduler moves it."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class StepNote(NamedTuple):
    """A step in which a traced request took part: when it began (monotonic) and how long it took, in seconds; tokens of
    the request, tokens and requests of the whole batch."""

    start_s: float
    duration_s: float
    num_tokens: int
    num_batch_tokens: int
    num_batch_requests: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence. Made by the service, then owned by the engine thread alone.

    `token_ids` are prompt and generated tokens together; `block_table[i]` is the KV block of tokens
    `[i * block_size, (i + 1) * block_size)`; `block_hashes[i]` is the chained hash of that block's tokens, for as many
    full blocks as were needed so far. Times are monotonic seconds, 0 for what has not happened; `steps` is filled for
    requests that are traced.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    root_hash: int
    resume_token_ids: Sequence[int] = ()
    priority: int = 0
    arrival_s: float = 0.0

    state: RequestState = RequestState.WAITING
    token_ids: array[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: array[int] = field(default_factory=lambda: array("i"))
    block_hashes: list[int] = field(default_factory=list)
    num_findable_blocks: int = 0
    num_preemptions: int = 0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    steps: list[StepNote] | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = array("I", self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(self.resume_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be read from logits, so that no token of the prompt
        may be left out. Those of token i + 1 are read where token i is computed."""
        return self.sampling.num_prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def is_resumed(self) -> bool:
        """Whether a client already has the beginning of the answer. Such a request is not turned away."""
        return len(self.resume_token_ids) > 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens so far, resumed ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The model's opinion at one position: natural logarithms, best first, rank from 1."""

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class RequestOutput(msgspec.Struct, frozen=True):
    """What one step gave to one request. With `finish` or `error` set it is the request's last.

    `start_pos` is the position of the first of `token_ids` among the generated tokens.
    """

    request: Request
    start_pos: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: StatusError | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None
