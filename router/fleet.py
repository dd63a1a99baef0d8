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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from headrace.protos import inference_pb2, router_pb2, worker_pb2
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.protos.session_client import MAX_UNREAD_BYTES
from headrace.protos.status import Reason, StatusError
from headrace.protos.transport import PLAIN, Transport
from headrace.router.answer_lengths import AnswerLengths
from headrace.router.bookings import Booking
from headrace.router.links import HEARTBEAT_MS, LinkState, WorkerLink
from headrace.router.policy import Candidate, Placement, Priors, RequestFacts, has_room, place
from headrace.router.prefix_index import PrefixIndex
from headrace.router.refusals import too_late
from headrace.router.registry import Registry

log = logging.getLogger(__name__)

_TICK_S = 0.25
# Models whose workers are all gone are remembered, so that a restart of the last one is a wait and not a 404.
_MAX_REMEMBERED_MODELS = 256
_REMEMBER_MODEL_S = 600.0
# A member that was not reached for so long since it became one counts no more when a model is said to be unknown.
_SETTLE_S = 5.0


_LinkAndCard: TypeAlias = tuple[WorkerLink, worker_pb2.ModelCard]


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Bounds and times of a fleet; times in seconds."""

    max_index_entries: int = 4_000_000
    max_predicted_blocks: int = 500_000
    prediction_ttl_s: float = 30.0
    max_sessions: int = 65_536
    heartbeat_ms: int = HEARTBEAT_MS


class RoutedRequest:
    """What placement needs of a request; the hashes of its blocks are computed once for each fingerprint."""

    def __init__(self, request: inference_pb2.GenerateRequest, tokens: array[int], num_generated: int) -> None:
        """`tokens` are the prompt and the `num_generated` tokens behind it that were delivered."""
        self.tokens = tokens
        self.session_key = request.session_key
        self.max_ttft_ms = math.inf
        self.max_new_tokens: int | None = None
        if request.sampling.HasField("max_tokens"):
            self.max_new_tokens = max(request.sampling.max_tokens - num_generated, 0)
        self._adapter = request.adapter
        self._cache_salt = request.cache_salt
        self._hashes: dict[tuple[str, int], list[int]] = {}

    def num_expected_tokens(self, priors: Priors) -> int:
        """Tokens to be computed and generated, as far as can be known."""
        answer = priors.answer_tokens if self.max_new_tokens is None else min(self.max_new_tokens, priors.answer_tokens)
        return len(self.tokens) + answer

    def hashes(self, card: worker_pb2.ModelCard) -> list[int]:
        """Hashes of the full blocks, as workers with this card compute them."""
        key = (card.fingerprint, card.block_size)
        if key not in self._hashes:
            root = root_hash(card.fingerprint, self._adapter, self._cache_salt)
            self._hashes[key] = block_hashes(root, self.tokens, card.block_size)
        return self._hashes[key]


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request at its worker, decided in `decision_s`. Whoever holds it releases the booking, once."""

    link: WorkerLink
    card: worker_pb2.ModelCard
    booking: Booking
    placement: Placement
    decision_s: float


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
        self.on_room: Callable[[], None] = lambda: None
        """Called when a worker may have room that it had not; set by whoever has requests waiting for that."""
        self.index = PrefixIndex(config.max_index_entries, config.max_predicted_blocks, config.prediction_ttl_s)
        self.answer_lengths = AnswerLengths()
        self._registry = registry
        self._config = config
        self._transport = transport
        self._rng = rng or random.Random()
        self._clock = clock
        self._started_at_s = clock()
        self._links: dict[str, WorkerLink] = {}
        self._retiring: set[WorkerLink] = set()
        self._live: dict[str, worker_pb2.ModelCard] | None = None  # what `models` answers, until something changes
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._remembered: OrderedDict[str, tuple[worker_pb2.ModelCard, float]] = OrderedDict()
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
        self._registry.register(worker_id, address, self._clock())
        self._sync()
        self._links[address].nudge()
        return self._registry.lease_s

    def deregister(self, worker_id: str, address: str) -> None:
        """A worker goes away: it gets no new requests, and those it has may end."""
        self._registry.deregister(worker_id, address)
        self._sync()

    def leases_seen(self, addresses: Mapping[str, str]) -> None:
        """A store that routers share was read: worker id -> address."""
        self._registry.shared.seen(addresses, self._clock())
        self._sync()

    def leases_lost(self) -> None:
        """The shared store could not be read: known workers stay."""
        self._registry.shared.lost()

    def _sync(self) -> None:
        members = self._registry.members()
        for address, member in members.items():
            if address not in self._links:
                link = WorkerLink(
                    address,
                    self.index,
                    self._on_change,
                    self._on_room,
                    heartbeat_ms=self._config.heartbeat_ms,
                    clock=self._clock,
                    transport=self._transport,
                )
                self._links[address] = link
                link.start()
            self._links[address].registered_id = member.worker_id
        for address in self._links.keys() - members.keys():
            self._live = None
            link = self._links.pop(address)
            link.retire()
            self._retiring.add(link)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = self._clock()
            self._registry.expire(now_s)
            self._sync()
            self.index.expire(now_s)
            self._remember()
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
        """Assert the invariants of the index and of all bookings. For tests."""
        self.index.check()
        for link in (*self._links.values(), *self._retiring):
            link.check()

    def _is_settling(self, link: WorkerLink, now_s: float) -> bool:
        return link.card is None and now_s - link.created_at_s < _SETTLE_S

    # -- the decision -----------------------------------------------------------------------------------------------

    def place(
        self,
        request: RoutedRequest,
        card: worker_pb2.ModelCard,
        excluded: Collection[WorkerLink],
        *,
        same_weights: bool,
    ) -> PlacedRequest | None:
        """Choose a ready worker of the card's model, book the request there and predict its blocks; None if none is.

        With `same_weights` only workers with the card's very fingerprint count: others would continue an answer
        differently. Raises StatusError (QUEUE_FULL) if the first token would come later than the request's
        `max_ttft_ms` wherever it went.
        """
        began_s = time.perf_counter()
        links = {
            link.address: (link, its_card)
            for link, its_card in self._ready_links(card)
            if (not same_weights or its_card.fingerprint == card.fingerprint) and link not in excluded
        }
        if not links:
            return None
        cached_blocks = self._cached_blocks(request, links)
        placement = self._decide(request, card.name, links, cached_blocks, self._rng)
        if placement.cost.ttft_ms > request.max_ttft_ms:
            raise too_late(placement.cost.ttft_ms / 1000, request.max_ttft_ms / 1000)
        link, its_card = links[placement.worker_id]
        booking = self._settle_on(request, link, its_card, placement, cached_blocks[link.address])
        return PlacedRequest(link, its_card, booking, placement, time.perf_counter() - began_s)

    def candidates(self, card: worker_pb2.ModelCard) -> list[Candidate]:
        """The workers of this model that take requests, as the policy sees them."""
        return [link.candidate() for link, _ in self._ready_links(card)]

    def has_room(self, card: worker_pb2.ModelCard) -> bool:
        """Whether a worker of this model has room in its batch."""
        return any(has_room(link.candidate()) for link, _ in self._ready_links(card))

    def weigh(self, request: RoutedRequest, card: worker_pb2.ModelCard) -> Placement | None:
        """The decision that `place` would take now, with nothing booked; None if no worker of the model is ready."""
        links = {link.address: (link, its_card) for link, its_card in self._ready_links(card)}
        if not links:
            return None
        # Ties are broken by random numbers of its own: asking must not change what comes next.
        return self._decide(request, card.name, links, self._cached_blocks(request, links), random.Random(0))

    def _ready_links(self, card: worker_pb2.ModelCard) -> Iterator[_LinkAndCard]:
        """The workers of this model that take requests, with their cards."""
        for link in self._links.values():
            if link.is_ready and link.card is not None and link.card.name == card.name:
                yield link, link.card

    def _cached_blocks(self, request: RoutedRequest, links: Mapping[str, _LinkAndCard]) -> dict[str, int]:
        """For each worker, the blocks from the start of the prompt that are found there."""
        cached_blocks: dict[str, int] = {}
        by_chain: dict[tuple[str, int], list[str]] = {}
        for address, (_, its_card) in links.items():
            by_chain.setdefault((its_card.fingerprint, its_card.block_size), []).append(address)
        for addresses in by_chain.values():
            cached_blocks |= self.index.match(request.hashes(links[addresses[0]][1]), addresses)
        return cached_blocks

    def _decide(
        self,
        request: RoutedRequest,
        model: str,
        links: Mapping[str, _LinkAndCard],
        cached_blocks: Mapping[str, int],
        rng: random.Random,
    ) -> Placement:
        session_worker = self._sessions.get((model, request.session_key)) if request.session_key else None
        facts = RequestFacts(len(request.tokens), request.max_new_tokens, session_worker, request.max_ttft_ms)
        candidates = [link.candidate() for link, _ in links.values()]
        priors = self.answer_lengths.priors(model)
        placement = place(facts, candidates, cached_blocks, self._clock(), rng, priors=priors)
        assert placement is not None, "every one of them takes requests"
        return placement

    def _settle_on(
        self,
        request: RoutedRequest,
        link: WorkerLink,
        card: worker_pb2.ModelCard,
        placement: Placement,
        num_cached_blocks: int,
    ) -> Booking:
        num_tokens = len(request.tokens) - placement.predicted_cached_tokens
        hashes = request.hashes(card)
        booking = link.book(num_tokens, len(hashes) + 1 - num_cached_blocks)
        self.index.predict(link.address, hashes, num_cached_blocks, self._clock())
        if request.session_key:
            session = (card.name, request.session_key)
            self._sessions[session] = link.address
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._config.max_sessions:
                self._sessions.popitem(last=False)
        return booking

    # -- waiting for a change ---------------------------------------------------------------------------------------

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change of any worker's state, or when the time is over."""
        # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the result.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _on_room(self) -> None:
        self.on_room()

    def _on_change(self) -> None:
        self._live = None
        self.on_room()
        self._remember()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _remember(self) -> None:
        now_s = self._clock()
        for link in self._links.values():
            if link.card is not None and link.is_ready:
                self._remembered[link.card.name] = (link.card, now_s)
                self._remembered.move_to_end(link.card.name)
        while len(self._remembered) > _MAX_REMEMBERED_MODELS:
            self._remembered.popitem(last=False)
