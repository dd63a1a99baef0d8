"""Measures what steps of a model cost on this host: `headrace bench calibrate`.

A server is started as `headrace serve` starts it, so that gateway, router and this client take their share of the
cores as they do when it serves. Its workers log each step (--step-log) while cells of load run: so many requests at
once, with prompts and answers of one length. Prompts of a cell are computed beside each other's answers, so one cell
shows steps of prompts, of streams, and of both. Then requests of mixed lengths arrive at random times, as from users:
first with nothing in common, then with prompts that begin with one of a few documents, so that prompts are computed
beside streams that share positions.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.bench.apis import Options, api_of
from headrace.bench.calibration import VERSION, Calibration, Front, Host, Layout, this_host
from headrace.bench.connection import Client, ExchangeError
from headrace.bench.fleet import Fleet, fleet_of
from headrace.bench.record import Record
from headrace.bench.sender import HttpSender, ask
from headrace.bench.serving import Serving, ServingError, sizes_of_workers
from headrace.bench.target import target_of
from headrace.common.version import headrace_version
from headrace.common.worker_flags import AUTO_RANKS
from headrace.sim import step_logs
from headrace.sim.step_logs import LoggedStep

FRONT_ROLES = ("gateway", "router")
_FIRST_TOKEN = 100
# What a worker logs when it starts.
_LIMITS = re.compile(r"steps of up to (\d+) tokens, (\d+) with running streams")
_REQUEST_TIMEOUT_S, _CALL_TIMEOUT_S = 600.0, 15.0
# The default of workers, which fleets do not tell.
_USUAL_BATCHED_TOKENS = 1024
# A round of cells that takes longer is told of in between.
_TELL_S = 20.0
# Shares of the time: cells, and requests that arrive at random. The rest is for the start and for what is left over.
_CELLS_SHARE, _LIVE_SHARE = 0.72, 0.18
# A cell that takes a larger share of the cells' time is left out.
_LARGEST_CELL = 0.2
# Cells without which there are too few steps for a fit, because each has one step with prompts or more; those that are
# added have at most so much work.
_LEAST_CELLS, _SMALL_WORK = 48, 2500
_BURST, _BURST_TOKENS = 48, 48
# Of a request with a prompt of 256 tokens and an answer of 128, whose token takes about as long as four of a prompt.
_CELL_UNITS = 256 + 4 * 128
# The rate of requests that arrive at random, as a share of what a cell of eight requests reached. Those over documents
# come faster, because what matters is how many of them share positions.
_LIVE_LOAD, _SHARED_LOAD = 0.7, 0.9
# Of requests that arrive at random: the most tokens of a prompt and of an answer.
_LIVE_PROMPT, _LIVE_ANSWER = 1500, 400
# Documents for each worker, their tokens, and the share of the time of random requests that they may take.
_DOCUMENTS, _DOCUMENT_TOKENS, _DOCUMENT_SHARE = 4, 1024, 0.25
# A smaller document shares too little to be measured.
_LEAST_DOCUMENT = 128
# So many requests under load tell what gateway and router take then.
_LEAST_MATCHED = 20


class CalibrateError(Exception):
    """The measurement failed. The message says why."""


class Cell(NamedTuple):
    """A load: a number of simultaneous requests for each worker, with prompts and answers of these lengths in tokens.
    The prompts of a worker begin with the same `shared` tokens, which are already in the KV cache."""

    batch: int
    prompt: int
    answer: int
    shared: int = 0

    @property
    def work(self) -> int:
        """A rough measure of its time."""
        return self.shared + self.batch * (self.prompt - self.shared) + 8 * (self.batch + 4) * self.answer

    @property
    def kv_tokens(self) -> int:
        """Tokens that it needs in the KV cache."""
        return self.batch * (self.prompt + self.answer)


CELLS = (
    Cell(1, 32, 24),
    Cell(1, 512, 16),
    Cell(2, 96, 24),
    Cell(3, 200, 24),
    Cell(4, 1024, 24),
    Cell(6, 48, 24),
    Cell(16, 8, 24),
    Cell(1, 2048, 16),
    Cell(8, 256, 32),
    Cell(12, 100, 24),
    Cell(32, 8, 32),
    Cell(16, 64, 32),
    Cell(1, 4096, 12),
    Cell(24, 160, 24),
    Cell(32, 48, 32),
    Cell(8, 2048, 24),
    Cell(16, 512, 32),
    Cell(12, 1056, 32, shared=1024),
    Cell(32, 256, 32),
    Cell(4, 1056, 32, shared=1024),
    Cell(32, 1056, 32, shared=1024),
    Cell(1, 8192, 8),
    Cell(64, 64, 32),
    Cell(48, 128, 24),
    Cell(64, 256, 32),
    Cell(96, 32, 24),
    Cell(128, 64, 32),
)


@dataclass(slots=True)
class Loader:
    """Sends requests whose prompts are random tokens, each of them a new one."""

    client: Client
    model: str
    vocabulary: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    num_requests: int = 0
    num_tokens: int = 0
    """Tokens of answers."""

    def tokens(self, count: int) -> list[int]:
        """A list of `count` random tokens."""
        return self.rng.choices(range(min(_FIRST_TOKEN, self.vocabulary // 2), self.vocabulary), k=count)

    async def ask(self, prompt: int, answer: int, first: Sequence[int] = ()) -> Record:
        """One request, whose prompt begins with the tokens `first`. Raises CalibrateError if it fails."""
        ids = [*first, *self.tokens(prompt - len(first))]
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": answer,
            "ignore_eos": True,
            "stream": True,
            "temperature": 1.0,
            "seed": self.num_requests,
        }
        record = Record(self.num_requests, prompt, answer)
        self.num_requests += 1
        api = api_of("openai", None)
        request = self.client.target.request("POST", api.path(self.model), msgspec.json.encode(body))
        record.sent_s = time.perf_counter()
        await ask(HttpSender(self.client, api, Options(self.model)), request, record)
        if record.error_kind:
            raise CalibrateError(f"a request failed: {record.error or record.error_kind}")
        self.num_tokens += answer
        return record

    async def run(self, cell: Cell, num_workers: int) -> list[Record]:
        """All requests of a cell."""
        count = cell.batch * num_workers if cell.batch > 1 else 1
        prefixes: list[list[int]] = [[]]
        if cell.shared:
            prefixes = [self.tokens(cell.shared) for _ in range(num_workers)]
            await asyncio.gather(*(self.ask(cell.shared + 1, 1, prefix) for prefix in prefixes))
        asked = (self.ask(cell.prompt, cell.answer, prefixes[number % len(prefixes)]) for number in range(count))
        return list(await asyncio.gather(*asked))


class Measured(NamedTuple):
    """The measurements of the load: the requests that were alone, those that arrived at random with prompts of their
    own, and the CPU seconds of gateway and router."""

    alone: list[Record]
    live: list[Record]
    cpu_s_per_request: float
    cpu_s_per_token: float


async def measured(model: str | None, flags: Sequence[str], seconds: float, tell: Callable[[str], None]) -> Calibration:
    """Start a server of `model` with these `flags` of `headrace serve`, measure it for about `seconds`, or longer if it
    is slow, and stop it. `tell` gets a line now and then. Raises CalibrateError."""
    began_s = time.perf_counter()
    serve = [*([model] if model else []), *flags]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "steps"
        try:
            workers = await sizes_of_workers(serve)
            tell("starting a server")
            quiet = ("--port", "0", "--grpc-port", "0", "--log-level", "info")
            async with Serving((*serve, *quiet), {"HEADRACE_WORKER_STEP_LOG": str(log)}) as serving:
                client = Client(target_of(serving.url, {}, None, False), _REQUEST_TIMEOUT_S)
                try:
                    fleet = await fleet_of(client)
                    limits = serving.logged(_LIMITS)
                    since_s = time.perf_counter()
                    tell(f"the server is ready; it is measured for about {seconds:.0f} s")
                    loader = Loader(client, fleet.model.name, fleet.vocabulary)
                    found = await _measure(loader, serving, fleet, since_s + seconds, tell)
                    fleet = await fleet_of(client)  # with what its workers have learned
                finally:
                    client.close()
            steps = step_logs.read(log.read_bytes())
        except (ServingError, ExchangeError) as error:
            raise CalibrateError(str(error)) from None
    threads = [worker.threads for worker in workers]
    if len(set(threads)) != 1:
        tell(f"workers have {min(threads)} to {max(threads)} threads; the costs are those of all of them together")
    layout = Layout(
        workers=len(threads),
        threads=min(threads),
        kv_tokens=fleet.kv_tokens,
        max_num_seqs=fleet.max_num_seqs,
        max_num_batched_tokens=int(limits[1]) if limits else _USUAL_BATCHED_TOKENS,
        max_num_mixed_tokens=int(limits[2]) if limits else _USUAL_BATCHED_TOKENS,
        least_decode=min((step.tokens for step in steps if not step.prompt_tokens), default=1),
        window_slots=fleet.window_slots,
        serve_flags=resolved(_without(flags, "--workers", "--threads"), workers[0].ranks),
    )
    try:
        return _made(steps, since_s, found, this_host(), fleet, layout, time.perf_counter() - began_s)
    except ValueError as error:
        raise CalibrateError(f"{error}; give more --seconds") from None


def _made(
    steps: Sequence[LoggedStep],
    since_s: float,
    found: Measured,
    host: Host,
    fleet: Fleet,
    layout: Layout,
    seconds: float,
) -> Calibration:
    """The calibration. Raises ValueError if there are too few steps."""
    machine = f"{host.cpu}, {layout.workers} x {layout.threads} threads"
    fit = step_logs.fit(step_logs.timed(steps, since_s), fleet.model.name, machine)
    inward_s, outward_s = loaded_front_s(found.live, steps) or front_s(found.alone, steps)
    return Calibration(
        version=VERSION,
        headrace=headrace_version(),
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        source="measured",
        seconds=round(seconds, 1),
        num_steps=fit.num_steps,
        host=host,
        model=fleet.model,
        layout=layout,
        steps=fit.steps,
        slowdown=fit.slowdown,
        front=Front(
            round(inward_s, 6), round(outward_s, 6), round(found.cpu_s_per_request, 6), round(found.cpu_s_per_token, 7)
        ),
        peer_bytes_per_s=round(fleet.peer_bytes_per_s),
    )


async def _measure(
    loader: Loader, serving: Serving, fleet: Fleet, until_s: float, tell: Callable[[str], None]
) -> Measured:
    """Put the load on until about `until_s`."""
    seconds = until_s - time.perf_counter()
    await loader.run(CELLS[0], fleet.num_workers)  # kernels of the first sizes are built
    cpu_s, num_requests, num_tokens = serving.cpu_s(FRONT_ROLES), loader.num_requests, loader.num_tokens
    alone, per_s = await _cells(loader, fleet, _CELLS_SHARE * seconds, tell)
    many = (serving.cpu_s(FRONT_ROLES) - cpu_s, loader.num_requests - num_requests, loader.num_tokens - num_tokens)
    cpu_s, num_requests, num_tokens = serving.cpu_s(FRONT_ROLES), loader.num_requests, loader.num_tokens
    for _ in range(2):
        await asyncio.gather(*(loader.ask(_BURST_TOKENS, 1) for _ in range(_BURST)))
    few = (serving.cpu_s(FRONT_ROLES) - cpu_s, loader.num_requests - num_requests, loader.num_tokens - num_tokens)
    tell("requests that arrive at random")
    live_s = min(_LIVE_SHARE * seconds, until_s - time.perf_counter())
    longest = fleet.model.max_context_tokens - 1
    live = await _arriving(loader, live_s / 2, _LIVE_LOAD * per_s, longest)
    documents = _documents(loader, fleet, _DOCUMENT_SHARE * live_s, per_s)
    if documents:
        tell("requests over shared documents")
        await asyncio.gather(*(loader.ask(len(document) + 1, 1, document) for document in documents))
        await _arriving(loader, live_s / 2, _SHARED_LOAD * per_s, longest, documents)
    return Measured(alone, live, *_cpu_costs(many, few))


def _documents(loader: Loader, fleet: Fleet, seconds: float, per_s: float) -> list[list[int]]:
    """Documents that prompts may begin with: as many as the host computes in so many seconds, at most a few for each
    worker, and none if they would be short. `per_s` is that of `_cells`."""
    tokens = min(_DOCUMENT_TOKENS, fleet.model.max_context_tokens // 2, fleet.kv_tokens // (4 * _DOCUMENTS))
    count = min(_DOCUMENTS * fleet.num_workers, int(seconds * per_s * _CELL_UNITS / tokens))
    return [loader.tokens(tokens) for _ in range(count)] if tokens >= _LEAST_DOCUMENT else []


async def _cells(
    loader: Loader, fleet: Fleet, seconds: float, tell: Callable[[str], None]
) -> tuple[list[Record], float]:
    """Run the cells in turn until the time is over, each at least once unless it is too large. Returns the requests
    that were alone, and how many requests a second a cell reached, each counted as its part of one with a prompt of 256
    tokens and an answer of 128."""
    until_s = time.perf_counter() + seconds
    cells = [
        cell
        for cell in CELLS
        if cell.prompt + cell.answer < fleet.model.max_context_tokens
        and cell.kv_tokens <= fleet.kv_tokens
        and cell.batch <= fleet.max_num_seqs
    ]
    small = [cell for cell in cells if cell.work <= _SMALL_WORK]
    alone: list[Record] = []
    work_per_s = 0.0
    rates: list[float] = []
    num_rounds = num_cells = 0
    told_s = time.perf_counter()
    while time.perf_counter() < until_s:
        num_run = 0
        for cell in cells:
            now_s = time.perf_counter()
            if now_s >= until_s and num_rounds:
                break
            if work_per_s and cell.work / work_per_s > (_LARGEST_CELL * seconds if now_s < until_s else 0.0):
                continue
            records = await loader.run(cell, fleet.num_workers)
            took_s = time.perf_counter() - now_s
            work_per_s = cell.work / took_s
            num_run += 1
            if cell.batch == 1:
                alone += records
            rates.append(len(records) / took_s * (cell.prompt + 4 * cell.answer) / _CELL_UNITS)
            if time.perf_counter() - told_s > _TELL_S:
                told_s = time.perf_counter()
                tell(f"{num_run} of up to {len(cells)} kinds of load, round {num_rounds + 1}")
        num_rounds += 1
        num_cells += num_run
        if not num_run:
            break
        tell(f"round {num_rounds}: {num_run} kind{'s' * (num_run > 1)} of load")
    if num_cells < _LEAST_CELLS:
        tell(f"the host is slow: {_LEAST_CELLS - num_cells} more small loads, without which there are too few steps")
    for number in range(num_cells, _LEAST_CELLS):
        records = await loader.run(small[number % len(small)], fleet.num_workers)
        alone += records if len(records) == 1 else []
    return alone, statistics.median(rates)


async def _arriving(
    loader: Loader, seconds: float, per_s: float, longest: int, documents: Sequence[Sequence[int]] = ()
) -> list[Record]:
    """Requests of mixed lengths that arrive at random for so long; none has more than `longest` tokens. If there are
    `documents`, a prompt is one of them and a question on it."""
    rng = random.Random(2)
    until_s = time.perf_counter() + max(0.0, seconds)
    median = 48 if documents else 192
    tasks = []
    async with asyncio.TaskGroup() as group:
        while (now_s := time.perf_counter()) < until_s:
            document = rng.choice(documents) if documents else ()
            answer = min(4 + round(rng.expovariate(1 / 96)), _LIVE_ANSWER, longest // 4)
            most = min(_LIVE_PROMPT, longest - answer - len(document))
            prompt = min(max(8, round(median * rng.lognormvariate(0.0, 0.8))), most)
            tasks.append(group.create_task(loader.ask(len(document) + prompt, answer, document)))
            await asyncio.sleep(min(rng.expovariate(max(per_s, 0.05)), until_s - now_s))
    return [task.result() for task in tasks]


def _cpu_costs(many: tuple[float, int, int], few: tuple[float, int, int]) -> tuple[float, float]:
    """CPU seconds of a request and of a token, from two loads: each its CPU seconds, requests and tokens."""
    (cpu_many, requests_many, tokens_many), (cpu_few, requests_few, tokens_few) = many, few
    scale = requests_many * tokens_few - requests_few * tokens_many
    if not scale:
        return 0.0, 0.0
    per_request = (cpu_many * tokens_few - cpu_few * tokens_many) / scale
    per_request = min(max(0.0, per_request), cpu_few / max(requests_few, 1))
    return per_request, max(0.0, (cpu_many - per_request * requests_many) / max(tokens_many, 1))


def front_s(alone: Sequence[Record], steps: Sequence[LoggedStep]) -> tuple[float, float]:
    """Median seconds from a request's sending to the first step, and from the end of the step of its first token to the
    token's arrival, for requests that were alone; 0 if there are none."""
    inward, outward = [], []
    for record in alone:
        own = [step for step in steps if record.sent_s <= step.start_s and step.end_s <= record.ended_s]
        prompts = [step for step in own if step.prompt_tokens]
        if prompts and record.times and len({step.worker for step in own}) == 1:
            inward.append(prompts[0].start_s - record.sent_s)
            outward.append(record.times[0] - prompts[-1].end_s)
    if not inward:
        return 0.0, 0.0
    return max(0.0, statistics.median(inward)), max(0.0, statistics.median(outward))


