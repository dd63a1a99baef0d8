"""One benchmark of a server: finds its model, makes the requests, runs them, and computes the result."""

from __future__ import annotations

import asyncio
import datetime
import gc
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from headrace.bench import checks, drafts, tokens
from headrace.bench.apis import Api, Options, Prompt, error_text
from headrace.bench.arrivals import Arrivals
from headrace.bench.connection import Client, ExchangeError
from headrace.bench.datasets import Conversation
from headrace.bench.display import Display
from headrace.bench.load import Load, beside, each_at_once
from headrace.bench.probes import Probes
from headrace.bench.record import Record
from headrace.bench.results import Result, Setup
from headrace.bench.sender import HttpSender, ask
from headrace.bench.texts import Writer, writer_for
from headrace.bench.tokens import Counter
from headrace.bench.workload import Drawn, Workload

_READY_POLL_S = 0.5
_Answer = TypeVar("_Answer")


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class BenchmarkError(Exception):
    """The server cannot be benchmarked. The message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, apart from the server. `num_users` is for conversations of users who think."""

    workload: Workload
    num_prompts: int
    arrivals: Arrivals
    is_self_timed: bool
    max_concurrency: int | None
    num_users: int | None
    think_s: float
    num_warmups: int
    ready_timeout_s: float
    tokenizer: str | None
    objectives_ms: Mapping[str, float]
    metrics: Sequence[str]
    percentiles: Sequence[float]
    backend: str
    label: str | None
    metadata: Mapping[str, str]
    seed: int
    shows_progress: bool
    probe_rate: float = 0.0
    """Small requests per second beside the load."""
    is_profiled: bool = False
    """Whether the server's profiler runs during the load."""
    keeps_part: bool = False
    """Whether Ctrl-C ends the load with a partial result, instead of the whole command."""


class Benchmark:
    """Runs benchmarks of one model of one server."""

    def __init__(self, client: Client, api: Api, sender: HttpSender, options: Options, writer: Writer) -> None:
        self._client = client
        self._api = api
        self._options = options
        self._writer = writer
        self._sender = sender

    async def draw(self, plan: Plan, num_prompts: int) -> Drawn:
        """The requests. Raises DatasetError, or BenchmarkError if the server cannot count their tokens."""
        try:
            return await plan.workload.draw(self._writer, num_prompts, plan.seed)
        except ExchangeError as error:
            raise BenchmarkError(str(error)) from None

    async def most_tokens(self) -> int | None:
        """The most tokens of a prompt and its answer, if the server's list of models tells, as those of headrace and
        vLLM do."""
        if self._api.models_path != "/v1/models":
            return None
        try:
            _, raw = await self._client.call("GET", self._api.models_path)
            cards = msgspec.json.decode(raw, type=_Cards).data
        except (ExchangeError, msgspec.DecodeError):
            return None
        return next((card.max_model_len for card in cards if card.id == self._options.model), None)

    async def warm_up(self, plan: Plan, conversations: Sequence[Conversation]) -> None:
        """Wait until the server answers, and send what is to go before. Raises BenchmarkError."""
        turn = conversations[0].turns[0]
        request = self._sender.prepared(Prompt([{"role": "user", "content": turn.text}], turn.output_tokens))
        deadline_s = time.monotonic() + plan.ready_timeout_s
        if plan.ready_timeout_s:
            while (failed := await self._once(request, turn.output_tokens)).error_kind:
                if time.monotonic() > deadline_s:
                    raise BenchmarkError(
                        f"the server did not answer a first request within {plan.ready_timeout_s:g} s: {failed.error}"
                    )
                await asyncio.sleep(_READY_POLL_S)

        async def one() -> None:
            await self._once(request, turn.output_tokens)

        await each_at_once(plan.num_warmups, plan.max_concurrency or plan.num_warmups, one)

    async def run(self, plan: Plan, conversations: Sequence[Conversation], arrivals: Arrivals, title: str) -> Result:
        """Run the load and compute the result."""
        load = Load(self._sender, time.perf_counter, plan.max_concurrency)
        rng = random.Random(f"arrivals {plan.seed}")
        gc.collect()
        freezes = not gc.get_freeze_count()  # the caller may have done so
        if freezes:
            gc.freeze()  # what exists need not be looked at while the load runs
        probes = Probes(self._sender, plan.probe_rate, time.perf_counter)
        if plan.is_profiled:
            await self._profiler("start_profile")
        drafted = await drafts.drafted(self._client)
        starts_s: Sequence[float] = ()
        began = datetime.datetime.now()
        cpu_s = time.process_time()
        display = Display(load.progress, title, plan.shows_progress)
        async with beside(display.shown()), beside(probes.asked()):
            with _interrupts() if plan.keeps_part else nullcontext() as stop:
                if plan.num_users is not None:
                    run = await load.users(conversations, plan.num_users, plan.think_s, rng, stop)
                elif plan.is_self_timed:
                    run = await load.open_loop(conversations, [each.at_s or 0.0 for each in conversations], stop)
                else:
                    starts_s = arrivals.times(len(conversations), rng)
                    run = await load.open_loop(conversations, starts_s, stop)
        cpu_s = time.process_time() - cpu_s
        if freezes:
            gc.unfreeze()
        drafted_too = await drafts.drafted(self._client) if drafted is not None else None
        if plan.is_profiled:
            await self._profiler("stop_profile")
        counted_by = await self._count(run.records)
        checked = checks.check(
            run.records,
            ignores_eos=self._options.ignore_eos,
            prompts_are_exact=self._writer.counter.is_exact,
            has_marked_end=self._api.marks_end,
        )
        setup = Setup(
            url=self._client.target.url,
            backend=plan.backend,
            label=plan.label,
            model=self._options.model,
            tokenizer=plan.tokenizer,
            dataset=plan.workload.name,
            num_prompts=sum(len(conversation.turns) for conversation in conversations),
            arrivals=arrivals,
            max_concurrency=plan.max_concurrency,
            num_users=plan.num_users,
            objectives_ms=plan.objectives_ms,
            metrics=plan.metrics,
            percentiles=plan.percentiles,
            prompts_counted_by=_prompt_source(run.records, self._writer.counter),
            answers_counted_by=counted_by,
            date=datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
            metadata=plan.metadata,
            seed=plan.seed,
            rate_changes=_rate_changes(arrivals, starts_s, began),
        )
        return Result.of(setup, run, checked, cpu_s, probes.figures(), drafts.figures(drafted, drafted_too))

    async def _profiler(self, verb: str) -> None:
        """Tell the server's profiler what to do. Raises BenchmarkError."""
        try:
            status, raw = await self._client.call("POST", f"/{verb}", b"{}")
        except ExchangeError as error:
            raise BenchmarkError(str(error)) from None
        if status != 200:
            remedy = "start vLLM with --profiler-config, or leave --profile out"
            raise BenchmarkError(f"POST /{verb} answered {status} ({error_text(raw)}): no profiler; {remedy}")

    async def _once(self, request: bytes, max_tokens: int) -> Record:
        record = Record(0, 0, max_tokens)
        await ask(self._sender, request, record)
        return record

    async def _count(self, records: Sequence[Record]) -> str:
        """Set the lengths of answers from the best available source. Returns the names of the sources."""
        good = [record for record in records if record.succeeded]
        counted = [record for record in good if record.usage_completion_tokens is not None]
        rest = [record for record in good if record.usage_completion_tokens is None]
        for record in counted:
            record.output_tokens = record.usage_completion_tokens or 0
        names = ["the server's usage"] if counted else []
        if rest and self._writer.counter.is_exact:
            names.append(self._writer.counter.name)
            around = self._writer.around
            try:
                for record, count in zip(
                    rest, await self._writer.counter.count([record.text for record in rest]), strict=True
                ):
                    record.output_tokens = max(count - around, 0)
            except ExchangeError as error:
                raise BenchmarkError(str(error)) from None
        elif rest:
            names.append("pieces of the stream")
            for record in rest:
                record.output_tokens = len(record.times)
        return " and ".join(names) or "nothing"


