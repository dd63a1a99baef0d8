"""The one form in which all protocols hand over an image, before anything of it is read (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.common.vision.family import Detail
from headrace.gateway.checks import MAX_ECHO_CHARS, invalid, unsupported
from headrace.gateway.images.refusal import remedy_for

_DETAILS = {"low": Detail.LOW, "high": Detail.HIGH, "auto": Detail.AUTO, "original": Detail.HIGH}
# Of a data URL: a type and parameters are short, so a prefix is enough to find the comma.
_MAX_HEAD_CHARS = 256
_DATA = "data:"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_WHITE_SPACE = " \t\n\f\r"
_REMOTE = ("http", "https")
_LOCAL = "file"


@dataclass(slots=True, eq=False, weakref_slot=True)
class GivenImage:
    """An image as its caller gave it: one of base64, data and URL. Images are compared by identity."""

    base64: str | None = None
    """The encoded file as base64; given up when it is decoded."""
    data: bytes | None = None
    """The encoded file; of base64 and URLs from when it was loaded (`loading`), so that each is loaded once."""
    url: str | None = None
    """Where the file is: `http:`, `https:` or `file:`."""
    detail: Detail = Detail.AUTO
    is_refused_if_reduced: bool = False
    """Whether the caller wants an error for an image that the model would read reduced."""


IMAGE = "image"
"""The key of the `GivenImage` in a part of a message."""


def part_of(image: GivenImage, kind: str = "image_url") -> dict[str, Any]:
    """The part of a message that is an image. `kind` is the caller's type of it."""
    return {"type": kind, IMAGE: image}


def image_of_url(name: str, url: object, detail: Detail = Detail.AUTO) -> GivenImage:
    """The image that a URL contains or names. `name` is the URL's field. Raises `StatusError`."""
    if not isinstance(url, str) or not url:
        raise invalid(name, f"{name} must be a text: a URL such as data:image/png;base64,...")
    url = url.strip(_WHITE_SPACE)
    if url[: len(_DATA)].lower() == _DATA:
        return GivenImage(base64=_base64_of(name, url), detail=detail)
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    if scheme not in (*_REMOTE, _LOCAL):
        named = f"has the scheme {scheme[:MAX_ECHO_CHARS]}" if scheme else "has no scheme"
        raise invalid(name, f"{name} {named}; send the image as data:image/png;base64,..., or as an https URL")
    return GivenImage(url=url, detail=detail)


def image_of_base64(name: str, text: object) -> GivenImage:
    """The image in a text of base64. A data URL around it is tolerated. Raises `StatusError`."""
    if not isinstance(text, str) or not text:
        raise invalid(name, f"{name} must be a text: the file of an image as base64")
    text = text.strip(_WHITE_SPACE)
    if text[: len(_DATA)].lower() == _DATA:
        return GivenImage(base64=_base64_of(name, text))
    if (found := _SCHEME.match(text)) is not None:
        problem = f"{name} must be the file of an image as base64, not a URL ({found[1][:MAX_ECHO_CHARS]}:)"
        raise invalid(name, problem)
    return GivenImage(base64=text)


def refuse_file(where: str, part: Mapping[str, Any]) -> None:
    """Raise `StatusError` if a part refers to a file that was uploaded to the server."""
    if part.get("file_id") is not None:
        name = f"{where}.file_id"
        raise unsupported(name, f"{name} is not supported: the server keeps no images; send it as a data: URL")


def detail_of(name: str, value: Any) -> Detail:
    """The detail of a field that may be left out. Raises `StatusError`."""
    if value is None:
        return Detail.AUTO
    if not isinstance(value, str) or value not in _DETAILS:
        raise invalid(name, f"{name} must be one of {', '.join(_DETAILS)}")
    return _DETAILS[value]


def _base64_of(name: str, url: str) -> str:
    """The base64 of a data URL."""
    end = url.find(",", 0, _MAX_HEAD_CHARS)
    head = url[len(_DATA) : max(end, 0)].lower()
    media_type, *parameters = head.split(";")
    if end < 0 or "base64" not in (one.strip() for one in parameters):
        raise invalid(name, f"{name} is a data URL without base64; write data:image/png;base64,...")
    kind = media_type.strip().partition("/")[0]
    # Whether the file is an image is read from the file itself. Clients that do not know its type send another.
    if kind in ("audio", "video", "text") or media_type.strip() == "application/pdf":
        problem = f"{name}: a file of the type {media_type.strip()[:MAX_ECHO_CHARS]} is no image"
        raise unsupported(name, f"{problem}: {remedy_for(media_type.strip()) or 'send the text as text'}")
    return url[end + 1 :]
