"""Chooses the requests for which a smaller model drafts. Handles requests for which it must catch up, lacks blocks or
fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from weakref import WeakSet

from headrace.worker.kv.cache import KVCache
from headrace.worker.request.request import Request, TokenPath
from headrace.worker.speculation.controller import StepLine
from headrace.worker.speculation.draft_model import MAX_BEHIND, Asked, DraftModel, Proposal
from headrace.worker.speculation.proposer import NO_DRAFT, Draft
from headrace.worker.speculation.speculation import GrammarDrafts

log = logging.getLogger(__name__)

# Catching up with a request may cost at most this share of the time that drafts may save for the rest of its answer.
_WORTH = 0.5
# After this many steps in a row in which it failed and did nothing, the smaller model is not used any more.
_MOST_FAILURES = 8


class ModelDrafts:
    """The drafts of a smaller model. If it fails for a request, the request continues without drafts."""

    def __init__(self, model: DraftModel, grammars: GrammarDrafts) -> None:
        self.source = model.source
        self.max_tokens = model.max_tokens
        self.has_branches = model.has_branches
        self._model = model
        self._grammars = grammars
        self._barred: WeakSet[Request] = WeakSet()
        self._num_failures = 0
        self._has_worked = self._has_failed = False

    def can_serve(self, request: Request) -> bool:
        """Whether the smaller model may draft for the request."""
        is_usable = self._num_failures < _MOST_FAILURES and request not in self._barred
        return is_usable and self._model.can_serve(request)

    def line(self, contexts: Sequence[int]) -> StepLine:
        """The cost of a step of the smaller model with one token for each of these streams, which have `contexts`
        tokens; in trees, with as many tokens as each has in a step."""
        line = self._model.times.line(contexts)
        more_ms = (self._model.width - 1) * line.token_ms
        return line._replace(base_ms=line.base_ms + len(contexts) * more_ms, token_ms=line.token_ms + more_ms)

    def warm_up(self, num_tokens: Sequence[int], num_steps: int) -> None:
        """See `DraftModel.warm_up`."""
        self._model.warm_up(num_tokens, num_steps)

    def take_spent_s(self) -> float:
        """How many seconds the smaller model has computed since the last call."""
        spent_s, self._model.spent_s = self._model.spent_s, 0.0
        return spent_s

    def compute(
        self, streams: Sequence[Request], drafts: Sequence[Draft], line: StepLine, kv_cache: KVCache
    ) -> list[Draft]:
        """The drafts, with tokens for those that the smaller model makes. `line` is the cost of the target's steps.

        A draft is dropped if there are no blocks for it, or if the smaller model still has to catch up with the
        request. It catches up in pieces, so that no step takes twice as long."""
        done = [NO_DRAFT if draft.source is self.source else draft for draft in drafts]
        asked, behind = self._ask_all(streams, drafts, kv_cache)
        for place, proposal in self._proposals(asked).items():
            done[place] = _completed(drafts[place], proposal, streams[place].sampling.stop_token_ids)
        if behind is not None:
            with self._noting(behind[0]):
                self._catch_up(*behind, line, len(streams))
        self._count_failure()
        return done

    def _ask_all(
        self, streams: Sequence[Request], drafts: Sequence[Draft], kv_cache: KVCache
    ) -> tuple[dict[int, Asked], tuple[Request, int] | None]:
        """Choose the requests for which the smaller model computes drafts in this step.

        Returns them by their index in `streams`; and, if any, the first request of which the smaller model has too few
        tokens in its KV cache, with the number of draft tokens that it wants.
        """
        asked: dict[int, Asked] = {}
        behind: tuple[Request, int] | None = None
        for place, (request, draft) in enumerate(zip(streams, drafts, strict=True)):
            count = len(draft.token_ids)
            if draft.source is not self.source or not count:
                continue
            with self._noting(request):
                if self._model.num_behind(request) > MAX_BEHIND:
                    behind = behind or (request, count)
                elif self._has_blocks(request, count, len(streams), kv_cache):
                    self._ask(place, request, draft, asked)
        return asked, behind

    def _proposals(self, asked: Mapping[int, Asked]) -> dict[int, Proposal]:
        """The proposals, by index in the step's streams. If proposing for all fails, each request is tried alone, and
        only those that fail get none."""
        if len(asked) > 1:
            try:
                found = self._model.propose(list(asked.values()))
            except Exception as error:
                log.warning("the draft model failed for %d requests; trying each alone: %r", len(asked), error)
            else:
                self._has_worked = True
                return dict(zip(asked, found, strict=True))
        proposals = {}
        for place, one in asked.items():
            with self._noting(one.request):
                (proposals[place],) = self._model.propose([one])
                self._has_worked = True
        return proposals

    def _ask(self, place: int, request: Request, draft: Draft, asked: dict[int, Asked]) -> None:
        """Add a request to draft for. It gets no draft if the place in its grammar is not known yet."""
        constraint = None
        if request.sampling.constraint is not None:
            constraint = self._grammars.branch(request)
            if constraint is None:
                return
        asked[place] = Asked(request, len(draft.token_ids), constraint, bool(draft.branches))

    def _has_blocks(self, request: Request, count: int, num_streams: int, kv_cache: KVCache) -> bool:
        """Take blocks for a draft, unless a stream may need them."""
        needed = kv_cache.num_blocks_for(request.num_tokens + count) - len(request.block_table)
        if needed > 0 and kv_cache.num_free_blocks < needed + num_streams:
            return False
        return kv_cache.reserve(request, request.num_tokens + count)

    def _catch_up(self, request: Request, count: int, line: StepLine, num_streams: int) -> None:
        """Compute a piece of the missing tokens, if drafts of `count` tokens will save more time than this costs."""
        model = self._model
        num_behind = model.num_behind(request) - 1
        past = request.num_tokens - 1 - num_behind
        num_left = request.sampling.max_tokens - request.num_generated_tokens
        may_save_ms = num_left * line.base_ms / num_streams * count / (count + 1)
        if model.times.prompt_ms(past, num_behind) > _WORTH * may_save_ms:
            self._barred.add(request)
        else:
            model.catch_up(request, max(MAX_BEHIND, model.times.tokens_for(line.base_ms, past)))
            self._has_worked = True

    @contextlib.contextmanager
    def _noting(self, request: Request) -> Iterator[None]:
        """If the block raises, the request gets no more drafts."""
        try:
            yield
        except Exception:
            log.exception("the draft model failed")
            self._barred.add(request)
            self._has_failed = True

    def _count_failure(self) -> None:
        """Count steps in which the smaller model failed for all requests."""
        if self._has_worked:
            self._num_failures = 0
        elif self._has_failed:
            self._num_failures += 1
            if self._num_failures == _MOST_FAILURES:
                log.error("the draft model failed %d times in a row; it is not used any more", _MOST_FAILURES)
        self._has_worked = self._has_failed = False


def _completed(draft: Draft, proposal: Proposal, stop_token_ids: Collection[int]) -> Draft:
    """The draft with proposed tokens. Its branch continues as the draft does, unless it stops."""
    token_ids, other, tree = proposal
    branches: Sequence[TokenPath] = ()
    if other is not None and token_ids:
        length = len(draft.branches[0].token_ids)
        branches = [TokenPath([other] if other in stop_token_ids else [other, *token_ids[1:length]])]
    return draft._replace(token_ids=token_ids, branches=branches, tree=tree)