def loaded_front_s(live: Sequence[Record], steps: Sequence[LoggedStep]) -> tuple[float, float] | None:
    """As `front_s`, for requests beside others, whose gateway and router wait for the cores too; None if too few can be
    told apart.

    The step of a prompt is found by its length. The request came to its worker while the step before was computed, or
    just before its own if there was none. So each request bounds the time on both sides, and the time is one with which
    most of them agree.
    """
    by_worker: dict[str, list[LoggedStep]] = {}
    for step in sorted(steps, key=lambda step: step.start_s):
        by_worker.setdefault(step.worker, []).append(step)
    bounds: list[tuple[float, float]] = []
    outward: list[float] = []
    for record in live:
        found = [
            (own, place)
            for own in by_worker.values()
            for place in range(
                bisect.bisect_left(own, record.sent_s, key=lambda step: step.start_s),
                bisect.bisect_right(own, record.times[0] if record.times else 0.0, key=lambda step: step.end_s),
            )
            if own[place].prompt_tokens == record.prompt_tokens
        ]
        if len(found) != 1:
            continue
        own, place = found[0]
        most_s = own[place].start_s - record.sent_s
        before = own[place - 1] if place else None
        was_idle = before is None or own[place].start_s - before.end_s > step_logs.MOST_GAP_S
        bounds.append((most_s if was_idle or before is None else max(0.0, before.start_s - record.sent_s), most_s))
        outward.append(record.times[0] - own[place].end_s)
    if len(bounds) < _LEAST_MATCHED:
        return None
    return _agreed(bounds), max(0.0, statistics.median(outward))


