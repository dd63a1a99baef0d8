"""`python -m headrace.sim`: simulates a trace and prints a table or JSON.

If the flags are wrong, it prints one sentence on standard error and exits with status 2.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace.common.commands import CommandError, run
from headrace.common.flags import FiniteRange
from headrace.sim import process_cost, step_cost, trace
from headrace.sim.images import FAMILIES, ImageSettings
from headrace.sim.process_cost import NOTHING, ProcessCost
from headrace.sim.report import Objective, PolicyReport, report_of
from headrace.sim.router import POLICIES
from headrace.sim.simulation import FleetSettings, Outcome, Simulation
from headrace.sim.tiers import TierSettings
from headrace.sim.trace import Job
from headrace.sim.worker import WorkerSettings

# Requests in flight per worker while the capacity is measured: enough for efficient steps, but few enough to leave room
# for cached blocks.
_CAPACITY_CONCURRENCY = 8
_WITH_ROLES = {"headrace", "oracle"}
# Width of the table if the output is not a terminal.
_FILE_WIDTH = 160


class Answer(msgspec.Struct, frozen=True):
    """The result, as `--json` prints it. Rates are in requests per second. With --rate, `capacity_per_s` is 0."""

    num_requests: int
    num_workers: int
    capacity_per_s: float
    rate_per_s: float
    seed: int
    objective: Objective
    step_cost: step_cost.StepCost
    policies: list[PolicyReport]


class _Runs:
    """Runs simulations, with a progress bar on standard error."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> _Runs:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def run(self, title: str, policy: str, jobs: Sequence[Job], fleet: FleetSettings) -> Outcome:
        """Run one simulation to its end."""
        task = self._progress.add_task(title, total=len(jobs))
        return Simulation(jobs, POLICIES[policy], fleet, lambda: self._progress.advance(task)).run()

    def compared(self, policy: str, num_routers: int, jobs: Sequence[Job], fleet: FleetSettings) -> Outcome:
        """Run one policy with `num_routers` routers."""
        title = policy if num_routers == 1 else f"{policy}, {num_routers}"
        return self.run(title, policy, jobs, dataclasses.replace(fleet, num_routers=num_routers))

    def capacity_per_s(self, jobs: Sequence[Job], fleet: FleetSettings) -> float:
        """Measure the capacity of the fleet: requests per second with the oracle policy and a constant number of
        requests in flight."""
        concurrency = _CAPACITY_CONCURRENCY * fleet.num_workers
        if len(jobs) < 2 * concurrency:
            raise CommandError(
                f"{len(jobs)} requests are too few to measure the capacity of {fleet.num_workers} workers; use at "
                f"least {2 * concurrency}, or set the arrival rate with --rate"
            )
        closed = dataclasses.replace(fleet, concurrency=concurrency)
        outcome = self.run("capacity", "oracle", jobs, closed)
        # Measure from the time at which the fleet was full until the last arrival.
        last_s = max(record.arrived_s for record in outcome.records)
        return (len(jobs) - concurrency) / last_s


def read_step_cost(path: Path | None, flag: str = "--step-cost") -> step_cost.StepCost:
    """Read the coefficients from a file. The default is the committed fit. Raises CommandError if the file is not
    valid."""
    if path is None:
        return step_cost.default()
    try:
        return step_cost.read(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {flag}: {error}; benchmarks/engine/step_cost.py writes such a file") from None


def read_process_cost(path: Path | None) -> ProcessCost:
    """Read what routers and messages take. Without a file, nothing. Raises CommandError if the file is not valid."""
    if path is None:
        return NOTHING
    try:
        return process_cost.read(path)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"cannot read --process-cost: {error}; benchmarks/router/real_fleet.py writes such a file"
        ) from None


def read_draft_cost(path: Path | None, acceptance: float | None) -> step_cost.StepCost | None:
    """Read the cost of a smaller model's steps, if there is a file. Raises CommandError if the file is not valid, or if
    it is given without `acceptance`."""
    if path is None:
        return None
    if acceptance is None:
        raise CommandError("--draft-step-cost needs to know how often drafts are right; add --acceptance")
    return read_step_cost(path, "--draft-step-cost")


