"""The option --draft-model: a smaller model that proposes tokens."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.cli.errors import CommandError
from headrace.cli.models.model_cache import cached_names, check_model_directory, is_model_name, model_directory


def find_draft_model(model: str) -> Path:
    """The directory of a model in the cache, or of the directory `model`. CommandError if there is none."""
    path = Path(model).expanduser()
    if is_model_name(model) and model_directory(model).exists():
        path = model_directory(model)
    elif not path.is_dir():
        known = ", ".join(sorted(cached_names())) or "nothing"
        raise CommandError(
            f"--draft-model {model!r} is neither a directory nor a model in the cache, which has {known}; get it with "
            "headrace pull"
        )
    check_model_directory(path)
    return path.absolute()


def _found(_context: click.Context, _option: click.Parameter, model: str | None) -> Path | None:
    return None if model is None else find_draft_model(model)


draft_model_option = click.option(
    "--draft-model",
    metavar="NAME_OR_DIR",
    callback=_found,
    help="Smaller model with the same tokenizer, in the cache or in a directory, that proposes tokens.",
)
