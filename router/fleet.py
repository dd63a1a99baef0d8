"""The fleet as one router sees it: members and their links, the index over all of them, and the decision.

Everything here but the links' own tasks is synchronous: a placement is decided and booked without an await in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.common.transport.channels import PLAIN, Transport
from headrace.common.transport.session_client import MAX_UNREAD_BYTES
from headrace.common.transport.silence import Silences
from headrace.protos import inference_pb2, router_pb2, worker_pb2
from headrace.protos.answer_bounds import max_request_bytes
from headrace.protos.block_hash import root_hash
from headrace.protos.model_identity import model_identity
from headrace.protos.status import Reason, StatusError
from headrace.router.answer_lengths import AnswerLengths
from headrace.router.beliefs import belief_message
from headrace.router.bookings import Booking
from headrace.router.candidates import Candidates, CandidateTable
from headrace.router.departed import Departed
from headrace.router.links import HEARTBEAT_MS, LinkState, WorkerLink
from headrace.router.policy import Placement, Priors, RequestFacts, place
from headrace.router.pools import NOBODY, Members, Pool
from headrace.router.predictions import Run
from headrace.router.prefix_index import Depths, PrefixIndex
from headrace.router.prompt import Prompt
from headrace.router.registry import Registry

log = logging.getLogger(__name__)

_TICK_S = 0.25
# Reports a second of all workers together, about, and how far apart those of one may be for it.
_REPORTS_PER_S = 3200
_SHORTEST_INTERVAL_MS = 20
_LONGEST_INTERVAL_MS = 250
# Models whose workers are all gone are remembered, so that a restart of the last one is a wait and not a 404.
_MAX_REMEMBERED_MODELS = 256
_REMEMBER_MODEL_S = 600.0
_MAX_DEPARTED = 4096
# After so long gateways know of another tokenizer.
_NEW_TOKENIZER_S = 2.0
# A member that was not reached for so long since it became one counts no more when a model is said to be unknown.
_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Bounds and times of a fleet; times in seconds."""

    max_index_entries: int = 4_000_000
    max_predicted_blocks: int = 500_000
    prediction_ttl_s: float = 30.0
    max_sessions: int = 65_536
    heartbeat_ms: int = HEARTBEAT_MS
    plain_grpc: bool = False
    """Whether each request to a worker is an RPC of its own, rather than one of many in a session."""


class RoutedRequest:
    """What placement needs of a request; the hashes of its blocks are computed once for each fingerprint."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        prompt: Prompt,
        generated: Sequence[int] = (),
        model_identity: str = "",
    ) -> None:
        """`generated` are the tokens behind the prompt that were delivered. `model_identity` is that of the worker they
        come from; empty for an answer that has not begun. Of `request` the tokens are not read."""
        self.num_tokens = prompt.num_tokens + len(generated)
        self._prompt = prompt
        self._generated = array("I", generated)
        self.model_identity = model_identity
        self.tokenizer_sha256 = request.tokenizer_sha256
        self.session_key = request.session_key
        self.max_ttft_ms = math.inf
        self.num_described = 0
        """How many of the workers its placement shall describe."""
        self.max_new_tokens: int | None = None
        if request.sampling.HasField("max_tokens"):
            self.max_new_tokens = max(request.sampling.max_tokens - len(generated), 0)
        self._adapter = request.adapter
        self._cache_salt = request.cache_salt
        self._hashes: dict[tuple[str, int], list[int]] = {}

    def num_expected_tokens(self, priors: Priors) -> int:
        """Tokens to be computed and generated, as far as can be known."""
        answer = priors.answer_tokens if self.max_new_tokens is None else min(self.max_new_tokens, priors.answer_tokens)
        return self.num_tokens + answer

    def may_go_to(self, card: worker_pb2.ModelCard) -> bool:
        """Whether workers with this card would continue the answer with the weights and the tokenizer it began with."""
        return not self.model_identity or self.model_identity == model_identity(card)

    async def prepare(self, cards: Iterable[worker_pb2.ModelCard]) -> None:
        """Copy and hash the prompt for workers with these cards, without holding the event loop for long."""
        await self._prompt.prepare({(self._root(card), card.block_size) for card in cards})

    def hashes(self, card: worker_pb2.ModelCard) -> list[int]:
        """Hashes of the full blocks, as workers with this card compute them."""
        key = (card.fingerprint, card.block_size)
        if key not in self._hashes:
            self._hashes[key] = self._prompt.hashes(self._root(card), card.block_size, self._generated)
        return self._hashes[key]

    def _root(self, card: worker_pb2.ModelCard) -> int:
        return root_hash(card.fingerprint, self._adapter, self._cache_salt)


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request at its worker, decided in `decision_s`. Whoever holds it releases the booking, once."""

    link: WorkerLink
    card: worker_pb2.ModelCard
    booking: Booking
    placement: Placement
    decision_s: float
    prediction: Run | None
    """Of the request's blocks at the worker."""

    def belief(self, *, may_be_given_back: bool) -> inference_pb2.Belief:
        """What the worker is told. Only where other routers place requests there too can it know better."""
        placement = self.placement
        believed = placement.belief if may_be_given_back and self.link.num_routers > 1 else None
        return belief_message(self.link.watcher_id, self.booking, placement.predicted_cached_tokens, believed)


