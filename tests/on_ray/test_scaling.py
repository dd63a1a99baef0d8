"""How many workers a signal asks for, and how a router's answer becomes a signal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.protos import router_pb2
from headrace.ray.scaling import SignalPolicy, desired
from headrace.ray.signals import signals_of

TARGETS = {"queue_wait_s": 2.0, "kv_pressure": 0.9}


@pytest.mark.parametrize(
    ("ready", "wanted", "queue_wait_s", "kv_pressure", "now", "expected"),
    [
        (1, 1, 8.0, 0.1, 1, 4),  # requests wait four times too long
        (2, 1, 0.0, 1.0, 2, 3),  # the cache is full
        (1, 4, 0.0, 0.1, 1, 4),  # routers want more
        (4, 1, 0.0, 0.0, 4, 1),  # idle: one remains
        (4, 0, 0.0, 0.0, 4, 1),
        (4, 1, 1.0, 0.1, 4, 2),  # with half of them the wait would be at its target
        (2, 1, 2.1, 0.1, 2, 2),  # near its target nothing changes
        (2, 1, 1.9, 0.1, 2, 2),
        (1, 1, 2.6, 0.1, 4, 4),  # three more load: none of them is stopped
        (0, 0, 0.0, 0.0, 3, 3),  # no router has seen a worker
    ],
)
def test_as_many_workers_as_are_wanted_and_more_above_a_target(
    ready: int, wanted: int, queue_wait_s: float, kv_pressure: float, now: int, expected: int
) -> None:
    values = {"workers": ready, "workers_wanted": wanted, "queue_wait_s": queue_wait_s, "kv_pressure": kv_pressure}
    assert desired(values, TARGETS, now) == expected


@pytest.mark.parametrize(
    ("ready", "wanted", "kv_pressure", "now", "expected"),
    [
        (1, 0, 0.0, 1, 0),  # idle for long
        (1, 1, 0.0, 1, 1),
        (1, 0, 0.5, 1, 1),  # requests still use its cache
        (0, 1, 0.0, 0, 0),  # a gateway's call starts the first one
        (0, 1, 0.0, 1, 1),  # it loads
    ],
)
def test_no_worker_is_enough_where_that_is_allowed(
    ready: int, wanted: int, kv_pressure: float, now: int, expected: int
) -> None:
    values = {"workers": ready, "workers_wanted": wanted, "queue_wait_s": 0.0, "kv_pressure": kv_pressure}
    found = {name: {"a": value} for name, value in values.items()}
    context = SimpleNamespace(aggregated_metrics=found, target_num_replicas=now)
    assert SignalPolicy(least=0, **TARGETS)(context) == (expected, {})


def test_the_policy_takes_what_any_replica_reports() -> None:
    found = {
        "workers": {"a": 2.0, "b": 1.0},
        "workers_wanted": {"a": 2.0, "b": 5.0},
        "queue_wait_s": {"a": 0.1, "b": 0.0},
        "kv_pressure": {},
    }
    policy = SignalPolicy(**TARGETS)
    assert policy(SimpleNamespace(aggregated_metrics=found, target_num_replicas=2)) == (5, {})


@pytest.mark.parametrize("found", [None, {}, {"workers": {}}, {"workers": {"a": 2.0}}])
def test_without_a_signal_nothing_changes(found: dict[str, dict[str, float]] | None) -> None:
    policy = SignalPolicy(**TARGETS)
    assert policy(SimpleNamespace(aggregated_metrics=found, target_num_replicas=3)) == (3, {})


def test_a_routers_answer_becomes_a_signal_of_each_model() -> None:
    answer = [
        router_pb2.ScalingSignal(model="a", workers_ready=2, workers_wanted=3, queue_wait_ms=1500, kv_pressure=0.25),
        router_pb2.ScalingSignal(model="b"),
    ]
    assert signals_of(answer) == {
        "a": {"workers": 2.0, "workers_wanted": 3.0, "queue_wait_s": 1.5, "kv_pressure": 0.25},
        "b": {"workers": 0.0, "workers_wanted": 0.0, "queue_wait_s": 0.0, "kv_pressure": 0.0},
    }
