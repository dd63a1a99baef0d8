"""Images in the messages of chats (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.gateway.chat.request import ChatMessage
from headrace.gateway.checks import unsupported
from headrace.gateway.images.given import GivenImage, detail_of, image_of_url, part_of

_KINDS = ("image_url", "input_image")
"""`input_image` is that of the Responses API, whose parts some clients send to both."""


def take_images(messages: Sequence[ChatMessage]) -> None:
    """Put a `GivenImage` in the place of each image of the messages. Those in turns of the assistant stay as they are:
    the model does not read them. Raises `StatusError`."""
    for position, message in enumerate(messages):
        if message.role == "assistant" or not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            kind = part.get("type")
            part.pop("image", None)  # nothing of a caller's stands for a checked image
            if isinstance(kind, str) and kind in _KINDS:
                image = _image(f"messages[{position}].content[{number}]", kind, part)
                message.content[number] = part_of(image, kind)


def _image(where: str, kind: str, part: dict[str, Any]) -> GivenImage:
    if kind == "input_image" and part.get("file_id") is not None:
        name = f"{where}.file_id"
        raise unsupported(name, f"{name} is not supported: the server keeps no files; send the image as a data: URL")
    given = part.get("image_url")
    if not isinstance(given, dict):
        return image_of_url(f"{where}.image_url", given, detail_of(f"{where}.detail", part.get("detail")))
    detail = detail_of(f"{where}.image_url.detail", given.get("detail"))
    return image_of_url(f"{where}.image_url.url", given.get("url"), detail)
