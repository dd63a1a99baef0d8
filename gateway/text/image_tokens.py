"""The tokens of a model's images: the placeholder that its chat template writes, and the tokens that replace it.

    template    ... <image> ...                     one placeholder for each image
    prompt      ... <row> P P P <row> P P P ...     marks, and the image's pseudo tokens (`common.vision.identity`)

Placeholders in the token ids come from the template alone: in what callers write, their texts stay text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.common.vision.family import Detail, FamilyError, ImageFamily
from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN, digest, pseudo_tokens

if TYPE_CHECKING:
    from headrace.gateway.text.tokenizer import Tokenizer

# Texts of marks that are kept with their tokens. A family has a few dozen of them.
_MAX_MARKS = 4096


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt."""

    data: bytes
    """The encoded file."""
    detail: Detail
    token_ids: array[int]
    """What replaces its placeholder."""
    num_tokens: int
    """Image tokens among these."""
    name: str = ""
    """Its field, for errors."""


class ImageTokens:
    """The images of one model. Its methods may be called from several threads at once."""

    def __init__(self, family: ImageFamily, tokenizer: Tokenizer) -> None:
        """Raises `FamilyError` if the tokenizer does not know the placeholder."""
        self.family = family
        self._tokenizer = tokenizer
        self._marks: dict[str, Sequence[int]] = {}
        if self._ids_of(family.placeholder) != [family.placeholder_token_id]:
            raise FamilyError(f"the tokenizer does not make the token {family.placeholder_token_id} of its placeholder")

    @property
    def placeholder(self) -> str:
        """The text that a chat template writes for an image."""
        return self.family.placeholder

    @property
    def placeholder_id(self) -> int:
        """The token of the placeholder."""
        return self.family.placeholder_token_id

    @property
    def reserved_ids(self) -> frozenset[int]:
        """Tokens that texts of callers must never become."""
        return self.family.reserved_token_ids | {self.placeholder_id, self.family.image_token_id}

    def expanded_text(self, text: str) -> str:
        """The text of a template before it is tokenized, with the family's marks around each placeholder."""
        placeholder, around = self.family.placeholder, self.family.text_around
        return text.replace(placeholder, f"{around}{placeholder}{around}") if around else text

    def image(self, data: bytes, width: int, height: int, detail: Detail, name: str = "") -> PromptImage:
        """An image of this size in pixels. `name` is its field. Raises `ImageError` if the model cannot read images of
        this shape."""
        layout = self.family.layout(width, height, detail)
        token_ids = layout.token_ids(self.family.image_token_id, self._ids_of)
        num_tokens = layout.num_image_tokens
        pseudo = np.frombuffer(pseudo_tokens(digest(data, self.family, detail), num_tokens), np.uint32)
        view = np.frombuffer(token_ids, np.uint32)
        view[view == self.family.image_token_id] = pseudo
        return PromptImage(data, detail, token_ids, num_tokens, name)

    def count_in(self, token_ids: Sequence[int]) -> int:
        """The number of placeholders in a template's tokens."""
        return token_ids.count(self.placeholder_id)

    def _ids_of(self, text: str) -> Sequence[int]:
        found = self._marks.get(text)
        if found is None:
            found = self._tokenizer.encode(text, add_special_tokens=False)
            if len(self._marks) < _MAX_MARKS:
                self._marks[text] = found
        return found


def with_images(token_ids: Sequence[int], placeholder_id: int, images: Iterable[PromptImage]) -> array[int]:
    """The tokens of a prompt, with the tokens of its images in place of the placeholders, in one pass. There must be
    one placeholder for each image."""
    found = array("I")
    start = 0
    for image in images:
        end = token_ids.index(placeholder_id, start)
        found.extend(token_ids[start:end])
        found += image.token_ids
        start = end + 1
    found.extend(token_ids[start:])
    return found


def shown(token_ids: Sequence[int], images: ImageTokens) -> list[int]:
    """The prompt's tokens as callers see them: with the model's image token in place of pseudo tokens."""
    image_token_id = images.family.image_token_id
    return [image_token_id if token_id >= FIRST_PSEUDO_TOKEN else token_id for token_id in token_ids]
