"""Where the user's cache of models is, and where in it the model of a name is."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """The cache folder; it need not exist. Raises RuntimeError if it is below a home directory that does not exist."""
    own = os.environ.get("HEADRACE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return Path(shared or "~/.cache").expanduser().absolute() / "headrace"


def directory_in(folder: Path, name: str) -> Path:
    """The directory of the model NAME in the cache FOLDER. OWNER/NAME is stored as OWNER--NAME."""
    return folder / "models" / name.replace("/", "--")


def find_directory(model: str) -> tuple[Path, str]:
    """The directory and the name of a model: of a directory, or of a name in the cache, as `headrace pull` understands
    it. The path as it was given, if there is neither."""
    path = Path(model)
    if path.exists() or model.startswith((".", "/", "~")):
        return path, path.resolve().name
    name, mark, revision = model.partition("@")
    name += mark + revision.replace("/", "-")
    try:
        cached = directory_in(cache_directory(), name)
    except RuntimeError:  # a user without a home directory, who has no cache
        return path, path.name
    return (cached, name) if cached.is_dir() else (path, path.name)
