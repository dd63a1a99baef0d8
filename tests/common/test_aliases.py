"""Other names of models, and how requests are divided among several."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from headrace.common.aliases import parse_aliases


def test_a_name_that_is_no_alias_is_that_of_a_model() -> None:
    aliases = parse_aliases(["chat=a", "hub=OWNER/NAME:Q8_0@main"])
    assert aliases.model_of("chat", "k") == "a"
    assert aliases.model_of("hub", "k") == "OWNER/NAME:Q8_0@main"
    assert aliases.model_of("other", "k") == "other"
    assert aliases.items() == [("chat", "a"), ("hub", "OWNER/NAME:Q8_0@main")]


@pytest.mark.parametrize(
    ("weights", "shares"), [("90,b:10", (0.9, 0.1)), ("1,b:1", (0.5, 0.5)), ("1,b:3", (0.25, 0.75))]
)
def test_a_split_is_what_its_weights_say(weights: str, shares: tuple[float, float]) -> None:
    aliases = parse_aliases([f"gpt=a:{weights}"])
    number = 20_000
    models = Counter(aliases.model_of("gpt", f"request-{i}") for i in range(number))
    assert models["a"] / number == pytest.approx(shares[0], abs=0.01)
    assert models["b"] / number == pytest.approx(shares[1], abs=0.01)


def test_the_same_key_gets_the_same_model_and_aliases_are_independent() -> None:
    aliases = parse_aliases(["x=a:1,b:1", "y=a:1,b:1"])
    keys = [f"k{i}" for i in range(200)]
    assert [aliases.model_of("x", key) for key in keys] == [aliases.model_of("x", key) for key in keys]
    same = sum(aliases.model_of("x", key) == aliases.model_of("y", key) for key in keys)
    assert 60 < same < 140


def test_a_shadow_gets_its_share_of_both_models_requests() -> None:
    aliases = parse_aliases(["x=a:1,b:1", "y=a"], ["x=c:25"])
    keys = [f"k{i}" for i in range(8000)]
    copied = [key for key in keys if aliases.shadow_of("x", key) == "c"]
    assert len(copied) / len(keys) == pytest.approx(0.25, abs=0.02)
    of_a = sum(aliases.model_of("x", key) == "a" for key in copied)
    assert of_a / len(copied) == pytest.approx(0.5, abs=0.05)
    assert aliases.shadow_of("y", "k") == ""


@pytest.mark.parametrize(
    ("texts", "shadows", "problem"),
    [
        (["a"], [], "'a' is not ALIAS=MODEL"),
        (["=a"], [], "is not ALIAS=MODEL"),
        (["a=b", "a=c"], [], "the alias 'a' is given twice"),
        (["a=b", "b=c"], [], "a=b refers to an alias"),
        (["a=b:1,c"], [], "needs a weight above 0 for each"),
        (["a=b:1,c:0"], [], "needs a weight above 0 for each"),
        (["a=b:1,c:inf"], [], "needs a weight above 0 for each"),
        (["a=b:1,:2"], [], "needs a weight above 0 for each"),
        (["a=b:1,b:2"], [], "names a model twice"),
        (["a=b"], ["a=c"], "needs a percentage above 0 and up to 100"),
        (["a=b"], ["a=c:101"], "needs a percentage above 0 and up to 100"),
        (["a=b"], ["x=c:1"], "must give an alias"),
        (["a=b"], ["a=a:1"], "must give an alias, which has no other shadow, and the name of a model"),
        (["a=b"], ["a=c:1", "a=d:1"], "which has no other shadow"),
    ],
)
def test_what_makes_no_sense_is_refused(texts: list[str], shadows: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_aliases(texts, shadows)
