"""One link for each worker: a channel, the worker's card, and a Watch that keeps its index and load up to date.

    UNREACHABLE --card, then first report--> READY <--reported state--> DRAINING
         ^                                   |  ^
         |                     silent, or a  |  | heard again
         |                     call failed   v  |
         +------silent for too long------- SUSPECT
         +------the Watch broke, from any state

A worker that is withheld (its pod is not ready) is SUSPECT instead of READY, whatever it reports.

A link reconnects until it is closed. The pause between attempts is a fiftieth of the time since the worker was lost,
between 50 ms and 1 s. So a restarted worker is found quickly, and a worker that stays away costs little.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import grpc

from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import PLAIN, Transport, channel_options
from headrace.common.transport.session_client import SessionClient
from headrace.common.transport.silence import LOST_HEARTBEATS, Peer, Silences
from headrace.protos import router_pb2, worker_pb2, worker_pb2_grpc
from headrace.router.fleet.reported_load import ReportedLoad, ReportPace
from headrace.router.fleet.worker_adapters import WorkerAdapters
from headrace.router.placement.bookings import Booking, Bookings
from headrace.router.placement.candidates import Candidate
from headrace.router.placement.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (*channel_options(longest_pause_ms=100), ("grpc.use_local_subchannel_pool", 1))

HEARTBEAT_MS = 500
# After this many silent heartbeats, a worker gets no new requests. After `LOST_HEARTBEATS`, its running requests move.
_SUSPECT_HEARTBEATS = 3
_CARD_TIMEOUT_S = 2.0
_MIN_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
# The event loop runs after this many hashes are applied.
_SLICE = 4096
# Running calls may continue for this long over a channel whose certificates were replaced.
_OLD_CHANNEL_S = 3600.0
_incarnations = itertools.count(1)

# Quoted, because the class is not generic at run time.
_Watch: TypeAlias = "grpc.aio.UnaryStreamCall[worker_pb2.WatchRequest, worker_pb2.WatchResponse]"


class _OutOfStepError(Exception):
    """The worker's reports are out of sequence, so the watch must start again."""


class _SilentError(_OutOfStepError):
    """The worker has been silent for too long."""


def _is_silence(error: Exception) -> bool:
    """Whether a watch ended because no message arrived, not because a connection was refused or closed."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return isinstance(error, _SilentError)


def _reason_of(error: Exception, worker_id: str) -> str:
    """Why a watch ended, in words. Logs unexpected exceptions."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, _OutOfStepError):
        return str(error)
    log.exception("the link to worker %s failed; reconnecting", worker_id)
    return f"the link to it failed: {type(error).__name__}"


class LinkState(enum.Enum):
    """The state of a worker, with the values of the protocol."""

    UNREACHABLE = router_pb2.WORKER_STATE_UNREACHABLE
    READY = router_pb2.WORKER_STATE_READY
    DRAINING = router_pb2.WORKER_STATE_DRAINING
    SUSPECT = router_pb2.WORKER_STATE_SUSPECT


class Abandonable(Protocol):
    """A running call that its link can abandon when the worker is lost."""

    def abandon(self, why: str) -> None:
        """End the call. Its reader gets an error that the worker was lost."""


class _SilenceTimer:
    """Calls `judge` with the peer until `stop`. `judge` returns the seconds until the next call.

    If it returns None, the peer counts as lost: `on_given_up` is called, and the timer ends.
    """

    def __init__(
        self, peer: Peer, first_s: float, judge: Callable[[Peer], float | None], on_given_up: Callable[[], object]
    ) -> None:
        self.peer = peer
        self.gave_up = False
        self._judge = judge
        self._on_given_up = on_given_up
        self._loop = asyncio.get_running_loop()
        self._arm(first_s)

    def stop(self) -> None:
        """Stop the timer."""
        self._handle.cancel()
        self.peer.close()

    def _arm(self, delay_s: float) -> None:
        self._handle = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        again_s = self._judge(self.peer)
        if again_s is None:
            self.gave_up = True
            self._on_given_up()
        else:
            self._arm(again_s)