@contextmanager
def _interrupts() -> Iterator[asyncio.Event]:
    """Sets an event at Ctrl-C instead of ending the process. A second Ctrl-C ends it."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _rate_changes(
    arrivals: Arrivals, starts_s: Sequence[float], began: datetime.datetime
) -> list[dict[str, int | str]]:
    """The whole rates that a ramp passed, as `vllm bench serve` saves them; empty without a ramp."""
    if arrivals.ramp_up is None:
        return []
    return [
        {"rps": rate, "timestamp": (began + datetime.timedelta(seconds=at_s)).isoformat()}
        for rate, at_s in arrivals.ramp_up.whole_rates(starts_s)
    ]


def _prompt_source(records: Sequence[Record], counter: Counter) -> str:
    if any(record.usage_prompt_tokens is not None for record in records):
        return "the server's usage"
    return counter.name


async def waited(ask: Callable[[], Awaitable[_Answer]], timeout_s: float) -> _Answer:
    """The answer of a server that may still be starting: it is asked again for `timeout_s`. Raises BenchmarkError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return await ask()
        except BenchmarkError:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(_READY_POLL_S)


async def first_model(client: Client, api: Api) -> str:
    """The first model that the server lists. Raises BenchmarkError with the remedy."""
    try:
        status, raw = await client.call("GET", api.models_path)
    except ExchangeError as error:
        raise BenchmarkError(str(error)) from None
    remedy = "name one with --model"
    if status != 200:
        raise BenchmarkError(f"GET {api.models_path} answered {status} ({error_text(raw)}); {remedy}")
    try:
        names = api.model_names(raw)
    except msgspec.DecodeError:
        raise BenchmarkError(f"GET {api.models_path} lists no models; {remedy}") from None
    if not names:
        raise BenchmarkError(
            f"the server has no models; load one, {remedy}, or wait for one that is loading with "
            "--ready-check-timeout-sec"
        )
    return names[0]


async def writer_of(client: Client, model: str, tokenizer: str | None) -> Writer:
    """The writer of prompts, which also counts tokens. Raises BenchmarkError, and ValueError for a useless
    tokenizer."""
    try:
        return await writer_for(await tokens.counter_for(client, model, tokenizer))
    except ExchangeError as error:
        raise BenchmarkError(str(error)) from None