def generated_trace(options: Mapping[str, Any]) -> trace.Generated:
    """The generated trace that the flags describe. Raises CommandError if the flags contradict each other."""
    try:
        return trace.Generated(
            num_requests=options["requests"],
            num_system_prompts=options["system_prompts"],
            system_prompt_tokens=options["system_prompt_tokens"],
            prompt_median=options["prompt_median"],
            output_mean=options["output_mean"],
            turns=options["turns"],
            num_conversations=options["conversations"],
            burst=options["burst"],
            image_share=options["image_share"],
            image_tokens=FAMILIES[options["image_family"]].num_tokens,
            num_pictures=options["pictures"],
        )
    except ValueError as error:
        raise CommandError(f"{error}: give more --conversations, or a smaller --burst") from None


def read_jobs(path: Path | None, limit: int | None, generated: trace.Generated, seed: int) -> list[Job]:
    """Read the requests from a file, or generate them. Raises CommandError if the file is not valid or has no
    requests."""
    if path is None:
        return generated.jobs(random.Random(seed))
    try:
        jobs = trace.read(path, limit)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read --trace: {error}") from None
    if not jobs:
        raise CommandError(f"{path} has no requests")
    return jobs


def prepared(jobs: Sequence[Job], settings: WorkerSettings) -> list[Job]:
    """Add block hashes to the jobs. Drop jobs that do not fit into a worker's KV cache: a worker would refuse them.
    Raises CommandError if none fits."""
    fitting = [job for job in jobs if settings.holds(job)]
    if not fitting:
        raise CommandError("no request of the trace fits into a worker's KV cache; increase --kv-tokens")
    if len(fitting) < len(jobs):
        click.echo(f"dropped {len(jobs) - len(fitting)} requests that do not fit into a worker's KV cache", err=True)
    return [job.hashed(settings.block_size) for job in fitting]


def check_prefill_workers(count: int, num_workers: int, peer_rate: float, policies: Iterable[str]) -> None:
    """Raise CommandError if no worker is left for answers, or if answers could not continue elsewhere."""
    if not count:
        return
    if count >= num_workers:
        raise CommandError(f"--prefill-workers {count} leaves no worker for answers; give more --workers")
    if not peer_rate:
        raise CommandError("--prefill-workers moves prompts from worker to worker; say how fast with --peer-rate")
    others = sorted(set(policies) - _WITH_ROLES)
    if others:
        raise CommandError(f"--prefill-workers is not for {', '.join(others)}; name policies with --policy")


def tiers_of(options: Mapping[str, Any]) -> TierSettings:
    """The tiers that the flags describe. Raises CommandError if the flags contradict each other."""
    if options["shared_disk"] and not options["disk_tokens"]:
        raise CommandError("--shared-disk needs a disk; say with --disk-tokens how much it holds")
    return TierSettings(options["disk_tokens"], options["disk_rate"], options["peer_rate"], options["shared_disk"])


def images_of(options: Mapping[str, Any]) -> ImageSettings | None:
    """How images are encoded, if requests have any. Raises CommandError if the flags contradict each other."""
    num_hosts = options["encode_workers"]
    if options["encode_where_first"] and not num_hosts:
        raise CommandError("--encode-where-first chooses between workers and those that encode; give --encode-workers")
    if not options["image_share"]:
        if num_hosts:
            raise CommandError("--encode-workers need images; say with --image-share how many requests bring one")
        return None
    if num_hosts >= options["workers"]:
        raise CommandError(f"--encode-workers {num_hosts} leaves no worker for text; give more --workers")
    return ImageSettings(
        FAMILIES[options["image_family"]],
        options["worker_cores"],
        num_hosts=num_hosts,
        workers_encode=options["encode_where_first"],
    )


