"""The option --draft-model: a smaller model, or heads, that propose tokens."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.cli.errors import CommandError
from headrace.cli.models.model_cache import cached_names, check_model_directory, is_model_name, model_directory
from headrace.common.model_files.heads import heads_kind, heads_weights


def find_draft_model(model: str) -> Path:
    """The directory of a model in the cache, or of the directory `model`. CommandError if there is none, or if it
    lacks files."""
    path = Path(model).expanduser()
    if is_model_name(model) and model_directory(model).exists():
        path = model_directory(model)
    elif not path.is_dir():
        known = ", ".join(sorted(cached_names())) or "nothing"
        raise CommandError(
            f"--draft-model {model!r} is neither a directory nor a model in the cache, which has {known}; get it with "
            "headrace pull"
        )
    if heads_kind(path) is None:
        check_model_directory(path)
    elif not heads_weights(path):
        raise CommandError(f"the heads in {path} have no model.safetensors; copy it there")
    return path.absolute()


def _found(_context: click.Context, _option: click.Parameter, model: str | None) -> Path | None:
    return None if model is None else find_draft_model(model)


draft_model_option = click.option(
    "--draft-model",
    metavar="NAME_OR_DIR",
    callback=_found,
    help="Smaller model with the same tokenizer, in the cache or in a directory, or directory of EAGLE-3 or Medusa "
    "heads for this model, that proposes tokens.",
)
