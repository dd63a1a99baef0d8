"""For each model, the workers that take requests, and those with room in their batch.

Each report updates only its own worker, so its cost does not depend on the size of the fleet. Waiting requests are
considered again only when a worker has room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.protos import worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.fleet.links import LinkState, WorkerLink
from headrace.router.fleet.routed_request import PlacedRequest, Prefilled, RoutedRequest
from headrace.router.placement.candidates import Candidates, CandidateTable, Places
from headrace.router.placement.policy import LONG_PROMPT_MS, is_long
from headrace.router.placement.prefix_index import Depths, PrefixIndex
from headrace.router.placement.rates import Priors
from headrace.router.placement.transfers import LEAST_MOVED, BlockFacts, Transfers

# Gateways learn of a new tokenizer within this time.
_NEW_TOKENIZER_S = 2.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Some workers of a model, sorted by address, which gives all routers the same order. `worker_ids` are their
    addresses, and `numbers` maps each address to its position in the order. `chains` has, for each layout of blocks,
    the card with the longest context and the positions of its workers. `tokenizers` are the hashes of the workers'
    tokenizer bundles."""

    links: Sequence[tuple[WorkerLink, worker_pb2.ModelCard]]
    worker_ids: Sequence[str]
    numbers: dict[str, int]
    slots: Places
    chains: Sequence[tuple[worker_pb2.ModelCard, Places]]
    tokenizers: frozenset[str]
    least_context: int = 0
    """The shortest context of these workers without eviction of KV blocks."""
    has_roles: bool = False
    """Whether some of them are reserved for long prompts, and others can continue the answers."""
    outside: Sequence[WorkerLink] = ()
    """Workers that are reserved for other requests, from which these workers may fetch blocks."""
    image_bounds: frozenset[int] = frozenset()
    """Their bounds on the pixels that they see of an image; 0 for workers that take text only."""
    _of_tokenizer: dict[str, Members] = field(default_factory=dict)
    _of_images: dict[int, Members] = field(default_factory=dict)
    _of_stage: dict[bool, Members] = field(default_factory=dict)

    @classmethod
    def of(cls, links: Sequence[tuple[WorkerLink, worker_pb2.ModelCard]]) -> Members:
        """The given workers, in the given order."""
        worker_ids = [link.address for link, _ in links]
        cards: dict[tuple[str, int, str], worker_pb2.ModelCard] = {}
        numbers: dict[tuple[str, int, str], list[int]] = {}
        for number, (_, card) in enumerate(links):
            chain = (card.fingerprint, card.block_size, card.kv_layout)
            known = cards.setdefault(chain, card)
            if card.max_context_tokens > known.max_context_tokens:
                cards[chain] = card
            numbers.setdefault(chain, []).append(number)
        return cls(
            links,
            worker_ids,
            {worker_id: number for number, worker_id in enumerate(worker_ids)},
            np.array([link.slot for link, _ in links], np.intp),
            [(card, np.array(numbers[chain], np.intp)) for chain, card in cards.items()],
            frozenset(card.tokenizer_sha256 for _, card in links),
            min((card.max_context_tokens for _, card in links), default=0),
            bool(
                _layouts(links, worker_pb2.ROLE_PREFILL)
                & _layouts(links, worker_pb2.ROLE_DECODE, worker_pb2.ROLE_UNSPECIFIED)
            ),
            image_bounds=frozenset(card.images.max_view_pixels for _, card in links),
        )

    def __len__(self) -> int:
        """Number of workers."""
        return len(self.links)

    def where(self, is_meant: Callable[[WorkerLink, worker_pb2.ModelCard], bool]) -> Members:
        """The workers for which `is_meant` returns True."""
        return Members.of([(link, card) for link, card in self.links if is_meant(link, card)])

    def of_tokenizer(self, sha256: str) -> Members:
        """The workers with this tokenizer, or all workers if `sha256` is empty."""
        if not sha256 or self.tokenizers == {sha256}:
            return self
        if sha256 not in self.tokenizers:
            return NOBODY
        if sha256 not in self._of_tokenizer:
            self._of_tokenizer[sha256] = self.where(lambda _, card: card.tokenizer_sha256 == sha256)
        return self._of_tokenizer[sha256]

    def of_images(self, view_pixels: int) -> Members:
        """The workers that see images within this bound, or all workers if it is 0."""
        if not view_pixels or self.image_bounds == {view_pixels}:
            return self
        if view_pixels not in self.image_bounds:
            return NOBODY
        if view_pixels not in self._of_images:
            self._of_images[view_pixels] = self.where(lambda _, card: card.images.max_view_pixels == view_pixels)
        return self._of_images[view_pixels]

    def fitting(self, request: RoutedRequest, priors: Priors) -> Members:
        """The workers whose context holds the request and an answer of the expected length. If there are none, those
        whose context holds one more token."""
        num_expected = request.num_expected_tokens(priors)
        if num_expected <= self.least_context and not request.has_eviction_rule:  # as nearly always
            return self
        contexts = [request.context_at(card) for _, card in self.links]
        least = num_expected if num_expected <= max(contexts, default=0) else request.least_context
        if least <= min(contexts, default=0):
            return self
        return Members.of([one for one, context in zip(self.links, contexts, strict=True) if least <= context])

    def of_stage(self, *, computes_prompt: bool) -> Members:
        """The workers for long prompts, or those for all other requests. A worker is reserved for long prompts only if
        another one can fetch its blocks."""
        if computes_prompt not in self._of_stage:
            layouts = _layouts(self.links, worker_pb2.ROLE_DECODE, worker_pb2.ROLE_UNSPECIFIED)
            away = worker_pb2.ROLE_DECODE if computes_prompt else worker_pb2.ROLE_PREFILL
            links = [
                (link, card)
                for link, card in self.links
                if card.role != away and (card.role != worker_pb2.ROLE_PREFILL or card.kv_layout in layouts)
            ]
            within = {link for link, _ in links}
            found = replace(Members.of(links), outside=[link for link, _ in self.links if link not in within])
            self._of_stage[computes_prompt] = found
        return self._of_stage[computes_prompt]

    def candidates(self, table: CandidateTable) -> Candidates:
        """These workers as candidates for the policy."""
        return Candidates(self.worker_ids, self.numbers, table.at(self.slots))

    def cached_blocks(self, index: PrefixIndex, hashes: Callable[[worker_pb2.ModelCard], Sequence[int]]) -> Depths:
        """For each worker, the number of blocks from the start of a prompt that are cached there and can be used.
        `hashes` gives the hashes of the prompt's blocks for a card."""
        if len(self.chains) == 1:  # as nearly always
            card = self.chains[0][0]
            return _cached_blocks(index, card, hashes(card), self.slots)
        cached_blocks: Depths = np.zeros(len(self), np.intp)
        for card, numbers in self.chains:
            cached_blocks[numbers] = _cached_blocks(index, card, hashes(card), self.slots[numbers])
        return cached_blocks

    def transfers(
        self,
        index: PrefixIndex,
        hashes: Callable[[worker_pb2.ModelCard], Sequence[int]],
        cached_blocks: Depths,
        leaving: Iterable[WorkerLink],
        prefilled: Prefilled | None = None,
    ) -> Transfers | None:
        """What these workers, which have `cached_blocks` in memory, could fetch from their disks, from one another,
        from workers that are `leaving`, and from those outside. All workers that can exchange blocks with the worker of
        `prefilled` could fetch the prompt there. None if there is nothing to fetch."""
        others = [link for link in (*leaving, *self.outside) if link.card is not None]
        has_peers = others or (len(self) > 1 and cached_blocks.max() >= cached_blocks.min() + LEAST_MOVED)
        if not has_peers and not len(index.disk) and prefilled is None:
            return None
        found = Transfers.none(len(self))
        for card, numbers in self.chains:
            outside = [link for link in others if link.card is not None and link.card.kv_layout == card.kv_layout]
            slots = np.concatenate((self.slots[numbers], np.array([link.slot for link in outside], np.intp)))
            addresses = [*(self.worker_ids[number] for number in numbers), *(link.address for link in outside)]
            block = BlockFacts(card.block_size, card.kv_block_bytes, bool(card.kv_layout) and bool(has_peers))
            found.add(index, hashes(card), cached_blocks, numbers, slots, addresses, block)
            if prefilled is not None and card.kv_layout and prefilled.kv_layout == card.kv_layout:
                found.offer(numbers, prefilled.num_tokens, prefilled.address)
        return found if found.tokens.any() or found.disk_tokens.any() else None


