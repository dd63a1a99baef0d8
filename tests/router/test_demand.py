"""How many workers a model's work needs, and the forecast of it."""

from __future__ import annotations

import pytest

from headrace.protos.load_report import LoadReport
from headrace.router.placement.candidates import Candidate, Candidates
from headrace.router.placement.demand import (
    BACKLOG_S,
    HORIZON_S,
    UTILISATION,
    Capacity,
    Forecast,
    Mean,
    Work,
    backlog_s,
    kv_pressure,
    need_of,
    used_blocks,
)
from headrace.router.placement.policy import expected_wait_ms
from headrace.router.placement.rates import Priors

CAPACITY = Capacity(seats=16, blocks=1000, prefill_tokens_per_s=500)


def workers(*loads: LoadReport) -> Candidates:
    return Candidates.of([Candidate(f"w{number}", load, 32) for number, load in enumerate(loads)])


@pytest.mark.parametrize(
    ("work", "busy"),
    [
        (Work(), 0.0),
        (Work(num_at_workers=8), 0.5),
        (Work(num_at_workers=8, num_waiting=24), 2.0),
        (Work(num_at_workers=8, num_refused=8), 1.0),
        (Work(tokens_per_s=1500), 3.0),
        (Work(uncached_tokens=500 * BACKLOG_S, waiting_tokens=500 * BACKLOG_S), 2.0),
        (Work(num_at_workers=2, used_blocks=2500), 2.5),
        (Work(num_at_workers=2, num_waiting=2, used_blocks=2500), 5.0),
        (Work(num_at_workers=160, tokens_per_s=500, used_blocks=1000), 10.0),
    ],
)
def test_the_scarcest_of_places_prompts_and_blocks_decides(work: Work, busy: float) -> None:
    assert need_of(work, CAPACITY) == pytest.approx(busy / UTILISATION)


def test_blocks_with_only_reusable_content_are_not_in_use() -> None:
    loads = [
        LoadReport(num_blocks=100, num_free_blocks=100, num_cached_blocks=100),
        LoadReport(num_blocks=100, num_free_blocks=40, num_cached_blocks=90),
    ]
    columns = workers(*loads).columns
    assert used_blocks(columns) == 60
    assert kv_pressure(columns) == pytest.approx(0.3)
    assert kv_pressure(workers().columns) == 0.0


def test_capacity_is_the_mean_of_workers_that_have_reported() -> None:
    loads = [
        LoadReport(max_num_seqs=8, num_blocks=100, prefill_tokens_per_s=200.0),
        LoadReport(max_num_seqs=24, num_blocks=300, prefill_tokens_per_s=200.0),
    ]
    capacity = Capacity.of(workers(*loads), Priors())
    assert capacity is not None
    assert (capacity.seats, capacity.blocks) == (16, 200)
    assert capacity.prefill_tokens_per_s == pytest.approx(200.0)
    assert Capacity.of(workers(LoadReport()), Priors()) is None
    assert Capacity.of(workers(), Priors()) is None


def test_a_backlog_is_what_the_workers_compute_in_that_time() -> None:
    work = Work(uncached_tokens=3000, waiting_tokens=1000)
    assert backlog_s(work, 4, CAPACITY) == pytest.approx(2.0)
    assert backlog_s(work, 0, CAPACITY) == pytest.approx(8.0)


def test_a_request_waits_at_the_worker_with_the_shortest_wait() -> None:
    idle = LoadReport(max_num_seqs=8, num_blocks=900, num_free_blocks=900, prefill_tokens_per_s=500.0)
    busy = LoadReport(
        num_running=8, num_waiting=4, max_num_seqs=8, num_blocks=900, num_free_blocks=500, prefill_tokens_per_s=500.0
    )
    assert expected_wait_ms(workers(idle, busy), 0.0, Priors()) == 0.0
    full_ms = expected_wait_ms(workers(busy), 0.0, Priors())
    assert full_ms > 100.0
    with_prompts = LoadReport(
        num_running=8, max_num_seqs=16, num_uncached_tokens=1000, num_blocks=900, num_free_blocks=500,
        prefill_tokens_per_s=500.0,
    )  # fmt: skip
    assert expected_wait_ms(workers(with_prompts), 0.0, Priors()) == pytest.approx(2000.0)
    assert expected_wait_ms(workers(), 0.0, Priors()) == float("inf")


def observed(forecast: Forecast, needs: list[float], from_s: float = 0.0) -> list[int]:
    """The wanted workers when the need is looked at each second."""
    return [forecast.observe(need, from_s + number) for number, need in enumerate(needs)]


def test_a_steady_need_is_rounded_up() -> None:
    assert observed(Forecast(), [3.2] * 60)[-1] == 4
    assert observed(Forecast(), [3.0] * 60)[-1] == 3
    assert observed(Forecast(), [0.0] * 60)[-1] == 0


def test_a_rising_need_is_met_before_it_is_there() -> None:
    needs = [1.0] * 60 + [1.0 + second / 30 for second in range(120)]
    wanted = observed(Forecast(), needs)
    assert wanted[59] == 1
    # After the start of the ramp, the forecast sees the need of HORIZON_S later.
    assert wanted[170] >= needs[170] + HORIZON_S / 30 - 1
    assert all(here <= 1 + needs[number] + HORIZON_S / 30 + 1 for number, here in enumerate(wanted))


def test_a_need_that_falls_lets_workers_go_slowly() -> None:
    forecast = Forecast(window_s=180.0)
    observed(forecast, [4.0] * 300)
    falling = observed(forecast, [0.0] * 600, 300.0)
    assert falling[30] == 4
    assert falling[-1] == 1
    assert falling == sorted(falling, reverse=True)
    quick = Forecast(window_s=10.0)
    observed(quick, [4.0] * 300)
    assert observed(quick, [0.0] * 60, 300.0)[-1] == 1


def test_a_need_at_the_border_of_two_numbers_does_not_flap() -> None:
    forecast = Forecast()
    observed(forecast, [2.0] * 300)
    wanted = set(observed(forecast, [2.0 + 0.04 * (-1) ** second for second in range(300)], 300.0))
    assert len(wanted) == 1


def test_a_mean_counts_a_value_for_its_time() -> None:
    often, seldom = Mean(20.0), Mean(20.0)
    often.observe(0.0, 0.0)
    seldom.observe(0.0, 0.0)
    for second in range(1, 41):
        often.observe(1.0, float(second))
    seldom.observe(1.0, 40.0)
    assert often.value == pytest.approx(seldom.value)
    assert often.value == pytest.approx(1 - 2.718281828**-2)
