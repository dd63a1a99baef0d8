"""Finds what --draft-model names: a smaller model, or heads, that propose tokens."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.errors import CommandError
from headrace.cli.models.model_cache import (
    cached_names,
    check_cached_directory,
    expanded,
    is_model_name,
    model_directory,
)
from headrace.cli.models.reference import parse_reference


def find_draft_model(model: str, *, offline: bool = False) -> Path:
    """The directory of a model or heads: in the cache, the directory `model` itself, or pulled from a hub by this name.
    CommandError if there is none, or if it lacks files."""
    path, reference = expanded(model), parse_reference(model)
    name = model if reference is None else reference.name
    if is_model_name(name) and model_directory(name).exists():
        path = model_directory(name)
    elif not path.is_dir():
        if reference is None:
            known = ", ".join(sorted(cached_names())) or "nothing"
            raise CommandError(
                f"--draft-model {model!r} is neither a directory nor a model in the cache, which has {known}; get it "
                "with headrace pull, or name one on a hub as OWNER/NAME"
            )
        # A deferred import: serving from the cache does not need it.
        from headrace.cli.models.pull import pull_model, source_of

        return pull_model(source_of(model), offline=offline)
    check_cached_directory(path)
    return path.absolute()
