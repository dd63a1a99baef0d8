"""A request as the engine sees it: its tokens, and how many of them are in the KV cache.

There are no prefill and decode phases. A request has tokens: the prompt and the tokens generated so far. The KV cache
holds the first `num_computed_tokens` of them. Each step computes more of them. When all are computed, the step samples
the next token:

    tokens    p p p p p p p p p p p p g g g
    computed  c c c c c c c c . . . . . . .
              |- 8 computed -| 7 to compute, then one more is sampled

A step may also verify a draft, tokens that are proposed to follow. It then samples a token after each of them, and
keeps those up to the first that differs. Only accepted tokens count as computed. A branch of a draft has other tokens
from some place on, and its own blocks.

A beam search computes several answers of the same length. `token_ids` and `block_table` are those of its best beam;
`beams` and `beam_tails` have the others.

This covers chunked prefill, prefix hits (start with some tokens computed), preemption (start again from 0 and keep the
generated tokens) and resumption after a failure (start with generated tokens).
"""

from __future__ import annotations

import enum
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.protos.priorities import BACKGROUND_PRIORITY
from headrace.worker.grammar.constraint import ConstraintSource
from headrace.worker.request.beam_search import BeamSearch, Candidates
from headrace.worker.request.eviction import Eviction
from headrace.worker.request.images import PlacedImage
from headrace.worker.request.logprobs import PromptLogprobs
from headrace.worker.request.params import SamplingParams