def _agreed(bounds: Sequence[tuple[float, float]]) -> float:
    """The middle of the first range that is within most of the intervals."""
    edges = sorted([(low, -1) for low, _ in bounds] + [(high, 1) for _, high in bounds])
    now = most = 0
    best = 0.0
    for place, (at, change) in enumerate(edges):
        now -= change
        if now > most:
            most = now
            best = (at + edges[place + 1][0]) / 2
    return best


def _without(flags: Sequence[str], *names: str) -> tuple[str, ...]:
    """The flags without those of these names and their values."""
    kept: list[str] = []
    skip = False
    for flag in flags:
        if skip:
            skip = False
        elif flag in names:
            skip = True
        elif flag.partition("=")[0] not in names:
            kept.append(flag)
    return tuple(kept)


def resolved(flags: Sequence[str], num_ranks: int) -> tuple[str, ...]:
    """The flags with the number of ranks that `auto` was on this host. Elsewhere it may be another one, and
    `headrace worker` takes only numbers."""
    flag = "--tensor-parallel"
    asked = list(flags)
    is_auto = f"{flag}={AUTO_RANKS}" in asked or (flag, AUTO_RANKS) in itertools.pairwise(asked)
    if not is_auto:
        return tuple(asked)
    return (*_without(asked, flag), *((flag, str(num_ranks)) if num_ranks > 1 else ()))


