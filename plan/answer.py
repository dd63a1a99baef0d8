"""The answer of `headrace plan`: how to start the fleet, how it performs, and at which load it fails. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.bench.calibration import Calibration
from headrace.plan.fleet import FRONT_SHARE, GIB, Fleet
from headrace.plan.load import Load
from headrace.plan.objectives import Limit, Objectives, time_text
from headrace.plan.search import Figures, Trial
from headrace.plan.start import commands, kv_gb_of

_BAR = 24
# Workers that compute for a smaller share of the time have no queue that grows, except by chance.
_IDLE = 0.75


@dataclass(frozen=True, slots=True)
class Present:
    """A running fleet under its present load, simulated and as its gateway has measured it: percentiles 50 and 95 of
    the time to the first token, in seconds."""

    trial: Trial
    measured_p50_s: float
    measured_p95_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan for one kind of host. `trial` is the trial of the hosts that the load needs, without the `spare` ones, and
    `least_kv` that of the smallest KV cache. `held` and `missed` are the trials on both sides of the knee, and `curve`
    those of several loads, in order. If not even `most_hosts` hosts meet the objectives, `trial` is None and `missed`
    is the trial of that many."""

    load: Load
    objectives: Objectives
    fleet: Fleet
    spare: int
    most_hosts: int
    trial: Trial | None
    least_kv: Trial | None = None
    held: Trial | None = None
    missed: Trial | None = None
    curve: tuple[Trial, ...] = ()
    is_judged: bool = False
    """Whether the number of hosts was given."""
    needed: Trial | None = None
    """If the given hosts are too few: the trial of the smallest number that is enough; None if none is."""
    present: Present | None = None
    """A running fleet under its present load."""

    @property
    def hosts(self) -> int:
        """Hosts to buy; 0 if none suffice."""
        return self.trial.fleet.hosts + self.spare if self.trial is not None else 0

    @property
    def cost(self) -> float | None:
        """The cost of the hosts, if it is known."""
        each = self.fleet.kind.cost
        return None if each is None or self.trial is None else each * self.hosts

    @property
    def kv_gb(self) -> float:
        """GiB of KV cache of each worker."""
        trial = self.least_kv or self.trial
        assert trial is not None
        return kv_gb_of(trial.fleet)

    def front_cores(self) -> float:
        """Cores that gateways and routers use under the load."""
        assert self.trial is not None
        front = self.fleet.kind.calibration.front
        return self.trial.per_s * front.cpu_s_per_request + self.trial.tokens_per_s * front.cpu_s_per_token

    def start(self) -> list[str]:
        """The commands that start the fleet."""
        return commands(self.fleet.with_hosts(self.hosts), self.kv_gb)


def text(answer: Answer) -> str:
    """The answer for people."""
    calibration = answer.fleet.kind.calibration
    lines = [
        _row("load", str(answer.load)),
        _row("objective", str(answer.objectives)),
        _row("host", _host(answer.fleet.kind.name, calibration)),
        *_present(answer.present),
    ]
    if answer.trial is None:
        assert answer.missed is not None
        hosts = f"{answer.most_hosts} host{'s do' if answer.most_hosts > 1 else ' does'} not meet the objectives"
        lines.append(_row("enough" if answer.is_judged else "plan", f"{'no' if answer.is_judged else 'none'}: {hosts}"))
        lines += [_row("", sentence) for sentence in answer.missed.broken]
        lines.append(_row("", f"{answer.missed.why()}; {_remedy(answer)}"))
        return "\n".join(lines)
    trial = answer.trial
    title, begin = ("enough", "yes: ") if answer.is_judged else ("plan", "")
    lines += ["", _row(title, begin + _plan(answer))]
    lines.append(
        _row("", f"workers compute {trial.busy:.0%} of the time; {trial.hit_share:.0%} of prompts from caches")
    )
    lines.append(_row("", f"time to the first token {_times(trial.ttft)}"))
    lines.append(_row("", f"time a token {_times(trial.tpot)}"))
    lines += _memory(answer)
    lines += _front(answer)
    lines += ["", *_limit(answer), "", *_curve(answer), ""]
    lines += [_row("start" if number == 0 else "", line) for number, line in enumerate(answer.start())]
    return "\n".join(lines)


def _present(present: Present | None) -> list[str]:
    """What the simulation says of the present load beside what was measured, by which it can be judged."""
    if present is None:
        return []
    ttft = present.trial.ttft
    measured = f"p50 {time_text(present.measured_p50_s)}, p95 {time_text(present.measured_p95_s)}"
    lines = [_row("present", f"time to the first token as measured: {measured}")]
    return [*lines, _row("", f"as simulated: p50 {time_text(ttft.p50)}, p95 {time_text(ttft.p95)}")]