def _cached_blocks(index: PrefixIndex, card: worker_pb2.ModelCard, hashes: Sequence[int], slots: Places) -> Depths:
    """For each of some workers with this card, the number of blocks from the start of a prompt that can be used."""
    depths: Depths = index.depths(hashes)[slots]
    return index.states.cut(hashes, slots, depths) if card.state_interval_tokens else depths


def _layouts(links: Iterable[tuple[WorkerLink, worker_pb2.ModelCard]], *roles: worker_pb2.Role) -> set[str]:
    """The layouts of blocks that workers with these roles exchange."""
    return {card.kv_layout for _, card in links if card.kv_layout and card.role in roles}


def _has_room(link: WorkerLink) -> bool:
    """Whether a worker has room for another request, including requests that were placed there but not reported yet."""
    load = link.reported.load
    return load.has_room(load.num_arrived + link.bookings.num_pending)


def has_background_room(link: WorkerLink) -> bool:
    """Whether a worker takes another request in the background."""
    load = link.reported.load
    return load.has_background_room(load.num_arrived + link.bookings.num_pending)


NOBODY = Members.of([])


class Pool:
    """The ready workers of one model."""

    def __init__(self, table: CandidateTable) -> None:
        self._table = table
        self._cards: dict[WorkerLink, worker_pb2.ModelCard] = {}
        self._with_room: set[WorkerLink] = set()
        self._members: Members | None = None

    def __contains__(self, link: WorkerLink) -> bool:
        """Whether a worker is in the pool."""
        return link in self._cards

    @property
    def has_room(self) -> bool:
        """Whether a worker of the pool has room in its batch."""
        return bool(self._with_room)

    def members(self) -> Members:
        """All workers of the pool."""
        if self._members is None:
            self._members = Members.of(sorted(self._cards.items(), key=lambda item: item[0].address))
        return self._members

    def add(self, link: WorkerLink) -> None:
        """Add a worker that has become ready."""
        assert link.card is not None, "a ready worker has a card"
        self._cards[link] = link.card
        self._members = None
        self.note(link)

    def remove(self, link: WorkerLink) -> None:
        """Remove a worker that is no longer ready."""
        del self._cards[link]
        self._table.forget(link.slot)
        self._with_room.discard(link)
        self._members = None

    def note(self, link: WorkerLink) -> None:
        """Bring the pool up to date with a member whose load or bookings have changed."""
        self._table.changed(link.slot, link.candidate)
        if _has_room(link):
            self._with_room.add(link)
        else:
            self._with_room.discard(link)

    def has_room_at(self, link: WorkerLink) -> bool:
        """Whether this member has room in its batch."""
        return link in self._with_room

    def check(self, links: Iterable[WorkerLink]) -> None:
        """Assert that the members are among `links` and ready, and that the recorded loads are current. For tests."""
        assert {link for link in links if link in self._cards} == self._cards.keys(), "a member has no link"
        for link in self._cards:
            assert link.is_ready
            assert _has_room(link) == (link in self._with_room)
        current = Candidates.of([link.candidate() for link, _ in self.members().links]).columns
        assert np.array_equal(current, self._table.at(self.members().slots)), "the table's loads are out of date"


