"""`python -m headrace.plan`: sizes a fleet for a load, by simulation.

If the flags are wrong, it prints one sentence on standard error and exits with status 2; if no fleet meets the
objectives, or the running one cannot be asked, with status 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from headrace.bench import calibration as files
from headrace.bench.lengths import SHAPES
from headrace.common import commands
from headrace.common.commands import CommandError, CommandFailed, SectionedCommand
from headrace.common.flags import FiniteRange, OutputPath, given_in
from headrace.plan.fleet import Fleet, Kind, Memory
from headrace.plan.load import Load, Requests, lengths
from headrace.plan.objectives import Limit, Objectives

if TYPE_CHECKING:
    from headrace.plan.planning import Running

_DEFAULT_MODEL = "smollm2-135m"
_CURVE = (0.25, 0.5, 0.75)
_RUN_S = 120.0
_LEAST_REQUESTS, _MOST_REQUESTS = 240, 600
# Flags that describe requests, which a trace and a running fleet have.
_OF_REQUESTS = frozenset(
    {"prompt", "answer", "prompt_dist", "answer_dist", "shared_prefix", "prefixes", "turns", "repeated_answer"}
)


class LimitType(click.ParamType[Limit]):
    """[pN:]TIME."""

    name = "[pN:]time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Limit:
        """The limit. Raises BadParameter."""
        if isinstance(value, Limit):
            return value
        try:
            return Limit.of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.ParamType[float]):
    """A time such as 25, 25s, 500ms or 2m, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The time in seconds. Raises BadParameter."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)?", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a time; write one such as 25s, 500ms or 2m", param, ctx)
        return float(match[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}[match[2]]


class Factor(click.ParamType[float]):
    """A multiple of a load, such as 2x."""

    name = "nx"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The factor, which is positive. Raises BadParameter."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*x?", str(value).strip().lower())
        if match is None or not float(match[1]):
            self.fail(f"{value!r} is not a multiple of a load; write one such as 2x or 1.5x", param, ctx)
        return float(match[1])


_SECTIONS = {
    "The load: one of --users, --rate, --trace": ("--users", "--think-time", "--every", "--rate", "--trace", "--load"),
    "The requests": (
        *("--prompt", "--answer", "--prompt-dist", "--answer-dist", "--shared-prefix", "--prefixes", "--turns"),
        "--repeated-answer",
    ),
    "The objectives": ("--ttft", "--tpot"),
    "The hosts": ("--calibration", "--cost-per-host", "--hosts", "--max-hosts", "--spare-hosts"),
    "A running fleet instead": ("--url", "--ca-file"),
    "Memory and batches": (
        *("--kv-cache-gb", "--kv-disk-gb", "--disk-gb-per-s", "--peer-gbit-per-s", "--max-num-seqs"),
    ),
    "The simulation, and what is written": ("--requests", "--seeds", "--html", "--json"),
}


