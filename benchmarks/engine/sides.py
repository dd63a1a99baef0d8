"""A common interface for the two engines: ours, and openvino-genai's ContinuousBatchingPipeline on the same IR.

Each side runs in a separate process and drives its engine's step loop from Python. A workload is a list of jobs with
arrival times. The result has the times of each job's first and last token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from headrace.worker.request.step import RequestOutput

# Of models with recurrent layers: slots for saved states, and the tokens between them.
_SAVED_STATES, _STATE_INTERVAL = 64, 256


@dataclass(frozen=True, slots=True)
class Job:
    """A request: seconds after the start at which it arrives, its prompt, and how many tokens it wants. With a
    temperature above 0 they are drawn from the nucleus of `top_p`."""

    arrival_s: float
    prompt: Sequence[int]
    output: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Seconds from a job's arrival to its first and last token, and how many tokens it got."""

    ttft_s: float
    total_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of a side: `num_blocks` KV blocks of the compiled model's block size (32 on CPU). Without
    `split_prompts`, the peer computes whole prompts in separate steps; our engine has no such mode.
    `max_num_mixed_tokens`, `target_step_ms` (None for the worker's choice) and `decode_graph` (see
    `wants_decode_graph`) apply only to our side. With `stays_exact`, our steps are limited to the size for which
    prompts are exact on this CPU, the worker's default."""

    model_dir: Path
    num_blocks: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 256
    max_num_mixed_tokens: int | None = None
    target_step_ms: float | None = None
    split_prompts: bool = True
    decode_graph: bool | None = None
    stays_exact: bool = True


# A job, how many new tokens it got, and whether it has ended.
Event = tuple[int, int, bool]


class Side(Protocol):
    """An engine that is fed and stepped."""

    def add(self, index: int, job: Job) -> None:
        """Add a job."""
        ...

    def step(self) -> tuple[float, list[Event]]:
        """Run one step. Returns the tokens of jobs, with their times by time.perf_counter. A side that delivers the
        tokens of a step during the next one returns those of the previous step."""
        ...


class HeadraceSide:
    """The worker's engine without its service."""

    def __init__(self, settings: EngineSettings) -> None:
        from headrace.common.host_memory import available_bytes
        from headrace.worker.engine.build import build_engine
        from headrace.worker.host.numa import usable_cpus
        from headrace.worker.kv.groups.recurrent import StateBudget
        from headrace.worker.model.decode_graph import wants_decode_graph
        from headrace.worker.model.runner import OpenVINOModelRunner
        from headrace.worker.model.step_limits import ROOM_FOR_PROMPTS, StepLimits
        from headrace.worker.request.params import SamplingParams
        from headrace.worker.request.request import Request
        from headrace.worker.sampling.row_sums import reducer_for
        from headrace.worker.sampling.sampler import BatchSampler

        self._request, self._params = Request, SamplingParams
        self._delivered: tuple[float, list[Event]] = (0.0, [])
        has_decode_graph = wants_decode_graph(
            settings.decode_graph,
            settings.model_dir,
            kv_precision="u8",
            execution_mode="performance",
            available=available_bytes(),
        )
        runner = OpenVINOModelRunner(
            settings.model_dir,
            threads=len(usable_cpus()),
            kv_precision="u8",
            execution_mode="performance",
            decode_graph=has_decode_graph,
        )
        runner.allocate(settings.num_blocks)
        most, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
        if settings.stays_exact and most > runner.exact_rows:
            most = runner.exact_rows
            seqs = min(seqs, most - ROOM_FOR_PROMPTS)
        limits = StepLimits(seqs, most, settings.max_num_mixed_tokens or most, is_exact=most <= runner.exact_rows)
        groups = []
        if runner.state_tables is not None:
            groups.append(StateBudget(2 * seqs + _SAVED_STATES, _STATE_INTERVAL))
            runner.allocate_states(groups[0].num_slots)
        sampler = BatchSampler(reducer_for(runner.vocab_size, len(usable_cpus())))
        target_ms = settings.target_step_ms
        self.engine = build_engine(
            runner, sampler, settings.num_blocks, limits, target_step_ms=target_ms, groups=groups
        )

    def add(self, index: int, job: Job) -> None:
        """See Side."""
        sampling = self._params(max_tokens=job.output, seed=index, temperature=job.temperature, top_p=job.top_p)
        self.engine.scheduler.add(self._request(str(index), job.prompt, sampling, 0, arrival_s=time.monotonic()))

    def step(self) -> tuple[float, list[Event]]:
        """See Side."""
        self.engine.advance(self._deliver)
        return self._delivered

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        events = [(int(output.request.request_id), len(output.token_ids), output.is_last) for output in outputs]
        self._delivered = time.perf_counter(), events


