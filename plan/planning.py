"""A plan for one kind of host: the fewest hosts, the least memory, the knee, and a curve of loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.plan.answer import Answer
from headrace.plan.fleet import Fleet
from headrace.plan.load import Load
from headrace.plan.objectives import Objectives
from headrace.plan.search import Search


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


def plan(fleet: Fleet, load: Load, objectives: Objectives, options: Options, told: Callable[[str], None]) -> Answer:
    """Plan with hosts as those of `fleet`. `told` gets a line before each simulation. Raises DoesNotFitError."""
    search = Search(load, objectives, options.seeds, options.count, told)
    most_hosts = options.hosts or options.most_hosts
    if options.hosts is not None:
        found = search.trial(fleet.with_hosts(options.hosts))
        trial = found if found.is_good else None
    else:
        trial = search.smallest(fleet, options.most_hosts)
    answer = Answer(load, objectives, fleet, options.spare, most_hosts, trial, is_judged=options.hosts is not None)
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
