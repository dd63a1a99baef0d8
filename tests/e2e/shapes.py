"""Questions about drawn pictures, for the model in shapes_vlm/: which colour and shape is in a picture?

    for question in questions():
        question.pictures    one or two PNG files
        question.text        the words behind them
        question.right       what is drawn
        question.reference   what transformers answers, the same for most

A wrong pixel, place or order of pictures gives another answer: `swapped` asks the same of two pictures in the other
order. Drawing is seeded, and needs Pillow alone.
"""

from __future__ import annotations

import functools
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

MODEL = Path(__file__).with_name("shapes_vlm")
"""A model directory of a LLaVA."""
SIDE = 56
TOKENS_PER_PICTURE = 16
NUM_QUESTIONS = 200
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 210, 40),
    "black": (20, 20, 20),
    "purple": (150, 50, 170),
}
SHAPES = ("circle", "square", "triangle")
_ANSWERS = MODEL / "answers.json"
_COLOUR_RANGE = 20


@dataclass(frozen=True, slots=True)
class Question:
    """`pictures` are PNG files. `reference` is the answer of transformers; empty while it is being made."""

    pictures: tuple[bytes, ...]
    text: str
    right: str
    reference: str = ""

    @property
    def content(self) -> list[dict[str, str]]:
        """The parts of the message, as the chat template takes them."""
        return [*({"type": "image"} for _ in self.pictures), {"type": "text", "text": self.text}]


@functools.cache
def questions() -> tuple[Question, ...]:
    """The 200 questions: every other one is about one picture, the rest about two."""
    return _with_references(drawn(), "answers")


@functools.cache
def swapped() -> tuple[Question, ...]:
    """The questions about two pictures, in the same order, with the pictures in the other order."""
    return _with_references(drawn_swapped(), "swapped")


def drawn() -> tuple[Question, ...]:
    """The questions without the reference's answers."""
    return tuple(_question(number, is_swapped=False) for number in range(NUM_QUESTIONS))


def drawn_swapped() -> tuple[Question, ...]:
    """Those about two pictures in the other order, without the reference's answers."""
    return tuple(_question(number, is_swapped=True) for number in range(1, NUM_QUESTIONS, 2))


def _with_references(made: Sequence[Question], name: str) -> tuple[Question, ...]:
    answers: list[str] = json.loads(_ANSWERS.read_bytes())[name]
    return tuple(Question(one.pictures, one.text, one.right, answer) for one, answer in zip(made, answers, strict=True))


def _question(number: int, *, is_swapped: bool) -> Question:
    """The question of this number. Two pictures never show the same, so swapping them changes what is right."""
    draw = random.Random(number)
    things = draw.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], 1 + number % 2)
    pictures = [picture(colour, shape, draw) for colour, shape in things]
    asked = draw.randrange(len(things))
    if is_swapped:
        pictures.reverse()
        things.reverse()
    which = ("first ", "second ")[asked] if len(things) > 1 else ""
    return Question(tuple(pictures), f"what is in the {which}picture ?", "a {} {}".format(*things[asked]))


def picture(colour: str, shape: str, draw: random.Random) -> bytes:
    """A PNG file of one shape on a light ground."""
    image = Image.new("RGB", (SIDE, SIDE), _rgb([draw.randint(200, 255) for _ in range(3)]))
    radius = draw.randint(9, 17)
    x, y = (draw.randint(radius, SIDE - 1 - radius) for _ in range(2))
    fill = _rgb([part + draw.randint(-_COLOUR_RANGE, _COLOUR_RANGE) for part in COLOURS[colour]])
    box = (x - radius, y - radius, x + radius, y + radius)
    canvas = ImageDraw.Draw(image)
    if shape == "circle":
        canvas.ellipse(box, fill=fill)
    elif shape == "square":
        canvas.rectangle(box, fill=fill)
    else:
        canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _rgb(parts: Sequence[int]) -> tuple[int, int, int]:
    red, green, blue = (max(0, min(255, part)) for part in parts)
    return red, green, blue
