"""Proposes drafts for the streams of a step, and learns from their acceptance.

scheduler   propose    streams -> drafts: the grammar's forced tokens, else those of `history` or of a smaller model
                       -> as many of them as the controller chooses
                       -> the smaller model computes those that are its own
                       -> of trees, the part that the controller chooses
scheduler   observe    accepted tokens -> acceptance rates, counters
step meter  observe_step    cost of the step -> controller
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

from headrace.worker.grammar.constraint import Constraint
from headrace.worker.kv.cache import KVCache
from headrace.worker.request.request import Request, TokenPath, num_common
from headrace.worker.speculation.acceptance_rate import AcceptanceRate
from headrace.worker.speculation.controller import (
    BranchChance,
    Planned,
    SizeCorrections,
    StepLine,
    best_counts,
    best_of_trees,
)
from headrace.worker.speculation.history import History
from headrace.worker.speculation.proposer import BRANCH_LEVEL, MODELLED, NO_DRAFT, Draft, Source
from headrace.worker.speculation.tree import TreeGain, part_of, paths_of, tree_gains

# The longest draft, and its length without a controller.
MAX_DRAFT = 15
FIXED_DRAFT = 7
# Batches of at least this many streams get proposals less often while no draft is worth verifying, because proposing
# takes 10 us for each stream.
_MANY_STREAMS = 4
_MOST_SKIPPED = 16
# Drafts of earlier text cost nothing, so they may be less likely than those of the smaller model by this much.
_FREE = 0.1


class GrammarDrafts(Protocol):
    """The next tokens that grammars predict; see `headrace.worker.sampling.sampler.BatchSampler`."""

    def forced_tokens(self, request: Request) -> Sequence[int]:
        """Tokens that the request's grammar is likely to force next."""
        ...

    def num_valid(self, request: Request, token_ids: Sequence[int]) -> int:
        """The number of the tokens, in order, that the grammar allows."""
        ...

    def branch(self, request: Request) -> Constraint | None:
        """The grammar after the request's latest token, for tokens that may be taken back."""
        ...


class SmallerModel(Protocol):
    """A model that proposes tokens; see `headrace.worker.speculation.model_drafts.ModelDrafts`."""

    source: Source
    max_tokens: int
    """The longest draft."""
    has_branches: bool
    """Whether it can propose a second first token."""

    def can_serve(self, request: Request) -> bool:
        """Whether it may draft for the request."""
        ...

    def line(self, contexts: Sequence[int]) -> StepLine:
        """The cost of its step with one token for each of these streams, which have `contexts` tokens."""
        ...

    def compute(
        self, streams: Sequence[Request], drafts: Sequence[Draft], line: StepLine, kv_cache: KVCache
    ) -> list[Draft]:
        """The drafts, with tokens for those that it makes itself."""
        ...

    def take_spent_s(self) -> float:
        """How many seconds it has computed since the last call."""
        ...

    def warm_up(self, num_tokens: Sequence[int], num_steps: int) -> None:
        """Before there are requests: compute prompts of these numbers of tokens, and `num_steps` decode steps after
        each."""
        ...


StepLineOf: TypeAlias = Callable[[Sequence[int]], StepLine | None]
"""Predicts the cost of steps of streams with these numbers of computed tokens; None while too little is known."""


