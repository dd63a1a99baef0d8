"""Conducts a study: starts a server, puts a load on it, stores the result, and continues with the next run."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from headrace.bench.apis import Options, api_of
from headrace.bench.arrivals import Arrivals
from headrace.bench.benchmark import Benchmark, BenchmarkError, Plan, writer_of
from headrace.bench.connection import Client, ExchangeError
from headrace.bench.results import Result, as_json
from headrace.bench.sender import HttpSender
from headrace.bench.study import recipes
from headrace.bench.study.directory import Finished, StudyDirectory
from headrace.bench.study.kinds import Kind, MissingError
from headrace.bench.study.model import StudiedModel
from headrace.bench.study.processes import Command, ServerError, busy_s, started
from headrace.bench.study.recipes import Experiment, Run, Scale
from headrace.bench.target import target_of
from headrace.bench.workload import Workload
from headrace.common.commands import CommandError
from headrace.common.host_memory import available_bytes
from headrace.common.ports import chosen_port

_BACKEND = "openai"
_START_TIMEOUT_S = 900.0
_REQUEST_TIMEOUT_S = 1800.0
_READY_TIMEOUT_S = 300.0
_NUM_WARMUPS = 4
# Texts drawn from the model itself do not repeat, as the most likely ones do. Repeated text would be faster where
# drafts are taken from it, and users do not send it.
_SAMPLING = {"temperature": 1.0, "top_p": 1.0}
_OTHER_WORK = 0.1
# Requests per second of a host that has not been measured; the time of a run hardly depends on it.
_SOME_CAPACITY = 4.0
_ONE_MODEL = "experiment 5 compares models; name a second one with another --model"


class Running(Protocol):
    """A server that runs."""

    url: str

    def check(self) -> None:
        """Raises ServerError if it has ended."""

    def cpu_s(self) -> float:
        """CPU seconds so far."""

    def memory_bytes(self) -> int:
        """Memory now."""


Launch = Callable[[str, Command, int, Path, float], AbstractAsyncContextManager[Running]]
"""Starts a server: its name, command, port, log file, and seconds until it must be ready."""


@dataclass(slots=True)
class Outcome:
    """What a call of the study did. `left_out` has a sentence for each server or experiment that took no part."""

    left_out: list[str] = field(default_factory=list)
    num_run: int = 0
    num_wrong: int = 0
    num_failed: int = 0


class Study:
    """The runs of experiments. A run whose result is in `directory` is not repeated."""

    def __init__(
        self,
        directory: StudyDirectory,
        scale: Scale,
        seed: int,
        models: Sequence[StudiedModel],
        kinds: Sequence[Kind],
        port: int | None,
        say: Callable[[str], None],
        workload: Workload,
        launch: Launch = started,
        shows_progress: bool = True,
    ) -> None:
        self._directory = directory
        self._scale = scale
        self._seed = seed
        self._models = {model.name: model for model in models}
        self._kinds = {kind.name: kind for kind in kinds}
        self._port = port
        self._say = say
        self._workload = workload
        self._launch = launch
        self._shows_progress = shows_progress
        self._outcome = Outcome()
        self._took_s = 0.0
        self._expected_s = 0.0

    @property
    def left_out(self) -> Sequence[str]:
        """A sentence for each server or experiment that takes no part."""
        return self._outcome.left_out

    async def conduct(self, experiments: Sequence[Experiment]) -> Outcome:
        """Run what is left of these experiments. Raises ServerError if headrace itself cannot be measured."""
        for kind in list(self._kinds.values()):
            try:
                kind.prepare()
            except MissingError as error:
                self._leave_out(kind.name, str(error))
        capacity = {model: await self._capacity(model) for model in self._measured(experiments)}
        self._outcome.left_out += filter(None, map(self._why_left_out, experiments))
        runs = [run for experiment in experiments for run in self._runs(experiment, capacity)]
        left = [run for run in runs if self._directory.find(run) is None]
        if len(left) < len(runs):
            self._say(f"{len(runs) - len(left)} of {len(runs)} runs are done already")
        for number, run in enumerate(left):
            if run.server not in self._kinds:
                continue
            expected = [self._expected(each) for each in left[number:] if each.server in self._kinds]
            minutes = sum(expected) / 60 * self._slowness()
            self._say(f"run {number + 1} of {len(left)}, about {math.ceil(minutes)} min left: {told(run)}")
            start_s = time.monotonic()
            await self._try(run)
            self._took_s += time.monotonic() - start_s
            self._expected_s += expected[0]
        return self._outcome

    def preview(self, experiments: Sequence[Experiment]) -> list[str]:
        """What `conduct` would do, in lines. Nothing is installed, started or written."""
        lines = [f"{name}: {state}" for name, state in self._outlook().items()]
        capacity: dict[str, float] = {}
        total_s, num_left = 0.0, 0
        for model in self._measured(experiments):
            run = recipes.capacity_run(model, self._scale)
            finished = self._directory.find(run)
            capacity[model] = _SOME_CAPACITY if finished is None else finished.figure("request_throughput") or 0.0
            if finished is None:
                total_s, num_left = total_s + self._expected(run), num_left + 1
                lines.append(f"capacity of this host with {model}, of which rates are shares: 1 run")
        for experiment in experiments:
            if why := self._why_left_out(experiment):
                lines.append(why)
                continue
            runs = self._runs(experiment, capacity)
            left = [run for run in runs if self._directory.find(run) is None]
            seconds = sum(map(self._expected, left))
            total_s, num_left = total_s + seconds, num_left + len(left)
            told = f"{len(runs)} runs"
            if len(left) < len(runs):
                told += f", of which {len(runs) - len(left)} are done"
            title = experiment.title[:1].lower() + experiment.title[1:]
            lines.append(f"{_name_of(experiment.name)}, {title}: {told}{_about(seconds)}")
        lines.append(f"in all {num_left} runs to do{_about(total_s)}")
        return lines

    def _outlook(self) -> dict[str, str]:
        """The state of each server. Those that cannot take part are left out."""
        found = {}
        for name, kind in list(self._kinds.items()):
            try:
                found[name] = kind.outlook()
                if not found[name]:
                    found[name] = f"installed, version {kind.version()}"
                    for model in self._models.values():
                        kind.command(replace(recipes.capacity_run(model.name, self._scale), server=name), model, 1)
            except MissingError as error:
                del self._kinds[name]
                found[name] = f"left out: {error}"
        return found

    def _why_left_out(self, experiment: Experiment) -> str:
        """Why an experiment does not take place; empty if it does."""
        return _ONE_MODEL if experiment.name == "5" and len(self._models) < 2 else ""

    def _measured(self, experiments: Sequence[Experiment]) -> list[str]:
        """The models whose capacity these experiments need."""
        return list(self._models)[: None if any(experiment.name == "5" for experiment in experiments) else 1]

    def _runs(self, experiment: Experiment, capacity: Mapping[str, float]) -> list[Run]:
        """The runs of an experiment with the servers that take part."""
        if self._why_left_out(experiment):
            return []
        return recipes.runs(experiment, self._scale, list(self._models), list(self._kinds), capacity)

    async def _capacity(self, model: str) -> float:
        """Requests per second of headrace when all come at once."""
        run = recipes.capacity_run(model, self._scale)
        finished = self._directory.find(run)
        if finished is None:
            self._say(f"finding out what this host can do: {told(run)}")
            finished = await self._run(run)
            if finished.figure("completed") == 0:
                raise ServerError(f"all requests to headrace failed: {finished.result['headrace']['error_examples']}")
            self._directory.add(finished)
        return finished.figure("request_throughput") or 0.0

    async def _try(self, run: Run) -> None:
        """Run and store one run. A peer that cannot take part is left out from now on."""
        try:
            finished = await self._run(run)
        except (MissingError, ServerError, BenchmarkError) as error:
            if run.server == recipes.OURS:
                raise ServerError(str(error)) from None
            self._leave_out(run.server, str(error))
            return
        self._directory.add(finished)
        self._outcome.num_run += 1
        self._outcome.num_wrong += finished.is_wrong
        throughput, ttft = finished.figure(recipes.THROUGHPUT) or 0.0, finished.figure(recipes.TTFT) or 0.0
        self._say(f"    {throughput:,.1f} tokens/s, TTFT {ttft:,.0f} ms{_remarks(finished)}")

    def _leave_out(self, server: str, why: str) -> None:
        del self._kinds[server]
        self._outcome.left_out.append(why if why.startswith(server) else f"{server}: {why}")
        self._say(f"left out: {self._outcome.left_out[-1]}")

    async def _run(self, run: Run) -> Finished:
        kind, model = self._kinds[run.server], self._models[run.model]
        need, have = kind.memory_bytes(run, model), available_bytes()
        if need > have:
            raise ServerError(
                f"{run.server} with {model.name} takes about {need / 2**30:.1f} GiB of memory, and {have / 2**30:.1f} "
                "GiB are available; stop other programs, or name a smaller model with --model"
            )
        try:
            port = chosen_port("127.0.0.1", self._port or 0)
        except CommandError as error:
            raise ServerError(str(error)) from None
        command = kind.command(run, model, port)
        start_s = time.monotonic()
        async with self._launch(
            run.server, command, port, self._directory.logs / f"{run.key}.log", _START_TIMEOUT_S
        ) as server:
            ready_s = time.monotonic() - start_s
            async with self._benchmark(server, model) as bench:
                plan = self._plan(run, model)
                drawn = await bench.draw(plan, run.num_prompts)
                # Not one of the requests that count: a server would find it in its cache.
                warm = await bench.draw(replace(plan, seed=-1 - plan.seed), 1)
                await bench.warm_up(plan, warm.conversations)
                before = await self._preemptions(kind, server)
                cpu_s, all_s, start_s = server.cpu_s(), busy_s(), time.monotonic()
                result = await bench.run(plan, drawn.conversations, plan.arrivals, f"    {run.server}")
                took_s = time.monotonic() - start_s
                cpu_s, all_s = server.cpu_s() - cpu_s, busy_s() - all_s
                server.check()
                after = await self._preemptions(kind, server)
                memory_bytes = server.memory_bytes()
        others_s = max(0.0, all_s - cpu_s - result.health.cpu_share * result.totals.duration_s)
        details = {
            "version": kind.version(),
            "command": " ".join([*(f"{k}={v}" for k, v in command.environment.items()), *command.argv]),
            "ready_s": ready_s,
            "cpu_s": cpu_s,
            "memory_bytes": memory_bytes,
            "preemptions": None if before is None or after is None else after - before,
        }
        machine = {"cores_of_others": others_s / took_s, "seconds": took_s}
        return Finished(run, _saved(result), details, machine)

    @asynccontextmanager
    async def _benchmark(self, server: Running, model: StudiedModel) -> AsyncIterator[Benchmark]:
        client = Client(target_of(server.url, {}, None, False), _REQUEST_TIMEOUT_S)
        try:
            writer = await writer_of(client, model.name, str(model.directory))
            options = Options(model.name, True, _SAMPLING)
            api = api_of(_BACKEND, None)
            yield Benchmark(client, api, HttpSender(client, api, options), options, writer)
        finally:
            client.close()

    def _plan(self, run: Run, model: StudiedModel) -> Plan:
        return Plan(
            workload=self._workload,
            num_prompts=run.num_prompts,
            arrivals=Arrivals(run.rate),
            is_self_timed=False,
            max_concurrency=None,
            num_users=None,
            think_s=0.0,
            num_warmups=_NUM_WARMUPS,
            ready_timeout_s=_READY_TIMEOUT_S,
            tokenizer=model.name,
            objectives_ms={},
            metrics=("ttft", "tpot", "itl", "e2el"),
            percentiles=(50.0, 95.0, 99.0),
            backend=_BACKEND,
            label=run.server,
            metadata={},
            # The same requests for all servers, others in each repetition.
            seed=1000 * self._seed + run.repetition,
            shows_progress=self._shows_progress,
        )

    async def _preemptions(self, kind: Kind, server: Running) -> float | None:
        """The counter now; None if the server has none."""
        if not kind.preemptions:
            return None
        client = Client(target_of(server.url, {}, None, False), _REQUEST_TIMEOUT_S)
        try:
            status, raw = await client.call("GET", "/metrics")
        except ExchangeError:
            return None
        finally:
            client.close()
        return counted(raw.decode(errors="replace"), kind.preemptions) if status == 200 else None

    def _expected(self, run: Run) -> float:
        """The approximate duration of a run in seconds."""
        arrivals_s = run.num_prompts / run.rate if math.isfinite(run.rate) else self._scale.seconds
        return self._kinds[run.server].start_s + arrivals_s + 10.0

    def _slowness(self) -> float:
        return self._took_s / self._expected_s if self._expected_s else 1.0


def told(run: Run) -> str:
    """A description of a run."""
    rate = "all at once" if math.isinf(run.rate) else f"{run.rate:g} requests/s"
    return (
        f"{_name_of(run.experiment)}, {run.server}, {run.model}, {rate}, {run.num_prompts} requests, "
        f"batch {run.batch}, {run.kv_tokens:,} tokens of KV cache, repetition {run.repetition}"
    )


def _name_of(experiment: str) -> str:
    """An experiment as messages name it."""
    if experiment == "0":
        return "capacity"
    return f"experiment {experiment}" if experiment.isdigit() else experiment


def _about(seconds: float) -> str:
    return f", about {math.ceil(seconds / 60)} min" if seconds else ""


def counted(metrics: str, name: str) -> float | None:
    """The sum of a counter over its labels, in Prometheus's text; None if it is not there."""
    found = [
        float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
    ]
    return sum(found) if found else None


def _remarks(finished: Finished) -> str:
    """Remarks about a run that a reader must see at once."""
    found = []
    if finished.result.get("failed"):
        found.append(f"{finished.result['failed']} requests FAILED")
    found += [f"WRONG: {finding['count']} {finding['sentence']}" for finding in finished.result["headrace"]["findings"]]
    if finished.machine["cores_of_others"] > _OTHER_WORK:
        found.append(f"other programs took {finished.machine['cores_of_others']:.1f} cores")
    return "".join(f"; {remark}" for remark in found)


def _saved(result: Result) -> Mapping[str, object]:
    return as_json(result, is_detailed=False)
