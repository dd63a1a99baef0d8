"""One router's view of the fleet: its members and their links, the prefix index over all of them, and placement.

Except for the links' tasks, everything is synchronous. A placement is decided and booked without an await in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.common.kubernetes.services import Endpoints
from headrace.common.observers import Observers
from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import PLAIN, Transport
from headrace.common.transport.session_client import MAX_UNREAD_BYTES
from headrace.common.transport.silence import Silences
from headrace.protos import inference_pb2, router_pb2, worker_pb2
from headrace.protos.answer_bounds import max_request_bytes
from headrace.protos.model_identity import model_identity
from headrace.protos.status import Reason, StatusError
from headrace.router.fleet.fleet_adapters import FleetAdapters, adapter_ms, members_with
from headrace.router.fleet.known_models import REMEMBER_MODEL_S, Departed, KnownModels
from headrace.router.fleet.links import HEARTBEAT_MS, LinkState, WorkerLink
from headrace.router.fleet.pools import Members, Pools, has_background_room
from headrace.router.fleet.registry import Registry
from headrace.router.fleet.reported_load import report_interval_ms
from headrace.router.fleet.routed_request import PlacedRequest, RoutedRequest
from headrace.router.placement.answer_lengths import AnswerLengths
from headrace.router.placement.bookings import Booking
from headrace.router.placement.candidates import Candidates
from headrace.router.placement.policy import LONG_PROMPT_MS, Placement, Policy, RequestFacts, place, place_at
from headrace.router.placement.predictions import Run
from headrace.router.placement.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

_TICK_S = 0.25
_MAX_DEPARTED = 16_384  # identities of models, without and with adapters
_SHOW_SILENT_S = 3600.0  # how long to show a hanging worker without a lease


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Limits and intervals of a fleet. Times are in seconds."""

    max_index_entries: int = 4_000_000
    max_predicted_blocks: int = 500_000
    prediction_ttl_s: float = 30.0
    max_sessions: int = 65_536
    heartbeat_ms: int = HEARTBEAT_MS
    long_prompt_ms: float = LONG_PROMPT_MS
    plain_grpc: bool = False
    """Whether each request to a worker is a separate RPC rather than one of many in a session."""


class SessionWorkers:
    """The address of the worker that got the last request of each session, by model and session key. The least recently
    used sessions are forgotten."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self._addresses: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._addresses)

    def get(self, model: str, session_key: str) -> str | None:
        """The address of the session's worker. None if the key is empty or unknown."""
        return self._addresses.get((model, session_key)) if session_key else None

    def put(self, model: str, session_key: str, address: str) -> None:
        """Record that the session's newest request goes to this worker."""
        self._addresses[model, session_key] = address
        self._addresses.move_to_end((model, session_key))
        if len(self._addresses) > self.max_sessions:
            self._addresses.popitem(last=False)


