"""The location of the user's cache of models, and of a model in it."""

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
    """The directory and the name of a model, from a path or from a name in the cache, in the form that `headrace pull`
    accepts. The given path if neither exists."""
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