@click.command(
    cls=SectionedCommand,
    sections=_SECTIONS,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
)
@click.argument("model", required=False)
@click.option(
    "--calibration",
    "calibrations",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="File of `headrace bench calibrate`; repeat it to compare kinds of hosts.  [default: that of MODEL, which "
    "`headrace bench calibrate MODEL` wrote]",
)
@click.option(
    "--url",
    help="URL of a running fleet's gateway: take its step costs and the load of its last five minutes, and say whether "
    "it is enough for --load. No calibration is needed.",
)
@click.option("--users", type=click.IntRange(1), help="Load: this many users, with --think-time or --every.")
@click.option(
    "--think-time",
    type=Seconds(),
    help="With --users, or with --rate and --turns: mean time between an answer and the next request, such as 30s.",
)
@click.option(
    "--every",
    type=Seconds(),
    help="With --users: mean time between two requests of a user, answered or not, such as 25s.",
)
@click.option("--rate", type=FiniteRange(0, min_open=True), help="Load: this many requests a second, at random times.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Load: the requests of a trace in Mooncake's format, at its own times.",
)
@click.option("--load", "factor", type=Factor(), default="1x", help="Plan for this multiple of the load, such as 2x.")
@click.option(
    "--prompt",
    type=FiniteRange(1),
    default=512.0,
    help="Mean tokens of a prompt. A --shared-prefix comes in addition, and earlier turns do.",
)
@click.option("--answer", type=FiniteRange(1), default=128.0, help="Mean tokens of an answer.")
@click.option("--prompt-dist", type=click.Choice(SHAPES), default="lognormal", help="Distribution of prompts.")
@click.option("--answer-dist", type=click.Choice(SHAPES), default="exponential", help="Distribution of answers.")
@click.option(
    "--shared-prefix", type=click.IntRange(0), default=0, help="Length of the prefix that prompts share, in tokens."
)
@click.option(
    "--prefixes",
    type=click.IntRange(1),
    default=1,
    help="Number of different shared prefixes, such as documents; each prompt begins with one.",
)
@click.option(
    "--turns",
    type=FiniteRange(1),
    default=1.0,
    help="Mean turns of a conversation. The prompt of each turn has all earlier turns before it.",
)
@click.option(
    "--repeated-answer",
    type=FiniteRange(0, 1),
    default=1.0,
    help="With --turns: share of an answer that the next prompt repeats token by token, so that it is in the cache. "
    "0 if clients leave it out or change it.",
)
@click.option(
    "--ttft",
    type=LimitType(),
    help="Maximum time to the first token, such as p95:2s: 95 % of requests are within it. 2s is p95:2s.",
)
@click.option(
    "--tpot",
    type=LimitType(),
    help="Maximum mean time of a request's later tokens, such as p95:100ms. 100ms is p95:100ms.",
)
@click.option(
    "--spare-hosts",
    type=click.IntRange(0),
    default=0,
    help="Availability: number of hosts that may fail while the others carry the load.",
)
@click.option("--max-hosts", type=click.IntRange(1), default=64, help="Maximum number of hosts to consider.")
@click.option(
    "--hosts",
    type=click.IntRange(1),
    help="Say whether this number of hosts is enough, instead of searching for the number.",
)
@click.option(
    "--cost-per-host",
    "costs",
    multiple=True,
    metavar="[NAME=]NUMBER",
    help="Cost of a host in any currency; the cheapest fleet comes first. With several calibrations, give one for "
    "each: NAME is its file name without .json.",
)
@click.option(
    "--kv-cache-gb",
    type=FiniteRange(0, min_open=True),
    help="KV cache of each worker, in GiB.  [default: that of the calibration]",
)
@click.option(
    "--kv-disk-gb",
    type=FiniteRange(0),
    default=0.0,
    help="Disk space of each host for cached prefixes, in GiB; 0: none.",
)
@click.option(
    "--disk-gb-per-s",
    type=FiniteRange(0, min_open=True),
    default=1.5,
    help="Speed at which this disk reads, in GB a second.",
)
@click.option(
    "--peer-gbit-per-s",
    type=FiniteRange(0, min_open=True),
    help="Speed at which workers fetch cached prefixes from each other, in Gbit a second.  [default: that of the "
    "calibration, or 4]",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    help="Maximum number of sequences in a batch of a worker.  [default: that of the calibration]",
)
@click.option(
    "--requests",
    type=click.IntRange(20),
    help="Number of requests in each simulation; with few of them, chance decides. Of a trace, the first ones.  "
    "[default: those of two minutes, 240 to 600; all of a trace]",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 20),
    default=2,
    help="Number of simulations of each fleet, each with other arrivals.",
)
@click.option("--html", "page_file", type=OutputPath(), help="Write a page with charts to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--ca-file", type=click.Path(path_type=Path), help="With --url: certificates of the server's authority.")
@click.pass_context
def main(context: click.Context, /, **flags: Any) -> None:
    """Plan a fleet for MODEL: workers, hosts and memory for a load, what breaks first, and how to start it.

    First run `headrace bench calibrate MODEL` on a host of the kind that you will use. Without MODEL, both are for the
    demo model. Then describe the load and the objectives.

    \b
    Examples:
      # 50 users who ask every 25 s
      headrace plan MODEL --users 50 --every 25s --ttft 1.5s --tpot 100ms
      # 4 requests a second, each about one of 20 documents of 3000 tokens; one host may fail
      headrace plan MODEL --rate 4 --prompt 200 --shared-prefix 3000 --prefixes 20 --spare-hosts 1
      # which of two kinds of hosts is cheaper
      headrace plan --calibration a.json --calibration b.json --cost-per-host a=90 --cost-per-host b=300 --rate 4
      # whether the running fleet is enough for twice its load
      headrace plan --url http://127.0.0.1:8000 --load 2x --ttft 2s

    The plan is found by simulation, with the real scheduler, KV cache and router and the measured step costs, in
    seconds to minutes. If no objective is given, they are --ttft p95:5s and --tpot p95:200ms; if one is given, only
    that one counts. If OPENAI_API_KEY is set, it is sent to --url as a bearer token.
    """
    check(flags, given_in(context))
    objectives = Objectives(flags["ttft"], flags["tpot"])
    if objectives == Objectives(None, None):
        objectives = Objectives(Limit(95.0, 5.0), Limit(95.0, 0.2))
    kinds, load, running = of_url(flags) if flags["url"] else of_files(flags)
    context.exit(
        planned(kinds, load.scaled(flags["factor"]) if flags["factor"] != 1 else load, objectives, running, flags)
    )


