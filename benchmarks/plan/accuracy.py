"""Plans beside measurements: `python -m benchmarks.plan.accuracy [--calibration FILE] [--workload NAME]`.

For each workload (ShareGPT-like, conversations, retrieval over shared documents) the plan predicts the knee of one
host: the highest rate at which nine of ten requests meet the objectives. A server is started as the plan says.
`headrace bench` puts shares of that rate on it, and the simulator gets the same requests: their arrivals, lengths,
prefixes, turns and times of thought. Goodput, time to the first token and time a token are printed side by side. With
--sweep, the knee is measured too. Nothing else should run on the machine.

The bars: goodput and p95 of the first token within 15 %, time a token within 10 %, the knee within 10 %.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from benchmarks.machine import describe
from headrace.bench import calibration as files
from headrace.bench.arrivals import Arrivals
from headrace.bench.benchmark import Benchmark, first_model, writer_of
from headrace.bench.benchmark import Plan as BenchPlan
from headrace.bench.calibrating import measured as calibrated
from headrace.bench.connection import Client
from headrace.bench.datasets import Conversation
from headrace.bench.measures import is_good
from headrace.bench.options import dataset, requests, server
from headrace.bench.record import Record
from headrace.bench.results import Result
from headrace.bench.sender import HttpSender
from headrace.bench.serve import serve
from headrace.bench.serving import Serving
from headrace.bench.sweep import sweep
from headrace.plan.fleet import Fleet, Kind
from headrace.plan.load import Load, Requests, lengths
from headrace.plan.objectives import Limit, Objectives, percentile
from headrace.plan.search import Search
from headrace.plan.start import serve_flags
from headrace.sim.router import POLICIES
from headrace.sim.simulation import JobRecord, Simulation
from headrace.sim.trace import Job

LOADS = (0.5, 0.8, 1.1)
BARS = {"goodput": 0.15, "TTFT p95": 0.15, "TPOT mean": 0.10, "knee": 0.10}
SEEDS, COUNT = (1, 2), 300
KV_GB = 0.6
# So many characters tell prefixes apart.
_TELLING = 200


class Workload(NamedTuple):
    """The flags of `headrace bench`, the same for the plan, the mean time of thought, and the tokens of the prefixes
    with which prompts begin, if they are not those of a system prompt."""

    flags: tuple[str, ...]
    asked: Requests
    think_s: float = 0.0
    prefix: int = 0


MOST = 2048
WORKLOADS = {
    "sharegpt": Workload(
        (
            *("--dataset-name", "random", "--input-len", "160", "--input-dist", "lognormal"),
            *("--output-len", "160", "--output-dist", "exponential", "--lognormal-sigma", "0.8"),
        ),
        Requests(lengths("lognormal", 220, MOST), lengths("exponential", 160, MOST), 220, 160, most=MOST),
    ),
    "turns": Workload(
        (
            *("--dataset-name", "multi_turn", "--backend", "openai-chat", "--multi-turn-turns", "4", "--ignore-eos"),
            *("--multi-turn-think-time", "3", "--multi-turn-system-len", "256", "--input-len", "64"),
            *("--output-len", "96", "--lognormal-sigma", "0.8"),
        ),
        Requests(
            lengths("lognormal", 88, MOST), lengths("exponential", 96, MOST), 88, 96, prefix=256, turns=4.0, most=MOST
        ),
        think_s=3.0,
    ),
    "rag": Workload(
        (
            *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "1024", "--ignore-eos"),
            *("--prefix-repetition-num-prefixes", "8", "--prefix-repetition-suffix-len", "64"),
            *("--prefix-repetition-output-len", "64", "--output-dist", "exponential"),
        ),
        Requests(
            lengths("fixed", 64, MOST), lengths("exponential", 64, MOST), 64, 64, prefix=1024, num_prefixes=8, most=MOST
        ),
        prefix=1024,
    ),
}


class Figures(msgspec.Struct):
    """What is compared. Rates are per second, times in milliseconds."""

    goodput: float
    ttft_p50: float
    ttft_p95: float
    tpot_mean: float
    tpot_p95: float
    hit_share: float = 0.0


class Row(msgspec.Struct):
    """One load of one workload."""

    workload: str
    load: float
    per_s: float
    predicted: Figures
    measured: Figures
    num_requests: int


def jobs_of(result: Result, conversations: Sequence[Conversation], workload: Workload) -> list[Job]:
    """The requests of a measured run for the simulator."""
    places = {
        hash(turn.parts): (number, place)
        for number, conversation in enumerate(conversations)
        for place, turn in enumerate(conversation.turns)
    }
    by_place = {places[record.prompt_id]: record for record in result.run.records}
    ids: dict[str, int] = {}
    jobs: list[Job] = []
    for number, conversation in enumerate(conversations):
        past: tuple[tuple[int, int], ...] = ()
        if conversation.system:
            past = ((ids.setdefault(conversation.system, len(ids)), conversation.system_tokens),)
        previous: int | None = None
        for place, turn in enumerate(conversation.turns):
            record = by_place.get((number, place))
            if record is None or not record.succeeded:
                break
            if workload.prefix:
                past = ((ids.setdefault(turn.text[:_TELLING], len(ids)), workload.prefix),)
            own = max(1, record.input_tokens - sum(length for _, length in past))
            segments = (*past, ((1 << 20) + len(jobs), own))
            at_s = record.planned_s - result.run.began_s if previous is None else 0.0
            think_s = turn.think_s if previous is not None else 0.0
            job = Job(len(jobs), at_s, segments, max(1, record.output_tokens), (), previous, think_s)
            jobs.append(job)
            previous = job.number
            past = (*segments, (job.answer_token_id, job.num_output_tokens))
    return jobs


def predicted(fleet: Fleet, jobs: Sequence[Job], limits_ms: dict[str, float]) -> tuple[Figures, float]:
    """What the simulator says of these requests, and until when."""
    settings = fleet.settings(1)
    hashed = [job.hashed(settings.worker.block_size) for job in jobs]
    records = Simulation(hashed, POLICIES["headrace"], settings).run().records

    def good(record: JobRecord) -> bool:
        return _ttft_ms(record) <= limits_ms["ttft"] and _tpot_ms(record) <= limits_ms["tpot"]

    end_s = max(record.ended_s for record in records)
    tpots = [_tpot_ms(record) for record in records if record.num_tokens > 1]
    ttfts = [_ttft_ms(record) for record in records]
    prompts = sum(record.job.num_prompt_tokens for record in records)
    return Figures(
        goodput=sum(map(good, records)) / end_s,
        ttft_p50=percentile(ttfts, 50),
        ttft_p95=percentile(ttfts, 95),
        tpot_mean=statistics.fmean(tpots),
        tpot_p95=percentile(tpots, 95),
        hit_share=sum(record.cached_tokens for record in records) / prompts,
    ), end_s


def _ttft_ms(record: JobRecord) -> float:
    return 1000 * (record.first_token_s - record.arrived_s)


def _tpot_ms(record: JobRecord) -> float:
    return 1000 * (record.ended_s - record.first_token_s) / (record.num_tokens - 1) if record.num_tokens > 1 else 0.0


def measured(result: Result, limits_ms: dict[str, float]) -> Figures:
    """What the client saw."""
    records: list[Record] = [record for record in result.run.records if record.succeeded]
    tpots = [1000 * record.tpot_s for record in records if record.output_tokens > 1]
    ttfts = [1000 * record.ttft_s for record in records]
    return Figures(
        goodput=sum(is_good(record, limits_ms) for record in records) / result.run.duration_s,
        ttft_p50=percentile(ttfts, 50),
        ttft_p95=percentile(ttfts, 95),
        tpot_mean=statistics.fmean(tpots),
        tpot_p95=percentile(tpots, 95),
    )


class Side:
    """A running server and a client of it."""

    def __init__(self, url: str, workload: Workload, limits_ms: dict[str, float]) -> None:
        self._workload = workload
        goodput = [f"{name}:{limit:g}" for name, limit in limits_ms.items()]
        args = [url, *workload.flags, "--max-total-len", str(MOST), "--goodput", *goodput, "--disable-tqdm"]
        self._flags: dict[str, Any] = dict(serve.make_context("serve", args).params)
        self.client = Client(server.target(self._flags), 600.0)

    async def bench(self) -> Benchmark:
        """The benchmark."""
        api = server.api(self._flags)
        model = await first_model(self.client, api)
        options = requests.request_options(self._flags, api, model)
        return Benchmark(
            self.client, api, HttpSender(self.client, api, options), options, await writer_of(self.client, model, None)
        )

    def plan(self, seed: int) -> BenchPlan:
        """What to run."""
        return BenchPlan(
            workload=dataset.workload(self._flags),
            num_prompts=0,
            arrivals=Arrivals(),
            is_self_timed=False,
            max_concurrency=None,
            num_users=None,
            think_s=0.0,
            num_warmups=2,
            ready_timeout_s=0.0,
            tokenizer=None,
            objectives_ms=dict(self._flags["goodput"]),
            metrics=("ttft", "tpot"),
            percentiles=(95.0,),
            backend=self._flags["backend"],
            label=None,
            metadata={},
            seed=seed,
            shows_progress=False,
        )

    async def run(
        self, bench: Benchmark, per_s: float, seconds: float, seed: int
    ) -> tuple[Result, Sequence[Conversation]]:
        """So many requests a second for so long."""
        plan = self.plan(seed)
        count = max(20, round(per_s * seconds))
        conversations = (await bench.draw(plan, count)).conversations
        await bench.warm_up(plan, conversations)
        starts = Arrivals(rate=per_s * len(conversations) / count)
        return await bench.run(plan, conversations, starts, ""), conversations


async def compare(name: str, fleet: Fleet, args: argparse.Namespace) -> list[Row]:
    """The loads of one workload, and its knee."""
    workload = WORKLOADS[name]
    objectives = Objectives(Limit(90.0, args.ttft_ms / 1000), Limit(90.0, args.tpot_ms / 1000))
    limits_ms = {"ttft": args.ttft_ms, "tpot": args.tpot_ms}
    search = Search(Load(workload.asked, per_s=1.0, think_s=workload.think_s), objectives, SEEDS, COUNT)
    held, missed = search.knee(fleet)
    knee = held.factor if held is not None else (missed.factor if missed is not None else 1.0)
    print(f"\n{name}: predicted knee {knee:.2f} requests/s{'' if held is not None else ' at most'}", flush=True)
    model = fleet.kind.calibration.model.name if args.model is None else args.model
    layout = fleet.kind.calibration.layout
    flags = ["--workers", str(layout.workers), "--threads", str(layout.threads)]
    rows = []
    quiet = ("--port", "0", "--grpc-port", "0", "--log-level", "warning")
    async with Serving((model, *flags, *serve_flags(fleet, args.kv_gb), *quiet), {}) as serving:
        side = Side(serving.url, workload, limits_ms)
        bench = await side.bench()
        await side.run(bench, min(args.load) * knee, args.seconds / 2, 0)  # steps of most sizes have then run once
        for number, load in enumerate(args.load):
            result, conversations = await side.run(bench, load * knee, args.seconds, number + 1)
            jobs = jobs_of(result, conversations, workload)
            found, _ = predicted(fleet, jobs, limits_ms)
            rows.append(Row(name, load, load * knee, found, measured(result, limits_ms), len(jobs)))
            print_row(rows[-1])
        if args.sweep:
            await print_knee(side, bench, knee, args.seconds)
        side.client.close()
    return rows


async def print_knee(side: Side, bench: Benchmark, knee: float, seconds: float) -> None:
    """Measure the knee and print it beside the predicted one."""
    count = 100

    async def run(per_s: float) -> Result:
        nonlocal count
        count += 1
        return (await side.run(bench, per_s, seconds, count))[0]

    found = (await sweep(0.7 * knee, 3, run)).knee
    if found is None:
        print("  knee       no rate was held")
        return
    print(
        f"  {'knee, req/s':18} {knee:>10.2f} {found.rate:>10.2f} {_error(knee, found.rate, BARS['knee'])}", flush=True
    )


def print_row(row: Row) -> None:
    """Both sides and the errors."""
    title = f"{row.load:g} of the knee, {row.per_s:.2f}/s, {row.num_requests} requests"
    print(f"  {title:40} hits predicted {row.predicted.hit_share:.0%}")
    print(f"  {'':18} {'predicted':>10} {'measured':>10} {'error':>8}")
    for title, field, bar in (
        ("goodput, req/s", "goodput", BARS["goodput"]),
        ("TTFT p50, ms", "ttft_p50", None),
        ("TTFT p95, ms", "ttft_p95", BARS["TTFT p95"]),
        ("TPOT mean, ms", "tpot_mean", BARS["TPOT mean"]),
        ("TPOT p95, ms", "tpot_p95", None),
    ):
        ours, theirs = getattr(row.predicted, field), getattr(row.measured, field)
        print(f"  {title:18} {ours:>10.2f} {theirs:>10.2f} {_error(ours, theirs, bar)}", flush=True)


def _error(ours: float, theirs: float, bar: float | None) -> str:
    error = ours / theirs - 1 if theirs else 0.0
    mark = "" if bar is None else f"   {'within' if abs(error) <= bar else 'BEYOND'} {bar:.0%}"
    return f"{error:>+8.1%}{mark}"


def calibration_of(args: argparse.Namespace) -> files.Calibration:
    """The one in the file, measured first if there is none."""
    if not args.calibration.exists():
        flags = ["--kv-cache-gb", f"{args.kv_gb:g}", "--speculation", "off"]
        flags += ["--workers", str(args.workers)] if args.workers else []
        flags += ["--threads", str(args.threads)] if args.threads else []
        found = asyncio.run(calibrated(args.model, flags, args.calibrate_seconds, lambda line: print(line, flush=True)))
        args.calibration.write_bytes(files.encoded(found))
    return files.read(args.calibration)


def main() -> None:
    """Parse the flags and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or directory; default: that of the calibration, or the demo model")
    parser.add_argument("--calibration", type=Path, default=Path("accuracy.json"), help="made if it does not exist")
    parser.add_argument("--calibrate-seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, help="of a new calibration")
    parser.add_argument("--threads", type=int, help="of a new calibration")
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--load", nargs="+", type=float, default=list(LOADS), help="shares of the predicted knee")
    parser.add_argument("--seconds", type=float, default=90.0, help="of arrivals at each load")
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--kv-gb", type=float, default=KV_GB)
    parser.add_argument("--sweep", action="store_true", help="measure the knee too")
    parser.add_argument("--save", type=Path, help="write all rows to this file, as JSON")
    args = parser.parse_args()
    calibration = calibration_of(args)
    print(f"{describe()}\n{files.described(calibration)}")
    fleet = Fleet(Kind(args.calibration.stem, calibration), 1)
    rows = [row for name in args.workload for row in uvloop.run(compare(name, fleet, args))]
    if args.save is not None:
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2))


if __name__ == "__main__":
    main()
