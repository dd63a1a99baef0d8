"""The workers of each model that take requests, and those with room.

Both are updated link by link, so the cost of a report does not depend on the number of workers, and a waiting request
is considered again only when there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.protos import worker_pb2
from headrace.router.fleet.links import WorkerLink
from headrace.router.placement.candidates import Candidates, CandidateTable, Places


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Some workers of a model by address, so in one order for all routers: links with their cards, names, their places
    in this order by name, and their slots. `chains` has a card and places for each way in which workers hash blocks,
    `tokenizers` the hashes of their tokenizer bundles."""

    links: Sequence[tuple[WorkerLink, worker_pb2.ModelCard]]
    worker_ids: Sequence[str]
    numbers: dict[str, int]
    slots: Places
    chains: Sequence[tuple[worker_pb2.ModelCard, Places]]
    tokenizers: frozenset[str]
    _of_tokenizer: dict[str, Members] = field(default_factory=dict)

    @classmethod
    def of(cls, links: Sequence[tuple[WorkerLink, worker_pb2.ModelCard]]) -> Members:
        """These, in their order."""
        worker_ids = [link.address for link, _ in links]
        cards: dict[tuple[str, int], worker_pb2.ModelCard] = {}
        numbers: dict[tuple[str, int], list[int]] = {}
        for number, (_, card) in enumerate(links):
            chain = (card.fingerprint, card.block_size)
            cards[chain] = card
            numbers.setdefault(chain, []).append(number)
        return cls(
            links,
            worker_ids,
            {worker_id: number for number, worker_id in enumerate(worker_ids)},
            np.array([link.slot for link, _ in links], np.intp),
            [(card, np.array(numbers[chain], np.intp)) for chain, card in cards.items()],
            frozenset(card.tokenizer_sha256 for _, card in links),
        )

    def __len__(self) -> int:
        """Number of workers."""
        return len(self.links)

    def where(self, is_meant: Callable[[WorkerLink, worker_pb2.ModelCard], bool]) -> Members:
        """Those for which this holds."""
        return Members.of([(link, card) for link, card in self.links if is_meant(link, card)])

    def of_tokenizer(self, sha256: str) -> Members:
        """Those with this tokenizer; all of them if it is empty."""
        if not sha256 or self.tokenizers == {sha256}:
            return self
        if sha256 not in self.tokenizers:
            return NOBODY
        if sha256 not in self._of_tokenizer:
            self._of_tokenizer[sha256] = self.where(lambda _, card: card.tokenizer_sha256 == sha256)
        return self._of_tokenizer[sha256]

    def candidates(self, table: CandidateTable) -> Candidates:
        """These for the policy."""
        return Candidates(self.worker_ids, self.numbers, table.at(self.slots))


NOBODY = Members.of([])


class Pool:
    """All workers of one model that take requests."""

    def __init__(self, table: CandidateTable) -> None:
        self._table = table
        self._cards: dict[WorkerLink, worker_pb2.ModelCard] = {}
        self._with_room: set[WorkerLink] = set()
        self._members: Members | None = None

    def __contains__(self, link: WorkerLink) -> bool:
        """Whether a worker is among them."""
        return link in self._cards

    @property
    def has_room(self) -> bool:
        """Whether one of them has room in its batch."""
        return bool(self._with_room)

    def members(self) -> Members:
        """All of them."""
        if self._members is None:
            self._members = Members.of(sorted(self._cards.items(), key=lambda item: item[0].address))
        return self._members

    def add(self, link: WorkerLink) -> None:
        """A worker with a card begins to take requests."""
        assert link.card is not None, "who takes requests has a card"
        self._cards[link] = link.card
        self._members = None
        self.note(link)

    def remove(self, link: WorkerLink) -> None:
        """A worker takes requests no longer."""
        del self._cards[link]
        self._with_room.discard(link)
        self._members = None

    def note(self, link: WorkerLink) -> None:
        """The load or the bookings of a member have changed."""
        candidate = link.candidate()
        self._table.put(link.slot, candidate)
        if candidate.load.has_room(candidate.num_booked_requests):
            self._with_room.add(link)
        else:
            self._with_room.discard(link)

    def has_room_at(self, link: WorkerLink) -> bool:
        """Whether this member has room."""
        return link in self._with_room

    def check(self, links: Iterable[WorkerLink]) -> None:
        """Assert that of all links these are the members, and that what is noted is so. For tests."""
        assert {link for link in links if link in self._cards} == self._cards.keys(), "no member is gone"
        for link in self._cards:
            candidate = link.candidate()
            assert link.is_ready
            assert candidate.load.has_room(candidate.num_booked_requests) == (link in self._with_room)
        values = Candidates.of([link.candidate() for link, _ in self.members().links]).values
        assert np.array_equal(values, self._table.at(self.members().slots)), "the columns show loads and bookings"


class Pools:
    """The workers that take requests, by model."""

    def __init__(self) -> None:
        self.table = CandidateTable()
        self._pools: dict[str, Pool] = {}
        self._model_of: dict[WorkerLink, str] = {}

    def add(self, link: WorkerLink) -> None:
        """A worker with a card begins to take requests."""
        assert link.card is not None, "who takes requests has a card"
        self._model_of[link] = link.card.name
        self._pools.setdefault(link.card.name, Pool(self.table)).add(link)

    def remove(self, link: WorkerLink) -> bool:
        """A worker takes requests no longer; whether it took any."""
        model = self._model_of.pop(link, None)
        if model is None:
            return False
        self._pools[model].remove(link)
        if not self._pools[model].members():
            del self._pools[model]
        return True

    def note(self, link: WorkerLink) -> None:
        """The load or the bookings of a worker have changed."""
        model = self._model_of.get(link)
        if model is not None:
            self._pools[model].note(link)

    def model_with_room_at(self, link: WorkerLink) -> str | None:
        """The model of a worker that has room in its batch; None without room."""
        model = self._model_of.get(link)
        return model if model is not None and self._pools[model].has_room_at(link) else None

    def members(self, model: str) -> Members:
        """The workers of a model."""
        pool = self._pools.get(model)
        return NOBODY if pool is None else pool.members()

    def is_served(self, model: str) -> bool:
        """Whether a worker of this model takes requests."""
        return model in self._pools

    def has_room(self, model: str) -> bool:
        """Whether a worker of this model has room in its batch."""
        pool = self._pools.get(model)
        return pool is not None and pool.has_room

    def cards(self) -> list[worker_pb2.ModelCard]:
        """A card for each model that is served."""
        return [pool.members().links[-1][1] for pool in self._pools.values()]

    def check(self, links: Collection[WorkerLink]) -> None:
        """Assert that of all links these are the members, and that what is noted is so. For tests."""
        for pool in self._pools.values():
            pool.check(links)
        assert sum(len(pool.members()) for pool in self._pools.values()) == sum(link.is_ready for link in links)