class Pools:
    """The ready workers of all models."""

    def __init__(self, long_prompt_ms: float = LONG_PROMPT_MS) -> None:
        self.table = CandidateTable()
        self._long_prompt_ms = long_prompt_ms
        self._pools: dict[str, Pool] = {}
        self._model_of: dict[WorkerLink, str] = {}
        self.draining: dict[WorkerLink, None] = {}
        """Workers that take no more requests. Others may fetch cached blocks from them."""

    def add(self, link: WorkerLink) -> None:
        """Add a worker that has become ready."""
        assert link.card is not None, "a ready worker has a card"
        self._model_of[link] = link.card.name
        self._pools.setdefault(link.card.name, Pool(self.table)).add(link)

    def remove(self, link: WorkerLink) -> bool:
        """Remove a worker whose state has changed. Returns whether it was ready before."""
        self.draining.pop(link, None)
        if link.state is LinkState.DRAINING:
            self.draining[link] = None
        model = self._model_of.pop(link, None)
        if model is None:
            return False
        self._pools[model].remove(link)
        if not self._pools[model].members():
            del self._pools[model]
        return True

    def note(self, link: WorkerLink) -> None:
        """Apply a change of a worker's load or bookings."""
        model = self._model_of.get(link)
        if model is not None:
            self._pools[model].note(link)

    def model_with_room_at(self, link: WorkerLink) -> str | None:
        """The worker's model if it has room in its batch, otherwise None."""
        model = self._model_of.get(link)
        return model if model is not None and self._pools[model].has_room_at(link) else None

    def members(self, model: str) -> Members:
        """The ready workers of a model."""
        pool = self._pools.get(model)
        return NOBODY if pool is None else pool.members()

    def members_for(self, model: str, request: RoutedRequest) -> Members:
        """The ready workers of a model that have the tokenizer of a request, and see images as its prompt has them.

        Raises StatusError (MODEL_CHANGED) if there are ready workers, but none of these, and the answer has not begun.
        """
        members = self.members(model).of_tokenizer(request.tokenizer_sha256)
        seeing = members.of_images(request.image_view_pixels)
        if members and not seeing and not request.model_identity:
            raise StatusError(
                Reason.MODEL_CHANGED,
                f"no worker of model {model!r} sees images within the bound of {request.image_view_pixels} pixels any "
                "more; send the request again",
                field="image_view_pixels",
                retry_after_s=_NEW_TOKENIZER_S,
            )
        if not members and self.is_served(model) and not request.model_identity:
            raise StatusError(
                Reason.MODEL_CHANGED,
                f"the prompt was encoded by a tokenizer that no worker of model {model!r} has any more; send the "
                "request again",
                field="tokenizer_sha256",
                retry_after_s=_NEW_TOKENIZER_S,
            )
        return seeing

    def that_fit(self, request: RoutedRequest, members: Members, priors: Priors, *, may_refuse: bool) -> Members:
        """The members that the request fits; see `Members.fitting`. If it fits none, the result is empty. If none of
        them evicts KV blocks as requested, all are returned, because they say why.

        Raises StatusError (NO_CAPACITY) instead of an empty result if it `may_refuse` the request.
        """
        found = members.fitting(request, priors)
        if found or not members:
            return found
        if request.has_eviction_rule and not any(request.context_at(card) for _, card in members.links):
            return members
        if may_refuse and not request.has_begun:
            which = f"no worker with a context of {request.least_context} tokens"
            problem = f"{which} takes requests at the moment; try again in a moment"
            raise StatusError(Reason.NO_CAPACITY, problem, retry_after_s=_RETRY_S)
        return found

    def for_next_stage(self, request: RoutedRequest, members: Members, index: PrefixIndex, priors: Priors) -> Members:
        """The members that are reserved for the request's next stage; all members if none are reserved."""
        if not members.has_roles:
            return members
        if request.prefilled is not None:
            return members.of_stage(computes_prompt=False)
        cached_blocks = members.cached_blocks(index, request.hashes)
        candidates = members.candidates(self.table)
        needs_prompt = is_long(request.num_tokens, cached_blocks, candidates, priors, self._long_prompt_ms)
        return members.of_stage(computes_prompt=needs_prompt)

    def continues_elsewhere(
        self,
        placed: PlacedRequest,
        num_more: int,
        excluded: Collection[WorkerLink],
        priors: Priors,
    ) -> bool:
        """Whether an answer should continue at another worker that is not excluded and that it fits, because its
        worker, which has generated `num_more` tokens, is reserved for prompts."""
        request = placed.request
        card = placed.card
        if card.role != worker_pb2.ROLE_PREFILL:
            return False
        members = self.members(card.name)
        adapter = request.adapter
        num_tokens = max(request.num_expected_tokens(priors), request.num_tokens + num_more + 1)
        return members.has_roles and any(
            link not in excluded
            and its.kv_layout == card.kv_layout
            and its.tokenizer_sha256 == card.tokenizer_sha256
            and (not adapter or link.adapters.sha256(adapter) == request.adapter_sha256)
            and num_tokens <= request.context_at(its)
            for link, its in members.of_stage(computes_prompt=False).links
        )

    def is_served(self, model: str) -> bool:
        """Whether a worker of this model is ready."""
        return model in self._pools

    def has_room(self, model: str) -> bool:
        """Whether a worker of this model has room in its batch."""
        pool = self._pools.get(model)
        return pool is not None and pool.has_room

    def cards(self) -> list[worker_pb2.ModelCard]:
        """For each model with a ready worker, the card with the longest context."""
        cards = ([card for card, _ in pool.members().chains] for pool in self._pools.values())
        return [max(of_model, key=lambda card: card.max_context_tokens) for of_model in cards]

    def check(self, links: Collection[WorkerLink]) -> None:
        """Assert that the pools contain exactly the ready workers, with their current loads. For tests."""
        for pool in self._pools.values():
            pool.check(links)
        assert sum(len(pool.members()) for pool in self._pools.values()) == sum(link.is_ready for link in links)
