"""The scaling signals of a router's models, which autoscalers follow: how much work there is, and for how many workers.

This is the one place where they are made. Prometheus (`RouterMetrics`), KEDA (`router/keda.py`) and the RPC
ListScalingSignals show the same numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from headrace.common.tasks import end_tasks
from headrace.protos import worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.admission import Admission
from headrace.router.dispatch.holding import Holding
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.links import WorkerLink
from headrace.router.placement.candidates import Candidates
from headrace.router.placement.demand import (
    WINDOW_S,
    Capacity,
    Forecast,
    Mean,
    Work,
    backlog_s,
    kv_pressure,
    need_of,
    used_blocks,
)
from headrace.router.placement.policy import expected_wait_ms, predicted_wait_ms
from headrace.router.placement.rates import Priors, believed_rates

IDLE_AFTER_S = 300.0
"""The time without requests after which a model on demand needs no worker."""
_TICK_S = 1.0
_RATE_SPAN_S = 20.0
# A model that is not served any more is forgotten after this time, unless it is on demand.
_FORGET_S = 600.0
_LACKS_ROOM = frozenset({Reason.QUEUE_FULL, Reason.NO_CAPACITY, Reason.MODEL_NOT_LOADED})


class ScalingSignal(msgspec.Struct, frozen=True, gc=False):
    """The signal of one model; see the message of the same name in router.proto. The wait is in milliseconds, the
    backlog in seconds, and the pressure from 0 to 1. `num_refused` counts by reason, since the router started."""

    model: str
    num_ready: int
    num_wanted: int
    queue_wait_ms: float
    backlog_s: float
    kv_pressure: float
    num_waiting: int
    num_at_workers: int
    num_refused: dict[str, int]


class _Totals:
    """Sums of the workers' counters. Each counter restarts at 0 with its worker."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}  # by address: epoch, prompt tokens, requests

    def grown(self, links: Sequence[WorkerLink]) -> tuple[int, int]:
        """How many prompt tokens were computed and requests admitted since the last call."""
        tokens = requests = 0
        now: dict[str, tuple[int, int, int]] = {}
        for link in links:
            counters = link.reported.message.counters
            current = (link.epoch, counters.prompt_tokens_computed, counters.requests_admitted)
            last = self._last.get(link.address)
            if last is not None and last[0] == link.epoch:
                tokens += max(current[1] - last[1], 0)
                requests += max(current[2] - last[2], 0)
            now[link.address] = current
        self._last = now
        return tokens, requests


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Times in seconds: `idle_after_s` without requests, a model on demand needs no worker; the need is averaged over
    `window_s` before fewer workers are wanted."""

    idle_after_s: float = IDLE_AFTER_S
    window_s: float = WINDOW_S


class _Model:
    """The state of a model between two computations of its signal."""

    def __init__(self, now_s: float, window_s: float) -> None:
        self.known_s = now_s
        self.forecast = Forecast(window_s)
        self.totals = _Totals()
        self.tokens_per_s = Mean(_RATE_SPAN_S)
        self.tokens_per_s.observe(0.0, now_s)
        self.refused_per_s = Mean(_RATE_SPAN_S)
        self.refused_per_s.observe(0.0, now_s)
        self.capacity = Capacity()
        self.refused: Counter[str] = Counter()
        self.num_refused_full = 0
        self.seen_s = now_s
        self.looked_s = now_s
        self.active_s = -math.inf
        """The last time with a request."""
        self.was_served = False


class Scaling:
    """Makes the signals of one router, every second and when they are asked for. For one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        holding: Holding,
        config: ScalingConfig = ScalingConfig(),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._holding = holding
        self._config = config
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._users: Counter[str] = Counter()
        """How many callers use a model without a request."""
        self._ticker: asyncio.Task[None] | None = None
        self.latest: Sequence[ScalingSignal] = ()
        """The newest signals, by model. It may be read in any thread."""
        self._changed = asyncio.Event()
        holding.changes.add(self._held)

    def start(self) -> None:
        """Make signals every second until `close`."""
        self._ticker = asyncio.create_task(self._tick(), name="scaling")

    async def close(self) -> None:
        """Stop."""
        if self._ticker is not None:
            await end_tasks(self._ticker)

    @contextlib.contextmanager
    def using(self, model: str) -> Iterator[None]:
        """Context manager: a caller uses this model without a request. It is not idle."""
        self._users[model] += 1
        try:
            yield
        finally:
            self._users[model] -= 1
            if not self._users[model]:
                del self._users[model]
            self._model(model).active_s = self._clock()

    def refused(self, model: str, reason: Reason) -> None:
        """Count a refused request of a model, if it was refused for lack of room or workers."""
        if reason not in _LACKS_ROOM:
            return
        try:
            card = self._fleet.resolve(self._holding.on_demand.resolved(model, self._fleet.models()))
        except StatusError:
            card = None
        name = model if card is None else card.name
        if card is None and name not in self._holding.on_demand:
            return  # not a model: a name that anyone may have made up
        known = self._model(name)
        known.refused[reason.name.lower()] += 1
        known.num_refused_full += reason is Reason.QUEUE_FULL

    def signals(self) -> Sequence[ScalingSignal]:
        """The signals now, by model."""
        now_s = self._clock()
        live = self._fleet.models()
        for name in {*live, *self._holding.on_demand.models, *self._admission.is_waited_for()}:
            self._model(name).seen_s = now_s
        for name in [name for name, model in self._models.items() if now_s - model.seen_s > _FORGET_S]:
            del self._models[name]
        links: dict[str, list[WorkerLink]] = {}
        for link in self._fleet.links():
            if link.card is not None:
                links.setdefault(link.card.name, []).append(link)
        self.latest = tuple(
            self._signal(name, live.get(name), links.get(name, []), now_s) for name in sorted(self._models)
        )
        return self.latest

    def signal(self, model: str) -> ScalingSignal | None:
        """The signal of one model now; None if it is unknown."""
        return next((signal for signal in self.signals() if signal.model == model), None)

    async def changed(self) -> None:
        """Wait until the signals are computed again, for at most a second."""
        await self._changed.wait()

    async def _tick(self) -> None:
        while True:
            self._tell()
            await asyncio.sleep(_TICK_S)

    def _held(self, model: str) -> None:
        """Notify the followers of the signals at once, because a request begins to wait for a model without a
        worker."""
        self._tell()

    def _tell(self) -> None:
        self.signals()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _model(self, name: str) -> _Model:
        if name not in self._models:
            self._models[name] = _Model(self._clock(), self._config.window_s)
        return self._models[name]

    def _signal(
        self, name: str, card: worker_pb2.ModelCard | None, links: Sequence[WorkerLink], now_s: float
    ) -> ScalingSignal:
        model = self._models[name]
        priors = self._fleet.answer_lengths.priors(name)
        candidates = self._fleet.candidates(card or worker_pb2.ModelCard(name=name))
        capacity = model.capacity = Capacity.of(candidates, priors) or model.capacity
        waiting = self._admission.waiting(name)
        num_waiting = waiting.num_requests + self._holding.held.get(name, 0)
        columns = candidates.columns
        num_at_workers = int((columns.running + columns.waiting + columns.booked_requests).sum())

        new_tokens, new_requests = model.totals.grown(links)
        passed_s = max(now_s - model.looked_s, 1e-3)
        num_refused, model.num_refused_full = model.num_refused_full, 0
        model.looked_s = now_s
        # Gateways use routers in turn, so others have as many requests that wait and are refused.
        num_routers = max((link.num_routers for link in links), default=1)
        refused_per_s = model.refused_per_s.observe(num_routers * num_refused / passed_s, now_s)
        num_present = num_at_workers + num_routers * num_waiting
        work = Work(
            num_at_workers=num_at_workers,
            num_waiting=num_routers * num_waiting,
            # Refused clients ask again soon, so what they would add is bounded.
            num_refused=min(refused_per_s * _answer_s(candidates, priors), num_present),
            uncached_tokens=float((columns.uncached_tokens + columns.booked_tokens).sum()),
            waiting_tokens=num_routers * waiting.num_tokens,
            tokens_per_s=model.tokens_per_s.observe(new_tokens / passed_s, now_s),
            used_blocks=used_blocks(columns) + float(columns.booked_blocks.sum()),
        )
        is_served = len(candidates) > 0
        if num_present or new_requests or num_refused or name in self._users or (is_served and not model.was_served):
            model.active_s = now_s
        model.was_served = is_served
        may_be_idle = name in self._holding.on_demand and now_s - model.active_s >= self._config.idle_after_s
        num_wanted = max(model.forecast.observe(need_of(work, capacity), now_s), 1)
        if now_s - model.known_s < self._config.window_s:
            # A router that has just started has not seen yet what the workers are there for.
            num_wanted = max(num_wanted, len(candidates))
        return ScalingSignal(
            model=name,
            num_ready=len(candidates),
            num_wanted=0 if may_be_idle else num_wanted,
            queue_wait_ms=self._queue_wait_ms(candidates, num_waiting, 1000 * waiting.oldest_s, now_s, priors),
            backlog_s=backlog_s(work, len(candidates), capacity),
            kv_pressure=kv_pressure(columns),
            num_waiting=num_waiting,
            num_at_workers=num_at_workers,
            num_refused=dict(model.refused),
        )

    def _queue_wait_ms(
        self, candidates: Candidates, num_waiting: int, oldest_ms: float, now_s: float, priors: Priors
    ) -> float:
        """The expected wait of a request that arrives now, in milliseconds. Without a worker, the time that the first
        request has waited so far."""
        if not len(candidates):
            return oldest_ms
        here_ms = predicted_wait_ms(num_waiting, candidates, priors) if num_waiting else 0.0
        return max(here_ms + expected_wait_ms(candidates, now_s, priors), oldest_ms)


def _answer_s(candidates: Candidates, priors: Priors) -> float:
    """The time that an answer takes, in seconds."""
    step_ms = believed_rates(candidates.columns, priors)[1]
    return priors.answer_tokens * (float(step_ms.mean()) if len(step_ms) else priors.decode_step_ms) / 1000
