"""Prompt lookup, and predictions."""

from __future__ import annotations

import random
import time

import pytest

from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.worker.speculation.history import History
from headrace.worker.speculation.proposer import Source


def draft_after(prompt: list[int], answer: list[int], most: int = 4, prediction: list[int] | None = None) -> list[int]:
    history = History(prediction or [], prompt)
    for end in range(len(answer) + 1):  # token by token, as they come
        history.extend([*prompt, *answer[:end]])
    return list(history.draft(most).token_ids)


def test_what_followed_the_same_tokens_is_proposed() -> None:
    assert draft_after([1, 2, 3, 4, 5, 6, 7], [9, 2, 3, 4]) == [5, 6, 7, 9]
    assert draft_after([1, 2, 3, 4, 5, 6, 7], [9, 3, 4], 2) == [5, 6], "after two equal tokens"
    assert draft_after([1, 2, 3, 4, 5, 6, 7], [9, 4], 2) == [5, 6], "after one"
    assert draft_after([1, 2, 3, 4, 5, 6, 7], [9]) == []
    assert draft_after([1, 2, 3], []) == []


def test_tokens_of_images_are_never_proposed() -> None:
    image = [FIRST_PSEUDO_TOKEN + number for number in range(5)]
    assert draft_after([1, 2, 3, *image, 4, 5], [9, 2, 3]) == []
    assert draft_after([1, 2, 3, 7, *image, 4, 5], [9, 2, 3]) == [7]
    assert draft_after([*image, 4, 5, 6], [9, 4]) == [5, 6, 9, 4]


def test_the_longest_match_is_preferred_to_a_later_one() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 70, 71, 9, 4, 5, 6, 80, 81]
    assert draft_after(prompt, [1, 2, 3, 4, 5, 6], 2) == [70, 71]
    assert draft_after(prompt, [5, 4, 5, 6], 2) == [80, 81]


def test_a_place_is_followed_as_long_as_it_is_right() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    assert draft_after(prompt, [1, 2, 3, 4, 5], 2) == [6, 7]
    assert draft_after(prompt, [1, 2, 3, 4, 99], 2) == []


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert draft_after([50], [1, 2, 1, 2, 1, 2], 7) == [1, 2, 1, 2, 1, 2, 1]


def test_a_prediction_is_proposed_from_its_beginning_and_behind_what_differs() -> None:
    prediction = [10, 11, 12, 13, 14, 15]
    assert draft_after([1], [], 3, prediction) == [10, 11, 12]
    assert draft_after([1], [10, 11], 9, prediction) == [12, 13, 14, 15]
    assert draft_after([1], [99, 11, 12, 13], 9, prediction) == [14, 15]
    assert draft_after([1], prediction, 3, prediction) == [], "behind its end nothing is predicted"
    history = History(prediction, [1, 10, 11, 12])
    assert history.draft(2).source is Source.PREDICTION


@pytest.mark.parametrize("seed", range(20))
def test_it_makes_no_difference_when_tokens_are_added(seed: int) -> None:
    rng = random.Random(seed)
    prompt, answer = ([rng.randrange(3) for _ in range(40)] for _ in range(2))
    at_once, one_by_one = History([], prompt), History([], prompt)
    for end in range(1, len(answer) + 1):
        one_by_one.extend([*prompt, *answer[:end]])
    at_once.extend([*prompt, *answer])
    assert len(at_once.draft(5).token_ids) == len(one_by_one.draft(5).token_ids)
    for history in (at_once, one_by_one):
        length = history._length
        assert (length >= 1) == (len(history.draft(5).token_ids) == 5)
        assert length == 0 or history._tokens[history._at - length : history._at] == history._tokens[-length:]


def test_a_long_prompt_is_indexed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.worker.speculation.history._MOST_INDEXED", 16)
    prompt = list(range(100, 200))
    history = History([], prompt)
    drafts = []
    for end in range(10):
        tokens = [*prompt, *range(10), *prompt[60 : 61 + end]]
        history.extend(tokens)
        drafts.append(list(history.draft(2).token_ids))
    assert drafts[:4] == [[], [], [], []], "after four steps the first 64 tokens are indexed"
    assert drafts[4:] == [prompt[61 + end : 63 + end] for end in range(4, 10)]


@pytest.mark.parametrize("seed", range(10))
def test_the_same_is_found_in_dicts_and_in_arrays(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    prompt, answer = ([rng.randrange(6) for _ in range(count)] for count in (150, 150))

    def drafts() -> list[tuple[list[int], int]]:
        history, found = History([], prompt), []
        for end in range(len(answer) + 1):
            history.extend([*prompt, *answer[:end]])
            draft = history.draft(5)
            found.append((list(draft.token_ids), draft.level))
        return found

    in_dicts = drafts()
    monkeypatch.setattr("headrace.worker.speculation.history._MOST_IN_DICTS", rng.choice([1, 8, 20]))
    assert drafts() == in_dicts


def test_a_step_behind_a_long_prompt_costs_no_more_than_behind_a_short_one() -> None:
    def seconds(num_tokens: int) -> float:
        rng = random.Random(1)
        tokens = [rng.randrange(50_000) for _ in range(num_tokens)]
        history = History([], tokens)
        times = []
        for _ in range(200):
            tokens.append(rng.randrange(50_000))
            start_s = time.perf_counter()
            history.extend(memoryview_of(tokens))
            history.draft(8)
            times.append(time.perf_counter() - start_s)
        return sorted(times)[100]

    assert seconds(100_000) < 20 * seconds(100) + 1e-4


class memoryview_of:
    """The end of a list, without a copy of the whole."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice) -> list[int]:
        return self._tokens[part]