def check(flags: Mapping[str, Any], given: set[str]) -> None:
    """Raise CommandError if the flags contradict each other."""
    loads = [name for name in ("users", "rate", "trace", "url") if flags[name] is not None]
    if len(loads) != 1:
        said = "which load? give" if not loads else f"--{' and --'.join(loads)} are several loads; give one of"
        raise CommandError(f"{said} --users with --every or --think-time, --rate, --trace, or --url of a running fleet")
    if flags["users"] is not None and (flags["think_time"] is None) == (flags["every"] is None):
        raise CommandError("--users needs either --every (from request to request) or --think-time (after each answer)")
    if flags["users"] is None and flags["every"] is not None:
        raise CommandError("--every is the time between two requests of a user; give the number of users with --users")
    if flags["every"] == 0:
        raise CommandError("--every must be above 0")
    if flags["think_time"] is not None and flags["users"] is None and not (flags["rate"] and flags["turns"] > 1):
        raise CommandError("--think-time is for --users, or for --rate with --turns of more than one")
    if flags["url"] and flags["calibrations"]:
        raise CommandError("--url brings costs and load of the running fleet; leave --calibration or --url out")
    of_requests = _OF_REQUESTS & given
    if of_requests and (flags["trace"] is not None or flags["url"] is not None):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(of_requests))
        whose = "a trace" if flags["trace"] is not None else "a running fleet"
        raise CommandError(f"{whose} has its own requests; leave out {names}")
    if flags["url"] is not None and flags["costs"]:
        raise CommandError("--cost-per-host compares calibrations; leave it out with --url")
    if "repeated_answer" in given and flags["turns"] <= 1:
        raise CommandError("--repeated-answer is for conversations; give their length with --turns")
    if flags["prefixes"] > 1 and not flags["shared_prefix"]:
        raise CommandError("--prefixes needs their length; give it with --shared-prefix")
    if flags["hosts"] and flags["spare_hosts"]:
        raise CommandError("--hosts judges a given fleet; leave --spare-hosts out")


def requests_of(flags: Mapping[str, Any], most: int) -> Requests:
    """The requests that the flags describe; none longer than `most` tokens. Raises CommandError."""
    prefix = flags["shared_prefix"]
    if prefix + flags["prompt"] + flags["answer"] > most:
        raise CommandError(
            f"--shared-prefix, --prompt and --answer are {prefix + flags['prompt'] + flags['answer']:,.0f} tokens "
            f"together, and the model takes {most:,}; give shorter ones"
        )
    return Requests(
        prompt=lengths(flags["prompt_dist"], flags["prompt"], most),
        answer=lengths(flags["answer_dist"], flags["answer"], most),
        mean_prompt=flags["prompt"],
        mean_answer=flags["answer"],
        prefix=prefix,
        num_prefixes=flags["prefixes"],
        turns=flags["turns"],
        most=most,
        reuse=flags["repeated_answer"],
    )


