"""Who is in the fleet, and what a worker does while the directory does not know it."""

from __future__ import annotations

import pytest

from headrace.ray import directory
from headrace.ray.directory import Directory, Front, KnownRouters, WorkerMember, merged


def front(name: str, **signals: dict[str, float]) -> Front:
    return Front(name, "host-a", f"http://{name}:8000", f"{name}:50051", f"{name}:9100", signals)


def worker(name: str) -> WorkerMember:
    return WorkerMember(name, "host-a", "m", "host-a/numa-0", "10.0.0.1:5", "10.0.0.1:6", (0,), (0, 1), 7, 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(directory.time, "monotonic", lambda: now[0])
    return now


def test_who_meets_the_directory_learns_of_the_gateways(clock: list[float]) -> None:
    found = Directory()
    assert found.meet(worker("w")) == []
    assert found.meet(front("b")) == [front("b")]
    assert found.meet(front("a")) == [front("a"), front("b")]
    assert found.meet(worker("w")) == [front("a"), front("b")]
    assert found.members() == [front("a"), front("b"), worker("w")]


def test_the_silent_are_forgotten_and_so_are_those_that_leave(clock: list[float]) -> None:
    found = Directory()
    found.meet(front("a"))
    clock[0] += 8
    found.meet(front("b"))
    clock[0] += 4
    assert found.members() == [front("b")]
    found.leave("b")
    found.leave("b")
    assert found.members() == []


def test_a_new_directory_that_knows_nobody_takes_no_router_from_a_worker() -> None:
    routers = KnownRouters()
    assert routers.listed(["a:1", "b:1"], 0.0) == {"a:1", "b:1"}
    assert routers.listed([], 5.0) == {"a:1", "b:1"}
    assert routers.listed(["b:1"], 6.0) == {"a:1", "b:1"}
    assert routers.listed(["b:1"], 21.0) == {"b:1"}


def test_a_router_that_does_not_know_the_workers_yet_hides_nothing() -> None:
    fronts = [
        front("new"),
        front("old", m={"workers": 2.0, "kv_pressure": 0.5}),
        front("third", m={"kv_pressure": 0.7}),
    ]
    assert merged(fronts, "m") == {"workers": 2.0, "kv_pressure": 0.7}
    assert merged(fronts, "other") == {}
