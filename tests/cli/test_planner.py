"""Which models are loaded and unloaded: cases, and a long run of random requests."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.cli.hosting.planner import Decisions, ModelView, Rules, State, decide

RULES = Rules(stay_s=2, patience_s=5, turn_s=10)
GIB = 1 << 30


def unloaded(name: str, wanted_since_s: float | None = None, **fields: object) -> ModelView:
    return replace(ModelView(name, State.UNLOADED, GIB, wanted_since_s=wanted_since_s), **fields)  # type: ignore[arg-type]


def loaded(name: str, last_used_s: float = 0.0, **fields: object) -> ModelView:
    made = ModelView(name, State.LOADED, GIB, has_processes=True, last_used_s=last_used_s)
    return replace(made, **fields)  # type: ignore[arg-type]


def now(*models: ModelView, budget_gib: float | None = 2, now_s: float = 100.0) -> Decisions:
    return decide(models, None if budget_gib is None else int(budget_gib * GIB), now_s, RULES)


def test_without_a_budget_everything_that_is_wanted_is_loaded() -> None:
    assert now(unloaded("a", 1), unloaded("b", 2), unloaded("c"), budget_gib=None) == Decisions(load=["a", "b"])


def test_what_fits_is_loaded_pinned_models_first_then_in_order_of_the_requests() -> None:
    assert now(unloaded("a", 3), unloaded("b", 2), unloaded("c", 4, is_pinned=True)).load == ["c", "b"]


def test_the_least_recently_used_model_gives_way() -> None:
    assert now(loaded("a", 50), loaded("b", 40), unloaded("c", 99)).unload == {"b": "it makes room for c"}


def test_only_as_many_models_give_way_as_are_needed() -> None:
    large = unloaded("c", 99, num_bytes=2 * GIB)
    assert now(loaded("a", 50), loaded("b", 40), loaded("d", 30), large, budget_gib=3).unload.keys() == {"d", "b"}


def test_a_model_that_is_leaving_makes_room_first() -> None:
    leaving = loaded("a", state=State.UNLOADING)
    assert now(leaving, loaded("b"), unloaded("c", 99)) == Decisions()


def test_nothing_is_unloaded_if_that_would_not_suffice() -> None:
    large = unloaded("c", 99, num_bytes=2 * GIB)
    assert now(loaded("a"), loaded("b", is_busy=True), large) == Decisions()


def test_a_busy_model_gives_way_only_after_its_turn_and_to_one_that_waited() -> None:
    busy = loaded("a", 100, is_busy=True, loaded_s=80), loaded("b", 100, is_busy=True, loaded_s=85)
    assert now(*busy, unloaded("c", 96)) == Decisions(), "has not waited for long"
    assert list(now(*busy, unloaded("c", 95)).unload) == ["a"]
    young = loaded("a", 100, is_busy=True, loaded_s=91), loaded("b", 100, is_busy=True, loaded_s=92)
    assert now(*young, unloaded("c", 50)) == Decisions(), "nobody has had a turn"


def test_a_model_that_was_just_loaded_stays_for_the_requests_that_waited() -> None:
    assert now(loaded("a", 99, loaded_s=99), loaded("b", 99, loaded_s=99), unloaded("c", 90)) == Decisions()


def test_nobody_takes_memory_before_the_first_in_line() -> None:
    large = unloaded("c", 90, num_bytes=2 * GIB)
    assert now(loaded("a", is_busy=True, loaded_s=95), large, unloaded("d", 91)) == Decisions()


def test_what_can_never_fit_is_refused_and_holds_nobody_up() -> None:
    large = unloaded("c", 90, num_bytes=3 * GIB)
    found = now(loaded("a"), large, unloaded("d", 91))
    assert found.load == ["d"]
    assert found.refuse == {"c": "it needs 3.00 GiB of memory, and the budget is 2.00 GiB"}
    pinned = loaded("a", is_pinned=True)
    found = now(pinned, unloaded("c", 90, num_bytes=2 * GIB))
    assert "2.00 GiB of memory beside 1.00 GiB for pinned models, and the budget is 2.00" in found.refuse["c"]


def test_a_model_that_is_larger_than_expected_makes_idle_ones_leave() -> None:
    grown = loaded("a", 90, num_bytes=2 * GIB, is_busy=True, loaded_s=90)
    found = now(grown, loaded("b", 50))
    assert found.unload == {"b": "the loaded models take more memory than the budget has"}
    assert now(grown, loaded("b", 50), budget_gib=3).unload == {}


@pytest.mark.parametrize(
    ("changes", "is_unloaded"),
    [
        ({}, True),
        ({"last_used_s": 41.0}, False),
        ({"is_pinned": True}, False),
        ({"is_busy": True}, False),
        ({"wanted_since_s": 99.0}, False),
        ({"idle_s": None}, False),
        ({"state": State.LOADING}, False),
    ],
)
def test_an_idle_model_is_unloaded(changes: dict[str, object], is_unloaded: bool) -> None:
    model = replace(loaded("a", 40, idle_s=60.0), **changes)  # type: ignore[arg-type]
    assert now(model).unload == ({"a": "it was not used for 60 s"} if is_unloaded else {})


@pytest.mark.parametrize("seed", range(20))
def test_under_random_load_everybody_is_served_within_the_budget(seed: int) -> None:
    """A host of six models with room for some of them. Loading takes 3 s, unloading 1 s, a request up to 8 s."""
    rng = random.Random(seed)
    names = [f"m{number}" for number in range(6)]
    sizes = {name: rng.choice([1, 1, 2]) * GIB for name in names}
    budget = rng.choice([2, 3, 4]) * GIB
    state = dict.fromkeys(names, State.UNLOADED)
    since, used_s, loaded_s = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    waiting: dict[str, float] = {}
    busy_until_s = dict.fromkeys(names, 0.0)
    longest_s = 0.0
    for step in range(4000):
        now_s = step * 0.5
        if rng.random() < 0.3 and now_s < 1800:
            name = rng.choice(names)
            waiting.setdefault(name, now_s)
        for name in names:
            if state[name] is State.LOADING and now_s - since[name] >= 3:
                state[name], loaded_s[name], used_s[name] = State.LOADED, now_s, now_s
            if state[name] is State.UNLOADING and now_s - since[name] >= 1 and busy_until_s[name] <= now_s:
                state[name] = State.UNLOADED
            if state[name] is State.LOADED and name in waiting:
                longest_s = max(longest_s, now_s - waiting.pop(name))
                busy_until_s[name] = now_s + rng.uniform(0.5, 8)
                used_s[name] = now_s
        views = [
            ModelView(
                name,
                state[name],
                sizes[name],
                has_processes=state[name] is not State.UNLOADED,
                is_busy=busy_until_s[name] > now_s,
                wanted_since_s=waiting.get(name),
                loaded_s=loaded_s[name],
                last_used_s=used_s[name],
                idle_s=30.0,
            )
            for name in names
        ]
        found = decide(views, budget, now_s, RULES)
        assert not found.refuse
        for name in found.load:
            state[name], since[name] = State.LOADING, now_s
        for name in found.unload:
            state[name], since[name] = State.UNLOADING, now_s
        assert sum(sizes[name] for name in names if state[name] is not State.UNLOADED) <= budget
    assert not waiting
    assert longest_s < 150
    assert all(one is State.UNLOADED for one in state.values()), "idle at the end"
