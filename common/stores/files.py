"""Files that are replaced as a whole: readers see the old content or the new."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    """Replace the content of a file. The new file has its mode from the beginning, and the `owner` (user and group) if
    this process may set it. Raises OSError."""
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            if owner is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), *owner)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        raise
