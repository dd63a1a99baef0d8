"""Trials and searches with a small calibration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.plan.fleet import Fleet, Kind
from headrace.plan.load import Load, Requests, lengths
from headrace.plan.objectives import Limit, Objectives
from headrace.plan.planning import Options, plan
from headrace.plan.search import DoesNotFitError, Search, least_hosts
from tests.plan.calibrations import calibration

REQUESTS = Requests(lengths("fixed", 128, 4096), lengths("fixed", 8, 4096), 128, 8, most=4096)
# 128 tokens take 61 ms and eight steps beside others some 15 ms each: one worker answers about eight a second.
LOAD = Load(REQUESTS, per_s=16.0)
OBJECTIVES = Objectives(Limit(95, 0.4), Limit(95, 0.1))
OPTIONS = Options(seeds=(1,), count=80, spare=0, most_hosts=16, hosts=None, curve=(0.5, 1.0))


def fleet(**others: Any) -> Fleet:
    return Fleet(Kind("small", calibration(**others)), 1)


def search(load: Load = LOAD, objectives: Objectives = OBJECTIVES) -> Search:
    return Search(load, objectives, (1,), 80)


def test_a_fleet_that_is_too_small_says_what_misses_and_why() -> None:
    trial = search().trial(fleet())
    assert not trial.is_good
    assert any(sentence.startswith("time to the first token: p95 is") for sentence in trial.broken)
    assert any("queue grows" in sentence for sentence in trial.broken)
    assert "workers compute" in trial.why()
    assert trial.busy > 0.9


def test_the_smallest_fleet_is_good_and_one_host_fewer_is_not() -> None:
    found = search()
    trial = found.smallest(fleet(), 16)
    assert trial is not None
    assert trial.is_good
    hosts = trial.fleet.hosts
    assert hosts > 1
    assert not found.trial(fleet().with_hosts(hosts - 1)).is_good


def test_faster_hosts_are_fewer() -> None:
    slow, quick = search().smallest(fleet(), 16), search().smallest(fleet(speed=4.0), 16)
    assert slow is not None
    assert quick is not None
    assert quick.fleet.hosts < slow.fleet.hosts


def test_no_fleet_meets_what_one_step_misses() -> None:
    assert search(objectives=Objectives(None, Limit(95, 0.001))).smallest(fleet(), 4) is None


def test_the_knee_lies_between_a_load_that_is_carried_and_one_that_is_not() -> None:
    held, missed = search().knee(fleet().with_hosts(4))
    assert held is not None
    assert missed is not None
    assert held.is_good
    assert not missed.is_good
    assert held.factor < missed.factor <= 1.05 * held.factor


def test_less_memory_is_enough_until_requests_do_not_fit() -> None:
    found = search()
    good = found.smallest(fleet(), 16)
    assert good is not None
    least = found.least_memory(good.fleet)
    assert least.is_good
    assert 136 <= least.fleet.kv_tokens_of_worker < good.fleet.kv_tokens_of_worker


def test_a_request_that_fits_into_no_cache_is_refused_with_the_remedy() -> None:
    with pytest.raises(DoesNotFitError, match=r"136 tokens.*--kv-cache-gb"):
        search().trial(fleet(kv_tokens=64))


def test_a_shared_prefix_is_found_in_the_caches_and_saves_hosts() -> None:
    asked = replace(REQUESTS, prefix=1024)
    shared = search(Load(asked, per_s=8.0)).trial(fleet().with_hosts(2))
    assert shared.hit_share > 0.8
    alone = replace(REQUESTS, prompt=lengths("fixed", 1152, 4096))
    assert search(Load(alone, per_s=8.0)).trial(fleet().with_hosts(2)).ttft.p95 > 2 * shared.ttft.p95


def test_workers_of_a_host_slow_each_other_down() -> None:
    two = calibration(workers=2)
    alone = Fleet(Kind("two", two), 1)
    together = Fleet(Kind("two", replace_slowdown(two, 0.8)), 1)
    load = Load(REQUESTS, per_s=8.0)
    assert search(load).trial(together).tpot.p95 > 1.2 * search(load).trial(alone).tpot.p95


def replace_slowdown(found: Any, slowdown: float) -> Any:
    import msgspec

    return msgspec.structs.replace(found, slowdown=slowdown)


def test_users_who_wait_for_their_answers_cannot_overload_a_queue() -> None:
    load = Load(REQUESTS, users=60.0, think_s=1.0)
    trial = Search(load, OBJECTIVES, (1,), 240).trial(fleet())
    assert not trial.is_good
    assert not any("queue grows" in sentence for sentence in trial.broken)
    assert trial.per_s < 60


def test_a_plan_has_hosts_memory_a_limit_and_a_curve() -> None:
    answer = plan(fleet(), LOAD, OBJECTIVES, replace(OPTIONS, spare=1), lambda line: None)
    assert answer.trial is not None
    assert answer.hosts == answer.trial.fleet.hosts + 1
    assert answer.held is not None
    assert answer.held.factor >= 1
    assert answer.missed is not None
    assert answer.missed.broken
    assert [trial.factor for trial in answer.curve] == sorted({trial.factor for trial in answer.curve})
    assert 0 < answer.kv_gb < 1


def test_a_given_number_of_hosts_is_judged() -> None:
    answer = plan(fleet(), LOAD, OBJECTIVES, replace(OPTIONS, hosts=1), lambda line: None)
    assert answer.trial is None
    assert answer.missed is not None
    assert answer.missed.fleet.hosts == 1


def test_later_turns_of_conversations_are_no_growing_queue() -> None:
    asked = replace(REQUESTS, turns=3.0)
    search = Search(Load(asked, per_s=4.0, think_s=5.0), OBJECTIVES, (1,), 120)
    assert search.trial(fleet(speed=4.0).with_hosts(2)).is_good


def test_conversations_are_simulated_until_as_many_end_as_begin() -> None:
    asked = replace(REQUESTS, turns=3.0)
    trial = Search(Load(asked, per_s=4.0, think_s=10.0), OBJECTIVES, (1,), 40).trial(fleet(speed=4.0).with_hosts(2))
    assert trial.per_s == pytest.approx(4.0, rel=0.35)


def test_the_step_costs_say_of_absurd_loads_how_many_hosts_they_need_at_least() -> None:
    """A request of 100 and 20 tokens takes 41 ms for its prompt and 20 tokens of 0.6 ms: half of 53 ms."""
    kind = Kind("small", calibration())
    load = Load(Requests(lengths("fixed", 100, 4000), lengths("fixed", 20, 4000), 100, 20), per_s=1000.0)
    limits = Objectives(Limit(95.0, 2.0), Limit(95.0, 0.1))
    found = least_hosts(Fleet(kind, 1), load, limits)
    assert found == pytest.approx(26, abs=2)
    assert least_hosts(Fleet(kind, 1), load.scaled(0.001), limits) == 1
    users = replace(load, per_s=None, users=9_000_000.0, think_s=1.0)
    assert least_hosts(Fleet(kind, 1), users, limits) > 10_000
    assert least_hosts(Fleet(kind, 1), users, Objectives(Limit(95.0, 2.0), None)) > 1000
