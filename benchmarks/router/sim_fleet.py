"""A real fleet beside the simulator: `python -m benchmarks.router.sim_fleet --trace FILE --step-cost FILE`.

Four workers with one thread each and a router run as processes, and a part of a Mooncake trace is replayed in real
time, as token ids. The simulator gets the same requests, memory, disks and speeds. Lengths of prompts are divided by
--shorter and those of answers by --shorter-answers, so that they fit a small model and some minutes. The workers' KV
caches together hold --memory-share of the working set of the part.

    memory   nothing else
    peers    workers fetch from one another
    disk     each worker has a disk of its own, as on four hosts, which holds everything
    both     both
    shared   both, and the workers share one disk, as on one host

If there is no FILE with the step cost, it is measured and written. The time of an engine around a step, and of a
message between two processes, are measured with single requests to an idle worker. The speeds of disks and of fetches
are those that the workers learned in the rounds. Each round starts all processes anew with empty disks.

Each round has a simulation beside it, with another seed. It prints median, minimum and maximum over the rounds, over
the simulations, and of the ratios. With --scale-steps the step cost is scaled so that the simulated workers are as busy
as those of the round. That separates the cost of a step, which other programs raise, from everything else. `--save
FILE` adds the rounds to those in a file, and `--rounds 0` compares what is there. Workers share the cores, and the
simulator does not know that: choose a --rate at which they are less than a quarter busy on two cores. Run it on a quiet
machine. Unknown flags are passed to the workers.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from benchmarks.cache.restart import spread
from benchmarks.machine import describe
from benchmarks.router.sim_fleet_processes import (
    MAX_BATCHED_TOKENS,
    NUM_WORKERS,
    Case,
    KvFacts,
    Overheads,
    Round,
    measured,
    overheads,
    typical,
    working_set,
)
from headrace.sim import step_cost, trace
from headrace.sim.report import Objective, PolicyReport, report_of
from headrace.sim.router import POLICIES
from headrace.sim.simulation import FleetSettings, Outcome, Simulation
from headrace.sim.step_cost import StepCost
from headrace.sim.tiers import TierSettings
from headrace.sim.trace import Job
from headrace.sim.worker import WorkerSettings
from tests.e2e.small_model import small_model

CASES = {
    "memory": Case(),
    "peers": Case(has_peers=True),
    "disk": Case(has_disk=True),
    "both": Case(has_disk=True, has_peers=True),
    "shared": Case(has_disk=True, has_peers=True, is_disk_shared=True),
}


class Experiment(msgspec.Struct):
    """What was measured: with which requests, step cost and memory, and the rounds of each case."""

    jobs: list[Job]
    cost: StepCost
    around: Overheads
    kv: KvFacts
    rounds: dict[str, list[Round]]


# How often the scale of steps is corrected.
SCALINGS = 3
# Smaller figures are not compared.
LEAST_COMPARED = 0.05
# What is compared: the unit, and how to read it from a report.
FIGURES: dict[str, tuple[str, Callable[[PolicyReport], float]]] = {
    "hits": ("%", lambda report: 100 * report.hit_share),
    "  in memory": ("%", lambda report: 100 * (report.hit_share - report.disk_share - report.peer_share)),
    "  from disk": ("%", lambda report: 100 * report.disk_share),
    "  from others": ("%", lambda report: 100 * report.peer_share),
    "TTFT mean": ("ms", lambda report: report.ttft_ms.mean),
    "TTFT p50": ("ms", lambda report: report.ttft_ms.p50),
    "TTFT p95": ("ms", lambda report: report.ttft_ms.p95),
    "TPOT p50": ("ms", lambda report: report.tpot_ms.p50),
    "busy": ("%", lambda report: 100 * report.utilization),
}


def scaled(job: Job, shorter: int, shorter_answers: float) -> Job:
    """The job with a shorter prompt and answer. Prompts share the same part of their length as before."""
    segments = tuple((segment, -(-length // shorter)) for segment, length in job.segments)
    return replace(job, segments=segments, num_output_tokens=max(1, round(job.num_output_tokens / shorter_answers)))


def jobs_for(args: argparse.Namespace, kv: KvFacts) -> tuple[list[Job], KvFacts]:
    """The requests that fit into the memory, and the memory of a worker."""
    jobs = [scaled(job, args.shorter, args.shorter_answers) for job in trace.read(args.trace)]
    jobs = trace.at_rate(jobs[args.first : args.first + args.requests], args.rate)
    size = working_set(jobs)
    kv = msgspec.structs.replace(kv, num_blocks=round(args.memory_share * size / NUM_WORKERS / kv.block_size))
    room = kv.num_blocks * kv.block_size
    fitting = [job for job in jobs if job.num_prompt_tokens + job.num_output_tokens <= room]
    print(f"{len(fitting)} requests of {len(jobs)} fit into {room} tokens, of {size} different ones")
    return [replace(job, number=number) for number, job in enumerate(fitting)], kv


def report(outcome: Outcome) -> PolicyReport:
    """The figures of a round or a simulation."""
    return report_of("headrace", 1, outcome, Objective(10_000, 300))


def real_report(jobs: Sequence[Job], one: Round) -> PolicyReport:
    """The figures of a round."""
    records = [answer.record(job) for answer, job in zip(one.answers, jobs, strict=True)]
    return report(Outcome(records, one.busy_s, one.counters["steps"], one.counters["preemptions"]))


def simulated(found: Experiment, tiers: TierSettings, seed: int, factor: float = 1.0) -> PolicyReport:
    """The figures of the simulator, with steps that take `factor` times as long."""
    kv = found.kv
    worker = WorkerSettings(
        step_cost_of(found, factor),
        kv.num_blocks * kv.block_size,
        kv.block_size,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        tiers=tiers,
    )
    fleet = FleetSettings(worker, NUM_WORKERS, hop_s=found.around.hop_s, seed=seed)
    return report(Simulation([job.hashed(kv.block_size) for job in found.jobs], POLICIES["headrace"], fleet).run())


def step_cost_of(found: Experiment, factor: float) -> StepCost:
    """The cost of an engine's step, whose kernels take `factor` times as long, with the time around them."""
    others = ("per_attended", "per_reread", "per_context", "per_sequence", "change")
    base = tuple(factor * ms + 1000 * found.around.step_s for ms in found.cost.base)
    return msgspec.structs.replace(
        found.cost, base=base, **{name: factor * getattr(found.cost, name) for name in others}
    )


