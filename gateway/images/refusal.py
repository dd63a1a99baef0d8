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


def too_large(name: str, max_bytes: int) -> ImageRefusal:
    """The refusal of a file with too many bytes."""
    return ImageRefusal(Why.BYTES, name, f"{name}: the image is larger than {max_bytes} bytes, the maximum")
