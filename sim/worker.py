"""A simulated worker with the real scheduler, KV cache and load reports. The cost model gives the time of each step.

    take --> [ arrived ] --begin_step--> scheduler.schedule() ... cost model's milliseconds ... --end_step--> outputs
                                                                                                    |
                                                                                       report (as EngineThread does)

Pure: the caller passes the time.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.protos.inference_pb2 import Belief
from headrace.protos.load_report import LoadReport
from headrace.sim.decode_run import DecodeRun, Learning
from headrace.sim.drafts import NoGrammars, SimulatedDrafts
from headrace.sim.images import Encoder, ImageSettings
from headrace.sim.step_cost import StepCost, StepCostPair
from headrace.sim.tiers import DiskSlots, SimulatedDisk, SimulatedPeers, TierSettings, Timer
from headrace.sim.trace import Job
from headrace.worker.engine.build import build_scheduler, build_speculation
from headrace.worker.engine.encoding import Encoding
from headrace.worker.engine.engine import EngineStats
from headrace.worker.engine.fetching import Fetching, without_images
from headrace.worker.engine.forecast import Forecast
from headrace.worker.engine.mailbox import EngineReport
from headrace.worker.engine.pacing import Pacing
from headrace.worker.engine.scheduler import SchedulerOutput
from headrace.worker.engine.stages import Stage, Stages
from headrace.worker.engine.step_cost import WARM_UP_TOKENS, StepCosts, StepRates, StepShape
from headrace.worker.engine.step_meter import StepMeter, StepSize
from headrace.worker.engine.thread import REPORT_INTERVAL_S, load_of
from headrace.worker.kv.cache import KVCache
from headrace.worker.kv.fetch import Persistence
from headrace.worker.kv.groups.window import WindowBudget
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput, Sampled
from headrace.worker.server.arrivals import Arrivals, is_contradicted
from headrace.worker.vision.states import StateStore

# Shorter runs are computed step by step.
_LEAST_RUN = 2


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of each worker. Its KV cache holds `kv_tokens` tokens in blocks of `block_size`. None means the worker's
    default."""

    cost: StepCost | StepCostPair
    kv_tokens: int = 600_000
    block_size: int = 512
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 1024
    max_num_mixed_tokens: int | None = None
    target_step_ms: float | None = None
    window: WindowBudget | None = None
    """What the memory has for layers that keep only a window of each request; None if all keep everything."""
    max_wait_s: float = math.inf
    """Requests that would wait longer for others are refused, as with --max-ttft; infinite: none."""
    least_decode: int = 1
    """Fewest tokens of a decode step, padding included."""
    acceptance: float | None = None
    """Probability that a draft token is right if those before it are; None for no speculation."""
    draft_cost: StepCost | None = None
    """Cost of the steps of a smaller model that drafts; None for drafts that cost nothing."""
    tiers: TierSettings = TierSettings()  # noqa: RUF009  frozen
    images: ImageSettings | None = None
    """How images are encoded; None for text alone."""
    skips_steps: bool = True
    """Whether decode steps that change nothing are computed together. The result is the same without: tests compare."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the KV cache."""
        return self.kv_tokens // self.block_size

    def holds(self, job: Job) -> bool:
        """Whether the job fits into the KV cache. A worker refuses other jobs."""
        return job.num_prompt_tokens + job.num_output_tokens <= self.num_blocks * self.block_size


class Placed(NamedTuple):
    """A placement: the rank of the router, and the placement's id there."""

    router: int
    placement_id: int


class Report(NamedTuple):
    """A worker's report to routers after a step or the arrival of a request. `load` includes the placements in `placed`
    and in earlier reports. A newer report has a higher `version`."""

    load: LoadReport
    version: int
    stored: Sequence[int] = ()
    evicted: Sequence[int] = ()
    placed: Sequence[Placed] = ()
    disk_changes: Mapping[int, bool] = {}


