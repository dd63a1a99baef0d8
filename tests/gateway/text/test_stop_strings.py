"""The stop-string matcher ends a text at the same place for any split, and releases as much as possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.text.stop_strings import StopMatcher

# Few letters, so that stop strings occur, overlap and nearly occur.
TEXTS = st.text("abé", max_size=20)
STOPS = st.lists(st.text("abé", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The released text and the stop string, found by checking every prefix."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> str:
    released = ""
    for piece in pieces:
        released += matcher.push(piece)
        if matcher.match is not None:
            return released
    return released + matcher.finish()


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(text=TEXTS, stops=STOPS, include=st.booleans(), data=st.data())
def test_every_cut_gives_what_looking_at_every_prefix_gives(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    matcher = StopMatcher(stops, include)
    assert (run(matcher, pieces_of(text, data)), matcher.match) == reference(text, stops, include)


@given(text=TEXTS, stops=STOPS, data=st.data())
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopMatcher(stops)
    pushed = released = ""
    for piece in pieces_of(text, data):
        pushed += piece
        released += matcher.push(piece)
        if matcher.match is not None:
            return
        suffixes = [pushed[i:] for i in range(len(pushed))]
        held = max((len(s) for s in suffixes if any(stop.startswith(s) and stop != s for stop in stops)), default=0)
        assert len(pushed) - len(released) == held


@pytest.mark.parametrize(
    ("stops", "pieces", "released", "match"),
    [
        (["\n\nUser:"], ["42.\n", "\nUs", "er: hi"], "42.", "\n\nUser:"),
        (["aab"], ["aa", "aab"], "aa", "aab"),
        (["abc", "b"], ["abc"], "a", "b"),
        (["b", "ab"], ["xab"], "x", "ab"),
        ([], ["any", "thing"], "anything", None),
    ],
)
def test_the_stop_string_that_is_completed_first_wins(
    stops: list[str], pieces: list[str], released: str, match: str | None
) -> None:
    matcher = StopMatcher(stops)
    assert run(matcher, pieces) == released
    assert matcher.match == match


def test_the_stop_string_stays_in_the_text_on_request_and_nothing_behind_it() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert run(matcher, ["the E", "ND of it"]) == "the END"
