"""Models of departed workers that may come back."""

from __future__ import annotations

from headrace.router.fleet.known_models import Departed


def test_a_model_may_come_back_for_a_time_after_its_last_worker_went() -> None:
    departed = Departed(600.0, 10)
    assert not departed.may_come_back("x", 0.0)
    departed.went("a", {"x"}, 0.0)
    departed.went("b", {"x"}, 100.0)
    assert departed.may_come_back("x", 650.0), "b may"
    assert not departed.may_come_back("y", 650.0)
    assert not departed.may_come_back("x", 701.0)


def test_a_worker_that_is_back_is_not_waited_for() -> None:
    departed = Departed(600.0, 10)
    departed.went("a", {"x"}, 0.0)
    departed.came("a")
    assert not departed.may_come_back("x", 1.0)
    departed.went("a", {"y"}, 2.0)
    assert not departed.may_come_back("x", 3.0), "it came back with another model"


def test_each_model_of_a_worker_may_come_back() -> None:
    departed = Departed(600.0, 10)
    departed.went("a", {"x", "x with sql"}, 0.0)
    assert [departed.may_come_back(name, 1.0) for name in ("x", "x with sql", "sql")] == [True, True, False]


def test_the_oldest_are_forgotten_beyond_the_bound() -> None:
    departed = Departed(600.0, 4)
    for number, name in enumerate("abc"):
        departed.went(name, {name, name.upper()}, float(number))
    assert [departed.may_come_back(name, 3.0) for name in "abc"] == [False, True, True]
    departed.went("b", {"b"}, 4.0)
    departed.went("d", {"d"}, 5.0)
    assert [departed.may_come_back(name, 5.0) for name in "bcd"] == [True, True, True]
    departed.came("c")
    departed.went("e", set("efg"), 6.0)
    assert [departed.may_come_back(name, 6.0) for name in "bde"] == [False, True, True]
    departed.went("large", set("lmnopq"), 7.0)
    assert [departed.may_come_back(name, 7.0) for name in "delq"] == [False, False, True, True]