class Speculation:
    """Drafts for one scheduler. `steps` predicts their cost; without it, drafts have a fixed length. Steps have at
    least `least_tokens` tokens, padding included, and at most `most_tokens`, or `small_decode` if their streams alone
    have no more."""

    def __init__(
        self,
        grammars: GrammarDrafts,
        steps: StepLineOf | None,
        *,
        most_tokens: int,
        least_tokens: int = 1,
        small_decode: int = 0,
        most_ms: float = math.inf,
        model_drafts: SmallerModel | None = None,
        looks_up: bool = True,
    ) -> None:
        self.counters = {f"{source.value}_tokens_{event}": 0 for source in Source for event in ("drafted", "accepted")}
        """Totals since the start."""
        self._grammars = grammars
        self._steps = steps
        self._least_tokens = least_tokens
        self._most_tokens = most_tokens
        self._small_decode = small_decode
        self._most_ms = most_ms
        self._histories: WeakKeyDictionary[Request, History] = WeakKeyDictionary()
        self._rates: WeakKeyDictionary[Request, AcceptanceRate] = WeakKeyDictionary()
        self._drafts: dict[Request, Draft] = {}
        self._rate = AcceptanceRate()
        self._corrections = SizeCorrections()
        self._size_before = 0
        self._num_skipped = self._num_to_skip = 0
        self.model_drafts = model_drafts
        """Drafts of a smaller model; None without one."""
        self.looks_up = looks_up
        """Whether earlier text and predictions are proposed."""

    def propose(self, wanted: dict[Request, int], kv_cache: KVCache) -> None:
        """Give drafts to streams, and add their tokens to the numbers of tokens to compute. No draft takes a block that
        a stream needs."""
        self._drafts.clear()
        if kv_cache.num_free_blocks < 2 * len(wanted) or self._is_skipped():
            return
        streams = list(wanted)
        drafts = [self._draft_of(request) for request in streams]
        if any(draft.token_ids for draft in drafts):
            for request, draft in zip(streams, self._chosen(streams, drafts, kv_cache), strict=True):
                if draft.token_ids:
                    request.draft = draft.token_ids
                    wanted[request] += len(draft.token_ids)
                    for path in draft.branches:
                        num_added = kv_cache.add_branch(request, path, num_spared=len(streams))
                        if not num_added:
                            break  # later branches may share tokens with this one
                        wanted[request] += num_added
                    self._drafts[request] = draft
        self._note_use(len(streams))

    def observe(self, request: Request, token_ids: Sequence[int]) -> tuple[int, int]:
        """Learn from a step that verified the request's draft, with its branches, and gave it these tokens. Returns how
        many tokens were proposed, and how many of them were accepted."""
        draft, paths = self._drafts[request], request.paths
        num_accepted = max(num_common(path.token_ids, token_ids) for path in paths)
        num_drafted = sum(len(path.token_ids) - path.num_shared for path in paths)
        for rate in (self._rate, self._rates.setdefault(request, AcceptanceRate.of_request())):
            _observe(rate, draft, token_ids)
            if draft.tree:
                _observe_tree(rate, draft, token_ids)
            elif len(paths) > 1:
                _observe_branch(rate, draft, paths[1].token_ids, token_ids)
        request.num_drafted += num_drafted
        request.num_accepted += num_accepted
        self.counters[f"{draft.source.value}_tokens_drafted"] += num_drafted
        self.counters[f"{draft.source.value}_tokens_accepted"] += num_accepted
        return num_drafted, num_accepted

    def observe_step(self, num_tokens: int, ratio: float | None) -> None:
        """Learn from a step of this many tokens, padding included. `ratio` is its time divided by its prediction; None
        for steps with prompts."""
        self._size_before = num_tokens
        if ratio is not None:
            self._corrections.observe(num_tokens, ratio)

    def take_draft_s(self) -> float:
        """The time in seconds that a smaller model has taken since the last call."""
        return self.model_drafts.take_spent_s() if self.model_drafts is not None else 0.0

    def _age_unused(self, streams: Sequence[Request], drafts: Sequence[Draft]) -> None:
        """Lower the confidence in the rates of drafts of the smaller model that were possible but not chosen."""
        for request, draft in zip(streams, drafts, strict=True):
            if draft.source in MODELLED and not draft.token_ids:
                self._rate.age(draft.source)
                if request in self._rates:
                    self._rates[request].age(draft.source)

    def _is_skipped(self) -> bool:
        self._num_skipped += 1
        return self._num_skipped <= self._num_to_skip

    def _note_use(self, num_streams: int) -> None:
        """After steps of many streams without any draft, skip more steps each time."""
        self._num_skipped = 0
        is_used = bool(self._drafts) or num_streams < _MANY_STREAMS or self._steps is None
        self._num_to_skip = 0 if is_used else min(max(1, 2 * self._num_to_skip), _MOST_SKIPPED)

    def _draft_of(self, request: Request) -> Draft:
        most = min(MAX_DRAFT, request.sampling.max_tokens - request.num_generated_tokens - 1)
        # Mirostat and DRY go on from token to token, so that the rows of a draft would be sampled one after the other.
        if most < 1 or request.eviction is not None or request.sampling.mirostat or request.sampling.has_dry:
            return NO_DRAFT
        if request.beams is not None:
            return NO_DRAFT
        forced = self._grammars.forced_tokens(request) if request.sampling.constraint is not None else ()
        if forced:
            return Draft(forced[:most], Source.GRAMMAR)
        draft = self._earlier_text(request, most) if self.looks_up else NO_DRAFT
        if request.sampling.constraint is not None and draft.token_ids:
            num_valid = self._grammars.num_valid(request, draft.token_ids)
            draft = draft._replace(token_ids=draft.token_ids[:num_valid])
        if self.model_drafts is None or not self.model_drafts.can_serve(request):
            return draft
        of_model = Draft(range(min(most, self.model_drafts.max_tokens)), self.model_drafts.source)
        is_better = draft.token_ids and self._chance(request, draft) + _FREE >= self._chance(request, of_model)
        return draft if is_better else of_model

    def _earlier_text(self, request: Request, most: int) -> Draft:
        history = self._histories.get(request)
        if history is None:
            history = self._histories[request] = History(request.prediction, request.prompt_token_ids)
        history.extend(request.token_ids)
        return history.draft(most)

    def _chosen(self, streams: Sequence[Request], drafts: Sequence[Draft], kv_cache: KVCache) -> Sequence[Draft]:
        """The part of each draft that a step should verify."""
        line = self._steps([request.num_computed_tokens for request in streams]) if self._steps is not None else None
        branches = [] if line is None else self._branches(streams, drafts, kv_cache)
        counts = self._counts(streams, drafts, line, branches, kv_cache.most_draft_tokens)
        drafts = [
            draft._replace(token_ids=draft.token_ids[:count]) for draft, count in zip(drafts, counts, strict=False)
        ]
        for branch, count in zip(branches, counts[len(streams) :], strict=True):
            draft = drafts[branch.stream]
            drafts[branch.stream] = draft._replace(branches=(TokenPath(draft.token_ids[:count]),) if count else ())
        if self.model_drafts is None or line is None:
            return drafts
        self._age_unused(streams, drafts)
        drafts = self.model_drafts.compute(streams, drafts, line, kv_cache)
        return self._pruned(streams, drafts, line, kv_cache) if any(draft.tree for draft in drafts) else drafts

    def _pruned(
        self, streams: Sequence[Request], drafts: Sequence[Draft], line: StepLine, kv_cache: KVCache
    ) -> Sequence[Draft]:
        """The drafts, with the paths of those parts of trees that a step should verify. The first token of a tree is
        always among them, so that something is learned from each."""
        gains: list[TreeGain] = []
        chosen: dict[int, list[int]] = {}
        num_tokens, expected = len(streams), float(len(streams))
        for stream, (request, draft) in enumerate(zip(streams, drafts, strict=True)):
            if draft.tree:
                chances = [self._chance(request, draft._replace(level=token.level)) for token in draft.tree]
                first, *more = tree_gains(stream, draft.tree, chances, partial(kv_cache.num_repeated, request))
                gains += more
                chosen[stream] = [first.number]
                num_tokens, expected = num_tokens + 1, expected + first.expected
            elif draft.token_ids:
                chance, length = self._chance(request, draft), len(draft.token_ids)
                num_tokens, expected = num_tokens + length, expected + sum(chance**n for n in range(1, length + 1))
        gains.sort(key=lambda gain: -gain.rank)
        count = best_of_trees(
            gains,
            Planned(len(streams), num_tokens, expected),
            line,
            self._corrections.of,
            size_before=self._size_before,
            most_tokens=self._most_in_step(len(streams), kv_cache.most_draft_tokens),
            most_ms=self._most_ms,
            least_tokens=self._least_tokens,
        )
        for gain in gains[:count]:
            chosen[gain.stream].append(gain.number)
        done = list(drafts)
        for stream, numbers in chosen.items():
            path, *branches = paths_of(part_of(drafts[stream].tree, numbers))
            done[stream] = drafts[stream]._replace(token_ids=path.token_ids, branches=branches)
        return done

    def _most_in_step(self, num_streams: int, most_draft_tokens: int) -> int:
        """How many tokens a step of these streams may have, with drafts."""
        most = self._small_decode if num_streams <= self._small_decode else self._most_tokens
        return min(most, num_streams + most_draft_tokens)

    def _chance(self, request: Request, draft: Draft) -> float:
        return self._rate.chance(draft, self._rates.get(request))

    def _branches(self, streams: Sequence[Request], drafts: Sequence[Draft], kv_cache: KVCache) -> list[BranchChance]:
        """The branches that drafts may have. The learned rate of a branch's first token counts only cases in which the
        draft's first token is wrong."""
        model = self.model_drafts
        if model is None or not model.has_branches or not kv_cache.has_branches:
            return []
        found = []
        for stream, (request, draft) in enumerate(zip(streams, drafts, strict=True)):
            if draft.source is model.source and draft.token_ids:
                chance = self._chance(request, draft)
                first = (1.0 - chance) * self._chance(request, draft._replace(level=BRANCH_LEVEL))
                num_repeated = kv_cache.num_repeated(request)
                found.append(BranchChance(stream, first, chance, len(draft.token_ids), num_repeated))
        return found

    def _counts(
        self,
        streams: Sequence[Request],
        drafts: Sequence[Draft],
        line: StepLine | None,
        branches: Sequence[BranchChance],
        most_draft_tokens: int,
    ) -> Sequence[int]:
        """The number of tokens of each draft to verify, at most `most_draft_tokens` in all, then that of each
        branch."""
        num_streams = len(streams)
        most = self._most_in_step(num_streams, most_draft_tokens)
        if self._steps is None:
            return _fixed_counts(drafts, most - num_streams)
        if line is None:
            return [0] * (num_streams + len(branches))
        is_modelled = [draft.source in MODELLED for draft in drafts]
        modelled = [request.num_computed_tokens for request, is_one in zip(streams, is_modelled, strict=True) if is_one]
        return best_counts(
            [self._chance(request, draft) for request, draft in zip(streams, drafts, strict=True)],
            [len(draft.token_ids) for draft in drafts],
            line,
            self._corrections.of,
            size_before=self._size_before,
            most_tokens=most,
            most_ms=self._most_ms,
            least_tokens=self._least_tokens,
            is_modelled=is_modelled,
            draft_line=self.model_drafts.line(modelled) if self.model_drafts is not None and modelled else None,
            branches=branches,
        )