def _plan(answer: Answer) -> str:
    assert answer.trial is not None
    layout = answer.fleet.kind.calibration.layout
    hosts, workers = answer.hosts, answer.hosts * layout.workers
    told = f"{hosts} host{'s' * (hosts > 1)} with {workers} worker{'s' * (workers > 1)}"
    told += f" of {layout.threads} thread{'s' * (layout.threads > 1)}" if layout.threads else ""
    if answer.spare:
        need = answer.trial.fleet.hosts
        told += f": {need} carr{'y' if need > 1 else 'ies'} the load, and {answer.spare} may fail"
    cost = answer.cost
    return told + (f"; cost {cost:,.6g}" if cost is not None else "")


def _memory(answer: Answer) -> list[str]:
    trial, least = answer.trial, answer.least_kv
    assert trial is not None
    token_bytes = answer.fleet.kind.calibration.model.kv_token_bytes
    held = trial.kv_used * trial.fleet.kv_tokens_of_worker
    has = trial.fleet.kv_bytes_of_worker / GIB
    lines = [_row("KV cache", f"{answer.kv_gb:.2f} GiB for each worker; the host has {has:.2f} GiB for it")]
    if least is not None and least is not trial:
        lines[0] = _row("KV cache", f"{answer.kv_gb:.2f} GiB for each worker are enough, of {has:.2f} GiB")
    lines.append(
        _row(
            "", f"running requests hold up to {held:,.0f} tokens, {held * token_bytes / GIB:.2f} GiB; the rest is cache"
        )
    )
    return lines


def _front(answer: Answer) -> list[str]:
    cores = answer.front_cores()
    if not cores:
        return []
    number = max(1, math.ceil(cores / 2 / FRONT_SHARE))
    more = " of each" if number > 1 else ""
    told = f"gateway and router use {cores:.2f} of a core"
    return [_row("front", told + (f": run {number}{more}" if number > 1 else "; one of each is enough"))]


def _limit(answer: Answer) -> list[str]:
    if answer.missed is None:
        assert answer.held is not None
        return [_row("limit", f"above {answer.held.factor:g} times the load, which was the most that was tried")]
    missed = answer.missed
    held = f"{answer.held.factor:.2f} times the load" if answer.held is not None else "less than the load"
    rate = f" ({answer.held.per_s:.2f} requests/s)" if answer.held is not None else ""
    lines = [_row("limit", f"{held}{rate}; what breaks first, at {missed.factor:.2f} times:")]
    lines += [_row("", sentence) for sentence in missed.broken]
    lines.append(_row("", missed.why()))
    return lines


def _curve(answer: Answer) -> list[str]:
    """A line for each load, with a bar for how near it comes to its limit."""
    limits = answer.objectives
    lines = [
        _row(
            "curve",
            f"{'load':>6} {'req/s':>7} {_column('TTFT', limits.ttft):>10} {_column('token', limits.tpot):>9} "
            f"{'busy':>5}  share of the nearest limit",
        )
    ]
    for trial in answer.curve:
        share = nearness(trial, answer.objectives)
        bar = "#" * min(_BAR, round(_BAR * min(share, 1.0)))
        mark = "" if trial.is_good else "  missed"
        lines.append(
            _row(
                "",
                f"{trial.factor:>6.2f} {trial.per_s:>7.2f} {time_text(_shown(trial.ttft)):>10} "
                f"{time_text(_shown(trial.tpot)):>9} {trial.busy:>5.0%}  {bar:{_BAR}}{mark}",
            )
        )
    return lines


def _column(name: str, limit: Limit | None) -> str:
    """The title of a column of `_shown` figures."""
    return f"{name} p{95 if limit is None else limit.percentile:g}"


def _shown(figures: Figures) -> float:
    return figures.of_limit or figures.p95


def nearness(trial: Trial, objectives: Objectives) -> float:
    """The larger of the shares of the limits that are used up."""
    shares = [0.0]
    if objectives.ttft is not None:
        shares.append(trial.ttft.of_limit / objectives.ttft.seconds)
    if objectives.tpot is not None:
        shares.append(trial.tpot.of_limit / objectives.tpot.seconds)
    return max(shares)


def _remedy(answer: Answer) -> str:
    missed = answer.missed
    assert missed is not None
    objectives = answer.objectives
    if answer.needed is not None:
        return f"{answer.needed.fleet.hosts} hosts are enough"
    if missed.busy < _IDLE and nearness(missed, objectives) <= 1:
        return "more requests in each simulation (--requests) tell whether this is chance"
    if objectives.tpot is not None and missed.busy < 0.5:
        return "faster hosts or a smaller model help, more hosts do not"
    if answer.is_judged:
        return "no number up to --max-hosts is enough either; looser limits or shorter prompts help"
    return "more hosts (--max-hosts), looser limits or shorter prompts help"


def _host(name: str, calibration: Calibration) -> str:
    host, layout = calibration.host, calibration.layout
    cores = f", {host.cores} cores" if host.cores else ""
    steps = calibration.steps
    known = calibration.source == "measured"
    error = f"step times within {max(steps.decode.median_error, steps.prompts.median_error):.0%} (median)"
    return (
        f"{name}: {host.cpu}{cores}, {layout.workers} worker{'s' * (layout.workers > 1)}; "
        f"{calibration.model.name}, {error if known else 'step times as its workers have learned'}"
    )


