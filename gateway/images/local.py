"""Reads images from files below one directory, for operators that allow it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote

from headrace.gateway.images.refusal import ImageRefusal, Why, too_large

_START = "file://"


class LocalImages:
    """Reads files below a directory."""

    def __init__(self, directory: Path) -> None:
        """Raises `OSError` if the directory cannot be opened."""
        self._root = os.path.realpath(directory, strict=True)
        if not os.path.isdir(self._root):
            raise NotADirectoryError(f"{directory} is not a directory")

    def read(self, name: str, url: str, max_bytes: int) -> bytes:
        """The file of a URL such as `file:///images/a.png`. `name` is the URL's field. Raises `ImageRefusal`, with one
        sentence for all that is not a readable file there."""
        host, slash, path = url[len(_START) :].partition("/")
        problem = f"{name}: there is no such file where the server may read images"
        missing = ImageRefusal(Why.URL, name, f"{problem}; send the image as a data: URL with base64")
        path = unquote(slash + path, errors="surrogateescape")
        if not url.lower().startswith(_START) or host not in ("", "localhost") or "\0" in path or not path:
            raise missing
        try:
            real = os.path.realpath(path, strict=True)
            if not self._has(real):
                raise missing
            # A pipe does not block.
            descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except (OSError, ValueError):
            raise missing from None
        try:
            status = os.fstat(descriptor)
            # A directory on the way may have become a link since then.
            if not self._has(os.readlink(f"/proc/self/fd/{descriptor}")) or not stat.S_ISREG(status.st_mode):
                raise missing
            if status.st_size > max_bytes:
                raise too_large(name, max_bytes)
            with open(descriptor, "rb", closefd=False) as file:
                found = file.read(max_bytes + 1)
        finally:
            os.close(descriptor)
        if len(found) > max_bytes:
            raise too_large(name, max_bytes)
        return found

    def _has(self, path: str) -> bool:
        return path.startswith(os.path.join(self._root, ""))
