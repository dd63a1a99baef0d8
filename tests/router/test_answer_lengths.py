"""Learning the length of answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.router.placement import answer_lengths
from headrace.router.placement.answer_lengths import AnswerLengths
from headrace.router.placement.rates import Priors

PRIOR = Priors().answer_tokens


def after(lengths: AnswerLengths, *num_tokens: int, model: str = "m") -> int:
    for count in num_tokens:
        lengths.ended(model, count)
    return lengths.priors(model).answer_tokens


def test_the_prior_holds_for_a_model_of_which_nothing_is_known() -> None:
    lengths = AnswerLengths()
    assert lengths.priors("m") == Priors()
    after(lengths, 5, 5, 5, model="other")
    assert lengths.priors("m") == Priors()


def test_a_few_answers_move_the_mean_a_little_and_many_move_it_all_the_way() -> None:
    lengths = AnswerLengths()
    assert PRIOR < after(lengths, 1000) < 300
    assert 990 <= after(lengths, *[1000] * 2000) <= 1000


def test_what_answers_were_like_long_ago_is_forgotten() -> None:
    lengths = AnswerLengths()
    after(lengths, *[1000] * 5000)
    assert after(lengths, *[20] * 2000) < 30


def test_models_are_apart_and_the_one_asked_longest_ago_is_forgotten() -> None:
    lengths = AnswerLengths()
    for number in range(answer_lengths.MAX_MODELS + 1):
        after(lengths, *[2000] * 50, model=str(number))
    assert len(lengths) == answer_lengths.MAX_MODELS
    assert lengths.priors("0") == Priors()
    assert lengths.priors("1").answer_tokens > PRIOR


@given(st.lists(st.integers(0, 10_000), min_size=1))
def test_the_mean_lies_within_the_prior_and_what_was_seen(counts: list[int]) -> None:
    mean = after(AnswerLengths(), *counts)
    assert max(1, min([PRIOR, *counts])) <= mean <= max([PRIOR, *counts])
    assert AnswerLengths().priors("m").weighed_tokens == Priors().weighed_tokens