async def learned(url: str, headers: Mapping[str, str], ca_file: Path | None, model: str | None) -> Calibration:
    """The calibration of a running fleet, from the costs that its workers have learned. Raises CalibrateError, or
    ValueError if the URL cannot be used."""
    client = Client(target_of(url, headers, ca_file, False), _CALL_TIMEOUT_S)
    try:
        return learned_of(await fleet_of(client, model))
    except ExchangeError as error:
        raise CalibrateError(str(error)) from None
    finally:
        client.close()


def learned_of(fleet: Fleet) -> Calibration:
    """The calibration of a fleet that was asked. Raises CalibrateError if its workers have learned too little."""
    prompts, decode = fleet.prompts, fleet.decode
    if prompts is None or decode is None:
        raise CalibrateError(
            "its workers have not learned what their steps cost; send some requests first, for example 50 of usual "
            "lengths with `headrace bench URL --num-prompts 50 --max-concurrency 4`"
        )
    host = Host("unknown CPUs", 0, 0, 0, 0)
    layout = Layout(
        workers=max(1, round(fleet.num_workers / fleet.num_hosts)),
        threads=0,
        kv_tokens=fleet.kv_tokens,
        max_num_seqs=fleet.max_num_seqs,
        max_num_batched_tokens=_USUAL_BATCHED_TOKENS,
        max_num_mixed_tokens=_USUAL_BATCHED_TOKENS,
        least_decode=1,
        window_slots=fleet.window_slots,
    )
    return Calibration(
        version=VERSION,
        headrace=headrace_version(),
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        source="learned",
        seconds=0.0,
        num_steps=prompts.num_steps + decode.num_steps,
        host=host,
        model=fleet.model,
        layout=layout,
        steps=step_logs.learned(prompts, decode, host.cpu, fleet.model.name),
        slowdown=0.0,
        front=Front(),
        peer_bytes_per_s=fleet.peer_bytes_per_s,
    )