def _observe(rate: AcceptanceRate, draft: Draft, token_ids: Sequence[int]) -> None:
    """Learn from a draft that these tokens followed."""
    rate.observe(draft, min(len(draft.token_ids), len(token_ids)), num_common(draft.token_ids, token_ids))


def _observe_branch(rate: AcceptanceRate, draft: Draft, branch: Sequence[int], token_ids: Sequence[int]) -> None:
    """Learn from a branch with other tokens than the draft from the first one on. Its first token tells something only
    if that of the draft was wrong."""
    if token_ids[0] != draft.token_ids[0]:
        is_right = token_ids[0] == branch[0]
        rate.observe(draft._replace(level=BRANCH_LEVEL), 1, int(is_right))
        if is_right:
            _observe(rate, draft._replace(token_ids=branch[1:]), token_ids[1:])


def _observe_tree(rate: AcceptanceRate, draft: Draft, token_ids: Sequence[int]) -> None:
    """Learn which of a tree's tokens would have been accepted, verified or not."""
    place = -1
    for token_id in token_ids:
        found = None
        for number, token in enumerate(draft.tree):
            if token.parent == place:
                is_right = token.token_id == token_id
                rate.observe(draft._replace(level=token.level), 1, int(is_right))
                found = number if is_right else found
        if found is None:
            return
        place = found


def _fixed_counts(drafts: Sequence[Draft], room: int) -> Sequence[int]:
    counts = []
    for draft in drafts:
        counts.append(min(len(draft.token_ids), FIXED_DRAFT, room))
        room -= counts[-1]
    return counts
