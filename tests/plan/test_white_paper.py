"""The sizing question of white papers on CPUs: 50 users, each with a request every 25 s, and 100 ms a token."""

from __future__ import annotations

import msgspec
import pytest

from headrace.bench.calibration import Layout
from headrace.plan.fleet import Fleet, Kind
from headrace.plan.load import Load, Requests, lengths
from headrace.plan.objectives import Limit, Objectives
from headrace.plan.search import Search, Trial
from headrace.sim.step_cost import StepCostPair, default
from tests.plan.calibrations import calibration

MOST = 8192


@pytest.fixture(scope="module")
def trial_of() -> dict[int, Trial]:
    """Trials by the number of users, on two cores of an EPYC with the demo model, whose costs are committed."""
    cost = default()
    small = calibration()
    host = msgspec.structs.replace(
        small, steps=StepCostPair(cost, cost), layout=Layout(1, 2, 200_000, 128, 1024, 1024, 1)
    )
    asked = Requests(lengths("lognormal", 256, MOST), lengths("exponential", 128, MOST), 256, 128, most=MOST)
    objectives = Objectives(None, Limit(95, 0.1))
    found = {}
    for users in (50, 200):
        search = Search(Load(asked, per_s=users / 25), objectives, (1,), 120)
        found[users] = search.trial(Fleet(Kind("epyc", host), 1))
    return found


def test_two_cores_carry_fifty_users_of_a_small_model(trial_of: dict[int, Trial]) -> None:
    trial = trial_of[50]
    assert trial.is_good
    assert trial.per_s == pytest.approx(2.0, rel=0.25)
    assert trial.tpot.p95 < 0.1


def test_four_times_the_users_are_too_many(trial_of: dict[int, Trial]) -> None:
    trial = trial_of[200]
    assert not trial.is_good
    assert any(sentence.startswith("time a token: p95 is") for sentence in trial.broken)