def report_interval_ms(num_workers: int) -> int:
    """How far apart reports of each of so many workers shall be: of few as often as workers tell, of many a few times a
    second. Bookings stand for what was placed meanwhile."""
    return min(max(1000 * num_workers // _REPORTS_PER_S, _SHORTEST_INTERVAL_MS), _LONGEST_INTERVAL_MS)


class Fleet:
    """Members, links, index, sessions; see the module. `start` and `close` frame its life on one event loop."""

    def __init__(
        self,
        registry: Registry,
        config: FleetConfig = FleetConfig(),
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: Transport = PLAIN,
    ) -> None:
        self.on_room: Callable[[str], None] = lambda _: None
        """Called with a model when one of its workers has room; set by whoever has requests waiting for that."""
        self.index = PrefixIndex(config.max_index_entries, config.max_predicted_blocks, config.prediction_ttl_s)
        self.answer_lengths = AnswerLengths()
        self._registry = registry
        self._config = config
        self._transport = transport
        self._rng = rng or random.Random()
        self._clock = clock
        self._started_at_s = clock()
        self._links: dict[str, WorkerLink] = {}
        self._watcher_id = random.SystemRandom().randrange(1, 1 << 64)
        self._table = CandidateTable()
        self._pools: dict[str, Pool] = {}  # by model; workers that take requests
        self._pool_of: dict[WorkerLink, str] = {}
        self._retiring: set[WorkerLink] = set()
        self._live: dict[str, worker_pb2.ModelCard] | None = None  # what `models` answers, until something changes
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._departed = Departed(_REMEMBER_MODEL_S, _MAX_DEPARTED)
        self._remembered: OrderedDict[str, tuple[worker_pb2.ModelCard, float]] = OrderedDict()
        self._silences = Silences()
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Link the members of the fixed list, and keep time."""
        self._sync()
        self._ticker = asyncio.create_task(self._tick(), name="fleet")

    async def close(self) -> None:
        """Close all links; running calls fail."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in (*self._links.values(), *self._retiring)))

    # -- membership -------------------------------------------------------------------------------------------------

    def register(self, worker_id: str, address: str) -> float:
        """Add a worker or renew its lease; seconds that the lease lasts. Raises StatusError, see Registry."""
        if self._registry.register(worker_id, address, self._clock()) or address not in self._links:
            self._sync()
        self._links[address].nudge()
        return self._registry.lease_s

    def deregister(self, worker_id: str, address: str) -> None:
        """A worker goes away: it gets no new requests, and those it has may end."""
        if self._registry.deregister(worker_id, address):
            self._sync(gone=address)

    def leases_seen(self, addresses: Mapping[str, str]) -> None:
        """A store that routers share was read: worker id -> address."""
        self._registry.shared.seen(addresses, self._clock())
        self._sync()

    def is_leased(self, address: str) -> bool:
        """Whether the worker at an address is a member by the fixed list or by a lease, heard or not."""
        return address in self._registry.members()

    def leases_lost(self) -> None:
        """The shared store could not be read: known workers stay."""
        self._registry.shared.lost()

    def _sync(self, gone: str | None = None) -> None:
        """Link new members, and let go of those that are none any more: the one that said that it goes, and those that
        are not heard either. A lease that nobody renews says nothing about a worker that reports."""
        members = self._registry.members()
        for address, member in members.items():
            if address not in self._links:
                self._link(address)
            self._links[address].registered_id = member.worker_id
        known_ids = {member.worker_id for member in members.values()}
        for address in self._links.keys() - members.keys():
            link = self._links[address]
            if address != gone and not self._is_given_up(link, is_elsewhere=link.registered_id in known_ids):
                continue
            self._live = None
            link = self._links.pop(address)
            link.retire()
            self._retiring.add(link)

    def _is_given_up(self, link: WorkerLink, *, is_elsewhere: bool) -> bool:
        """Whether a worker without a lease is forgotten: it is not heard, and has come back elsewhere or was silent for
        as long as a lease lasts."""
        if link.state is not LinkState.UNREACHABLE:
            return False
        return is_elsewhere or self._clock() - link.away_since_s >= self._registry.lease_s

    def _link(self, address: str) -> None:
        link = self._links[address] = WorkerLink(
            address,
            self.index,
            self._on_change,
            self._on_load,
            self._on_room,
            heartbeat_ms=self._config.heartbeat_ms,
            watcher_id=self._watcher_id,
            report_interval_ms=lambda: report_interval_ms(len(self._links)),
            clock=self._clock,
            transport=self._transport,
            plain_grpc=self._config.plain_grpc,
            silences=self._silences,
        )
        link.start()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = self._clock()
            self._registry.expire(now_s)
            self._sync()
            self.index.expire(now_s)
            self._remember_ready()
            for link in [link for link in self._retiring if link.num_in_flight == 0]:
                self._retiring.discard(link)
                await link.close()

    # -- what is known ----------------------------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        """Workers that take requests."""
        return sum(link.is_ready for link in self._links.values())

    @property
    def num_in_flight(self) -> int:
        """Requests booked on workers."""
        return sum(link.num_in_flight for link in (*self._links.values(), *self._retiring))

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of answers that came from workers and were not passed on yet."""
        return sum(link.sessions.num_unread_bytes for link in (*self._links.values(), *self._retiring))

    @property
    def max_unread_bytes(self) -> int:
        """Bound of `num_unread_bytes`."""
        return MAX_UNREAD_BYTES * (len(self._links) + len(self._retiring))

    @property
    def num_sessions(self) -> int:
        """Sessions whose worker is remembered."""
        return len(self._sessions)

    @property
    def max_sessions(self) -> int:
        """Bound of `num_sessions`."""
        return self._config.max_sessions

    def links(self) -> list[WorkerLink]:
        """The links of all members, by name of the worker."""
        return sorted(self._links.values(), key=lambda link: (link.worker_id, link.address))

    def workers(self) -> list[router_pb2.WorkerInfo]:
        """All members, reachable or not, by name."""
        return [link.info() for link in self.links()]

    def models(self) -> dict[str, worker_pb2.ModelCard]:
        """Model name -> card, for the models that a live worker serves; sorted."""
        if self._live is None:
            live = {
                link.card.name: link.card
                for link in self.links()
                if link.card is not None and link.state is not LinkState.UNREACHABLE
            }
            self._live = dict(sorted(live.items()))
        return self._live

    def resolve(self, model: str) -> worker_pb2.ModelCard | None:
        """The card of the model that a request means ("" is the only one there is), or None while that is open.

        Raises StatusError: MODEL_NOT_FOUND, or INVALID_FIELD when "" could be several.
        """
        live = self.models()
        if model in live:
            return live[model]
        now_s = self._clock()
        known = {
            name: card for name, (card, seen_at_s) in self._remembered.items() if now_s - seen_at_s < _REMEMBER_MODEL_S
        }
        known |= live
        if model:
            if model in known:
                return known[model]
        else:
            choice = live or known
            if len(choice) > 1:
                names = ", ".join(sorted(choice))
                raise StatusError(
                    Reason.INVALID_FIELD, f"model is empty and there are several: name one of {names}", field="model"
                )
            if choice:
                return next(iter(choice.values()))
        if not self._links or not known or any(self._is_settling(link, now_s) for link in self._links.values()):
            return None
        names = ", ".join(sorted(known))
        raise StatusError(Reason.MODEL_NOT_FOUND, f"no model {model!r} here; there is {names}", field="model")

    def check(self) -> None:
        """Assert the invariants of the index, of all bookings and of who takes requests. For tests."""
        self.index.check()
        for link in (*self._links.values(), *self._retiring):
            link.check()
        for pool in self._pools.values():
            pool.check(self._links.values())
        assert sum(len(pool.members()) for pool in self._pools.values()) == self.num_ready

    def _is_settling(self, link: WorkerLink, now_s: float) -> bool:
        return link.card is None and now_s - link.created_at_s < _SETTLE_S

    # -- the decision -----------------------------------------------------------------------------------------------

    def place(
        self,
        request: RoutedRequest,
        card: worker_pb2.ModelCard,
        excluded: Collection[WorkerLink],
    ) -> PlacedRequest | None:
        """Choose a ready worker of the card's model, book the request there and predict its blocks; None if none is.

        A prompt goes only to workers with the tokenizer that made it, an answer that has begun only to workers of its
        own identity. Whether a request has to wait there for too long is for the worker to say, which knows it exactly.

        Raises StatusError (MODEL_CHANGED) if workers take requests, but none that has the prompt's tokenizer.
        """
        began_s = time.perf_counter()
        members = self._members(card).of_tokenizer(request.tokenizer_sha256)
        if not members and self.is_served(card) and not request.model_identity:
            raise StatusError(
                Reason.MODEL_CHANGED,
                f"the prompt was made by a tokenizer that no worker of model {card.name!r} has any more; ask again",
                field="tokenizer_sha256",
                retry_after_s=_NEW_TOKENIZER_S,
            )
        if excluded or request.model_identity:
            members = members.where(lambda link, its_card: link not in excluded and request.may_go_to(its_card))
        if not members:
            return None
        cached_blocks = self._cached_blocks(request, members)
        placement = self._decide(request, card.name, members, cached_blocks, self._rng, request.num_described)
        link, its_card = members.links[placement.number]
        booking, prediction = self._settle_on(request, link, its_card, placement, int(cached_blocks[placement.number]))
        return PlacedRequest(link, its_card, booking, placement, time.perf_counter() - began_s, prediction)

    def not_taken(self, placed: PlacedRequest) -> None:
        """The worker did not take the request: its blocks will not come there."""
        if placed.prediction is not None:
            self.index.withdraw(placed.prediction)

    def cards(self, model: str) -> list[worker_pb2.ModelCard]:
        """The different cards, by fingerprint and block size, of workers of a model that take requests."""
        pool = self._pools.get(model)
        return [] if pool is None else [card for card, _ in pool.members().chains]

    @property
    def max_request_bytes(self) -> int | None:
        """Bytes that no valid request has, for any of the models that are known. None while none is."""
        remembered = [card for card, _ in self._remembered.values()]
        return max((max_request_bytes(card) for card in (*self.models().values(), *remembered)), default=None)

    def candidates(self, card: worker_pb2.ModelCard) -> Candidates:
        """The workers of this model that take requests, as the policy sees them."""
        return self._members(card).candidates(self._table)

    def has_several_identities(self, model: str) -> bool:
        """Whether the workers known to serve a model, reachable or not, differ in weights or tokenizer."""
        cards = (link.card for link in self._links.values())
        return len({model_identity(card) for card in cards if card is not None and card.name == model}) > 1

    def may_come_back(self, identity: str) -> bool:
        """Whether a worker with these weights and this tokenizer was lost not long ago: it may only be restarting."""
        return self._departed.may_come_back(identity, self._clock())

    def is_served(self, card: worker_pb2.ModelCard) -> bool:
        """Whether a worker of this model takes requests."""
        return card.name in self._pools

    def has_room(self, card: worker_pb2.ModelCard) -> bool:
        """Whether a worker of this model has room in its batch."""
        pool = self._pools.get(card.name)
        return pool is not None and pool.has_room

    def weigh(self, request: RoutedRequest, card: worker_pb2.ModelCard) -> Placement | None:
        """The decision that `place` would take now, with nothing booked and all workers described; None if no worker of
        the model is ready."""
        members = self._members(card)
        if not members:
            return None
        # Ties are broken by random numbers of its own: asking must not change what comes next.
        cached_blocks = self._cached_blocks(request, members)
        return self._decide(request, card.name, members, cached_blocks, random.Random(0), len(members))

    def _members(self, card: worker_pb2.ModelCard) -> Members:
        """The workers of this model that take requests."""
        pool = self._pools.get(card.name)
        return NOBODY if pool is None else pool.members()

    def _cached_blocks(self, request: RoutedRequest, members: Members) -> Depths:
        """For each worker, the blocks from the start of the prompt that are found there."""
        cached_blocks: Depths = np.zeros(len(members), np.intp)
        for card, numbers in members.chains:
            cached_blocks[numbers] = self.index.depths(request.hashes(card))[members.slots[numbers]]
        return cached_blocks

    def _decide(
        self,
        request: RoutedRequest,
        model: str,
        members: Members,
        cached_blocks: Depths,
        rng: random.Random,
        num_described: int,
    ) -> Placement:
        session_worker = self._sessions.get((model, request.session_key)) if request.session_key else None
        facts = RequestFacts(request.num_tokens, request.max_new_tokens, session_worker, request.max_ttft_ms)
        placement = place(
            facts,
            members.candidates(self._table),
            cached_blocks,
            self._clock(),
            rng,
            num_described=num_described,
            priors=self.answer_lengths.priors(model),
        )
        assert placement is not None, "there are candidates"
        return placement

    def _settle_on(
        self,
        request: RoutedRequest,
        link: WorkerLink,
        card: worker_pb2.ModelCard,
        placement: Placement,
        num_cached_blocks: int,
    ) -> tuple[Booking, Run | None]:
        num_tokens = request.num_tokens - placement.predicted_cached_tokens
        hashes = request.hashes(card)
        booking = link.book(num_tokens, len(hashes) + 1 - num_cached_blocks)
        prediction = self.index.predict(link.address, hashes, num_cached_blocks, self._clock())
        if request.session_key:
            session = (card.name, request.session_key)
            self._sessions[session] = link.address
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._config.max_sessions:
                self._sessions.popitem(last=False)
        return booking, prediction

    # -- waiting for a change ---------------------------------------------------------------------------------------

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change of any worker's state, or when the time is over."""
        # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the result.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _on_room(self, link: WorkerLink) -> None:
        model = self._pool_of.get(link)
        if model is not None and self._pools[model].has_room_at(link):
            self.on_room(model)

    def _on_load(self, link: WorkerLink) -> None:
        model = self._pool_of.get(link)
        if model is not None:
            self._pools[model].note(link)

    def _on_change(self, link: WorkerLink) -> None:
        self._live = None
        model = self._pool_of.pop(link, None)
        if model is not None:
            self._pools[model].remove(link)
            if not self._pools[model].members():
                del self._pools[model]
            if link.card is not None:
                self._departed.went(link.worker_id, model_identity(link.card), self._clock())
        if link.is_ready and link.card is not None:
            model = self._pool_of[link] = link.card.name
            self._departed.came(link.worker_id)
            self._pools.setdefault(model, Pool(self._table)).add(link)
            self._remember(model, link.card, self._clock())
            self._on_room(link)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _remember_ready(self) -> None:
        now_s = self._clock()
        for model, pool in self._pools.items():
            self._remember(model, pool.members().links[-1][1], now_s)

    def _remember(self, model: str, card: worker_pb2.ModelCard, now_s: float) -> None:
        self._remembered[model] = (card, now_s)
        self._remembered.move_to_end(model)
        while len(self._remembered) > _MAX_REMEMBERED_MODELS:
            self._remembered.popitem(last=False)
