"""Refusals of images, by reason, so that metrics can count them (pure)."""

from __future__ import annotations

import enum

from headrace.protos.status import Reason, StatusError


class Why(enum.StrEnum):
    """Why an image was refused. The values are labels of a metric."""

    TEXT_MODEL = "text_model"
    NUMBER = "number"
    BYTES = "bytes"
    PIXELS = "pixels"
    FORMAT = "format"
    URL = "url"
    """The operator does not allow it."""
    FETCH = "fetch"
    """It could not be fetched."""
    PLACE = "place"
    """The chat template has no place for it."""


class ImageRefusal(StatusError):
    """A request is refused because of an image in it."""

    def __init__(self, why: Why, field: str, message: str, reason: Reason = Reason.INVALID_FIELD) -> None:
        super().__init__(reason, message, field=field)
        self.why = why


# Words in the types of parts that are no images, and what to send in their place.
_OTHER_MEDIA = {
    "audio": "the model hears no audio; send a transcript of it as text",
    "video": "the model sees no videos; send single pictures of it as images",
    **dict.fromkeys(
        ("file", "document", "pdf"), "the server reads no files; send its text, or pictures of its pages as images"
    ),
}


def remedy_for(kind: str) -> str:
    """The reason why a part or a file of this type is refused, such as `input_audio` or `application/pdf`, and what to
    send instead. Empty for unknown types."""
    words = kind.lower().replace("/", "_").split("_")
    return next((_OTHER_MEDIA[word] for word in words if word in _OTHER_MEDIA), "")


def too_large(name: str, max_bytes: int) -> ImageRefusal:
    """The refusal of a file with too many bytes."""
    return ImageRefusal(
        Why.BYTES, name, f"{name}: the image is larger than {max_bytes} bytes, the maximum. Send a smaller file"
    )