class SimulatedWorker:
    """One worker. `begin_step` and `end_step` alternate; `begin_run` and `end_run` may take their place. `cut_run`
    comes before anything else, because a run has computed what has not happened yet."""

    def __init__(
        self,
        settings: WorkerSettings,
        clock: Callable[[], float],
        *,
        reports_every_step: bool = False,
        timer: Timer | None = None,
        cache_of: Callable[[str], KVCache] | None = None,
        shared_disk: DiskSlots | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        """With tiers, `timer` has their events, and `cache_of` finds the KV caches of other workers. `shared_disk` is
        the disk of all workers, if they share one. `encoder` encodes images."""
        self.settings = settings
        self._num_taken = 0
        self._clock = clock
        self._arrivals = Arrivals(settings.block_size)
        self._placed: list[Placed] = []
        self._version = 0
        self._load = LoadReport(max_num_seqs=settings.max_num_seqs)
        most = settings.max_num_batched_tokens
        limits = StepLimits(settings.max_num_seqs, most, settings.max_num_mixed_tokens or most, is_exact=True)
        costs = StepCosts()
        target_ms = settings.target_step_ms
        speculation = None
        if settings.acceptance is not None:
            drafts = SimulatedDrafts(settings.acceptance, settings.draft_cost, self._right_token)
            # Simulated answers repeat one token, so earlier text is no draft.
            speculation = build_speculation(
                costs, NoGrammars(), limits, target_step_ms=target_ms, model_drafts=drafts, looks_up=False
            )
        self._disk, self._peers = _tiers(settings, timer, cache_of, shared_disk)
        self.scheduler = build_scheduler(
            KVCache(
                settings.num_blocks,
                settings.block_size,
                () if settings.window is None else (settings.window,),
                Persistence(spill=self._disk),
            ),
            limits,
            target_step_ms=target_ms,
            step_costs=costs,
            speculation=speculation,
            clock=clock,
        )
        self._forecast: Forecast | None = None
        if math.isfinite(settings.max_wait_s):
            self._forecast = Forecast(self.scheduler, settings.max_wait_s, clock)
        self._refused: list[RequestOutput] = []
        self.encoder, self._encoding = self._with_images(settings.images, encoder)
        encode_s = without_images if self._encoding is None else self._encoding.spared_s
        self.fetching: Fetching | None = None
        if settings.tiers.are_any:
            self.fetching = Fetching(self.scheduler, self._disk, self._peers, clock, encode_s=encode_s)
        stages: list[Stage] = [stage for stage in (self.fetching, self._encoding) if stage is not None]
        self._stages = Stages(stages) if stages else None
        self._pacing = None if self.encoder is None else Pacing(self.scheduler, Stages(stages), clock)
        self._meter = StepMeter(self.scheduler)
        self._learning = Learning(costs.decode)
        self._stats = EngineStats()
        self._warm_up()
        self._arrived: list[Request] = []
        self._answers: dict[Request, Sampled] = {}
        self._output: SchedulerOutput | None = None
        self._run: DecodeRun | None = None
        self._num_step_tokens = 0
        self._step_ms = self._draft_ms = 0.0
        self._size: StepSize | None = None
        """The size of the running step; None without speculation."""
        self._commands_came = False
        self._next_report_s = 0.0
        self._reports_every_step = reports_every_step

    def _with_images(
        self, settings: ImageSettings | None, encoder: Encoder | None
    ) -> tuple[Encoder | None, Encoding | None]:
        """The stage of requests with images."""
        if settings is None:
            return None, None
        assert encoder is not None, "images need an encoder"
        return encoder, Encoding(self.scheduler, encoder, StateStore(settings.cache_bytes), math.inf, self._clock)

    def _warm_up(self) -> None:
        """Fit the worker's cost model to the steps of a warm-up, each of a different size than the previous one."""
        for num_tokens in WARM_UP_TOKENS:
            for step in ((0, num_tokens), (num_tokens, 1)):
                shape = StepShape.of([step], changed=True)
                self.scheduler.step_costs.observe(shape, self.settings.cost.milliseconds(shape), is_first=False)
        self.scheduler.step_costs.rates = StepRates()

    @property
    def busy_s(self) -> float:
        """Total time of all completed steps, in seconds."""
        run = self._run
        return self._stats.infer_s if run is None else run.busy_s(run.num_ended(self._clock()))

    @property
    def num_steps(self) -> int:
        """Number of completed steps."""
        run = self._run
        return self._stats.num_steps + (0 if run is None else run.num_ended(self._clock()))

    @property
    def pause_s(self) -> float:
        """Seconds until the next step should begin, because images wait for the encoder; 0 if it should at once."""
        return self._pacing.left_s if self._pacing is not None and self._shares_cores else 0.0

    @property
    def is_stepping(self) -> bool:
        """Whether a step, or a run of steps, has not ended."""
        return self._output is not None or self._run is not None

    @property
    def run(self) -> DecodeRun | None:
        """The run of steps that has not ended, if there is one."""
        return self._run

    def begin_run(self) -> DecodeRun | None:
        """Begin a run of steps, if the next ones change nothing but the length of answers. `end_run` or `cut_run`
        follows. None if the next step is to begin by itself."""
        assert not self.is_stepping, "a step is running"
        if self._encoding is not None:
            self._add_ready()
        num_steps = 0 if self._is_paced else self._num_alike()
        if num_steps < _LEAST_RUN:
            return None
        running = self.scheduler.running
        num_requests = len(running)
        context = sum(request.num_computed_tokens for request in running) + num_requests
        num_shared = self.scheduler.kv_cache.num_shared_tokens
        changed = num_requests != self._num_step_tokens
        exact = self._reports_every_step
        self._run = DecodeRun(
            self.settings.cost,
            StepShape(num_requests, 0, 0, context, num_requests, changed=changed, shared=min(num_shared, context)),
            num_steps,
            self._clock(),
            self._stats.infer_s,
            self.scheduler.step_costs.rates.decode_step_ms,
            self._engine_load(0.0),
            self._version,
            0.0 if exact else self._next_report_s,
            0.0 if exact else REPORT_INTERVAL_S,
            1.0 if self.encoder is None else self.encoder.step_factor,
        )
        self._engine_is(busy=True)
        return self._run

    @property
    def _is_paced(self) -> bool:
        """Whether a pause may follow each step."""
        return self._shares_cores and self._stages is not None and self._stages.num_sharing(-sys.maxsize) > 0

    @property
    def _shares_cores(self) -> bool:
        return self.encoder is not None and self.encoder.shares_cores

    def _engine_is(self, *, busy: bool) -> None:
        if self.encoder is not None:
            self.encoder.engine_is(busy=busy)

    def _add_ready(self) -> None:
        """Give the scheduler the requests that have passed all stages."""
        if self._stages is not None:
            for request in self._stages.take_ready():
                self.scheduler.add(request)
            assert not self._stages.take_outputs(), "a request ended before it was scheduled"

    def _num_alike(self) -> int:
        """How many of the next steps change nothing but the length of answers."""
        scheduler = self.scheduler
        is_plain = self.settings.skips_steps and self.fetching is None and scheduler.speculation is None
        is_plain = is_plain and self.settings.window is None
        has_arrivals = self._arrivals.num_requests or scheduler.waiting
        if not is_plain or has_arrivals or not scheduler.running or not self._learning.is_steady:
            return 0
        if len(scheduler.running) < self.settings.least_decode:
            return 0  # such steps are padded
        size = self.settings.block_size
        least = sys.maxsize
        for request in scheduler.running:
            computed = request.num_computed_tokens
            generated = request.num_generated_tokens
            if not generated or request.num_uncomputed_tokens != 1 or request.num_findable_blocks < computed // size:
                return 0
            least = min(
                least,
                request.sampling.max_tokens - generated - 1,  # the last token ends it
                size - computed % size - 1,  # a full block is to be published
                len(request.block_table) * size - computed,  # the next block is to be taken
            )
        return least

    def end_run(self) -> None:
        """Complete all steps of the run."""
        run = self._run
        assert run is not None, "no run"
        self._pass(run, len(run.ends_s))

    def cut_run(self) -> float | None:
        """End the run early, because something else happens. The last completed step becomes the worker's latest step,
        and the step that is being computed becomes a separate step. Returns the time at which that step ends; None if
        there is no run."""
        run = self._run
        if run is None:
            return None
        num_steps = run.num_ended(self._clock())
        self._pass(run, num_steps)
        begun_s = run.ends_s[num_steps - 1] if num_steps else run.start_s
        run.cut(num_steps)
        # What comes now is not a part of the step that is being computed.
        self._commands_came = False
        step_ms = self._begin(1.0)
        assert step_ms is not None, "the step of a run"
        return begun_s + step_ms / 1000

    def _pass(self, run: DecodeRun, num_steps: int) -> None:
        """Complete the first `num_steps` steps of the run."""
        self._run = None
        if not num_steps:
            return
        self.scheduler.repeat([self._answers[request].token_id for request in self.scheduler.running], num_steps)
        self._meter.passed(run.first.tokens)
        self._num_step_tokens = run.first.tokens
        self._learning.steps(run.first, run.step_ms[:num_steps])
        self.scheduler.step_costs.rates.decode_step_ms = run.decode_step_ms(num_steps)
        self._stats.infer_s = run.busy_s(num_steps)
        self._stats.num_steps += num_steps
        num_reports = bisect_right(run.reported, num_steps - 1)
        if num_reports:
            last_s = run.reported_s(num_reports - 1)
            self._version = run.version + num_reports
            self._next_report_s = last_s + REPORT_INTERVAL_S
            self._load = replace(run.load, decode_step_ms=run.reported_ms(num_reports - 1), as_of_s=last_s)

    def contradiction(self, belief: Belief) -> Report | None:
        """The current state if the worker has more work than the router believed, as in `WatchHub.contradiction`."""
        assert self._run is None, "the run was not cut"
        load = self._load
        arrivals = self._arrivals
        num_requests = load.num_running + load.num_waiting + arrivals.num_requests
        if not is_contradicted(belief, num_requests, load.num_uncached_tokens + arrivals.num_tokens):
            return None
        return Report(self._load_now(), self._version, placed=self._placed.copy())

    def take(self, request: Request, job: Job, belief: Belief) -> Report:
        """Add a request, which the next step includes. Returns the report to send at once."""
        assert self._run is None, "the run was not cut"
        assert self.settings.holds(job), f"request {job.number} does not fit into the cache"
        self._arrivals.add(job.num_prompt_tokens, belief.num_cached_tokens)
        self._placed.append(Placed(belief.watcher_id - 1, belief.placement_id))
        self._arrived.append(request)
        self._answers[request] = Sampled(job.answer_token_id)
        return self._new_report(self._load_now(), (), (), {})

    def begin_step(self, stretch: float = 1.0) -> float | None:
        """Schedule a step. Returns its milliseconds, which are `stretch` times its cost, or None if there is nothing to
        compute."""
        assert not self.is_stepping, "a step is running"
        self._commands_came = bool(self._arrived)
        self._num_taken += len(self._arrived)
        if self._forecast is not None and self._arrived and not self.scheduler.has_requests:
            self._forecast.begin()
        for request in self._arrived:
            error = None if self._forecast is None else self._forecast.refusal(request)
            if error is not None:
                self._refused.append(self.scheduler.refuse(request, error))
                continue
            if self._stages is None or not self._stages.begin(request):
                self.scheduler.add(request)
        self._arrived.clear()
        self._add_ready()
        return self._begin(stretch)

    def _begin(self, stretch: float) -> float | None:
        """Begin a step, which takes `stretch` times as long as its cost if the encoder does not run beside it. Returns
        None if there is nothing to compute or a pause is due."""
        if self.pause_s:
            self._engine_is(busy=False)
            return None
        if self._pacing is not None and self._shares_cores:
            self._pacing.begin()
        step_factor = stretch * (1.0 if self.encoder is None else self.encoder.step_factor)
        output = None
        if self.scheduler.has_requests:
            output = self.scheduler.schedule(None if self._stages is None else self._stages.begin_late)
        if output is None or not output.scheduled:
            is_waiting = self.scheduler.num_fetching or not self.scheduler.has_requests
            assert is_waiting, "there are requests, but none is scheduled"
            if self._pacing is not None:
                self._pacing.end()
            self._engine_is(busy=False)
            return None
        self._engine_is(busy=True)
        self._output = output
        size = self._meter.size(output, least=self.settings.least_decode)
        shape = size.shape
        self._num_step_tokens = shape.tokens
        self._step_ms = self.settings.cost.milliseconds(shape) * step_factor
        if self.scheduler.speculation is None and shape.prompt_tokens:
            self.scheduler.step_costs.observe(shape, self._step_ms, is_first=False)
        elif self.scheduler.speculation is None:
            self._learning.step(shape, self._step_ms)
            self.scheduler.step_costs.rates.observe_decode(self._step_ms)
        else:
            self._size = size
            self._draft_ms = 1000 * self.scheduler.speculation.take_draft_s()
            self._step_ms += self._draft_ms
        return self._step_ms

    def take_refused(self) -> list[RequestOutput]:
        """The requests that were refused since the last call, with their errors."""
        if self._forecast is not None:
            self._refused += [self.scheduler.give_back(request, error) for request, error in self._forecast.overdue()]
        refused, self._refused = self._refused, []
        for output in refused:
            del self._answers[output.request]
        return refused

    def take_news(self, now_s: float) -> Report | None:
        """The report that is due although nothing is computed: of requests that wait for images."""
        if self._encoding is None or not self._commands_came:
            return None
        self._commands_came = False
        return self._report(now_s)

    def end_step(self, now_s: float, *, hands_on: bool = False) -> tuple[list[RequestOutput], Report | None]:
        """End the current step. Returns its outputs, and a report if one is due. With `hands_on`, answers that have
        begun continue elsewhere."""
        output, self._output = self._output, None
        assert output is not None, "no step is running"
        sampled = [
            self._sampled(request)
            for request, new in output.scheduled
            if request.num_computed_tokens + new == request.num_tokens + len(request.draft)
        ]
        if self._size is not None:
            num_more = sum(len(entry.more) for entry in sampled)
            step_s = (self._step_ms - self._draft_ms) / 1000
            draft_s = self._draft_ms / 1000
            self._meter.observe(self._size, step_s, 1.0 + num_more / max(1, len(sampled)), draft_s)
        outputs = self.scheduler.update(output, sampled)
        if self._pacing is not None:
            self._pacing.end()
        if self._forecast is not None:
            self._forecast.observe()
        self._stats.infer_s += self._step_ms / 1000
        self._stats.num_steps += 1
        for given in outputs:
            if hands_on and not given.is_last:
                self.scheduler.cancel(given.request)
            if hands_on or given.is_last:
                del self._answers[given.request]
        return outputs, self._report(now_s) if self._is_report_due(now_s) else None

    def _right_token(self, request: Request) -> int:
        return self._answers[request].token_id

    def _sampled(self, request: Request) -> Sampled:
        """The answer's next token, and one more for each correct token of the draft."""
        answer = self._answers[request]
        num_right = 0
        for token_id in request.draft:
            if token_id != answer.token_id:
                break
            num_right += 1
        return answer._replace(more=(answer.token_id,) * num_right) if num_right else answer

    def check(self) -> None:
        """Assert the invariants of the scheduler and the pool, and that every request in them is known."""
        self.scheduler.check()
        num_held = 0 if self._stages is None else self._stages.num_held
        known = len(self._arrived) + len(self.scheduler.running) + len(self.scheduler.waiting)
        assert len(self._answers) == known + num_held

    def _is_report_due(self, now_s: float) -> bool:
        """Whether a report is due, by the rule of EngineThread."""
        is_idle = not self.scheduler.has_requests
        if now_s < self._next_report_s and not (is_idle or self._commands_came or self._reports_every_step):
            return False
        self._next_report_s = now_s + REPORT_INTERVAL_S
        return True

    def _report(self, now_s: float) -> Report:
        changed = self.scheduler.kv_cache.take_changes()
        self._arrivals.shown(self._num_taken)
        self._load = self._engine_load(now_s)
        changes = {} if self._disk is None else self._disk.take_changes()
        return self._new_report(self._load_now(), changed.stored, changed.evicted, changes)

    def _engine_load(self, now_s: float) -> LoadReport:
        """The load of the engine now."""
        num_fetching = 0 if self.fetching is None else self.fetching.num_held
        load = load_of(
            self.scheduler,
            num_fetching=num_fetching,
            max_num_seqs=self.settings.max_num_seqs,
            as_of_s=now_s,
            transfer_bytes_per_s=0.0 if self._peers is None else self._peers.bytes_per_s,
            disk_bytes_per_s=0.0 if self._disk is None else self._disk.bytes_per_s,
        )
        if num_fetching:
            load = replace(load, num_waiting=load.num_waiting + num_fetching)
        return load if self._encoding is None else self._encoding.report(EngineReport(load)).load

    def _load_now(self) -> LoadReport:
        """The engine's latest report, plus the requests that have arrived since."""
        if not self._arrivals.num_requests:
            return self._load
        return replace(
            self._load,
            num_arrived=self._arrivals.num_requests,
            arrived_tokens=self._arrivals.num_tokens,
            arrived_blocks=self._arrivals.num_blocks,
        )

    def _new_report(
        self, load: LoadReport, stored: Sequence[int], evicted: Sequence[int], disk_changes: Mapping[int, bool]
    ) -> Report:
        self._version += 1
        placed, self._placed = self._placed, []
        return Report(load, self._version, stored, evicted, placed, disk_changes)


class OneWorker:
    """A worker alone, with its own clock, which starts at 0. Records when each request gets each of its tokens."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.now_s = 0.0
        self.worker = SimulatedWorker(settings, lambda: self.now_s)

    def run(self, jobs: Sequence[Job]) -> list[list[float]]:
        """Serve jobs, which are numbered from 0 in order of arrival. Returns each job's token times in seconds."""
        worker = self.worker
        token_s: list[list[float]] = [[] for _ in jobs]
        coming = list(reversed(jobs))
        while coming or worker.scheduler.has_requests:
            while coming and coming[-1].arrival_s <= self.now_s:
                job = coming.pop()
                worker.take(job.request(job.arrival_s), job, Belief())
            step_ms = worker.begin_step()
            if step_ms is None:
                self.now_s = coming[-1].arrival_s
                continue
            self.now_s += step_ms / 1000
            for output in worker.end_step(self.now_s)[0]:
                token_s[int(output.request.request_id)] += [self.now_s] * len(output.token_ids)
        return token_s


def _tiers(
    settings: WorkerSettings,
    timer: Timer | None,
    cache_of: Callable[[str], KVCache] | None,
    shared_disk: DiskSlots | None,
) -> tuple[SimulatedDisk | None, SimulatedPeers | None]:
    """The tiers of a worker."""
    tiers, size = settings.tiers, settings.block_size
    disk, peers = None, None
    if tiers.are_any:
        assert timer is not None, "tiers need events"
        assert cache_of is not None, "tiers need the others"
        if tiers.disk_tokens:
            slots = shared_disk or DiskSlots(tiers.disk_tokens // size)
            disk = SimulatedDisk(slots, size / tiers.disk_rate, tiers.disk_rate, timer)
        if tiers.peer_rate:
            peers = SimulatedPeers(size / tiers.peer_rate, tiers.peer_rate, cache_of, timer)
    return disk, peers