class Fleet:
    """Members, links, index, sessions; see the module. Call `start` and `close` on one event loop."""

    def __init__(
        self,
        registry: Registry,
        config: FleetConfig = FleetConfig(),
        *,
        policy: Policy = place,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: Transport = PLAIN,
    ) -> None:
        """`policy` chooses a worker for each request."""
        self.states: Observers[WorkerLink] = Observers()
        """Told of each worker whose state has changed."""
        self.rooms: Observers[str] = Observers()
        """Told of a model's name when one of its workers has room for waiting requests."""
        self.index = PrefixIndex(config.max_index_entries, config.max_predicted_blocks, config.prediction_ttl_s)
        self.answer_lengths = AnswerLengths()
        self._registry = registry
        self._policy = policy
        self._config = config
        self._transport = transport
        self._rng = rng or random.Random()
        self._clock = clock
        self._links: dict[str, WorkerLink] = {}
        self._watcher_id = random.SystemRandom().randrange(1, 1 << 64)
        self._pools = Pools(config.long_prompt_ms)
        self._retiring: set[WorkerLink] = set()
        self._models = KnownModels(clock)
        self._sessions = SessionWorkers(config.max_sessions)
        self._departed = Departed(REMEMBER_MODEL_S, _MAX_DEPARTED)
        self._silences = Silences()
        self.adapters = FleetAdapters(self.links, self.resolve)
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the members of the fixed list, and start the timer."""
        self._sync()
        self._ticker = asyncio.create_task(self._tick(), name="fleet")

    async def close(self) -> None:
        """Close all links. Running calls fail."""
        if self._ticker is not None:
            await end_tasks(self._ticker)
        await asyncio.gather(*(link.close() for link in (*self._links.values(), *self._retiring)))

    def register(self, worker_id: str, address: str) -> float:
        """Add a worker or renew its lease. Returns the duration of the lease in seconds. Raises StatusError, as
        `Registry.register` does."""
        if self._registry.register(worker_id, address, self._clock()) or address not in self._links:
            self._sync()
        self._links[address].nudge()
        return self._registry.lease_s

    def deregister(self, worker_id: str, address: str) -> None:
        """Deregister a worker. It gets no new requests, and its running ones may end."""
        if self._registry.deregister(worker_id, address):
            self._sync(gone=(address,))

    def leases_seen(self, addresses: Mapping[str, str]) -> None:
        """Apply the leases of the shared store: worker id -> address."""
        self._registry.shared.seen(addresses, self._clock())
        self._sync()

    def pods_seen(self, service: str, endpoints: Endpoints) -> None:
        """Apply the pods of a Kubernetes Service. A pod that has left it gets no new requests, and its running ones may
        end."""
        num_left_out = self._registry.services.num_left_out
        self._sync(gone=self._registry.services.seen(service, endpoints))
        if self._registry.services.num_left_out not in (0, num_left_out):
            log.warning(
                "the service %s has %d pods more than this router accepts; they get no requests from it: raise "
                "--max-workers",
                service,
                self._registry.services.num_left_out,
            )
        self._tell_waiters()

    def leases_lost(self) -> None:
        """Note that the shared store could not be read. Known workers stay."""
        self._registry.shared.lost()

    def _sync(self, gone: Collection[str] = ()) -> None:
        """Connect to new members, and drop two kinds of old ones: those that have left (`gone`), and silent workers
        without a lease. A worker that reports stays even after its lease has ended."""
        members = self._registry.members()
        for address, member in members.items():
            if address not in self._links:
                self._link(address)
            self._links[address].registered_id = member.worker_id
            self._links[address].withhold(member.withheld)
        known_ids = {member.worker_id for member in members.values()}
        for address in self._links.keys() - members.keys():
            link = self._links[address]
            if address not in gone and not self._is_given_up(link, is_elsewhere=link.registered_id in known_ids):
                continue
            self._models.workers_changed()
            link = self._links.pop(address)
            link.retire()
            self._retiring.add(link)

    def _is_given_up(self, link: WorkerLink, *, is_elsewhere: bool) -> bool:
        """Whether to drop an unreachable worker without a lease: it has registered at another address, or was
        unreachable for the duration of a lease. A hanging worker is shown for longer."""
        if link.state is not LinkState.UNREACHABLE:
            return False
        away_s = self._clock() - link.away_since_s
        return is_elsewhere or away_s >= (_SHOW_SILENT_S if link.silent_s else self._registry.lease_s)

    def _link(self, address: str) -> None:
        link = WorkerLink(
            address,
            self.index,
            self._on_change,
            self._pools.note,
            self._on_room,
            self.adapters.changed,
            heartbeat_ms=self._config.heartbeat_ms,
            watcher_id=self._watcher_id,
            report_interval_ms=lambda: report_interval_ms(len(self._links)),
            clock=self._clock,
            transport=self._transport,
            plain_grpc=self._config.plain_grpc,
            silences=self._silences,
        )
        self._links[address] = link
        link.start()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = self._clock()
            self._registry.expire(now_s)
            self._sync()
            self.index.expire(now_s)
            for card in self._pools.cards():
                self._models.remember(card)
            for link in [link for link in self._retiring if link.num_in_flight == 0]:
                self._retiring.discard(link)
                await link.close()

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        """Number of workers that take requests."""
        return sum(link.is_ready for link in self._links.values())

    @property
    def num_in_flight(self) -> int:
        """Number of requests booked on workers."""
        return sum(link.num_in_flight for link in (*self._links.values(), *self._retiring))

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of answers that were received from workers but not yet passed on."""
        return sum(link.sessions.num_unread_bytes for link in (*self._links.values(), *self._retiring))

    @property
    def max_unread_bytes(self) -> int:
        """Maximum of `num_unread_bytes`."""
        return MAX_UNREAD_BYTES * (len(self._links) + len(self._retiring))

    @property
    def num_sessions(self) -> int:
        """Number of sessions whose worker is remembered."""
        return len(self._sessions)

    @property
    def max_sessions(self) -> int:
        """Maximum of `num_sessions`."""
        return self._sessions.max_sessions

    def links(self) -> list[WorkerLink]:
        """The links of all members, sorted by worker name."""
        return sorted(self._links.values(), key=lambda link: (link.worker_id, link.address))

    def workers(self) -> list[router_pb2.WorkerInfo]:
        """All members, reachable or not, sorted by name."""
        return [link.info() for link in self.links()]

    def models(self) -> dict[str, worker_pb2.ModelCard]:
        """Model name -> card for all models of live workers, sorted by name."""
        return self._models.live(self.links)

    def resolve(self, model: str) -> worker_pb2.ModelCard | None:
        """The card of the model that a request names; "" names the only model. None while new members may still
        announce the model.

        Raises StatusError: MODEL_NOT_FOUND, or INVALID_FIELD if "" is ambiguous.
        """
        return self._models.resolve(model, self.links)

    def described(self, asked: router_pb2.ExplainRequest) -> tuple[worker_pb2.ModelCard, inference_pb2.GenerateRequest]:
        """The model, and the request without its prompt, that an Explain request or a pick describes.

        Raises StatusError: NO_CAPACITY while no worker of the model has been reached, and what `resolve` raises.
        """
        card = self.resolve(asked.model)
        if card is None:
            raise StatusError(Reason.NO_CAPACITY, "no worker has been reached yet", retry_after_s=1.0)
        sampling = inference_pb2.SamplingParams()
        if asked.HasField("max_tokens"):
            sampling.max_tokens = asked.max_tokens
        request = inference_pb2.GenerateRequest(
            model=card.name,
            adapter=asked.adapter,
            sampling=sampling,
            cache_salt=asked.cache_salt,
            session_key=asked.session_key,
        )
        return card, request

    def check(self) -> None:
        """Assert the invariants of the index, of the bookings, and of the pools of ready workers. For tests."""
        self.index.check()
        for link in (*self._links.values(), *self._retiring):
            link.check()
        self._pools.check(self._links.values())

    # -- placement --------------------------------------------------------------------------------------------------

    def place(
        self, request: RoutedRequest, card: worker_pb2.ModelCard, excluded: Collection[WorkerLink]
    ) -> PlacedRequest | None:
        """Choose a ready worker of the card's model, book the request there and predict its cached blocks. Returns None
        if no worker is ready.

        A prompt goes only to workers with the tokenizer that encoded it. An answer that has begun continues only at
        workers with the same model identity. The worker itself decides whether the request would wait too long there,
        because only the worker knows its exact load.

        Raises StatusError if workers are ready, but none has the prompt's tokenizer (MODEL_CHANGED), or, for a new
        request, a context that is long enough (NO_CAPACITY).
        """
        began_s = time.perf_counter()
        self.adapters.choose(request, card)
        members = members_with(request, self._pools.members_for(card.name, request))
        if excluded or request.model_identity:
            members = members.where(lambda link, its_card: link not in excluded and request.may_go_to(its_card))
        if request.is_background and not request.has_begun:
            members = members.where(lambda link, its_card: has_background_room(link))
        members = self._pools.that_fit(request, members, self.answer_lengths.priors(card.name), may_refuse=not excluded)
        if not members:
            return None
        placement, (link, its_card), num_cached = self._decide(
            request, card.name, members, self._rng, request.num_described
        )
        booking, prediction = self._settle_on(request, link, its_card, placement, num_cached)
        took_s = time.perf_counter() - began_s
        return PlacedRequest(request, link, its_card, booking, placement, took_s, prediction)

    def not_taken(self, placed: PlacedRequest) -> None:
        """Withdraw the prediction for a request that the worker did not accept: its blocks will not be cached there."""
        if placed.prediction is not None:
            self.index.withdraw(placed.prediction)

    def cards(self, model: str) -> list[worker_pb2.ModelCard]:
        """One card for each fingerprint and block size among the ready workers of a model."""
        return [card for card, _ in self._pools.members(model).chains]

    @property
    def max_request_bytes(self) -> int | None:
        """Upper bound of a valid request's size in bytes, over all known models. None while no model is known."""
        cards = (*self.models().values(), *self._models.remembered())
        return max((max_request_bytes(card) for card in cards), default=None)

    def candidates(self, card: worker_pb2.ModelCard) -> Candidates:
        """The ready workers of this model as candidates for the policy."""
        return self._pools.members(card.name).candidates(self._pools.table)

    def has_several_identities(self, model: str) -> bool:
        """Whether the known workers of a model, reachable or not, differ in weights or tokenizer."""
        cards = (link.card for link in self._links.values())
        return len({model_identity(card) for card in cards if card is not None and card.name == model}) > 1

    def may_come_back(self, identity: str) -> bool:
        """Whether a worker with this model identity was lost recently and may be restarting or loading its adapters."""
        return self.adapters.is_loading or self._departed.may_come_back(identity, self._clock())

    def is_served(self, card: worker_pb2.ModelCard) -> bool:
        """Whether a worker of this model takes requests."""
        return self._pools.is_served(card.name)

    def has_room(self, card: worker_pb2.ModelCard) -> bool:
        """Whether a worker of this model has room in its batch."""
        return self._pools.has_room(card.name)

    def weigh(self, request: RoutedRequest, card: worker_pb2.ModelCard) -> Placement | None:
        """The decision that `place` would make now, with a description of every worker. Books nothing. None if no
        worker of the model is ready."""
        members = members_with(request, self._pools.members(card.name))
        members = self._pools.that_fit(request, members, self.answer_lengths.priors(card.name), may_refuse=False)
        if not members:
            return None
        # A separate random generator breaks ties, so that this call does not affect later placements.
        return self._decide(request, card.name, members, random.Random(0), len(members))[0]

    def continues_elsewhere(self, placed: PlacedRequest, num_more: int, excluded: Collection[WorkerLink]) -> bool:
        """See `Pools.continues_elsewhere`."""
        return self._pools.continues_elsewhere(placed, num_more, excluded, self.answer_lengths.priors(placed.card.name))

    def _decide(
        self, request: RoutedRequest, model: str, members: Members, rng: random.Random, num_described: int
    ) -> tuple[Placement, tuple[WorkerLink, worker_pb2.ModelCard], int]:
        """The placement at one of the members, that member, and how many of the prompt's blocks it has in memory."""
        priors = self.answer_lengths.priors(model)
        members = self._pools.for_next_stage(request, members, self.index, priors)
        cached_blocks = members.cached_blocks(self.index, request.hashes)
        session_worker = self._sessions.get(model, request.session_key)
        facts = RequestFacts(
            request.num_tokens,
            request.max_new_tokens,
            session_worker,
            request.max_ttft_ms,
            request.image_places(members.links[0][1]),
        )
        transfers = members.transfers(
            self.index, request.hashes, cached_blocks, self._pools.draining, request.prefilled
        )
        if len(members) == 1 and transfers is None and not num_described:
            link, card = members.links[0]
            num_cached = int(cached_blocks[0])
            return place_at(facts, link.address, num_cached * card.block_size), (link, card), num_cached
        placement = self._policy(
            facts,
            members.candidates(self._pools.table),
            cached_blocks,
            self._clock(),
            rng,
            num_described=num_described,
            priors=priors,
            adapter_ms=adapter_ms(request, members),
            transfers=transfers,
        )
        assert placement is not None, "there are candidates"
        return placement, members.links[placement.number], int(cached_blocks[placement.number])

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
        places = request.image_places(card)
        num_image_tokens = 0
        if places is not None:
            num_image_tokens = len(places) - int(np.searchsorted(places, placement.predicted_cached_tokens))
        booking = link.book(num_tokens, len(hashes) + 1 - num_cached_blocks, num_image_tokens)
        prediction = self.index.predict(link.address, hashes, num_cached_blocks, self._clock())
        if request.session_key:
            self._sessions.put(card.name, request.session_key, link.address)
        return booking, prediction

    # -- changes of state -------------------------------------------------------------------------------------------

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next change of any worker's state, or of the pods of a Service, at most `timeout_s`."""
        # asyncio.wait_for in Python 3.11 loses a cancellation that arrives together with the result.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _on_room(self, link: WorkerLink) -> None:
        model = self._pools.model_with_room_at(link)
        if model is not None:
            self.rooms.tell(model)

    def _on_change(self, link: WorkerLink) -> None:
        self._models.workers_changed()
        if self._pools.remove(link) and link.card is not None:
            self._departed.went(link.worker_id, link.adapters.identities(link.card), self._clock())
        if link.is_ready and link.card is not None:
            self._pools.add(link)
            self._departed.came(link.worker_id)
            self._models.remember(link.card)
            self.adapters.joined(link)
            self._on_room(link)
        self.states.tell(link)
        self._tell_waiters()

    def _tell_waiters(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