def of_files(flags: Mapping[str, Any]) -> tuple[list[Kind], Load, None]:
    """The kinds of hosts of the calibrations, and the load that the flags describe. Raises CommandError."""
    model = flags["model"] or _DEFAULT_MODEL
    paths = flags["calibrations"] or (files.usual_path(model),)
    if not flags["calibrations"] and not paths[0].exists():
        others = sorted(path.stem.replace("--", "/") for path in paths[0].parent.glob("*.json"))
        raise CommandError(
            f"there is no calibration of {model}: run `headrace bench calibrate {model}` on a host of the kind that "
            "you will use, or name a file with --calibration"
            + (f"; there are calibrations of {', '.join(others)}" if others else "")
        )
    kinds = kinds_of(paths, flags["costs"], flags["model"])
    most = min(kind.calibration.model.max_context_tokens for kind in kinds)
    if flags["trace"] is not None:
        return kinds, _of_trace(flags["trace"], most, flags["requests"]), None
    requests = requests_of(flags, most)
    users, every_s, think_s = flags["users"], flags["every"], flags["think_time"]
    if users is None:
        return kinds, Load(requests, per_s=flags["rate"], think_s=think_s or 0.0), None
    if every_s is not None:
        name = f"{users} users, each with a request every {every_s:g} s ({users / every_s:.3g} requests/s)"
        return kinds, Load(requests, per_s=users / every_s, name=name), None
    return kinds, Load(requests, users=float(users), think_s=think_s), None


