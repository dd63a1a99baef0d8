"""Files that go with a question: those of options and commands, and those whose paths a person drags into the
terminal."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import click

from headrace.common.commands import CommandError
from headrace.common.vision.header import ImageError, read_header

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MAX_TEXT_BYTES = 8 << 20
_IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".gif"))
# A word as terminals paste the path of a file that is dragged into them: in quotes, or with escaped spaces.
_WORD = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|[^\s\\])+""")
_EXPLICIT = ("/", "./", "../", "~/", "file://")
_FENCE = re.compile(r"^`{3,}", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TextFile:
    """A text for the next question."""

    name: str
    text: str

    @property
    def quoted(self) -> str:
        """The text as a part of a question: its name, and the text in a fence that it does not contain."""
        fence = "`" * max((len(found) + 1 for found in _FENCE.findall(self.text)), default=3)
        end = "" if self.text.endswith("\n") else "\n"
        return f"{self.name}:\n{fence}\n{self.text}{end}{fence}\n"


def image_url(path: str) -> str:
    """An image file as a data URL. Raises CommandError if it cannot be read, or is not an image in a format that
    servers accept."""
    if not path:
        raise CommandError("/image needs the name of an image file, such as /image photo.jpg")
    data = _content(path, "image")
    try:
        return _data_url(data)
    except ImageError as error:
        raise CommandError(f"{path}: {error}") from None


def attachment(path: str) -> str | TextFile:
    """A file as a data URL if it is an image, else as a text; "-" is standard input. Raises CommandError if it is
    neither, or cannot be read."""
    if not path:
        raise CommandError("/file needs the name of a text or image file, such as /file notes.txt")
    if path == "-":
        data, name = sys.stdin.buffer.read(_MAX_TEXT_BYTES + 1), "standard input"
    else:
        data, name = _content(path, "file"), Path(path).name
    try:
        return _data_url(data)
    except ImageError:
        pass
    if len(data) > _MAX_TEXT_BYTES:
        raise CommandError(f"{path} has more than {_MAX_TEXT_BYTES >> 20} MiB, which no context holds; cut it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise CommandError(f"{path} is neither text in UTF-8 nor a PNG, JPEG, WebP or GIF image; convert it first")
    return TextFile(name, text)


def paths_in(line: str) -> tuple[list[str], str]:
    """The files that a typed line names, and the rest of the line. A line may name images anywhere, and files of any
    kind if it has nothing else. Only paths that begin with /, ./, ../, ~/ or file:// count, and only files that
    exist."""
    words = [(found.span(), _path_of(found.group())) for found in _WORD.finditer(line)]
    if words and all(path is not None for _, path in words):
        return [path for _, path in words if path is not None], ""
    named = [(span, path) for span, path in words if path is not None and Path(path).suffix.lower() in _IMAGE_SUFFIXES]
    rest = line
    for (begin, end), _ in reversed(named):
        rest = f"{rest[:begin].rstrip()} {rest[end:].lstrip()}"
    return [path for _, path in named], rest.strip()


def _path_of(word: str) -> str | None:
    """The existing file that a word means; None if it means none."""
    bare = word[1:-1] if word[:1] in ("'", '"') and word[-1:] == word[:1] else re.sub(r"\\(.)", r"\1", word)
    if not bare.startswith(_EXPLICIT):
        return None
    path = Path(unquote(urlsplit(bare).path)) if bare.startswith("file://") else Path(bare)
    try:
        found = path.expanduser()
        return str(found) if found.is_file() else None
    except (OSError, RuntimeError, ValueError):  # a name that is too long, a user who is not there, a null byte
        return None


def _content(path: str, kind: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # a name with a null byte, too
        problem = (isinstance(error, OSError) and error.strerror) or error
        raise CommandError(f"the {kind} {path} cannot be read: {problem}") from None


def _data_url(data: bytes) -> str:
    """Encode an image file as a data URL. Raises ImageError if the data are not an image."""
    return f"data:image/{read_header(data).format.lower()};base64,{base64.b64encode(data).decode()}"


def attachment_options(command: _Command) -> _Command:
    """Add --image and --file, which a command gets as `images`, a list of data URLs, and `files`, a list of what
    `attachment` returns."""
    images = click.option(
        "--image",
        "images",
        multiple=True,
        metavar="FILE",
        callback=lambda _context, _parameter, paths: [image_url(path) for path in paths],
        help="PNG, JPEG, WebP or GIF file to show the model with the first question. May be repeated.",
    )
    files = click.option(
        "--file",
        "files",
        multiple=True,
        metavar="FILE",
        callback=lambda _context, _parameter, paths: [attachment(path) for path in paths],
        help="Text or image file that goes with the first question; - is standard input. May be repeated.",
    )
    return images(files(command))
