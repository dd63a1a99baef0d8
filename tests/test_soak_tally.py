"""Soaks continue where the last run has ended."""

from __future__ import annotations

from pathlib import Path

from tests.soak_tally import Tally


def test_rounds_of_several_runs_add_up(tmp_path: Path) -> None:
    file = tmp_path / "tally"
    drawn = {}
    for number, rng in Tally("ranks", 7, file).rounds(3):
        drawn[number] = rng.random()
        tally = Tally("ranks", 7, file)
        tally.note("a death" if number else "a hang", 1.5)
        if number == 1:
            break
    again = Tally("ranks", 7, file)
    assert again.num_rounds == 2
    assert str(again) == "ranks, seed 7: 2 rounds so far (a death 1, a hang 1)"
    ((number, rng),) = again.rounds(3)
    assert number == 2
    assert rng.random() not in drawn.values()
    others = (Tally("ranks", 7), Tally("stages", 7, file), Tally("ranks", 8, file))
    assert [other.num_rounds for other in others] == [0, 0, 0]


def test_a_round_has_the_same_choices_in_each_run() -> None:
    first, second = ([rng.random() for _, rng in Tally("ranks", 3).rounds(4)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 4


def test_a_run_begins_no_round_after_its_time() -> None:
    assert list(Tally("ranks", 3).rounds(4, most_s=-1)) == []
