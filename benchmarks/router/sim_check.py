"""The simulator against a real worker's engine: `python -m benchmarks.router.sim_check MODEL_DIR [--requests 40]`.

The same made trace runs through the engine with OpenVINO in real time and through the simulator with one worker of the
same settings, and their times are printed side by side. Before it a few requests warm the kernels up.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

from benchmarks.engine.sides import EngineSettings, HeadraceSide, Job, JobTimes, run_jobs
from headrace.sim import step_cost
from headrace.sim.router import POLICIES
from headrace.sim.simulation import FleetSettings, Simulation
from headrace.sim.trace import Generated, at_rate
from headrace.sim.trace import Job as SimulatedJob
from headrace.sim.worker import WorkerSettings

NUM_BLOCKS = 2000
BLOCK_SIZE = 32
VOCAB = 49_000
ROUNDS = 3
TRACE = Generated(num_system_prompts=4, system_prompt_tokens=512, output_mean=40.0, max_prompt_tokens=4000)


def real_job(job: SimulatedJob, salt: int) -> Job:
    """The job with real tokens. Equal segments stay equal, and segments with another salt differ."""
    tokens: list[int] = []
    for segment, length in job.segments:
        source = random.Random(segment * 1000 + salt)
        tokens.extend(source.randrange(100, VOCAB) for _ in range(length))
    return Job(job.arrival_s, tokens, job.num_output_tokens)


def simulated(jobs: list[SimulatedJob], cost: step_cost.StepCost) -> list[JobTimes]:
    """The times of each job as the simulator sees them."""
    worker = WorkerSettings(cost, kv_tokens=NUM_BLOCKS * BLOCK_SIZE, block_size=BLOCK_SIZE)
    hashed = [job.hashed(BLOCK_SIZE) for job in jobs]
    records = Simulation(hashed, POLICIES["random"], FleetSettings(worker, num_workers=1)).run().records
    return [JobTimes(r.first_token_s - r.arrived_s, r.ended_s - r.arrived_s, r.num_tokens) for r in records]


def figures(times: list[JobTimes]) -> dict[str, float]:
    """The compared figures, in milliseconds."""
    ttfts = sorted(1000 * t.ttft_s for t in times)
    tpots = [1000 * (t.total_s - t.ttft_s) / (t.num_tokens - 1) for t in times if t.num_tokens > 1]
    return {
        "TTFT p50": statistics.median(ttfts),
        "TTFT p95": ttfts[int(0.95 * (len(ttfts) - 1))],
        "TPOT p50": statistics.median(tpots),
        "request mean": statistics.fmean(1000 * t.total_s for t in times),
    }


def main() -> None:
    """Run both and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    parser.add_argument("--step-cost", type=Path, default=step_cost.DEFAULT_FILE)
    args = parser.parse_args()
    side = HeadraceSide(EngineSettings(args.model_dir, NUM_BLOCKS))
    jobs = at_rate(TRACE.jobs(random.Random(1))[: args.requests], args.rate)
    run_jobs(side, [real_job(job, 99) for job in at_rate(jobs[:8], 100.0)])
    expected = figures(simulated(jobs, step_cost.read(args.step_cost)))
    measured = []
    for number in range(ROUNDS):
        side.engine.scheduler.kv_cache.pool.forget_all()
        measured.append(figures(run_jobs(side, [real_job(job, number) for job in jobs])[1]))
    for name, ms in expected.items():
        values = sorted(run[name] for run in measured)
        median = statistics.median(values)
        print(
            f"{name:13} simulated {ms:8.1f} ms, measured {median:8.1f} (min {values[0]:.1f}, max {values[-1]:.1f}), "
            f"off by {ms / median - 1:+.0%}"
        )


if __name__ == "__main__":
    main()
