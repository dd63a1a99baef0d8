"""Finds the directory of a model, or of one that drafts for it, by its name, and checks that models fit into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.cli.models.catalogue import CATALOGUE
from headrace.cli.models.model_cache import (
    cached_names,
    check_cached_directory,
    check_model_directory,
    expanded,
    is_model_name,
    model_directory,
    read_manifest,
)
from headrace.cli.models.reference import near_name, parse_reference, path_problem
from headrace.cli.models.requirements import check_weights_fit
from headrace.cli.models.short_names import SHORT_NAMES
from headrace.common.commands import CommandError
from headrace.common.host_memory import GIB, available_bytes
from headrace.common.kernel_files import ROOT
from headrace.common.model_files.networks import weights_in
from headrace.common.model_files.vision_networks import vision_weights_in


def find_model(model: str, *, offline: bool = False, num_workers: float = 1) -> tuple[Path, str]:
    """Return the directory and name of MODEL, after pulling or converting it if necessary. Raises CommandError if there
    is no such model, or if the weights of `num_workers` workers do not fit into memory. A worker counts less than 1 if
    others have some of its layers."""
    directory, name = _find_model(model, offline=offline, num_workers=num_workers)
    weights = [*weights_in(directory), *vision_weights_in(directory)]
    check_weights_fit(name, sum(path.stat().st_size for path in weights), num_workers)
    return directory, name


def _find_model(model: str, *, offline: bool, num_workers: float) -> tuple[Path, str]:
    # Imports of pull are deferred: serving a cached model does not need it.
    path = expanded(model)
    reference = parse_reference(model)
    name = model if reference is None else reference.name
    if is_model_name(name) and model_directory(name).exists():
        directory = model_directory(name)
        check_model_directory(directory)
        return directory, name
    if path.is_dir() and path.suffix != ".gguf":
        check_model_directory(path)
        manifest = read_manifest(path)
        return path.absolute(), manifest.name if manifest is not None else path.resolve().name
    if path.suffix == ".gguf" or model in CATALOGUE or model in SHORT_NAMES or reference is not None:
        from headrace.cli.models.pull import pull_model, source_of

        source = source_of(model)
        return pull_model(source, offline=offline, num_workers=num_workers), source.name
    if problem := path_problem(model, path):
        raise CommandError(f"unknown model {model!r}: {problem}")
    known = {*CATALOGUE, *cached_names()}
    raise CommandError(
        f"unknown model {model!r}: it is not one of {', '.join(sorted(known))}, nor a directory, a .gguf file or a "
        f"hub's OWNER/NAME; {near_name(model, {*known, *SHORT_NAMES})}"
    )


def find_draft_model(model: str, *, offline: bool = False) -> Path:
    """The directory of a model or heads: in the cache, the directory `model` itself, or pulled from a hub by this name.
    CommandError if there is none, or if it lacks files."""
    path = expanded(model)
    reference = parse_reference(model)
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
        from headrace.cli.models.pull import pull_model, source_of

        return pull_model(source_of(model), offline=offline)
    check_cached_directory(path)
    return path.absolute()


def check_memory(sizes: Mapping[str, float | None], num_workers: int, root: Path = ROOT) -> None:
    """Raise CommandError if what flags ask for does not fit into memory: the GiB of each worker, by the flag; None
    without the flag. Each worker also checks its own limits."""
    asked = {flag: size_gb for flag, size_gb in sizes.items() if size_gb}
    if not asked:
        return
    each_gb, available_gb = sum(asked.values()), available_bytes(root) / GIB
    if num_workers * each_gb > available_gb:
        of_each = f"{each_gb:g} GiB" if num_workers == 1 else f"{num_workers} times {each_gb:g} GiB"
        flags, verb = (" and ".join(asked), "ask") if len(asked) > 1 else (next(iter(asked)), "asks")
        raise CommandError(
            f"{flags} {verb} for {of_each}, but only {available_gb:.1f} GiB of memory are available; choose a "
            "smaller size, or omit the flag"
        )