def _of_trace(path: Path, most: int, count: int | None) -> Load:
    """The first `count` requests of a trace, of those that have at most `most` tokens. Raises CommandError."""
    from headrace.sim import trace

    try:
        jobs = trace.read(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read --trace: {error}") from None
    taken = [job for job in jobs if job.num_prompt_tokens + job.num_output_tokens <= most]
    num_refused = len(jobs) - len(taken)
    if len(taken) < 2:
        many = f": {num_refused} have more than the {most:,} tokens that the model takes" if num_refused else ""
        raise CommandError(f"{path} has fewer than two requests{many}")
    kept = taken[:count]
    name = f"{'the first ' if len(kept) < len(taken) else ''}{len(kept)} requests of {path.name}"
    if num_refused:
        name += f", without {num_refused} of more than the {most:,} tokens that the model takes"
    return Load(trace=tuple(replace(job, number=number) for number, job in enumerate(kept)), name=name)


def kinds_of(paths: Sequence[Path], costs: Sequence[str], model: str | None) -> list[Kind]:
    """The calibrations in these files. Raises CommandError if one cannot be used, or if they are of several models."""
    try:
        kinds = [Kind(path.stem, files.read(path)) for path in paths]
    except files.CalibrationError as error:
        raise CommandError(str(error)) from None
    names = sorted({kind.calibration.model.name for kind in kinds})
    if len(names) > 1:
        raise CommandError(f"the calibrations are of several models: {', '.join(names)}; compare hosts with one model")
    if model is not None and names[0] != model:
        raise CommandError(f"the calibration is of {names[0]}, not of {model}; calibrate {model}, or leave MODEL out")
    stems = [kind.name for kind in kinds]
    if len(set(stems)) < len(stems):
        raise CommandError("two calibrations have the same file name; rename one, because names tell them apart")
    prices = dict(_price(cost, stems) for cost in costs)
    if prices and set(prices) != set(stems):
        missing = ", ".join(sorted(set(stems) - set(prices)))
        raise CommandError(f"--cost-per-host is missing for {missing}; give NAME=NUMBER for each calibration")
    return [replace(kind, cost=prices.get(kind.name)) for kind in kinds]


def _price(text: str, names: Sequence[str]) -> tuple[str, float]:
    name, mark, number = text.rpartition("=")
    try:
        price = float(number)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise CommandError(f"--cost-per-host {text!r} is not [NAME=]NUMBER, such as {names[0]}=350")
    if not mark:
        if len(names) > 1:
            raise CommandError(f"--cost-per-host {text!r}: of which host? Write {names[0]}={number} and so on")
        return names[0], price
    if name not in names:
        raise CommandError(f"--cost-per-host {text!r}: no calibration is called {name!r}; there is {', '.join(names)}")
    return name, price


def of_url(flags: Mapping[str, Any]) -> tuple[list[Kind], Load, Running]:
    """The kind of host of a running fleet, its load, and the fleet under it. Raises CommandError."""
    import asyncio

    from headrace.bench.calibrating import CalibrateError, learned_of
    from headrace.bench.connection import Client, ExchangeError
    from headrace.bench.fleet import Fleet as Told
    from headrace.bench.fleet import fleet_of
    from headrace.bench.target import key_header, target_of
    from headrace.plan.planning import Running

    async def ask() -> Told:
        client = Client(target_of(flags["url"], key_header(), flags["ca_file"], False), 15.0)
        try:
            return await fleet_of(client, flags["model"])
        finally:
            client.close()

    try:
        told = asyncio.run(ask())
        found = learned_of(told)
    except (ExchangeError, CalibrateError) as error:
        raise CommandFailed(str(error)) from None
    except ValueError as error:
        raise CommandError(str(error)) from None
    if told.load is None:
        raise CommandFailed(
            "the gateway has answered no request in its last minutes; ask again under load, or give the load"
        )
    recent = told.load
    prompt, cached, answer = max(1.0, recent.prompt - recent.cached), round(recent.cached), max(1.0, recent.answer)
    most = found.model.max_context_tokens
    requests = Requests(
        lengths("lognormal", prompt, most), lengths("exponential", answer, most), prompt, answer, cached, 1, 1.0, most
    )
    name = f"{recent.per_s:.3g} requests/s, as in the last {recent.seconds:.0f} s"
    if recent.num_refused:
        name += f", without {recent.num_refused} that were refused"
    load = Load(requests, per_s=recent.per_s, name=name)
    times_ms = recent.ttft_p50_ms, recent.ttft_p95_ms
    measured_s = None if None in times_ms else ((times_ms[0] or 0.0) / 1000, (times_ms[1] or 0.0) / 1000)
    return [Kind("running", found)], load, Running(told.num_hosts, load, measured_s)


def planned(
    kinds: Sequence[Kind], load: Load, objectives: Objectives, running: Running | None, flags: Mapping[str, Any]
) -> int:
    """Plan for each kind of host, and print it; the exit status."""
    from headrace.plan.answer import comparison, rank, text, told
    from headrace.plan.planning import Options, plan
    from headrace.plan.search import DoesNotFitError

    gbit_per_s = flags["peer_gbit_per_s"]
    memory = Memory(
        flags["kv_cache_gb"],
        flags["kv_disk_gb"],
        1e9 * flags["disk_gb_per_s"],
        None if gbit_per_s is None else 1e9 / 8 * gbit_per_s,
    )
    usual = round(min(max(_RUN_S * load.offered_per_s, _LEAST_REQUESTS), _MOST_REQUESTS))
    options = Options(
        seeds=tuple(range(1, flags["seeds"] + 1)),
        count=flags["requests"] or usual,
        spare=flags["spare_hosts"],
        most_hosts=flags["max_hosts"],
        hosts=flags["hosts"] or (None if running is None else running.hosts),
        curve=_CURVE,
        running=running,
    )

    def tell(line: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\033[K{line}", nl=False, err=True)

    try:
        answers = [
            plan(Fleet(kind, 1, memory, max_num_seqs=flags["max_num_seqs"]), load, objectives, options, tell)
            for kind in kinds
        ]
    except DoesNotFitError as error:
        tell("")
        raise CommandError(str(error)) from None
    tell("")
    answers.sort(key=rank)
    if flags["as_json"]:
        click.echo(msgspec.json.format(msgspec.json.encode([told(answer) for answer in answers]), indent=2).decode())
    else:
        if len(answers) > 1:
            click.echo(comparison(answers) + "\n")
        click.echo(text(answers[0]))
    if flags["page_file"] is not None:
        from headrace.plan.page import page

        flags["page_file"].parent.mkdir(parents=True, exist_ok=True)
        flags["page_file"].write_text(page(answers, "Plan of a fleet"), encoding="utf-8")
        click.echo(f"wrote {flags['page_file']}", err=True)
    return int(answers[0].trial is None)


def run(args: Sequence[str] | None = None) -> int:
    """Run the command; see `headrace.common.commands.run`."""
    return commands.run(main, "headrace plan", args)


if __name__ == "__main__":
    sys.exit(run())