class GenaiSide:
    """openvino-genai's pipeline with the same scheduler settings and prefix caching on."""

    def __init__(self, settings: EngineSettings) -> None:
        import openvino as ov
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = settings.num_blocks
        scheduler.max_num_seqs = settings.max_num_seqs
        scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
        scheduler.dynamic_split_fuse = settings.split_prompts
        scheduler.enable_prefix_caching = True
        self._ov, self._genai = ov, genai
        self._pipeline = genai.ContinuousBatchingPipeline(str(settings.model_dir), scheduler, "CPU", {}, {})
        self._handles: dict[int, object] = {}
        self._counts: dict[int, int] = {}

    def add(self, index: int, job: Job) -> None:
        """See Side."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = job.output
        config.ignore_eos = True
        config.do_sample = job.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p, config.rng_seed = job.temperature, job.top_p, index
        prompt = self._ov.Tensor(np.asarray([job.prompt], np.int64))
        self._handles[index] = self._pipeline.add_request(index, prompt, config)

    def step(self) -> tuple[float, list[Event]]:
        """See Side."""
        self._pipeline.step()
        events = []
        for index, handle in list(self._handles.items()):
            new = 0
            while handle.can_read():  # type: ignore[attr-defined]
                new += sum(len(output.generated_ids) for output in handle.read().values())  # type: ignore[attr-defined]
            ended = handle.get_status() != self._genai.GenerationStatus.RUNNING  # type: ignore[attr-defined]
            if ended:
                del self._handles[index]
            if new or ended:
                events.append((index, new, ended))
        return time.perf_counter(), events


SIDES = {"headrace": HeadraceSide, "openvino-genai": GenaiSide}


def run_jobs(side: Side, jobs: Sequence[Job]) -> tuple[float, list[JobTimes]]:
    """Drive one workload to its end; seconds in all and each job's times."""
    first: dict[int, float] = {}
    counts = dict.fromkeys(range(len(jobs)), 0)
    last: dict[int, float] = {}
    due = 0
    start = time.perf_counter()
    while len(last) < len(jobs):
        now = time.perf_counter() - start
        while due < len(jobs) and jobs[due].arrival_s <= now:
            side.add(due, jobs[due])
            due += 1
        if len(last) == due:
            time.sleep(max(0.0, jobs[due].arrival_s - now))
            continue
        at_s, events = side.step()
        now = at_s - start
        for index, new, ended in events:
            if new:
                first.setdefault(index, now)
                counts[index] += new
            if ended:
                last[index] = now
    seconds = time.perf_counter() - start
    times = [
        JobTimes(first[index] - job.arrival_s, last[index] - job.arrival_s, counts[index])
        for index, job in enumerate(jobs)
    ]
    return seconds, times


def side_process(name: str, settings: EngineSettings, pipe: Connection) -> None:
    """Answer each received workload with its times, until None comes."""
    side = SIDES[name](settings)
    pipe.send("ready")
    while (jobs := pipe.recv()) is not None:
        pipe.send(run_jobs(side, jobs))
