"""Heads in the format of EAGLE-3 propose the next tokens from features of the model's hidden states.

    token     0    1    2    3    4    5          the request; the model has computed tokens 0 to 4
    feature   f0   f1   f2   f3   f4
    slot      0    1    2    3    4               slot t of the heads' sequence: token t + 1 with feature t

The last slot gives the token after the request's last. For a token after that, the heads take their own state in place
of a feature. When the model has verified a proposal, its slots are computed again with the model's features.

Blocks that came from a disk or from another worker have no features. The heads then see only the context after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

from headrace.worker.grammar.constraint import Constraint
from headrace.worker.kv.cache import KVCache
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.draft_model import DraftModel, DraftRunner, DraftTimes, Progress
from headrace.worker.speculation.proposer import Source


class Features(Protocol):
    """The features of blocks; see `headrace.worker.draft_heads.features.FeatureStore`."""

    def first_usable(self, table: Sequence[int], start: int, end: int) -> int:
        """The index of the first block of `table` from which on tokens up to `end` have features without a gap; tokens
        before `start` need none."""
        ...


class HeadRunner(DraftRunner, Protocol):
    """Computes steps of heads; see `headrace.worker.draft_heads.eagle_runner.EagleRunner`."""

    @property
    def store(self) -> Features:
        """The features of the model's tokens."""
        ...


class EagleModel(DraftModel):
    """The heads, for the requests of one scheduler. The last slot of a block depends on the first token of the next
    one, so a request that finds a block by its hash computes that slot again. The cache must tell the features' store
    which blocks it takes (`FeatureStore.forget`)."""

    source: ClassVar[Source] = Source.EAGLE3
    _lag: ClassVar[int] = 1

    def __init__(
        self,
        runner: HeadRunner,
        sampler: BatchSampler,
        kv_cache: KVCache,
        times: DraftTimes,
        vocab_size: int,
    ) -> None:
        super().__init__(runner, sampler, kv_cache, times, vocab_size)
        self._store = runner.store
        self._starts: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def can_serve(self, request: Request) -> bool:
        """Whether the heads may draft for the request, and have features of its latest tokens."""
        return super().can_serve(request) and not self._follow(request).is_stuck

    def _follow(self, request: Request) -> Progress:
        self._note_replaced(request)
        progress = super()._follow(request)
        size, tokens = self._runner.block_size, request.token_ids
        known = max(len(progress.tokens), self._lag)
        if known <= progress.start * size:
            progress.start = 0
            progress.num_marked = 0
            known = self._lag
        if known < len(tokens):
            usable = self._store.first_usable(request.block_table, known - 1, len(tokens) - 1)
            if usable > (known - 1) // size:
                progress.start, known = usable, usable * size + self._lag
        progress.is_stuck = known >= len(tokens)
        if progress.is_stuck:
            progress.start = 0
            progress.num_marked = 0
            known = self._lag
        progress.tokens, progress.num_agreed = tokens[:known], known
        return progress

    def _note_replaced(self, request: Request) -> None:
        """If an accepted branch has replaced a block, use the new block: the heads' part of the old one was copied to
        it."""
        progress, replaced = self._progress.get(request), request.replaced
        request.replaced = None
        if progress is None or replaced is None:
            return
        place, source, block = replaced
        if progress.table[place : place + 1].tolist() == [source]:
            progress.table[place] = block

    def _shadow(self, request: Request, progress: Progress, constraint: Constraint | None) -> Request:
        shadow = super()._shadow(request, progress, constraint)
        self._starts[shadow] = progress.start
        return shadow

    def _view(self, shadow: Request) -> Request:
        start = self._starts.get(shadow, 0)
        first = start * self._runner.block_size + self._lag
        view = Request(shadow.request_id, (), shadow.sampling, shadow.root_hash)
        view.token_ids = shadow.token_ids[first:]
        view.block_table = shadow.block_table[start:]
        view.num_computed_tokens = shadow.num_computed_tokens - first
        return view

    def _num_kept(self, request: Request, shadow: Request) -> int:
        return request.num_tokens


class MtpModel(EagleModel):
    """As `EagleModel`, for a layer that predicts more tokens (MTP). Its features are the model's last hidden states."""

    source: ClassVar[Source] = Source.MTP
