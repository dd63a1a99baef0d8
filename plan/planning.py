"""A plan for one kind of host: the fewest hosts, the least memory, the knee, and a curve of loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.plan.answer import Answer, Present
from headrace.plan.fleet import Fleet
from headrace.plan.load import Load
from headrace.plan.objectives import Objectives
from headrace.plan.search import DoesNotFitError, Search, least_hosts


@dataclass(frozen=True, slots=True)
class Running:
    """A running fleet: its hosts, its present load, and percentiles 50 and 95 of the time to the first token that its
    gateway has measured, in seconds; None if it has measured none."""

    hosts: int
    load: Load
    measured_s: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Options:
    """How to search for a fleet. With `hosts`, a fleet of that many hosts is judged instead. `curve` has the loads to
    simulate below the highest one, as shares of it."""

    seeds: Sequence[int]
    count: int
    spare: int
    most_hosts: int
    hosts: int | None
    curve: Sequence[float]
    running: Running | None = None


def plan(fleet: Fleet, load: Load, objectives: Objectives, options: Options, told: Callable[[str], None]) -> Answer:
    """Plan with hosts as those of `fleet`. `told` gets a line before each simulation. Raises DoesNotFitError."""
    search = Search(load, objectives, options.seeds, options.count, told)
    most_hosts = options.hosts or options.most_hosts
    least = least_hosts(fleet, load, objectives)
    if options.hosts is None and least > options.most_hosts:
        raise DoesNotFitError(
            f"this load needs at least {least:,} hosts such as {fleet.kind.name}, by what its tokens cost, and "
            f"--max-hosts is {options.most_hosts}; give a smaller load, or a larger --max-hosts"
        )
    if options.hosts is not None:
        found = search.trial(fleet.with_hosts(options.hosts))
        trial = found if found.is_good else None
    else:
        trial = search.smallest(fleet, options.most_hosts)
    answer = Answer(load, objectives, fleet, options.spare, most_hosts, trial, is_judged=options.hosts is not None)
    answer = replace(answer, present=_present(fleet, objectives, options, told))
    judged = fleet.with_hosts(most_hosts)
    if trial is None:
        needed = search.smallest(fleet, options.most_hosts) if answer.is_judged else None
        return replace(answer, missed=search.trial(judged), needed=needed)
    judged = trial.fleet
    held, missed = search.knee(judged)
    least_kv = search.least_memory(judged)
    limit = held.factor if held is not None else 1.0
    factors = sorted({round(share * limit, 2) for share in options.curve if share * limit < limit} | {1.0})
    curve = [search.trial(judged, factor) for factor in factors]
    curve += [one for one in (held, missed) if one is not None]
    unique = {round(one.factor, 2): one for one in curve}
    return replace(
        answer, least_kv=least_kv, held=held, missed=missed, curve=tuple(unique[factor] for factor in sorted(unique))
    )


def _present(fleet: Fleet, objectives: Objectives, options: Options, told: Callable[[str], None]) -> Present | None:
    """The running fleet under its present load; None if there is none or nothing was measured."""
    running = options.running
    if running is None or running.measured_s is None:
        return None
    search = Search(running.load, objectives, options.seeds, options.count, told)
    return Present(search.trial(fleet.with_hosts(running.hosts)), *running.measured_s)
