"""Image files that a person names on the command line or in a chat."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from headrace.common.commands import CommandError
from headrace.common.vision.header import ImageError, read_header

_Command = TypeVar("_Command", bound=Callable[..., Any])


def image_url(path: str) -> str:
    """An image file as a data URL. Raises CommandError if it cannot be read, or is no image that servers take."""
    if not path:
        raise CommandError("/image needs the name of an image file, such as /image photo.jpg")
    try:
        data = Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        problem = (isinstance(error, OSError) and error.strerror) or error
        raise CommandError(f"the image {path} cannot be read: {problem}") from None
    try:
        kind = read_header(data).format.lower()
    except ImageError as error:
        raise CommandError(f"{path}: {error}") from None
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def chat_options(command: _Command) -> _Command:
    """Add the options of a chat: --system, --max-tokens, and --image with files for the first question, which the
    command gets as `images`, a list of data URLs."""
    images = click.option(
        "--image",
        "images",
        multiple=True,
        metavar="FILE",
        callback=lambda _context, _parameter, paths: [image_url(path) for path in paths],
        help="PNG, JPEG, WebP or GIF file to show the model with the first question. May be repeated.",
    )
    length = click.option(
        "--max-tokens",
        type=click.IntRange(1),
        help="Maximum tokens of an answer.  [default: the rest of the model's context]",
    )
    return click.option("--system", help="System message.")(length(images(command)))
