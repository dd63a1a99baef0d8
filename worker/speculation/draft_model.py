"""A smaller model proposes the next tokens. It has its own graph, and its own keys and values for the blocks of the
pool.

    block          0      1      2      3           a request's block table leads to both
    target's KV    [....] [....] [....] [....]
    draft's KV     [....] [....] [..  ] [    ]      what the smaller model has computed of the same tokens

So a block that a prefix hit finds may also have the smaller model's part, and code that ends, preempts or resumes
requests need not know about drafts. The part is valid if the block's hash is that of the tokens that the smaller model
computed there (`_contents`). A block that is reused needs no notice, because other content has another hash.

Proposed tokens are drawn like the request's own, with its seed, position and parameters. So a drawn token is likely to
be the same if the two distributions are close.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from headrace.worker.grammar.constraint import Constraint
from headrace.worker.kv.cache import KVCache
from headrace.worker.model.batch import Batch, build_batch, one_by_one, padded
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import Sampled, Scheduled
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.controller import StepLine, rounded_size
from headrace.worker.speculation.proposer import MAX_MODEL_DRAFT, Source, TreeToken

# If the smaller model is further behind than this, it catches up before the request gets drafts.
MAX_BEHIND = 16


class DraftRunner(Protocol):
    """Computes steps of a model; see `headrace.worker.model.runner.OpenVINOModelRunner`."""

    vocab_size: int
    block_size: int

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Set the inputs of a step. With `keeps_logits`, the logits of the last step stay valid while it runs."""
        ...

    def run(self) -> Logits:
        """Compute the step and update the KV cache. Returns logits `[rows, vocab_size]`; the batch says which rows."""
        ...


class DraftTimes(Protocol):
    """The learned cost of the smaller model's steps."""

    def observe(self, sequences: Sequence[tuple[int, int]], padding: int, milliseconds: float) -> None:
        """Learn from a step: for each sequence the tokens before it and its new tokens."""
        ...

    def line(self, contexts: Sequence[int]) -> StepLine:
        """The cost of a step with one token for each of these streams, which have `contexts` tokens."""
        ...

    def tokens_for(self, milliseconds: float, past: int) -> int:
        """How many tokens of a prompt, after `past` others, a step of this many milliseconds computes."""
        ...

    def prompt_ms(self, past: int, num_tokens: int) -> float:
        """How many milliseconds `num_tokens` tokens of a prompt take, after `past` others."""
        ...


class Asked(NamedTuple):
    """A request to continue by up to `num_tokens` tokens. `constraint` is a branch of its grammar, if it has one. With
    `has_branch`, a second first token is proposed too."""

    request: Request
    num_tokens: int
    constraint: Constraint | None = None
    has_branch: bool = False


class Proposal(NamedTuple):
    """The proposed next tokens of a request, and `other`, a second choice for the first of them; None without one.
    `tree`: the tree of which they are a path, parents first; empty if none was grown."""

    token_ids: list[int]
    other: int | None = None
    tree: Sequence[TreeToken] = ()


