"""What routers take: a thread that reports, tokens and requests share."""

from __future__ import annotations

import pytest

from headrace.sim import process_cost, step_cost
from headrace.sim.process_cost import ProcessCost, RouterTime
from headrace.sim.router import POLICIES
from headrace.sim.simulation import FleetSettings, Simulation
from headrace.sim.trace import Job
from headrace.sim.worker import WorkerSettings

COST = ProcessCost(request_us=1000.0, per_worker_us=2.0, report_us=50.0, token_us=100.0)


def test_the_committed_measurement_is_a_thousandth_of_a_second_a_request() -> None:
    cost = process_cost.default()
    assert 100 < cost.request_us < 10_000
    assert 0 < cost.per_worker_us < 10
    assert cost.machine


def test_requests_take_their_time_one_after_the_other() -> None:
    time = RouterTime(COST, 500)
    assert time.request_done_s(10.0, 0) == pytest.approx(10.002)
    assert time.request_done_s(10.001, 0) == pytest.approx(10.004)
    assert time.request_done_s(11.0, 0) == pytest.approx(11.002)


def test_reports_and_tokens_leave_less_for_requests() -> None:
    time = RouterTime(COST, 0)
    for tenth in range(1, 200):
        time.tokens(300)  # 3,000 tokens a second: 0.3 of its time
        done_s = time.request_done_s(tenth / 10, 400 * tenth)  # 4,000 reports: 0.2
    assert time.background == pytest.approx(0.5, abs=0.01)
    assert done_s == pytest.approx(19.9 + 0.002, abs=1e-4)


def test_an_overloaded_router_still_places_requests() -> None:
    time = RouterTime(COST, 0)
    for second in range(1, 20):
        done_s = time.request_done_s(float(second), 100_000 * second)
    assert time.background > 1.0
    assert 19.0 < done_s < 20.0


def test_the_first_token_comes_later_by_what_the_router_takes() -> None:
    worker = WorkerSettings(step_cost.default(), kv_tokens=40_000, block_size=64)
    jobs = [Job(number, 5.0 * number, ((number, 300),), 4).hashed(64) for number in range(4)]
    free, costly = (
        Simulation(jobs, POLICIES["headrace"], FleetSettings(worker, num_workers=2, process_cost=cost)).run().records
        for cost in (ProcessCost(), COST)
    )
    for one, other in zip(free, costly, strict=True):
        assert other.first_token_s - one.first_token_s >= 0.001