class WorkerLink:
    """The router's knowledge of one worker, and the connection to it.

    Owns the worker's part of the index (under `address`, at `slot`). `on_change` is called when the state changes,
    `on_load` when load or bookings change, and then `on_room` if there may be more room; `on_adapter` as `on_change` of
    `WorkerAdapters`. `watcher_id` identifies the
    router to the worker, which counts its routers and reports their number (`num_routers`). `report_interval_ms`
    returns the minimum interval between reports; 0 leaves it to the worker. All links of a router share
    `silences`.
    """

    def __init__(
        self,
        address: str,
        index: PrefixIndex,
        on_change: Callable[[WorkerLink], None] = lambda _: None,
        on_load: Callable[[WorkerLink], None] = lambda _: None,
        on_room: Callable[[WorkerLink], None] = lambda _: None,
        on_adapter: Callable[[WorkerLink, str, worker_pb2.Adapter | None], None] = lambda link, name, adapter: None,
        *,
        heartbeat_ms: int = HEARTBEAT_MS,
        report_interval_ms: Callable[[], int] = lambda: 0,
        watcher_id: int = 0,
        clock: Callable[[], float] = time.monotonic,
        transport: Transport = PLAIN,
        plain_grpc: bool = False,
        silences: Silences | None = None,
    ) -> None:
        self.address = address
        self._index = index
        self._on_change = on_change
        self._on_load = on_load
        self._on_room = on_room
        self._clock = clock
        self._transport = transport
        self._silences = silences or Silences()
        self._plain_grpc = plain_grpc
        self._pace = ReportPace(report_interval_ms)
        self.watcher_id = watcher_id
        self.num_routers = 1
        self._watched_since_s = 0.0
        self._adjusting: object = None
        """A call whose result is not needed. Keep a reference, because it would be cancelled without one."""
        self.reported = ReportedLoad()
        self.adapters = WorkerAdapters(partial(on_adapter, self))
        self.registered_id = ""
        self.card: worker_pb2.ModelCard | None = None
        self.epoch = 0
        self.state = LinkState.UNREACHABLE
        self.detail = "not reached yet"
        self.incarnation = 0  # a new number each time that the worker becomes ready, never used twice in this process
        self.created_at_s = clock()
        self.away_since_s = self.created_at_s
        self._own_id = ""
        self._withheld = ""  # why, or empty
        self._is_silent = False
        self._heartbeat_ms = heartbeat_ms
        self._suspect_after_s = _SUSPECT_HEARTBEATS * heartbeat_ms / 1000
        self.bookings = Bookings()
        self._calls: dict[Abandonable, None] = {}  # in order of arrival, which is the order of resumption elsewhere
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.slot = index.add_worker(address)
        self._closing: set[asyncio.Task[None]] = set()
        self._open_channel()

    def _open_channel(self) -> None:
        """Open the channel and create its stubs."""
        self._version = self._transport.version
        self._channel = self._transport.channel(self.address, _CHANNEL_OPTIONS)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self.load_adapter = self._stub.LoadAdapter
        self.unload_adapter = self._stub.UnloadAdapter
        self.hand_over = self._stub.HandOver
        self.take_blocks = self._stub.TakeBlocks
        self.drain = self._stub.Drain
        self.sessions = SessionClient(
            self._channel, plain_grpc=self._plain_grpc, silences=self._silences, peer=self.address
        )
        self.generate = self.sessions.generate
        # Without serializers, requests and responses stay encoded.
        self.get_tokenizer: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            "/headrace.v1.Worker/GetTokenizer"
        )

    @property
    def worker_id(self) -> str:
        """The worker's name from its card. Until it is reached, the name that it registered with, or its address."""
        return self._own_id or self.registered_id or self.address

    @property
    def is_ready(self) -> bool:
        """Whether the worker takes requests."""
        return self.state is LinkState.READY

    @property
    def silent_s(self) -> float:
        """Seconds since the last report of a lost worker whose process may still run but does not answer. Otherwise
        0."""
        is_silent = self._is_silent and self.state is LinkState.UNREACHABLE
        return self.reported.age_ms(self._clock()) / 1000 if is_silent else 0.0

    def info(self) -> router_pb2.WorkerInfo:
        """This worker's entry in ListWorkers."""
        silent_s = self.silent_s
        return router_pb2.WorkerInfo(
            worker_id=self.worker_id,
            address=self.address,
            state=router_pb2.WORKER_STATE_NOT_ANSWERING if silent_s else self.state.value,
            model=self.card.name if self.card else "",
            role=self.card.role if self.card else worker_pb2.ROLE_UNSPECIFIED,
            load=self.reported.message,
            report_age_ms=self.reported.age_ms(self._clock()),
            num_in_flight=self.num_in_flight,
            detail=f"it has not answered for {silent_s:.0f} s" if silent_s else self.detail,
            num_indexed_blocks=self._index.num_entries_of(self.address),
            indexed_digest=self._index.digest_of(self.address),
            adapters=self.adapters.message(),
        )

    def candidate(self) -> Candidate:
        """This worker as a candidate for the policy. It must have a card."""
        assert self.card is not None, "a worker without a card is not a candidate"
        return Candidate.of(self.address, self.reported.load, self.card.block_size, self.bookings)

    # -- bookings ---------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Number of requests that are booked here and not released."""
        return self.bookings.num_in_flight

    def book(self, num_tokens: int, num_blocks: int, num_image_tokens: int = 0) -> Booking:
        """Add a request's uncached tokens and new blocks to this worker's load until its reports include them."""
        booking = self.bookings.book(num_tokens, num_blocks, self._clock(), num_image_tokens)
        self._on_load(self)
        return booking

    def settle(self, booking: Booking) -> None:
        """Stop adding a booking to the load, because the worker's reports now include it. Idempotent."""
        if self.bookings.settle(booking):
            self._on_load(self)

    def release(self, booking: Booking) -> None:
        """Release a booking. Must be called exactly once for each."""
        self.bookings.release(booking)
        self._on_load(self)
        self._on_room(self)

    def check(self) -> None:
        """Assert that the totals match the bookings. For tests."""
        self.bookings.check()

    @contextlib.contextmanager
    def running(self, call: Abandonable) -> Iterator[None]:
        """Context manager: while it is open, the call is abandoned if the worker is silent for too long."""
        self._calls[call] = None
        try:
            yield
        finally:
            self._calls.pop(call, None)

    # -- state ------------------------------------------------------------------------------------------------------

    def suspect(self, why: str) -> None:
        """Send no new requests until the worker reports again. Called when a call fails as if the worker were dead."""
        if self.state is LinkState.READY:
            self._enter(LinkState.SUSPECT, why)

    def withhold(self, why: str) -> None:
        """Send no new requests for this reason, although the worker may report that it takes some. An empty reason ends
        that, with the worker's next report. Running requests continue."""
        if why == self._withheld:
            return
        self._withheld = why
        if why:
            self.suspect(why)
        else:
            self.nudge()

    def draining(self) -> None:
        """Send no new requests, because the worker refused one while draining. Its next report will say so, too."""
        if self.state is LinkState.READY:
            self._enter(LinkState.DRAINING, "the worker drains")

    def start(self) -> None:
        """Start tasks that connect to the worker and stay connected until `close`."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name=f"link {self.address}")

    def nudge(self) -> None:
        """Reconnect at once, because there is a sign that the worker is running."""
        if self.state is LinkState.UNREACHABLE:
            self._wake.set()

    def retire(self) -> None:
        """Stop watching, remove the worker from the index, and take no new requests. Running ones may end."""
        if self._task is not None:
            self._task.cancel()
        self._enter(LinkState.UNREACHABLE, "retired")
        self._index.remove_worker(self.address)

    async def close(self) -> None:
        """Close the channel. Running calls fail."""
        if self._task is not None:
            await end_tasks(self._task)
        for closing in self._closing:
            closing.cancel()
        await self._channel.close()

    def _enter(self, state: LinkState, detail: str) -> None:
        self.detail = detail
        if state is self.state:
            return
        change = f"{self.state.name} -> {state.name}" + (f": {detail}" if detail else "")
        running = f"; {self.num_in_flight} requests are running there" if self.num_in_flight else ""
        log.info("worker %s at %s: %s%s", self.worker_id, self.address, change, running)
        if state is LinkState.UNREACHABLE:
            self.away_since_s = self._clock()
        if state is LinkState.READY:
            self.incarnation = next(_incarnations)
        self.state = state
        self._on_change(self)

    # -- the watch --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._session()
            except Exception as error:
                # Without this change of state, the worker would count as ready although nobody watches it.
                self._is_silent = _is_silence(error)
                self._enter(LinkState.UNREACHABLE, _reason_of(error, self.worker_id))
            pause_s = min(max((self._clock() - self.away_since_s) / 50, _MIN_PAUSE_S), _MAX_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()

    async def _session(self) -> None:
        """Fetch the card, then watch until the worker's epoch changes, it falls silent, or the stream breaks."""
        if self._transport.version != self._version:
            # Running calls finish on the old channel.
            closing = asyncio.create_task(self._channel.close(_OLD_CHANNEL_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._open_channel()
        answer = await self._stub.GetModelCard(worker_pb2.GetModelCardRequest(), timeout=_CARD_TIMEOUT_S)
        if not (answer.card.name and answer.card.block_size and answer.card.max_context_tokens):
            raise _OutOfStepError("its model card lacks a name, a block size or a context length")
        self.card = answer.card
        self.epoch = answer.epoch
        self._own_id = answer.worker_id
        self.reported.begin_epoch()
        while True:
            self._watched_since_s = self._clock()
            watch = self._stub.Watch(
                worker_pb2.WatchRequest(
                    heartbeat_ms=self._heartbeat_ms,
                    min_interval_ms=self._pace.begin(),
                    watcher_id=self.watcher_id,
                )
            )
            peer = self._silences.watch(self.address, LOST_HEARTBEATS * self._heartbeat_ms / 1000)
            silence = _SilenceTimer(peer, self._suspect_after_s, self._judge_silence, watch.cancel)
            try:
                await self._follow(watch, silence)
            finally:
                silence.stop()
                watch.cancel()

    async def _follow(self, watch: _Watch, silence: _SilenceTimer) -> None:
        """Apply the reports of one watch. Returns at a gap, so that the watch starts again."""
        expected = 0
        while True:
            try:
                message = await watch.read()
            except asyncio.CancelledError:
                if silence.gave_up:
                    raise _SilentError(f"silent for {silence.peer.silent_s:.1f} s") from None
                raise
            if message is grpc.aio.EOF:
                raise _OutOfStepError("it ended the watch")
            assert isinstance(message, worker_pb2.WatchResponse)
            silence.peer.heard()
            if message.epoch != self.epoch:
                raise _OutOfStepError("it restarted")
            if message.sequence != expected:
                log.warning("worker %s sent report %d instead of %d", self.worker_id, message.sequence, expected)
                if expected == 0:
                    raise _OutOfStepError("its watch does not start with report 0")
                return
            if expected == 0 and not message.kv_events.reset:
                raise _OutOfStepError("its watch does not start with a snapshot")
            expected += 1
            await self._apply(message)
            self._keep_pace()

    def _keep_pace(self) -> None:
        """Tell the worker how often to report, if that has changed. The answer is not needed: if the worker does not
        know the watch, it is about to end."""
        interval_ms = self._pace.change() if self.watcher_id else None
        if interval_ms is not None:
            request = worker_pb2.AdjustWatchRequest(watcher_id=self.watcher_id, min_interval_ms=interval_ms)
            self._adjusting = self._stub.AdjustWatch(request)

    async def _apply(self, message: worker_pb2.WatchResponse) -> None:
        events = message.kv_events
        if events.reset:
            self._index.reset(self.address)
        for index, changes in ((self._index.disk, message.disk_events), (self._index.states, message.state_events)):
            if changes.stored or changes.evicted:
                index.apply(self.slot, changes.stored, changes.evicted)
        for change, hashes in ((self._index.evict, events.evicted), (self._index.store, events.stored)):
            await self._in_slices(change, hashes)
        self.num_routers = message.num_watchers
        self.adapters.take(message)
        if message.sequence == 0:  # the first report includes earlier requests, but does not name them
            self.bookings.settle_until(self._watched_since_s)
        self._take_load(message.load, message.placement_ids)
        if message.load.draining:
            self._enter(LinkState.DRAINING, "the worker drains")
        elif self._withheld:
            self._enter(LinkState.SUSPECT, self._withheld)
        else:
            self._enter(LinkState.READY, "")

    async def _in_slices(self, change: Callable[[str, Sequence[int]], None], hashes: Sequence[int]) -> None:
        for start in range(0, len(hashes), _SLICE):
            if start:
                await asyncio.sleep(0)
            change(self.address, hashes[start : start + _SLICE])

    def given_back(self, message: worker_pb2.GivenBack) -> None:
        """Apply the load that a worker sent when it returned a request."""
        if message.epoch == self.epoch:
            self._take_load(message.load, message.placement_ids)

    def _take_load(self, load: worker_pb2.Load, placement_ids: Sequence[int]) -> None:
        """Apply a load report that includes these placements of this router."""
        now_s = self._clock()
        self.bookings.settle_named(placement_ids)
        self.reported.take(load, now_s)
        self._on_load(self)
        self._on_room(self)

    def _judge_silence(self, peer: Peer) -> float | None:
        """Suspect or give up a worker that is silent for too long. Returns the seconds until the next check; None if
        the worker was given up."""
        silent_s = peer.silent_s
        if silent_s < self._suspect_after_s:
            return self._suspect_after_s - silent_s
        why = f"silent for {silent_s:.1f} s"
        self.suspect(why)
        again_s = peer.judge()
        if again_s:
            return again_s
        self._enter(LinkState.UNREACHABLE, why)
        for call in list(self._calls):
            call.abandon(f"worker {self.worker_id} is {why}")
        return None
