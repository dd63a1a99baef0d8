"""The questions about drawn pictures are worth asking: the reference knows what is drawn, and in which picture."""

from __future__ import annotations

from tests.e2e.shapes import COLOURS, SHAPES, questions, swapped


def test_the_reference_knows_what_is_drawn() -> None:
    found = [*questions(), *swapped()]
    assert len({question.pictures for question in found}) == len(found)
    assert {question.right for question in found} == {f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES}
    assert sum(question.right == question.reference for question in found) == 286


def test_swapped_pictures_swap_the_answers_of_the_reference() -> None:
    of_two = questions()[1::2]
    for question, other in zip(of_two, swapped(), strict=True):
        assert (question.text, question.pictures[::-1]) == (other.text, other.pictures)
        assert question.right != other.right
    assert sum(one.reference != other.reference for one, other in zip(of_two, swapped(), strict=True)) == 99