def scale_of(found: Experiment, tiers: TierSettings, busy: float) -> float:
    """How many times as long steps take if simulated workers are `busy` for this share of the time."""
    factor = 1.0
    for _ in range(SCALINGS):
        factor *= busy / simulated(found, tiers, 1, factor).utilization
    return factor


def tiers_of(case: Case, found: Experiment, rounds: Sequence[Round]) -> TierSettings:
    """The tiers for the simulator, with the speeds of the rounds."""
    settings = TierSettings()
    if case.has_disk:
        disk_rate = typical([one.disk_rate for one in rounds]) or settings.disk_rate
        size, is_shared = 2 * working_set(found.jobs), case.is_disk_shared
        settings = replace(settings, disk_tokens=size, disk_rate=disk_rate, is_disk_shared=is_shared)
    if case.has_peers:
        settings = replace(settings, peer_rate=typical([one.peer_rate for one in rounds]) or 100_000.0)
    return settings


def print_case(name: str, found: Experiment, *, scales_steps: bool) -> None:
    """Both sides of a case, and the ratio of each round and the simulation beside it."""
    rounds = found.rounds[name]
    tiers = tiers_of(CASES[name], found, rounds)
    real = [real_report(found.jobs, one) for one in rounds]
    factors = [scale_of(found, tiers, one.utilization) if scales_steps else 1.0 for one in real]
    made = [simulated(found, tiers, seed, factor) for seed, factor in enumerate(factors, 1)]
    print(f"\n{name}, {len(rounds)} rounds; disk {tiers.disk_rate:,.0f}, others {tiers.peer_rate:,.0f} tokens/s")
    print(f"steps take {spread(factors, 2)} times as long")
    print(f"{'':14} {'measured':>24} {'simulated':>24} {'simulated / measured':>24}")
    for figure, (unit, value) in FIGURES.items():
        ours, theirs = [value(one) for one in real], [value(one) for one in made]
        ratios = [one / other for one, other in zip(theirs, ours, strict=True)] if min(ours) > LEAST_COMPARED else []
        ratio = spread(ratios, 2) if ratios else "-"
        print(f"{figure:14} {spread(ours, 1):>24} {spread(theirs, 1):>24} {ratio:>24}  ({unit})")
    print(f"counted: {[one.counters for one in rounds]}", flush=True)


