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
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.protos.status import StatusError

if TYPE_CHECKING:
    from headrace.worker.sampling.constraint import Constraint


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
    deadline_s: float = math.inf
    """When its caller gives up, on the clock of `arrival_s`."""
    max_wait_s: float = math.inf
    """How long it may wait for others before its first token."""
    prompt_hashes: list[int] = field(default_factory=list)
    """Those of `block_hashes` that are of the prompt alone: one list of all requests with this prompt and `root_hash`
    that came together, which grows as any of them needs more."""

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
    prompt_logprobs: PromptLogprobs = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_logprobs = PromptLogprobs(self.sampling.num_prompt_logprobs or 0)
        self.token_ids = array("I", self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(self.resume_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be read from logits, so that no token of the prompt
        may be left out. Those of token i + 1 are read where token i is computed. A resumed request has told them."""
        if self.sampling.num_prompt_logprobs is None or self.is_resumed:
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_prompt_logprob_values(self) -> int:
        """Log-probabilities that are kept of the prompt: of its tokens, and of the most probable ones at each."""
        num_top = self.sampling.num_prompt_logprobs
        return 0 if num_top is None or self.is_resumed else (1 + num_top) * (self.num_prompt_tokens - 1)

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


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from the second on, with the `num_top` best at each position. Kept as
    numbers, 8 bytes for each, where objects would take 70."""

    __slots__ = ("_logprobs", "_num_top", "_ranks", "_top_logprobs", "_top_token_ids")

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._logprobs, self._ranks = array("f"), array("I")
        self._top_logprobs, self._top_token_ids = array("f"), array("I")

    def __len__(self) -> int:
        return len(self._logprobs)

    def __getitem__(self, position: int) -> TokenLogprobs:
        if not 0 <= position < len(self._logprobs):
            raise IndexError(position)
        top = slice(position * self._num_top, (position + 1) * self._num_top)
        return TokenLogprobs(
            self._logprobs[position],
            self._ranks[position],
            tuple(self._top_token_ids[top]),
            tuple(self._top_logprobs[top]),
        )

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return (self[position] for position in range(len(self)))

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        """Add those of the next tokens."""
        for entry in entries:
            assert len(entry.top_token_ids) == len(entry.top_logprobs) == self._num_top
            self._logprobs.append(entry.logprob)
            self._ranks.append(entry.rank)
            self._top_token_ids.extend(entry.top_token_ids)
            self._top_logprobs.extend(entry.top_logprobs)


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
