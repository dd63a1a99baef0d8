"""Hosts with several workers, requests that follow others, padded decode steps, and costs of two kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.sim.router import POLICIES
from headrace.sim.simulation import FleetSettings, JobRecord, Simulation
from headrace.sim.step_cost import StepCost, StepCostPair, shape_of
from headrace.sim.trace import Job
from headrace.sim.worker import WorkerSettings

COST = StepCost((1, 1001), (10.0, 1010.0), 0.0, 0.0, 0.0, 0.0, 0.0)
WORKER = WorkerSettings(COST, kv_tokens=8000, block_size=32)


def records_of(jobs: list[Job], fleet: FleetSettings) -> list[JobRecord]:
    hashed = [job.hashed(fleet.worker.block_size) for job in jobs]
    return list(Simulation(hashed, POLICIES["headrace"], fleet).run().records)


def test_a_request_comes_a_thought_after_the_answer_that_it_follows() -> None:
    jobs = [
        Job(0, 1.0, ((1, 64),), 5),
        Job(1, 0.0, ((2, 64),), 5, (), 0, 2.5),
        Job(2, 0.0, ((3, 64),), 5, (), 1, 0.0),
        Job(3, 1.2, ((4, 64),), 5),
    ]
    found = {record.job.number: record for record in records_of(jobs, FleetSettings(WORKER, 1, hop_s=0.001))}
    assert found[1].arrived_s == pytest.approx(found[0].ended_s + 2.5)
    assert found[2].arrived_s == found[1].ended_s
    assert (found[0].arrived_s, found[3].arrived_s) == (1.0, 1.2)


@pytest.mark.parametrize(("slowdown", "stretch"), [(0.0, 1.0), (0.5, 1.5)])
def test_workers_of_one_host_slow_each_other_down_while_both_compute(slowdown: float, stretch: float) -> None:
    worker = replace(WORKER, skips_steps=not slowdown)
    jobs = [Job(number, 0.0, ((number, 64),), 60) for number in range(2)]
    fleet = FleetSettings(worker, 2, workers_per_host=2, slowdown=slowdown)
    both = records_of(jobs, fleet)
    assert {record.worker for record in both} == {0, 1}
    (alone,) = records_of(jobs[:1], fleet)
    for record in both:
        took_s, alone_s = (one.ended_s - one.first_token_s for one in (record, alone))
        assert took_s == pytest.approx(stretch * alone_s, rel=0.03)


def test_workers_of_other_hosts_do_not() -> None:
    worker = replace(WORKER, skips_steps=False)
    jobs = [Job(number, 0.0, ((number, 64),), 60) for number in range(2)]
    apart = records_of(jobs, FleetSettings(worker, 2, workers_per_host=1, slowdown=0.5))
    (alone,) = records_of(jobs[:1], FleetSettings(worker, 1))
    assert {record.ended_s for record in apart} == {alone.ended_s}


@pytest.mark.parametrize("skips_steps", [True, False])
def test_decode_steps_are_padded_to_their_least_size(skips_steps: bool) -> None:
    worker = replace(WORKER, skips_steps=skips_steps)
    jobs = [Job(0, 0.0, ((1, 64),), 50)]
    (plain,) = records_of(jobs, FleetSettings(worker, 1))
    (padded,) = records_of(jobs, FleetSettings(replace(worker, least_decode=2), 1))
    more_s = (padded.ended_s - padded.first_token_s) - (plain.ended_s - plain.first_token_s)
    assert more_s == pytest.approx(49 * 0.001)  # a token is a millisecond


def test_a_pair_of_costs_has_one_for_each_kind_of_step() -> None:
    decode = StepCost((1, 2), (5.0, 6.0), 0.0, 0.0, 0.0, 0.0, 2.0)
    pair = StepCostPair(COST, decode)
    assert pair.milliseconds(shape_of([(0, 101)])) == 110.0
    assert pair.milliseconds(shape_of([(9, 1)])) == 5.0
    assert pair.change == 2.0
    jobs = [Job(0, 0.0, ((1, 64),), 50)]
    (skipping,) = records_of(jobs, FleetSettings(replace(WORKER, cost=pair), 1))
    (single,) = records_of(jobs, FleetSettings(replace(WORKER, cost=pair, skips_steps=False), 1))
    assert skipping.ended_s == pytest.approx(single.ended_s, rel=1e-12)