def print_table(answer: Answer) -> None:
    """Print the result as a table."""
    kept = f"goodput: TTFT <= {answer.objective.ttft_ms:g} ms and TPOT <= {answer.objective.tpot_ms:g} ms"
    capacity = f", {answer.rate_per_s / answer.capacity_per_s:.0%} of capacity" if answer.capacity_per_s else ""
    cost = answer.step_cost
    table = Table(
        title=f"{answer.num_requests} requests, {answer.num_workers} workers, {answer.rate_per_s:.3g}/s{capacity}",
        caption=f"{kept}. Step cost of {cost.model or 'an unknown model'} on {cost.machine or 'an unknown machine'} "
        f"(error {cost.median_error:.0%} median, {cost.p90_error:.0%} p90).",
    )
    table.add_column("policy")
    table.add_column("routers", justify="right")
    has_tiers = any(report.disk_share or report.peer_share for report in answer.policies)
    headers = ("TTFT mean", "p50", "p95", "p99 ms", "TPOT p50", "p95", "p99 ms", "hits")
    has_images = any(report.num_images_encoded for report in answer.policies)
    of_images = ("image TTFT p50", "p95") if has_images else ()
    for header in (*headers, *(("disk", "peers") if has_tiers else ()), "load cv", "goodput", "busy", *of_images):
        table.add_column(header, justify="right")
    for report in answer.policies:
        ttft = report.ttft_ms
        tpot = report.tpot_ms
        times = [f"{value:,.0f}" for value in (ttft.mean, ttft.p50, ttft.p95, ttft.p99, tpot.p50, tpot.p95, tpot.p99)]
        tiers = (report.disk_share, report.peer_share) if has_tiers else ()
        shares = [f"{share:.1%}" for share in (report.hit_share, *tiers)]
        shares += [f"{report.load_cv:.3f}", f"{report.goodput:.1%}"]
        image_ttft = (report.image_ttft_ms.p50, report.image_ttft_ms.p95) if has_images else ()
        more = [f"{report.utilization:.0%}", *(f"{value:,.0f}" for value in image_ttft)]
        table.add_row(report.policy, str(report.num_routers), *times, *shares, *more)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(table)