class FinishReason(enum.Enum):
    """Why a request ended without an error."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ENCODED = enum.auto()


class RequestState(enum.Enum):
    """The state of a request. Only the scheduler changes it."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class TokenPath(NamedTuple):
    """Tokens that are proposed to follow a request's own. The first `num_shared` also begin an earlier path of the same
    step, which samples a token after each of the others."""

    token_ids: Sequence[int]
    num_shared: int = 0


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of two sequences."""
    return next(
        (place for place, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
        min(len(left), len(right)),
    )


def row_after(paths: Iterable[TokenPath], token_ids: Sequence[int]) -> int | None:
    """The row of a step that follows these tokens, counted from the row after the request's own tokens; None if no path
    begins with them."""
    if not token_ids:
        return 0
    num_before, count = 0, len(token_ids)
    for path, num_shared in paths:
        if num_shared < count <= len(path) and list(path[:count]) == list(token_ids):
            return num_before + count - num_shared
        num_before += len(path) - num_shared
    return None


class Branch(NamedTuple):
    """An alternative to a request's draft: other proposed tokens, and the blocks in which a step computes them. These
    replace the blocks from `first_block` on in the block table."""

    path: TokenPath
    first_block: int
    blocks: Sequence[int]


class Replaced(NamedTuple):
    """The block `source` of a request's table, at `place`, was replaced by `block`, which has a copy of its computed
    part."""

    place: int
    source: int
    block: int


class StepNote(NamedTuple):
    """A step of a traced request: its start (monotonic clock) and duration in seconds, the request's tokens in it, and
    the tokens and requests of the whole batch."""

    start_s: float
    duration_s: float
    num_tokens: int
    num_batch_tokens: int
    num_batch_requests: int


class MirostatStates:
    """Mirostat's state before each token that this process generates: the largest surprise of the next token, in bits.

    All of them are kept, so that a token that is sampled again is sampled from the same state. They go to the client's
    side beside the tokens, because they depend on the probabilities of these: a worker that resumes the answer does not
    compute them again.
    """

    __slots__ = ("_first", "_states")

    def __init__(self, first: int, mu: float) -> None:
        """`mu` is the state before the generated token `first`."""
        self._first = first
        self._states = [mu]

    def before(self, position: int) -> float:
        """The state before the generated token at `position`, counted from 0."""
        return self._states[position - self._first]

    def note(self, position: int, mu: float) -> None:
        """The token at `position` was sampled, and this is the state after it."""
        place = position - self._first + 1
        if place == len(self._states):
            self._states.append(mu)
        else:
            self._states[place] = mu


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence. The service makes it; after that only the engine thread touches it.

    `token_ids` holds the prompt and the generated tokens. `block_table[i]` is the KV block of tokens
    `[i * block_size, (i + 1) * block_size)`. `block_hashes[i]` is the chained hash of that block's tokens, for the full
    blocks that were needed so far. Times are in seconds on the monotonic clock; 0 means that it has not happened.
    `steps` is a list if the request is traced.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    root_hash: int
    resume_token_ids: Sequence[int] = ()
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float = math.inf
    """When the caller's deadline is, on the clock of `arrival_s`."""
    max_wait_s: float = math.inf
    """How long it may wait for others before its first token."""
    prediction: Sequence[int] = ()
    """Tokens that the caller expects the answer to have. They are proposed as drafts."""
    tenant: str = ""
    """The caller's tenant, for fair shares among texts that are encoded."""
    num_first_text_tokens: int = 0
    """Of a pair of texts, the tokens of the first one; 0 for a single text."""
    kv_source: str = ""
    """Address of a worker that has more of the prompt's blocks."""
    num_source_tokens: int = 0
    """Tokens of the prompt that are expected to be cached there."""
    adapter_slot: int = -1
    """Slot of its adapter's weights, which stay there until it has ended; -1 without an adapter."""
    model_identity: str = ""
    """The identity of the model, with its adapter, that answers."""
    constraint_source: ConstraintSource | None = None
    """The constraint of the answer, as it was sent. `sampling` has it once it is compiled."""
    images: Sequence[PlacedImage] = ()
    """The images of its prompt, in the order of their tokens."""
    eviction: Eviction | None = None
    """The blocks that it evicts when it becomes long; None if it keeps all."""
    mirostat_mu: float | None = None
    """Mirostat's state after `resume_token_ids`, if it is known."""
    prompt_hashes: list[int] = field(default_factory=list)
    """The part of `block_hashes` that covers the prompt. Requests that arrived together with the same prompt and
    `root_hash` share the list, so each hash is computed once."""

    state: RequestState = RequestState.WAITING
    token_ids: array[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0
    """Tokens that were read from the disk for it."""
    num_peer_tokens: int = 0
    """Tokens that came from another worker for it."""
    block_table: array[int] = field(default_factory=lambda: array("i"))
    block_hashes: list[int] = field(default_factory=list)
    num_findable_blocks: int = 0
    num_preemptions: int = 0
    draft: Sequence[int] = ()
    """Tokens proposed to follow `token_ids`, while a step verifies them."""
    branches: Sequence[Branch] = ()
    """Other tokens that may follow, while the same step verifies them."""
    replaced: Replaced | None = None
    """The block that the last accepted branch has replaced."""
    beam_tails: list[array[int]] = field(default_factory=list)
    """For each beam except the first, its blocks after the full blocks of the prompt, which all beams share."""
    num_drafted: int = 0
    """Draft tokens that steps have verified."""
    num_accepted: int = 0
    """Draft tokens that became part of the answer."""
    is_accepted: bool = False
    """Whether it has been in the scheduler's queue."""
    was_fetched_for: bool = False
    """Whether nothing more is fetched for it: it has been fetched for, or it has waited too long."""
    fetch_from: int = sys.maxsize
    """The first of its blocks for which it has waited while they were fetched for another request."""
    fetch_wait_s: float = 0.0
    """How long it has waited for blocks from the disk or from another worker, in seconds."""
    image_wait_s: float = 0.0
    """How long it has waited for its images to be encoded, in seconds."""
    images_ready_s: float = 0.0
    """When it last had waited for them; 0 if it has not."""
    preparing_s: float = 0.0
    """How long it has waited for its grammar and its adapter before it was queued, in seconds."""
    lacks_blocks_since_s: float = 0.0
    """The time since when it is the first that waits, without enough free KV blocks. Others may overtake it for some
    time."""
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    steps: list[StepNote] | None = None
    images_end: int = field(init=False)
    """The place after the last token of an image; 0 without images."""
    position_shift: int = field(init=False)
    """The positions of tokens after all images, minus their places."""
    prompt_logprobs: PromptLogprobs = field(init=False)
    mirostat: MirostatStates | None = field(init=False)
    """Mirostat's states; None without mirostat."""
    beams: BeamSearch | None = field(init=False)
    """Its beam search; None if it is not one."""

    def __post_init__(self) -> None:
        self.prompt_logprobs = PromptLogprobs(self.sampling.num_prompt_logprobs or 0)
        self.images_end = self.images[-1].end if self.images else 0
        self.position_shift = sum(image.grid.shift for image in self.images if image.grid is not None)
        self.token_ids = array("I", self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(self.resume_token_ids)
        self.mirostat = None
        if self.sampling.mirostat:
            first = 2.0 * self.sampling.mirostat_tau if self.mirostat_mu is None else self.mirostat_mu
            self.mirostat = MirostatStates(len(self.resume_token_ids), first)
        search = self.sampling.beam_search
        self.beams = None if search is None else BeamSearch(search, self.sampling)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing. If so, every prompt token has to be computed:
        the logits of token i give the log-probability of token i + 1. A resumed request has already delivered them."""
        if self.sampling.num_prompt_logprobs is None or self.is_resumed:
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_prompt_logprob_values(self) -> int:
        """How many log-probabilities the request stores for its prompt: of its tokens, and of the most probable tokens
        at each position."""
        num_top = self.sampling.num_prompt_logprobs
        return 0 if num_top is None or self.is_resumed else (1 + num_top) * (self.num_prompt_tokens - 1)

    @property
    def is_background(self) -> bool:
        """Whether it only takes what all other requests leave."""
        return self.priority == BACKGROUND_PRIORITY

    @property
    def is_resumed(self) -> bool:
        """Whether the client already has the beginning of the answer. Such a request is never refused for load."""
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
    def num_output_tokens(self) -> int:
        """Generated tokens that were in outputs, or were resumed. A beam search has an output only at its end."""
        return 0 if self.beams is not None else self.num_generated_tokens

    @property
    def num_kv_tokens(self) -> int:
        """Tokens in the KV cache: the computed ones, without those whose blocks it has evicted."""
        return self.num_computed_tokens - (0 if self.eviction is None else self.eviction.num_evicted_tokens)

    @property
    def num_sequences(self) -> int:
        """The largest number of sequences that it has in a step, without those of drafts."""
        return 1 if self.beams is None else self.beams.width

    @property
    def is_searching(self) -> bool:
        """Whether its next step extends the beams of a search, each by one token."""
        return self.beams is not None and not self.beams.is_at_prompt

    @property
    def num_step_tokens(self) -> int:
        """How many tokens a step of its answer computes, without a draft."""
        return 1 if self.beams is None else len(self.beams.beams)

    def whole_until(self, place: int) -> int:
        """The largest number of its tokens, at most `place`, after which a step may end and a cached prefix may be
        used: not inside of an image whose tokens see each other."""
        for image in self.images:
            if image.is_whole and image.first < place < image.end:
                return image.first
        return place

    @property
    def computes_images(self) -> bool:
        """Whether tokens of its images are not computed yet."""
        return self.images_end > self.num_computed_tokens

    @property
    def is_replaying(self) -> bool:
        """Whether it evicts blocks and computes tokens of its answer again. Each of these tokens is then a separate
        sequence, as when it was generated, so the same blocks stay."""
        return (
            self.eviction is not None
            and self.num_computed_tokens >= self.num_prompt_tokens
            and self.num_uncomputed_tokens > 1
        )

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that are not in the KV cache yet."""
        return len(self.token_ids) - self.num_computed_tokens

    def advance_beams(self, candidates: Sequence[Candidates]) -> None:
        """Take a step of its search. `token_ids` are then those of the best beam."""
        assert self.beams is not None, "it is no beam search"
        self.beams.advance(candidates)
        del self.token_ids[self.num_prompt_tokens :]
        self.token_ids.extend(self.beams.beams[0].token_ids)

    def begin_beams(self) -> None:
        """If it is a beam search, forget its beams, which begin at the prompt again."""
        if self.beams is not None:
            self.beams.begin()
            del self.token_ids[self.num_prompt_tokens :]

    @property
    def paths(self) -> list[TokenPath]:
        """All proposed tokens: the draft, then its branches."""
        return [TokenPath(self.draft), *(branch.path for branch in self.branches)]
