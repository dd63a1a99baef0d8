"""Admission: requests that wait at the router for room, and refusals of router and worker."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from headrace.sim import step_cost
from headrace.sim.router import POLICIES
from headrace.sim.simulation import FleetSettings, Outcome, Simulation
from headrace.sim.trace import Generated, Job, at_rate
from headrace.sim.worker import WorkerSettings

WORKER = WorkerSettings(step_cost.default(), kv_tokens=8_000, block_size=64, max_num_seqs=4)
TRACE = Generated(num_requests=120, num_system_prompts=0, output_mean=10.0, prompt_median=60.0, prompt_sigma=0.3)


def jobs_of(per_s: float) -> list[Job]:
    return [job.hashed(WORKER.block_size) for job in at_rate(TRACE.jobs(random.Random(1)), per_s)]


def run(per_s: float, max_wait_s: float, num_routers: int = 1) -> Outcome:
    worker = replace(WORKER, max_wait_s=max_wait_s)
    fleet = FleetSettings(worker, num_workers=2, num_routers=num_routers, hop_s=0.001)
    return Simulation(jobs_of(per_s), POLICIES["headrace"], fleet).run()


def test_with_room_admission_changes_nothing() -> None:
    bounded, unbounded = run(4.0, 60.0), run(4.0, math.inf)
    assert [record.ended_s for record in bounded.records] == [record.ended_s for record in unbounded.records]
    assert not any(record.is_refused for record in bounded.records)


def test_in_an_overload_requests_wait_no_longer_than_they_may() -> None:
    outcome = run(200.0, 1.0, num_routers=2)
    refused = [record for record in outcome.records if record.is_refused]
    served = [record for record in outcome.records if not record.is_refused]
    assert len(refused) > 5
    assert len(served) > 20
    assert all(record.num_tokens == 0 and record.first_token_s < 0 for record in refused)
    assert all(record.num_tokens == record.job.num_output_tokens for record in served)
    own_s = 0.5  # the time of its own prompt does not count
    assert max(record.first_token_s - record.arrived_s for record in served) < 2 * 1.0 + own_s


def test_those_who_would_wait_long_enough_are_all_served() -> None:
    assert not any(record.is_refused for record in run(200.0, 1000.0).records)


def test_after_a_refusal_a_user_goes_on() -> None:
    jobs = jobs_of(200.0)
    jobs[-1] = replace(jobs[-1], follows=100, think_s=3.0)
    fleet = FleetSettings(replace(WORKER, max_wait_s=0.2), num_workers=1)
    records = {record.job.number: record for record in Simulation(jobs, POLICIES["headrace"], fleet).run().records}
    assert records[100].is_refused
    assert records[119].arrived_s == records[100].ended_s + 3.0
    assert not records[119].is_refused