async def new_experiment(model: Path, args: argparse.Namespace) -> Experiment:
    """Measure what the simulator needs to know."""
    cost = step_cost.read(args.step_cost)
    around, kv = await overheads(model, cost, args.worker_flags)
    jobs, kv = jobs_for(args, kv)
    return Experiment(jobs, cost, around, kv, {})


async def compare(model: Path, args: argparse.Namespace) -> None:
    """Measure the rounds, whose cases alternate, and print all that is known."""
    if args.save and args.save.exists():
        found = msgspec.json.decode(args.save.read_bytes(), type=Experiment)
    else:
        found = await new_experiment(model, args)
    for number in range(args.rounds):
        for name in args.case:
            one = await measured(model, found.jobs, found.kv, CASES[name], args.disk_dir, args.worker_flags)
            found.rounds.setdefault(name, []).append(one)
            late_ms = 1000 * max(a.asked_s - job.arrival_s for a, job in zip(one.answers, found.jobs, strict=True))
            print(
                f"round {number} of {name}: requests were sent at most {late_ms:.0f} ms late, and other programs used "
                f"{one.foreign_cpus:.2f} CPUs",
                flush=True,
            )
            if args.save:
                args.save.write_bytes(msgspec.json.encode(found))
    lengths = [statistics.fmean(job.num_prompt_tokens for job in found.jobs)]
    lengths.append(statistics.fmean(job.num_output_tokens for job in found.jobs))
    print(
        f"{describe()}\n{model.name}; step cost: {found.cost.median_error:.1%} median error, "
        f"{found.cost.p90_error:.1%} p90; {1000 * found.around.step_s:.2f} ms around a step, "
        f"{1000 * found.around.hop_s:.2f} ms for a message\n"
        f"{len(found.jobs)} requests of {lengths[0]:.0f} and {lengths[1]:.1f} tokens in "
        f"{found.jobs[-1].arrival_s:.0f} s; KV caches of {found.kv.num_blocks} blocks"
    )
    for name in found.rounds:
        print_case(name, found, scales_steps=args.scale_steps)


def main() -> None:
    """Parse the flags and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a model; default: some layers of the demo model")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--step-cost", type=Path, required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=2000, help="index of the first request of the trace")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--shorter", type=int, default=32)
    parser.add_argument("--shorter-answers", type=float, default=16.0)
    parser.add_argument(
        "--scale-steps", action="store_true", help="let the simulated workers be as busy as the real ones"
    )
    parser.add_argument("--memory-share", type=float, default=0.05)
    parser.add_argument("--disk-dir", type=Path, default=Path(tempfile.gettempdir()))
    args, worker_flags = parser.parse_known_args()
    args.worker_flags = worker_flags
    model = args.model or small_model()
    if not args.step_cost.exists():
        command = [sys.executable, "-m", "benchmarks.engine.step_cost", str(model), "--threads", "1", "--rounds", "3"]
        subprocess.run([*command, "--out", str(args.step_cost)], check=True, stdout=subprocess.DEVNULL)
    uvloop.run(compare(model, args))


if __name__ == "__main__":
    main()
