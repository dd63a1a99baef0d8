"""The flags of rates, concurrency, users, warm-up and sweeps: when requests are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import click

from headrace.bench.arrivals import Arrivals, RampUp
from headrace.bench.options.parsing import Section
from headrace.bench.options.values import PositiveOrInf
from headrace.common.commands import CommandError
from headrace.common.flags import FiniteRange

FLAGS = Section(
    "When it is asked",
    click.option("--request-rate", type=PositiveOrInf(), default="inf", help="Requests per second. inf: all at once."),
    click.option(
        "--burstiness",
        type=PositiveOrInf(),
        default="1.0",
        help="Shape of arrivals. 1: a Poisson process; below 1: more bursts; above 1: more even; inf: evenly spaced.",
    ),
    click.option(
        "--max-concurrency",
        type=click.IntRange(1),
        help="Maximum number of requests in flight. Others wait in the client. Without --request-rate: so many "
        "clients, each of which waits for its answer.",
    ),
    click.option(
        "--ramp-up-strategy",
        type=click.Choice(("linear", "exponential")),
        help="Raise the rate from request to request.",
    ),
    click.option("--ramp-up-start-rps", type=FiniteRange(0), help="Requests per second at the beginning of the ramp."),
    click.option("--ramp-up-end-rps", type=FiniteRange(0), help="Requests per second at the end of the ramp."),
    click.option(
        "--probe-request-rate",
        type=FiniteRange(0),
        default=0.0,
        help="Additional requests of one token, per second; their latency has a section of its own. 0: none.",
    ),
    click.option(
        "--num-warmups", type=click.IntRange(0), default=0, help="Number of warm-up requests, which are not counted."
    ),
    click.option(
        "--ready-check-timeout-sec",
        type=FiniteRange(0),
        default=0.0,
        help="Maximum seconds to wait for a server that starts, until it gives a first answer. 0: do not wait.",
    ),
    click.option(
        "--sweep",
        "is_sweep",
        is_flag=True,
        help="Find the knee, the highest rate that the server sustains: it answers as fast as requests come, none "
        "fails or is answered wrongly, and nine of ten meet every --goodput. Rates and numbers of requests are chosen "
        "by the command.",
    ),
    click.option(
        "--sweep-seconds",
        type=FiniteRange(0, min_open=True),
        default=30.0,
        help="Seconds of arrivals at each rate of --sweep, or longer for 20 requests. It should be several times that "
        "of an answer: a queue must have time to grow.",
    ),
    click.option(
        "--sweep-refinements",
        type=click.IntRange(0),
        default=2,
        help="Number of rates that --sweep tries between a sustained and a too high rate.",
    ),
)


def arrivals(flags: Mapping[str, Any]) -> Arrivals:
    """When requests are due. Raises CommandError."""
    rate, strategy = flags["request_rate"], flags["ramp_up_strategy"]
    start, end = flags["ramp_up_start_rps"], flags["ramp_up_end_rps"]
    if strategy is None:
        if start is not None or end is not None:
            raise CommandError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return Arrivals(rate, flags["burstiness"])
    if math.isfinite(rate):
        raise CommandError("a ramp has its own rates; leave --request-rate out")
    if start is None or not end:
        raise CommandError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if start > end:
        raise CommandError("--ramp-up-start-rps is more than --ramp-up-end-rps; exchange them")
    if strategy == "exponential" and start == 0:
        raise CommandError("an exponential ramp cannot begin at 0; give another --ramp-up-start-rps")
    return Arrivals(rate, flags["burstiness"], RampUp(strategy, start, end))


def is_self_timed(flags: Mapping[str, Any]) -> bool:
    """Whether requests are sent at the times of their dataset. Raises CommandError."""
    name, asked = flags["dataset_name"], flags["self_timed"]
    if name != "timed_trace":
        if asked is not None:
            raise CommandError(f"--self-timed is for --dataset-name timed_trace; {name} has no times")
        return False
    found = asked is not False and not flags["is_sweep"]
    if found and (math.isfinite(flags["request_rate"]) or flags["ramp_up_strategy"] is not None):
        raise CommandError("a trace is sent at its own times; add --no-self-timed to send it at a rate")
    return found


def num_users(flags: Mapping[str, Any]) -> int | None:
    """How many users take turns; None if requests are due whatever the server does."""
    is_timed = math.isfinite(flags["request_rate"]) or flags["ramp_up_strategy"] is not None
    if flags["dataset_name"] != "multi_turn" or is_timed or flags["is_sweep"]:
        return None
    users: int = flags["multi_turn_users"]
    return users


def check_sweep(flags: Mapping[str, Any]) -> None:
    """Raise CommandError for flags that a sweep sets itself."""
    given = {
        "--request-rate": math.isfinite(flags["request_rate"]),
        "--ramp-up-strategy": flags["ramp_up_strategy"] is not None,
        "--max-concurrency": flags["max_concurrency"] is not None,
        "--num-prompts": flags["num_prompts"] is not None,
        "--self-timed": flags["self_timed"] is not None,
    }
    for flag, is_given in given.items():
        if flags["is_sweep"] and is_given:
            raise CommandError(f"--sweep chooses rates and numbers of requests itself; leave {flag} out")