@click.command(context_settings={"show_default": True, "auto_envvar_prefix": "HEADRACE_SIM"})
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path),
    help="File with a Mooncake trace. Default: a generated trace.",
)
@click.option("--limit", type=click.IntRange(1), help="Use only this many requests of the trace.")
@click.option("--requests", type=click.IntRange(2), default=2000, help="Generated trace: number of requests.")
@click.option(
    "--system-prompts", type=click.IntRange(0), default=32, help="Generated trace: number of shared system prompts."
)
@click.option(
    "--system-prompt-tokens", type=click.IntRange(1), default=1024, help="Generated trace: tokens of a system prompt."
)
@click.option(
    "--prompt-median",
    type=FiniteRange(1),
    default=400.0,
    help="Generated trace: tokens of a prompt after its system prompt.",
)
@click.option("--output-mean", type=FiniteRange(1), default=128.0, help="Generated trace: mean tokens of an answer.")
@click.option("--turns", type=FiniteRange(1), default=1.0, help="Generated trace: mean turns of a conversation.")
@click.option(
    "--conversations", type=click.IntRange(1), default=200, help="Generated trace: number of open conversations."
)
@click.option("--burst", type=click.IntRange(1), default=1, help="Generated trace: mean requests per arrival.")
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(list(POLICIES)), help="Policies to compare. Default: all."
)
@click.option("--workers", type=click.IntRange(1), default=16, help="Number of workers.")
@click.option(
    "--routers",
    multiple=True,
    type=click.IntRange(1),
    default=(1,),
    help="Number of routers. May be repeated; each gets its own run.",
)
@click.option("--load", type=FiniteRange(0, min_open=True), default=0.7, help="Arrivals as a share of capacity.")
@click.option("--rate", type=FiniteRange(0, min_open=True), help="Arrivals a second, instead of --load.")
@click.option("--kv-tokens", type=click.IntRange(1), default=600_000, help="Tokens of each worker's KV cache.")
@click.option("--block-size", type=click.IntRange(1), default=512, help="Tokens in a KV block.")
@click.option(
    "--disk-tokens", type=click.IntRange(0), default=0, help="Tokens that fit on each worker's disk; 0: no disk."
)
@click.option("--shared-disk", is_flag=True, help="All workers have the same disk, as on one host.")
@click.option("--disk-rate", type=FiniteRange(1), default=40_000.0, help="Tokens read from a disk per second.")
@click.option(
    "--peer-rate",
    type=FiniteRange(0),
    default=0.0,
    help="Tokens per second that a worker fetches from another one; 0: none.",
)
@click.option(
    "--prefill-workers",
    type=click.IntRange(0),
    default=0,
    help="Number of workers reserved for long prompts. Their answers continue at the others; needs --peer-rate.",
)
@click.option(
    "--image-share", type=FiniteRange(0, 1), default=0.0, help="Generated trace: share of requests with a picture."
)
@click.option(
    "--image-family",
    type=click.Choice(list(FAMILIES)),
    default="llava",
    help="Family of the model, for the tokens and the encoding of a photo of 4000 x 3000 pixels.",
)
@click.option(
    "--pictures",
    type=click.IntRange(0),
    default=0,
    help="Generated trace: number of different pictures; 0: all differ.",
)
@click.option(
    "--worker-cores",
    type=click.IntRange(1),
    default=2,
    help="Cores of each worker, which encode images beside its steps. --step-cost must be of as many.",
)
@click.option(
    "--encode-workers",
    type=click.IntRange(0),
    default=0,
    help="Number of workers that only encode images, for the others; 0: each worker encodes its own.",
)
@click.option(
    "--encode-where-first",
    is_flag=True,
    help="With --encode-workers, the other workers encode an image themselves if they are expected to finish sooner.",
)
@click.option("--max-num-seqs", type=click.IntRange(1), default=128, help="Maximum number of sequences in a batch.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=1024, help="Limit for the tokens of a step.")
@click.option("--max-num-mixed-tokens", type=click.IntRange(1), help="Limit for steps with running requests.")
@click.option("--report-delay-ms", type=FiniteRange(0), default=20.0, help="Delay of reports to routers.")
@click.option(
    "--hop-ms",
    type=FiniteRange(0),
    help="Time of a message between client and router, and between router and worker. Default: as --process-cost.",
)
@click.option(
    "--process-cost",
    "process_cost_file",
    type=click.Path(path_type=Path),
    help="File with the costs of routers and messages, from benchmarks/router/real_fleet.py. Default: no costs.",
)
@click.option(
    "--step-cost",
    "cost_file",
    type=click.Path(path_type=Path),
    help="File with a step cost from benchmarks/engine/step_cost.py.",
)
@click.option(
    "--acceptance",
    type=FiniteRange(0, 1),
    help="Probability that a draft token is accepted. Default: no speculation.",
)
@click.option(
    "--draft-step-cost",
    "draft_cost_file",
    type=click.Path(path_type=Path),
    help="File with the step cost of a smaller model that drafts. Default: drafts cost nothing.",
)
@click.option("--ttft-ms", type=FiniteRange(0), default=10_000.0, help="Objective: time to the first token.")
@click.option("--tpot-ms", type=FiniteRange(0), default=300.0, help="Objective: time per later token.")
@click.option("--seed", type=int, default=1, help="Seed of all random numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(trace_file: Path | None, policies: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compare routing policies on a trace in virtual time, with the real scheduler, prefix index and policy."""
    generated = generated_trace(options)
    cost = read_step_cost(options["cost_file"])
    worker = WorkerSettings(
        cost=cost,
        kv_tokens=options["kv_tokens"],
        block_size=options["block_size"],
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_num_mixed_tokens=options["max_num_mixed_tokens"],
        acceptance=options["acceptance"],
        draft_cost=read_draft_cost(options["draft_cost_file"], options["acceptance"]),
        tiers=tiers_of(options),
        images=images_of(options),
    )
    check_prefill_workers(options["prefill_workers"], options["workers"], options["peer_rate"], policies or POLICIES)
    process = read_process_cost(options["process_cost_file"])
    fleet = FleetSettings(
        worker,
        options["workers"] - options["encode_workers"],
        report_delay_s=options["report_delay_ms"] / 1000,
        hop_s=(process.hop_ms if options["hop_ms"] is None else options["hop_ms"]) / 1000,
        process_cost=process,
        seed=options["seed"],
        num_prefill=options["prefill_workers"],
    )
    jobs = prepared(read_jobs(trace_file, options["limit"], generated, options["seed"]), worker)
    objective = Objective(options["ttft_ms"], options["tpot_ms"])
    with _Runs() as runs:
        capacity = 0.0 if options["rate"] else runs.capacity_per_s(jobs, fleet)
        rate = options["rate"] or options["load"] * capacity
        timed = trace.at_rate(jobs, rate)
        reports = [
            report_of(policy, num_routers, runs.compared(policy, num_routers, timed, fleet), objective)
            for policy in policies or POLICIES
            for num_routers in ((1,) if POLICIES[policy].is_exact else options["routers"])
        ]
    answer = Answer(len(jobs), fleet.num_workers, capacity, rate, fleet.seed, objective, cost, reports)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2))
    else:
        print_table(answer)


if __name__ == "__main__":
    sys.exit(run(main, "headrace sim"))
