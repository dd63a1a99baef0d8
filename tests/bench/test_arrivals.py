"""Arrival times and lengths: their rates, their spread, and that a seed repeats them."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import pytest

from headrace.bench.arrivals import Arrivals, RampUp
from headrace.bench.lengths import Lengths


def gaps(arrivals: Arrivals, count: int = 20_000) -> list[float]:
    times = arrivals.times(count, random.Random(3))
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(
    burstiness: float, variation: float
) -> None:
    found = gaps(Arrivals(10.0, burstiness))
    assert statistics.fmean(found) == pytest.approx(0.1, rel=0.001)
    assert statistics.pstdev(found) / statistics.fmean(found) == pytest.approx(variation, abs=0.06)


def test_the_offered_rate_is_the_one_asked_for_whatever_the_seed() -> None:
    for seed in range(5):
        assert Arrivals(8.0).times(40, random.Random(seed))[-1] == pytest.approx(5.0)


def test_without_a_rate_all_are_due_at_once() -> None:
    assert Arrivals().times(3, random.Random(0)) == [0.0, 0.0, 0.0]
    assert not Arrivals().are_timed


def test_a_seed_repeats_the_times() -> None:
    assert Arrivals(5.0).times(50, random.Random(1)) == Arrivals(5.0).times(50, random.Random(1))


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 55.0), ("exponential", math.sqrt(1000))])
def test_a_ramp_raises_the_rate_from_its_start_to_its_end(strategy: str, middle: float) -> None:
    ramp = RampUp(strategy, 10.0, 100.0)  # type: ignore[arg-type]
    assert [ramp.rate(share) for share in (0.0, 0.5, 1.0)] == pytest.approx([10.0, middle, 100.0])
    found = gaps(Arrivals(ramp_up=ramp))
    assert statistics.fmean(found[:300]) == pytest.approx(0.1, rel=0.2)
    assert statistics.fmean(found[-300:]) == pytest.approx(0.01, rel=0.2)


def test_a_linear_ramp_may_begin_at_zero() -> None:
    assert all(map(math.isfinite, Arrivals(ramp_up=RampUp("linear", 0.0, 10.0)).times(20, random.Random(0))))


def test_a_ramp_passes_each_whole_rate() -> None:
    assert RampUp("linear", 2.0, 6.0).whole_rates([0.0, 1.0, 2.0]) == [(2, 0.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]
    assert RampUp("exponential", 1.0, 4.0).whole_rates([0.5]) == [(1, 0.0)]


def drawn(lengths: Lengths) -> list[int]:
    rng = random.Random(5)
    return [lengths.draw(rng) for _ in range(20_000)]


def test_exponential_lengths_have_their_mean() -> None:
    found = drawn(Lengths("exponential", 128))
    assert statistics.fmean(found) == pytest.approx(128, rel=0.03)
    assert statistics.pstdev(found) == pytest.approx(128, rel=0.05)
    assert min(found) == 1


def test_lognormal_lengths_have_their_median_and_sigma() -> None:
    found = drawn(Lengths("lognormal", 400, 1.0))
    assert statistics.median(found) == pytest.approx(400, rel=0.03)
    assert statistics.pstdev(map(math.log, found)) == pytest.approx(1.0, abs=0.03)


def test_uniform_lengths_stay_within_their_share() -> None:
    found = drawn(Lengths("uniform", 100, 0.2))
    assert (min(found), max(found)) == (80, 120)


def test_lengths_are_at_least_one_and_at_most_their_limit() -> None:
    found = drawn(Lengths("lognormal", 10, 3.0, 50))
    assert (min(found), max(found)) == (1, 50)
    assert set(drawn(Lengths("fixed", 7))) == {7}
