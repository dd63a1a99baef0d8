"""The content of a message: a text, or texts and images in their order (pure).

"what is this?"                   a text
[ImagePlace(0), "what is this?"]  an image and a text, which templates get as a list of parts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Where an image stands, by the number of the image in its conversation."""

    number: int


Content: TypeAlias = "str | list[str | ImagePlace]"


def content_of(pieces: Iterable[str | ImagePlace], separator: str) -> Content:
    """The content of these pieces. Neighbouring texts are joined by the separator."""
    found: list[str | ImagePlace] = []
    waiting: list[str] = []  # joined only once, because there may be very many
    for piece in pieces:
        if isinstance(piece, str):
            waiting.append(piece)
            continue
        if waiting:
            found.append(separator.join(waiting))
            waiting = []
        found.append(piece)
    if not found:
        return separator.join(waiting)
    return [*found, separator.join(waiting)] if waiting else found


def joined(contents: Sequence[Content | None], separator: str) -> Content:
    """The contents as one, with the separator between them. Empty ones are left out."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return separator.join(given)  # type: ignore[arg-type]
    pieces: list[str | ImagePlace] = []
    for number, content in enumerate(given):
        pieces += [separator] if number else []
        pieces += [content] if isinstance(content, str) else content
    return content_of(pieces, "")


def text_of(content: object) -> str:
    """All text of a content, without its images."""
    if isinstance(content, str):
        return content
    return "".join(piece for piece in content if isinstance(piece, str)) if isinstance(content, list) else ""


def images_in(content: object) -> Sequence[ImagePlace]:
    """The images of a content."""
    return [piece for piece in content if isinstance(piece, ImagePlace)] if isinstance(content, list) else ()


def image_numbers(messages: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    """The numbers of all images of a conversation, in the order of its messages."""
    for message in messages:
        for image in images_in(message.get("content")):
            yield image.number


def parts_of(content: Content) -> list[dict[str, str]]:
    """The content as a list of parts, as the chat templates of multimodal models expect it."""
    pieces = [content] if isinstance(content, str) else content
    return [{"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image"} for piece in pieces]