def _times(figures: Figures) -> str:
    return f"p50 {time_text(figures.p50)}, p95 {time_text(figures.p95)}, p99 {time_text(figures.p99)}"


def _row(title: str, told: str) -> str:
    return f"{title:10}{told}".rstrip()


def comparison(answers: Sequence[Answer]) -> str:
    """A table of several kinds of hosts, in the order of `rank`."""
    head = f"{'host':24} {'hosts':>5} {'workers':>7} {'cost':>12} {'busy':>5} {'limit':>6}"
    lines = [head]
    for answer in sorted(answers, key=rank):
        name = answer.fleet.kind.name[:24]
        if answer.trial is None:
            lines.append(f"{name:24} none of up to {answer.most_hosts} hosts meets the objectives")
            continue
        cost = "" if answer.cost is None else f"{answer.cost:,.6g}"
        workers = answer.hosts * answer.fleet.kind.calibration.layout.workers
        limit = f"{answer.held.factor:.2f}x" if answer.held is not None else ""
        lines.append(f"{name:24} {answer.hosts:>5} {workers:>7} {cost:>12} {answer.trial.busy:>5.0%} {limit:>6}")
    return "\n".join(lines)


def rank(answer: Answer) -> tuple[bool, float, int, float]:
    """Sorts answers: those with a plan, by cost if it is known, else by hosts; of equal ones, those that carry more
    first."""
    cost, held = answer.cost, answer.held
    most = held.factor if held is not None else 0.0
    return answer.trial is None, math.inf if cost is None else cost, answer.hosts, -most


class ToldTrial(msgspec.Struct):
    """A trial in JSON. Times are in milliseconds."""

    load: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    good_share: float
    busy: float
    hit_share: float
    kv_used: float
    refused_share: float
    meets_objectives: bool
    broken: tuple[str, ...]


class ToldPresent(msgspec.Struct):
    """A running fleet under its present load. Times to the first token, in milliseconds."""

    simulated_ms: dict[str, float]
    measured_ms: dict[str, float]


class ToldAnswer(msgspec.Struct):
    """An answer in JSON. `limit` is the highest load that is carried, as a multiple of the planned one."""

    host: str
    calibration: str
    hosts: int
    """0 if no number of hosts is enough, or if the given ones are not."""
    hosts_needed: int | None
    """If the given hosts are not enough: how many are."""
    workers: int
    spare_hosts: int
    cost: float | None
    kv_cache_gb: float | None
    front_cores: float | None
    plan: ToldTrial | None
    limit: float | None
    breaks_first: tuple[str, ...]
    because: str | None
    curve: list[ToldTrial]
    start: list[str]
    present: ToldPresent | None = None


def told(answer: Answer) -> ToldAnswer:
    """The answer for programs."""
    has_plan = answer.trial is not None
    missed = answer.missed
    return ToldAnswer(
        host=answer.fleet.kind.name,
        calibration=answer.fleet.kind.calibration.made,
        hosts=answer.hosts,
        hosts_needed=None if answer.needed is None else answer.needed.fleet.hosts,
        workers=answer.hosts * answer.fleet.kind.calibration.layout.workers,
        spare_hosts=answer.spare,
        cost=answer.cost,
        kv_cache_gb=answer.kv_gb if has_plan else None,
        front_cores=round(answer.front_cores(), 3) if has_plan else None,
        plan=None if answer.trial is None else _told_trial(answer.trial),
        limit=None if answer.held is None else round(answer.held.factor, 3),
        breaks_first=() if missed is None else missed.broken,
        because=None if missed is None else missed.why(),
        curve=[_told_trial(trial) for trial in answer.curve],
        start=answer.start() if has_plan else [],
        present=None if answer.present is None else _told_present(answer.present),
    )


def _told_present(present: Present) -> ToldPresent:
    ttft = present.trial.ttft
    return ToldPresent(
        {"p50": round(1000 * ttft.p50, 2), "p95": round(1000 * ttft.p95, 2)},
        {"p50": round(1000 * present.measured_p50_s, 2), "p95": round(1000 * present.measured_p95_s, 2)},
    )


def _told_trial(trial: Trial) -> ToldTrial:
    def in_ms(figures: Figures) -> dict[str, float]:
        return {name: round(1000 * getattr(figures, name), 2) for name in ("p50", "p95", "p99")}

    return ToldTrial(
        load=round(trial.factor, 4),
        requests_per_s=round(trial.per_s, 4),
        output_tokens_per_s=round(trial.tokens_per_s, 2),
        ttft_ms=in_ms(trial.ttft),
        tpot_ms=in_ms(trial.tpot),
        good_share=round(trial.good_share, 4),
        busy=round(trial.busy, 4),
        hit_share=round(trial.hit_share, 4),
        kv_used=round(trial.kv_used, 4),
        refused_share=round(trial.refused_share, 4),
        meets_objectives=trial.is_good,
        broken=trial.broken,
    )
