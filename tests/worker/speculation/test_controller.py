"""The number of draft tokens that a step verifies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from headrace.worker.speculation.acceptance_rate import AcceptanceRate
from headrace.worker.speculation.controller import BranchChance, SizeCorrections, StepLine, best_counts
from headrace.worker.speculation.proposer import Draft, Source


def counts(
    chances: Sequence[float],
    line: StepLine,
    *,
    length: int = 8,
    size_before: int | None = None,
    most_tokens: int = 64,
    most_ms: float = math.inf,
    least_tokens: int = 1,
    corrections: SizeCorrections | None = None,
    branches: Sequence[BranchChance] = (),
) -> list[int]:
    return best_counts(
        chances,
        [length] * len(chances),
        line,
        (corrections or SizeCorrections()).of,
        size_before=len(chances) if size_before is None else size_before,
        most_tokens=most_tokens,
        most_ms=most_ms,
        least_tokens=least_tokens,
        branches=branches,
    )


CHEAP_TOKENS = StepLine(base_ms=100.0, token_ms=2.0, change_ms=5.0)
DEAR_TOKENS = StepLine(base_ms=40.0, token_ms=40.0, change_ms=5.0)


def test_likely_drafts_are_long_and_unlikely_ones_are_left() -> None:
    (likely,), (half,), (unlikely,) = (counts([chance], CHEAP_TOKENS) for chance in (0.95, 0.5, 0.02))
    assert likely >= 7 > half > unlikely == 0


def test_a_tree_is_taken_where_it_gives_more_than_a_longer_draft() -> None:
    def tree(chance: float, second: float, line: StepLine = CHEAP_TOKENS, num_repeated: int = 1) -> list[int]:
        branch = BranchChance(0, (1 - chance) * second, chance, 3, num_repeated)
        return counts([chance], line, length=3, branches=[branch])

    assert tree(0.5, 0.6) == [3, 3]
    assert tree(0.97, 0.6) == [3, 0], "the draft is rarely wrong at once"
    assert tree(0.5, 0.02) == [3, 0], "the second token is rarely right"
    assert tree(0.5, 0.6, StepLine(base_ms=100.0, token_ms=25.0, change_ms=5.0)) == [1, 0]
    assert tree(0.5, 0.02, num_repeated=0) == [3, 0]


def test_a_branch_is_never_longer_than_its_draft() -> None:
    for chance in (0.05, 0.3, 0.6):
        for second in (0.1, 0.5, 0.9):
            branch = BranchChance(0, (1 - chance) * second, chance, 8, 0)
            draft, other = counts([chance], CHEAP_TOKENS, branches=[branch])
            assert other <= draft


def test_where_a_token_costs_what_a_step_costs_nothing_is_drafted() -> None:
    assert counts([0.9] * 32, DEAR_TOKENS) == [0] * 32


def test_the_rate_is_close_to_the_best_although_sizes_are_few() -> None:
    for chances in ([0.8], [0.9, 0.1], [0.5] * 4):
        chosen = counts(chances, CHEAP_TOKENS._replace(change_ms=0.0), length=4)

        def rate(drafted: Sequence[int], chances: Sequence[float] = chances) -> float:
            tokens = sum(1 + sum(p**i for i in range(1, n + 1)) for p, n in zip(chances, drafted, strict=True))
            return tokens / (100.0 + 2.0 * sum(drafted))

        assert rate(chosen) >= 0.85 * max(rate([n] * len(chances)) for n in range(5))


def test_the_likelier_stream_gets_more() -> None:
    likely, unlikely = counts([0.9, 0.3], CHEAP_TOKENS)
    assert likely > unlikely


def test_a_change_of_size_has_to_pay() -> None:
    line = StepLine(base_ms=7.0, token_ms=0.4, change_ms=60.0)
    assert counts([0.8], line) == [0]
    assert counts([0.8], line, size_before=8) == [7]
    assert counts([0.05], line._replace(change_ms=5.0), size_before=8) == [0], "it would never change back"


def test_a_token_in_place_of_padding_is_free() -> None:
    for chance, length in ((0.1, 1), (0.1, 8), (0.02, 8)):
        found = counts([chance], DEAR_TOKENS, length=length, size_before=2, least_tokens=2)
        assert found == [chance > 0.05], "what is gained has to exceed the margin"
    assert counts([0.1] * 2, DEAR_TOKENS, size_before=2, least_tokens=2) == [0, 0]


def test_a_larger_size_is_kept_only_while_drafts_are_likely() -> None:
    line = StepLine(base_ms=20.0, token_ms=1.0, change_ms=10.0)
    assert counts([0.4], line, size_before=6, least_tokens=2) == [5]
    assert counts([0.08], line, size_before=6, least_tokens=2) == [1]


def test_limits_hold() -> None:
    assert sum(counts([0.9] * 4, CHEAP_TOKENS, most_tokens=10)) <= 6
    assert counts([0.9], CHEAP_TOKENS, most_ms=104.0)[0] <= 2
    assert counts([0.9], CHEAP_TOKENS, most_ms=50.0) == [0]
    assert counts([0.9], CHEAP_TOKENS, most_tokens=1) == [0]


def test_sizes_that_cost_more_than_predicted_are_avoided() -> None:
    corrections = SizeCorrections()
    for _ in range(50):
        corrections.observe(1, 1.0)
        for size in (2, 4, 6, 8):
            corrections.observe(size, 2.4)
    assert counts([0.4], CHEAP_TOKENS, length=7, corrections=corrections) == [0]
    assert corrections.of(7) == pytest.approx(corrections.of(6))


def test_acceptance_is_learned_for_all_and_for_each() -> None:
    rate, of_one = AcceptanceRate(), AcceptanceRate.of_request()
    draft = Draft([1, 2, 3, 4], Source.NGRAM, 2)
    before = rate.chance(draft, None)
    for _ in range(30):
        rate.observe(draft, 4, 4)
        of_one.observe(draft, 4, 0)
    assert rate.chance(draft, None) > max(before, 0.9)
    assert rate.chance(draft, of_one) < 0.4
    assert rate.chance(draft._replace(level=0), None) < before, "other classes of drafts learn nothing"
