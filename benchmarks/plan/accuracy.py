"""Plans beside measurements: `python -m benchmarks.plan.accuracy [--calibration FILE] [--workload NAME]`.

For each workload (ShareGPT-like, conversations, retrieval over shared documents) the plan predicts the knee of one
host: the highest rate at which nine of ten requests meet the objectives. A server is started as the plan says.
`headrace bench` puts shares of that rate on it, and the simulator gets the same requests: their arrivals, tokens, turns
and times of thought. Goodput, time to the first token and time a token are printed side by side, and so are the steps
that the workers computed and what the calibration says of them. With --sweep, the knee is measured too. Nothing else
should run on the machine.

The bars: goodput and p95 of the first token within 15 %, time a token within 10 %, the knee within 10 %.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from benchmarks.machine import describe
from benchmarks.plan import comparison, steps
from benchmarks.plan.comparison import Asked, Figures
from benchmarks.plan.noted import ASKED, Notes
from benchmarks.plan.steps import Cores, Ran, StepKind
from headrace.bench import calibration as files
from headrace.bench.arrivals import Arrivals
from headrace.bench.benchmark import Benchmark, first_model, writer_of
from headrace.bench.benchmark import Plan as BenchPlan
from headrace.bench.calibrating import FRONT_ROLES
from headrace.bench.calibrating import measured as calibrated
from headrace.bench.connection import Client
from headrace.bench.datasets import Conversation
from headrace.bench.options import dataset, requests, server
from headrace.bench.results import Result
from headrace.bench.sender import HttpSender
from headrace.bench.serve import serve
from headrace.bench.serving import Serving
from headrace.bench.sweep import why_not_held
from headrace.plan.fleet import Fleet, Kind
from headrace.plan.load import Load, Requests, lengths
from headrace.plan.objectives import Limit, Objectives
from headrace.plan.search import Search, longest_token_s
from headrace.plan.start import serve_flags
from headrace.sim import step_logs
from headrace.sim.fitting import OUTLIER
from headrace.sim.router import POLICIES
from headrace.sim.simulation import Simulation

LOADS = (0.5, 0.8, 1.1)
BARS = {"goodput": 0.15, "TTFT p95": 0.15, "TPOT mean": 0.10, "knee": 0.10}
SEEDS, COUNT = (1, 2), 300
KV_GB = 0.6
# The first rates of a measured knee, as shares of the predicted one, and by how much they are spread if both are held
# or neither is. Then the interval is halved so often: to 4 %.
_LOW, _HIGH, _SPREAD, _HALVINGS = 0.8, 1.25, 1.4, 3
_MOST_RATES = 10
_OTHER_SEED = 10_000


class Workload(NamedTuple):
    """The flags of `headrace bench`, the same for the plan, and the mean time of thought."""

    flags: tuple[str, ...]
    asked: Requests
    think_s: float = 0.0


MOST = 2048
# Chat templates add about so many tokens to a turn.
_TEMPLATE = 10
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
            lengths("lognormal", 88 + _TEMPLATE, MOST),
            lengths("exponential", 96, MOST),
            88 + _TEMPLATE,
            96,
            prefix=256,
            turns=4.0,
            most=MOST,
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
    ),
}


class Row(msgspec.Struct):
    """One load of one workload; of all its rounds together."""

    workload: str
    load: float
    per_s: float
    predicted: Figures
    measured: Figures
    num_requests: int
    rounds: list[Figures]
    """What was measured in each round."""
    steps: list[StepKind]
    cores: Cores


class Knee(msgspec.Struct):
    """The knee of one workload, in requests per second. `held` and `missed` are the rates around the measured one."""

    workload: str
    predicted: float
    measured: float
    held: float
    missed: float


def predicted(fleet: Fleet, asked: Asked, settle_s: float) -> comparison.Side:
    """What the simulator says of these requests."""
    settings = fleet.settings(1)
    hashed = [job.hashed(settings.worker.block_size) for job in asked.jobs]
    records = Simulation(hashed, POLICIES["headrace"], settings).run().records
    return comparison.counted(comparison.simulated(records), asked.starts_s, settle_s)


class Side:
    """A running server whose workers write their steps to `log`, and a client of it."""

    def __init__(self, serving: Serving, log: Path, flags: Sequence[str], limits_ms: Mapping[str, float]) -> None:
        self._serving = serving
        self._log = log
        goodput = [f"{name}:{limit:g}" for name, limit in limits_ms.items()]
        args = [serving.url, *flags, "--max-total-len", str(MOST), "--goodput", *goodput, "--disable-tqdm"]
        self._flags: dict[str, Any] = dict(serve.make_context("serve", args).params)
        self.client = Client(server.target(self._flags), 600.0)
        self.notes = Notes()
        self._front_s = self._workers_s = 0.0

    async def bench(self) -> Benchmark:
        """The benchmark."""
        api = server.api(self._flags)
        model = await first_model(self.client, api)
        options = requests.request_options(self._flags, api, model)
        options = options._replace(extra={**options.extra, **ASKED})
        sender = HttpSender(self.client, api, options, stream_of=self.notes.stream)
        return Benchmark(self.client, api, sender, options, await writer_of(self.client, model, None))

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
        self.notes.clear()
        plan = self.plan(seed)
        count = max(20, round(per_s * seconds))
        conversations = (await bench.draw(plan, count)).conversations
        # Not with a prompt of the run, which the simulator would not find in a cache.
        await bench.warm_up(plan, (await bench.draw(self.plan(seed + _OTHER_SEED), count)).conversations)
        starts = Arrivals(rate=per_s * len(conversations) / count)
        self._front_s, self._workers_s = self._cpu_s()
        return await bench.run(plan, conversations, starts, ""), conversations

    def ran(self, result: Result) -> Ran:
        """What server and client did in the latest run."""
        front_s, workers_s = self._cpu_s()
        run = result.run
        return Ran(
            run.began_s,
            run.ended_s,
            step_logs.read(self._log.read_bytes()),
            front_s - self._front_s,
            result.health.cpu_share * run.duration_s,
            workers_s - self._workers_s,
            len(run.records),
            sum(record.output_tokens for record in run.records),
        )

    def _cpu_s(self) -> tuple[float, float]:
        """CPU seconds of gateway and router until now, and of the workers."""
        return self._serving.cpu_s(FRONT_ROLES), self._serving.cpu_s(("worker",))


class Comparison:
    """One workload: the plan of `fleet`, and a server of its own beside it."""

    def __init__(self, name: str, fleet: Fleet, args: argparse.Namespace) -> None:
        self._name = name
        self._workload = WORKLOADS[name]
        self._fleet = fleet
        self._args = args
        self._limits_ms = {"ttft": args.ttft_ms, "tpot": args.tpot_ms}
        self._objectives = Objectives(Limit(90.0, args.ttft_ms / 1000), Limit(90.0, args.tpot_ms / 1000))
        self._asked = self._workload.asked
        self._seed = 0

    def knee(self) -> float:
        """The predicted knee, in requests per second."""
        load = Load(self._asked, per_s=1.0, think_s=self._workload.think_s)
        search = Search(load, self._objectives, SEEDS, COUNT)
        held, missed = search.knee(self._fleet)
        if held is None or missed is None:
            one = held or missed
            return one.factor if one is not None else 1.0
        return math.sqrt(held.factor * missed.factor)

    async def run(self) -> tuple[list[Row], list[Knee]]:
        """All loads, and the knee if it is wanted."""
        args, layout = self._args, self._fleet.kind.calibration.layout
        model = self._fleet.kind.calibration.model.name if args.model is None else args.model
        flags = ["--workers", str(layout.workers), "--threads", str(layout.threads)]
        quiet = ("--port", "0", "--grpc-port", "0", "--log-level", "warning")
        knee = self.knee()
        rows, knees = [], []
        argv = (model, *flags, *serve_flags(self._fleet, args.kv_gb), *quiet)
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "steps"
            async with Serving(argv, {"HEADRACE_WORKER_STEP_LOG": str(log)}) as serving:
                backend = [] if args.backend is None else ["--backend", args.backend]
                side = Side(serving, log, [*self._workload.flags, *backend], self._limits_ms)
                bench = await side.bench()
                # Steps of most sizes have run once after this.
                settling = await side.run(bench, 0.5 * knee, args.seconds / 2, self._seed)
                reuse = comparison.asked(*settling, side.notes.tokens).reuse
                if self._asked.turns > 1 and reuse < 1:
                    self._asked = replace(self._asked, reuse=reuse)
                    knee = self.knee()
                print(f"\n{self._name}: predicted knee {knee:.2f} requests/s", flush=True)
                if self._asked.turns > 1:
                    print(f"  the next turn's prompt begins with {reuse:.0%} of an answer, token by token")
                for load in args.load:
                    rows.append(await self._compared(side, bench, load, load * knee))
                    print_row(rows[-1])
                if args.sweep:
                    knees.append(await self._measured_knee(side, bench, knee))
                side.client.close()
        return rows, knees

    async def _compared(self, side: Side, bench: Benchmark, load: float, per_s: float) -> Row:
        """One load, measured and simulated in each round with other requests."""
        calibration = self._fleet.kind.calibration
        load_of_all = Load(self._asked, per_s=per_s, think_s=self._workload.think_s)
        settle_s = load_of_all.settle_s(longest_token_s(self._fleet, self._objectives))
        found, simulated, runs = [], [], []
        for _ in range(self._args.rounds):
            self._seed += 1
            result, conversations = await side.run(bench, per_s, self._args.seconds, self._seed)
            if result.totals.failed:
                print(f"  {result.totals.failed} requests failed, which the simulation does not get", flush=True)
            runs.append(side.ran(result))
            asked = comparison.asked(result, conversations, side.notes.tokens)
            simulated.append(predicted(self._fleet, asked, settle_s))
            found.append(comparison.counted(comparison.measured(result), asked.starts_s, settle_s))
        return Row(
            self._name,
            load,
            per_s,
            comparison.figures(simulated, self._limits_ms),
            comparison.figures(found, self._limits_ms),
            sum(len(one.samples) for one in found),
            [comparison.figures([one], self._limits_ms) for one in found],
            steps.kinds(runs, calibration),
            steps.cores(runs, calibration),
        )

    async def _measured_knee(self, side: Side, bench: Benchmark, knee: float) -> Knee:
        """The knee by the rule of --sweep, printed beside the predicted one."""

        async def why_not(per_s: float) -> str:
            self._seed += 1
            result, _ = await side.run(bench, per_s, self._args.seconds, self._seed)
            reason = why_not_held(result, per_s)
            print(f"  {per_s:.2f} requests/s: {f'missed: {reason}' if reason else 'held'}", flush=True)
            return reason

        held, missed = await between(_LOW * knee, _HIGH * knee, why_not)
        found = Knee(self._name, knee, math.sqrt(held * missed), held, missed)
        print_knee(found)
        return found


async def between(low: float, high: float, why_not: Callable[[float], Awaitable[str]]) -> tuple[float, float]:
    """The highest rate that is held and the lowest that is not, found from a lower and a higher one. `why_not` tries a
    rate and says why it is not held; empty if it is."""
    num_tried = 0

    async def is_held(rate: float) -> bool:
        nonlocal num_tried
        num_tried += 1
        return not await why_not(rate)

    while not await is_held(low) and num_tried < _MOST_RATES:
        low, high = low / _SPREAD, low
    if num_tried == 1:
        while await is_held(high) and num_tried < _MOST_RATES:
            low, high = high, high * _SPREAD
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if await is_held(middle):
            low = middle
        else:
            high = middle
    return low, high


def print_knee(knee: Knee) -> None:
    """Both sides and the error."""
    error = _error(knee.predicted, knee.measured, BARS["knee"])
    between = f"   (between {knee.held:.2f} and {knee.missed:.2f})"
    print(f"  {'knee, req/s':18} {knee.predicted:>10.2f} {knee.measured:>10.2f} {error}{between}", flush=True)


def print_row(row: Row) -> None:
    """Both sides and the errors."""
    refused = f", {row.measured.num_refused} not answered" if row.measured.num_refused else ""
    num_rounds = len(row.rounds)
    print(f"  {row.load:g} of the knee, {row.per_s:.2f}/s, {row.num_requests} requests in {num_rounds} rounds{refused}")
    print(f"  {'':18} {'predicted':>10} {'measured':>10} {'error':>8}")
    for title, field, bar in (
        ("goodput, req/s", "goodput", BARS["goodput"]),
        ("TTFT p50, ms", "ttft_p50", None),
        ("TTFT p95, ms", "ttft_p95", BARS["TTFT p95"]),
        ("TPOT mean, ms", "tpot_mean", BARS["TPOT mean"]),
        ("TPOT p95, ms", "tpot_p95", None),
        ("from the cache", "hit_share", None),
    ):
        ours, theirs = getattr(row.predicted, field), getattr(row.measured, field)
        of_rounds = [getattr(one, field) for one in row.rounds]
        spread = f"   rounds {min(of_rounds):.2f} to {max(of_rounds):.2f}" if num_rounds > 1 else ""
        print(f"  {title:18} {ours:>10.2f} {theirs:>10.2f} {_error(ours, theirs, bar)}{spread}")
    print("  steps, ms")
    for kind in row.steps:
        error = _error(kind.predicted_ms, kind.measured_ms, None)
        often = f"   of {kind.count:,}, {kind.long_share:.1%} took over {OUTLIER:g} times as long"
        print(f"  {kind.title:18} {kind.predicted_ms:>10.2f} {kind.measured_ms:>10.2f} {error}{often}")
    cores = row.cores
    print(
        f"  cores: gateway and router {cores.front:.3f} (predicted {cores.predicted_front:.3f}), client "
        f"{cores.client:.3f}, workers {cores.workers:.2f} for steps of {cores.in_steps:.2f}",
        flush=True,
    )


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
    parser.add_argument("--backend", help="API for all workloads, such as openai for a model without a chat template")
    parser.add_argument("--load", nargs="*", type=float, default=list(LOADS), help="shares of the predicted knee")
    parser.add_argument(
        "--seconds",
        type=float,
        default=90.0,
        help="of arrivals at each load; more on a slow host, where the first requests of documents, which no cache has,"
        " are else more than a twentieth, and conversations take half of it to become as many as they will be",
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each load, each with other requests")
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--kv-gb", type=float, default=KV_GB)
    parser.add_argument("--sweep", action="store_true", help="measure the knee too; only it with --load alone")
    parser.add_argument("--save", type=Path, help="write all rows and knees to this file, as JSON")
    args = parser.parse_args()
    calibration = calibration_of(args)
    print(f"{describe()}\n{files.described(calibration)}")
    fleet = Fleet(Kind(args.calibration.stem, calibration), 1)
    rows: list[Row] = []
    knees: list[Knee] = []
    for name in args.workload:
        more_rows, more_knees = uvloop.run(Comparison(name, fleet, args).run())
        rows += more_rows
        knees += more_knees
        if args.save is not None:
            args.save.write_bytes(msgspec.json.format(msgspec.json.encode({"rows": rows, "knees": knees}), indent=2))


if __name__ == "__main__":
    main()