@dataclass(slots=True)
class Progress:
    """The smaller model's state of a request: `tokens` that it has computed, in the blocks of `table`. The first
    `num_agreed` are the request's, and the hashes of the first `num_marked` blocks are recorded. It has computed
    nothing in the blocks before `start`."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    table: array[int] = field(default_factory=lambda: array("i"))
    num_agreed: int = 0
    num_marked: int = 0
    num_preemptions: int = 0
    start: int = 0
    is_stuck: bool = False
    """Whether it cannot continue the request now."""


class DraftModel:
    """The smaller model, for the requests of one scheduler. `runner` has allocated as many blocks as the pool has, and
    one for padding. `vocab_size` is the target's. Used by the engine thread only."""

    source: ClassVar[Source] = Source.DRAFT
    max_tokens: int = MAX_MODEL_DRAFT
    """The longest draft."""
    has_branches: ClassVar[bool] = False
    """Whether it can propose a second first token."""
    width: int = 1
    """How many tokens of a request it computes in a step, once it has caught up."""
    _reads_tokens: ClassVar[bool] = True
    """Whether it reads the request's tokens. Then it cannot serve a request with images, which it does not see."""
    _lag: ClassVar[int] = 0
    """How many places later a token is in the request than in the smaller model's sequence."""

    def __init__(
        self,
        runner: DraftRunner,
        sampler: BatchSampler,
        kv_cache: KVCache,
        times: DraftTimes,
        vocab_size: int,
    ) -> None:
        assert runner.block_size == kv_cache.block_size, "blocks of two sizes"
        self.times = times
        self.spent_s = 0.0
        """Time spent since it was last set to 0."""
        self._runner = runner
        self._sampler = sampler
        self._kv_cache = kv_cache
        self._vocab_size = vocab_size
        self._contents: list[int | None] = [None] * kv_cache.num_blocks
        self._progress: WeakKeyDictionary[Request, Progress] = WeakKeyDictionary()
        self._samplings: WeakKeyDictionary[Request, SamplingParams | None] = WeakKeyDictionary()
        self._num_known: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._shadows: WeakKeyDictionary[Request, Request] = WeakKeyDictionary()
        self._size = 0

    def can_serve(self, request: Request) -> bool:
        """Whether the smaller model knows all tokens of the request, and can follow its grammar."""
        if request.images and self._reads_tokens:
            return False
        if request not in self._samplings:
            self._samplings[request] = self._sampling_of(request)
        if self._samplings[request] is not None and not self._knows_tokens(request):
            self._samplings[request] = None
        return self._samplings[request] is not None

    def num_behind(self, request: Request) -> int:
        """How many tokens the smaller model has to compute before it proposes one, the latest included."""
        return request.num_tokens - len(self._follow(request).tokens)

    def catch_up(self, request: Request, num_tokens: int) -> None:
        """Compute up to `num_tokens` of the tokens that are missing, except the latest."""
        progress = self._follow(request)
        num_tokens = min(num_tokens, request.num_tokens - 1 - len(progress.tokens))
        if num_tokens > 0:
            shadow = self._shadow(request, progress, None)
            self._forget(request, len(progress.tokens), len(progress.tokens) + num_tokens)
            self._run(build_batch([Scheduled(self._view(shadow), num_tokens)], self._runner.block_size), padding=0)
            progress.tokens.extend(request.token_ids[len(progress.tokens) : len(progress.tokens) + num_tokens])
            progress.table = request.block_table[:]
            self._keep(request, shadow)

    def propose(self, asked: Sequence[Asked]) -> list[Proposal]:
        """Propose tokens for requests, which have blocks for them."""
        found: list[list[int]] = [[] for _ in asked]
        shadows = self._begin(asked)
        active = list(range(len(asked)))
        while active:
            sampled = self._step([shadows[place] for place in active])
            active = [
                place
                for place, entry in zip(active, sampled, strict=True)
                if self._take(shadows[place], found[place], entry.token_id)
                and len(found[place]) < asked[place].num_tokens
            ]
        self._end(asked, shadows)
        return [Proposal(token_ids) for token_ids in found]

    def warm_up(self, num_tokens: Sequence[int], num_steps: int) -> None:
        """Run prompts of this many tokens and decode steps, before there are requests, to build kernels and learn
        costs."""
        blocks = array("i", range(min(self._kv_cache.num_blocks_for(max(num_tokens) + 1), len(self._contents))))
        most = len(blocks) * self._runner.block_size - 1
        for count in (*num_tokens, *num_tokens):
            request = Request("warm-up", [0] * (min(count, most) + 1), SamplingParams(1, 0, temperature=0.0), 0)
            request.block_table = blocks
            request.num_computed_tokens = self._lag
            num_new = request.num_tokens - 1 - self._lag
            self._run(build_batch([Scheduled(self._view(request), num_new)], self._runner.block_size), padding=0)
            for _ in range(num_steps):
                request.num_computed_tokens = request.num_tokens - 1
                self._step([request])
        self.spent_s = 0.0

    def _begin(self, asked: Sequence[Asked]) -> list[Request]:
        """Make the state from which proposals begin: the requests as the smaller model sees them."""
        shadows = []
        for request, count, constraint, _ in asked:
            progress = self._follow(request)
            self._forget(request, len(progress.tokens), request.num_tokens + count - 1)
            shadows.append(self._shadow(request, progress, constraint))
        return shadows

    def _end(self, asked: Sequence[Asked], shadows: Sequence[Request]) -> None:
        """Record what the smaller model has computed for proposals, and keep the shadows for the next ones."""
        for (request, *_), shadow in zip(asked, shadows, strict=True):
            progress = self._progress[request]
            progress.tokens = shadow.token_ids[: self._num_kept(request, shadow)]
            progress.table = request.block_table[:]
            self._keep(request, shadow)

    def _take(self, shadow: Request, found: list[int], token_id: int) -> bool:
        """Add a proposed token. Returns whether another may follow."""
        if not 0 <= token_id < self._vocab_size:
            return False
        found.append(token_id)
        shadow.token_ids.append(token_id)
        return token_id not in shadow.sampling.stop_token_ids

    def _step(self, shadows: Sequence[Request]) -> Sequence[Sampled]:
        """Compute all missing tokens of some requests, and sample the next."""
        return self._sampler.sample(shadows, self._forward(shadows))

    def _forward(self, shadows: Sequence[Request]) -> Logits:
        """Compute all missing tokens of some requests. Returns the logits of the next ones, a row for each."""
        scheduled = [Scheduled(self._view(shadow), shadow.num_uncomputed_tokens) for shadow in shadows]
        num_tokens = sum(count for _, count in scheduled)
        # A change in the number of tokens costs time (docs/decisions/scheduling.md); a few more tokens cost little.
        if not num_tokens <= self._size <= max(2, 2 * num_tokens):
            self._size = rounded_size(max(2, num_tokens))
        batch = one_by_one(scheduled, self._runner.block_size)
        logits = self._run(batch, padding=self._size - num_tokens)
        for shadow in shadows:
            shadow.num_computed_tokens = shadow.num_tokens
        return logits

    def _run(self, batch: Batch, *, padding: int) -> Logits:
        sequences = [
            (past, end - begin)
            for past, begin, end in zip(
                batch.past_lens.tolist(),
                batch.subsequence_begins[:-1].tolist(),
                batch.subsequence_begins[1:].tolist(),
                strict=True,
            )
        ]
        start_s = time.perf_counter()
        self._runner.bind(padded(batch, padding, len(self._contents)) if padding else batch, keeps_logits=False)
        logits = self._runner.run()
        seconds = time.perf_counter() - start_s
        self.spent_s += seconds
        self.times.observe(sequences, padding, 1000 * seconds)
        return logits

    def _follow(self, request: Request) -> Progress:
        """Find how many of the request's tokens the smaller model has, after the request's tokens or blocks have
        changed."""
        progress = self._progress.get(request)
        if progress is None or progress.num_preemptions != request.num_preemptions:
            progress = self._progress[request] = Progress(num_preemptions=request.num_preemptions)
        size = self._runner.block_size
        table = request.block_table
        tokens = request.token_ids
        agreed, most = progress.num_agreed, min(len(progress.tokens), len(tokens) - 1)
        while agreed < most and progress.tokens[agreed] == tokens[agreed]:
            agreed += 1
        agreed = 0 if agreed <= self._lag else agreed
        num_blocks = -(-agreed // size)
        if progress.table[:num_blocks] != table[:num_blocks]:
            first = next(
                place for place, (left, right) in enumerate(zip(progress.table, table, strict=False)) if left != right
            )
            agreed, progress.num_marked = min(agreed, first * size), min(progress.num_marked, first)
        for index in range(progress.num_marked, agreed // size) if progress.start == 0 else ():
            self._contents[table[index]] = self._kv_cache.hash_of(request, index)
        while agreed % size == 0 and agreed + size < len(tokens) and agreed // size < len(table):
            index = agreed // size
            if self._contents[table[index]] != self._kv_cache.hash_of(request, index):
                break
            agreed += size
        progress.tokens = tokens[:agreed]
        progress.table = table[:]
        progress.num_agreed, progress.num_marked = agreed, agreed // size
        return progress

    def _forget(self, request: Request, start: int, end: int) -> None:
        """Forget the content of the blocks of tokens `start` to `end`, because they are about to be written."""
        size = self._runner.block_size
        for index in range(start // size, -(-end // size)):
            self._contents[request.block_table[index]] = None

    def _shadow(self, request: Request, progress: Progress, constraint: Constraint | None) -> Request:
        """The request as the smaller model sees it. It is used by one proposal, and by others after `_keep`."""
        sampling = self._samplings[request]
        assert sampling is not None
        if constraint is not None:
            vocab_size = self._runner.vocab_size
            sampling = replace(sampling, constraint=replace(constraint, vocab_size=vocab_size))
        shadow = self._shadows.pop(request, None)
        if shadow is None:
            shadow = Request(request.request_id, (), sampling, request.root_hash)
            shadow.prompt_token_ids, shadow.num_prompt_tokens = request.prompt_token_ids, request.num_prompt_tokens
        shadow.sampling = sampling
        shadow.token_ids.extend(request.token_ids[len(shadow.token_ids) :])
        shadow.block_table = request.block_table
        shadow.num_computed_tokens = len(progress.tokens)
        return shadow

    def _keep(self, request: Request, shadow: Request) -> None:
        """Keep the shadow for the request's next proposal, without the proposed tokens: samplers remember the tokens of
        requests, and to count them again in each proposal would take milliseconds."""
        self._sampler.take_back(shadow, request.num_tokens)
        del shadow.token_ids[request.num_tokens :]
        self._shadows[request] = shadow

    def _view(self, shadow: Request) -> Request:
        """The request's tokens and blocks as the smaller model's sequence has them."""
        return shadow

    def _num_kept(self, request: Request, shadow: Request) -> int:
        """How many tokens of a proposal's shadow the smaller model keeps if they are accepted."""
        return shadow.num_computed_tokens

    def _knows_tokens(self, request: Request) -> bool:
        """Whether the tokens that the request has got since the last call are in the smaller model's vocabulary."""
        size, num_known = self._runner.vocab_size, self._num_known.get(request, 0)
        if size < self._vocab_size:
            self._num_known[request] = request.num_tokens
            return max(request.token_ids[num_known:], default=0) < size
        return True

    def _sampling_of(self, request: Request) -> SamplingParams | None:
        """The request's parameters for the smaller model, which may know fewer tokens; None if it cannot serve it."""
        size, sampling = self._runner.vocab_size, request.sampling
        if sampling.constraint is not None and size > self._vocab_size:
            return None
        allowed = tuple(token_id for token_id in sampling.allowed_token_ids if token_id < size)
        if sampling.allowed_token_ids and not allowed:
            return None
        return replace(
            sampling,
            num_logprobs=None,
            num_prompt_logprobs=None,
            constraint=None,
            logit_bias=tuple(entry for entry in sampling.logit_bias if entry[0] < size),
            allowed_token_ids=allowed,
            bad_words=tuple(word for word in sampling.bad_words if max(word) < size),
            stop_token_ids=frozenset(token_id for token_id in sampling.stop_token_ids if token_id < size),
        )
