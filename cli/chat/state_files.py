"""Files that outlive a chat: the history of what was typed, and saved conversations. Only their user may read them.

    STATE/history.jsonl       a text of JSON in each line, the newest last
    STATE/chats/NAME.json     saved conversations

STATE is $XDG_STATE_HOME/headrace or ~/.local/state/headrace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.common.commands import CommandError, CommandFailed

_MAX_ENTRIES = 1000
_NAME = re.compile(r"\w[\w .-]{0,99}")


def state_directory() -> Path:
    """The directory for these files, which may not exist."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".local/state") / "headrace"


class History:
    """The lines that were typed, oldest first. Several chats may add to it at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self) -> Sequence[str]:
        """The newest entries. A file that has grown to twice as many is shortened. Raises CommandFailed."""
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
            if len(lines) > 2 * _MAX_ENTRIES:
                _write_private(self._path, b"".join(lines[-_MAX_ENTRIES:]))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failure(error) from None
        return [text for line in lines[-_MAX_ENTRIES:] if (text := _text_of(line))]

    def add(self, text: str) -> None:
        """Add an entry. Raises CommandFailed."""
        try:
            _make_private_directory(self._path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
                os.write(descriptor, f"{json.dumps(text)}\n".encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> CommandFailed:
        problem = error.strerror or error
        return CommandFailed(f"the history {self._path} cannot be kept: {problem}; --no-history does without")


class SavedChats:
    """Saved conversations: by a name, or by a path, which has a slash."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> Sequence[str]:
        """The names of conversations that were saved by a name."""
        with contextlib.suppress(OSError):
            return sorted(path.stem for path in self._directory.glob("*.json"))
        return []

    def save(self, name: str, document: Mapping[str, Any]) -> Path:
        """Write a conversation, over an older one of that name, and return its path. Raises CommandError."""
        path = self._path(name)
        try:
            if path.parent == self._directory:
                _make_private_directory(path.parent)
            _write_private(path, json.dumps(document, ensure_ascii=False, indent=1).encode("utf-8", "replace"))
        except OSError as error:
            raise CommandFailed(f"{path} cannot be written: {error.strerror or error}") from None
        return path

    def load(self, name: str) -> Mapping[str, Any]:
        """Read a conversation. Raises CommandError."""
        path = self._path(name)
        try:
            document = json.loads(path.read_bytes())
        except FileNotFoundError:
            there = ", ".join(self.names()) or "none"
            raise CommandError(f"there is no saved conversation {name[:100]}; saved are: {there}") from None
        except OSError as error:
            raise CommandFailed(f"{path} cannot be read: {error.strerror or error}") from None
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise CommandError(f"{path} is no saved conversation")
        return document

    def _path(self, name: str) -> Path:
        if "/" in name:
            return Path(name).expanduser()
        if _NAME.fullmatch(name) is None:
            raise CommandError(
                "a saved conversation needs a name of letters, digits, dots and dashes, or a path with /"
            )
        return self._directory / f"{name}.json"


def _text_of(line: bytes) -> str:
    """The text of a line of the history; empty if it is not valid, such as one of a full disk."""
    try:
        text = json.loads(line)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""


def _make_private_directory(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def _write_private(path: Path, content: bytes) -> None:
    """Replace a file as a whole."""
    descriptor, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
