"""`headrace models`: lists the models in the cache, shows their memory needs, and removes them; its other commands are
in `remote`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from headrace.cli.fleet.fleet_access import ApiAccess
from headrace.cli.fleet.gateway_access import operator_options
from headrace.cli.fleet.run_state import running_serves
from headrace.cli.fleet.tables import print_columns
from headrace.cli.fleet.watching import watch_option
from headrace.cli.hosting.remote import alias, load, ps, show_fleet_models, unload
from headrace.cli.models.catalogue import CATALOGUE
from headrace.cli.models.completers import complete_cached_models
from headrace.cli.models.model_cache import (
    cache_directory,
    cached_names,
    check_cached_directory,
    heads_in,
    model_directory,
    model_lock,
    no_pulls,
    read_manifest,
    remove_path,
)
from headrace.cli.models.progress import say
from headrace.cli.models.requirements import kv_cache_gib, worker_bytes
from headrace.cli.models.shape import ModelShape, shape_of
from headrace.cli.models.short_names import SHORT_NAMES
from headrace.common.commands import CommandError
from headrace.common.host_memory import GIB
from headrace.common.model_files.config import config_in
from headrace.common.model_files.heads import HeadsKind, heads_weights
from headrace.common.model_files.networks import weights_in
from headrace.common.model_files.vision_networks import vision_weights_in

_CONTEXTS = (8192, 32768)
_CATALOGUE_TITLES = ("name", "source", "licence", "size", "context", "memory 8k", "32k", "tools", "checked")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. `vision_bytes` is the size of its weights for images, if these are served. `problem` says
    why it cannot be served; it is empty if it can."""

    name: str
    directory: Path
    source: dict[str, str]
    num_bytes: int
    weight_bytes: int
    vision_bytes: int
    config: dict[str, Any]
    problem: str
    heads: HeadsKind | None = None

    @property
    def origin(self) -> str:
        """The source of the model in a word or two."""
        kind = self.source.get("kind", "link")
        named = {"hub": "reference", "catalogue": "name", "gguf": "path", "link": "path"}[kind]
        return f"{kind} {self.source.get(named, self.source.get('repository', ''))}".rstrip()

    @property
    def modalities(self) -> tuple[str, ...]:
        """The types of input that the model accepts."""
        return ("text", "image") if self.vision_bytes else ("text",)

    @property
    def shape(self) -> ModelShape | None:
        """The shape in the model's config.json; None for heads."""
        return shape_of(self.config) if self.heads is None else None


def cached_model(name: str) -> CachedModel:
    """Look up a model in the cache. Raises CommandError if it has no model of that name."""
    directory = model_directory(name)
    if not directory.exists() and not directory.is_symlink():
        near = difflib.get_close_matches(name, cached_names(), 1)
        meant = f"; did you mean {near[0]}?" if near else "; headrace models list shows its models"
        raise CommandError(f"the cache has no model {name}{meant}")
    manifest = read_manifest(directory)
    source = dict(manifest.source) if manifest is not None else {}
    if directory.is_symlink():
        source = {"kind": "link", "path": str(directory.readlink())}
    return CachedModel(
        name,
        directory,
        source,
        sum(path.stat().st_size for path in _files(directory)),
        sum(map(_size, _weights(directory))),
        sum(map(_size, vision_weights_in(directory))),
        config_in(directory / "config.json"),
        _problem(directory),
        heads_in(directory),
    )


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if path.is_file()) if directory.is_dir() else iter(())


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _weights(directory: Path) -> list[Path]:
    return weights_in(directory) if heads_in(directory) is None else heads_weights(directory)


def _problem(directory: Path) -> str:
    try:
        check_cached_directory(directory)
    except CommandError as error:
        return error.message
    return ""


def _row(model: CachedModel) -> dict[str, Any]:
    """The model as JSON: sizes in bytes, memory in GiB. Unknown values are None."""
    shape = model.shape
    context = shape.context_tokens if shape is not None else 0
    return {
        "name": model.name,
        "directory": str(model.directory),
        "source": model.source,
        "bytes": model.num_bytes,
        "weight_bytes": model.weight_bytes,
        "vision_weight_bytes": model.vision_bytes,
        "modalities": model.modalities,
        "heads": None if model.heads is None else model.heads.value,
        "architecture": model.config.get("model_type"),
        "context_tokens": context or None,
        "kv_bytes_per_token": None if shape is None else shape.kv_bytes_per_token,
        "memory_gib": {} if shape is None else _memory(model.weight_bytes, shape, model.vision_bytes),
        "problem": model.problem or None,
    }


def _memory(weight_bytes: int, shape: ModelShape, vision_bytes: int = 0) -> dict[str, float]:
    """Context length in tokens -> GiB for weights, processes and one context of that length."""
    base = worker_bytes(weight_bytes, vision_bytes) / GIB
    fitting = [length for length in _CONTEXTS if length <= (shape.context_tokens or length)]
    return {str(length): round(base + kv_cache_gib(shape, length), 2) for length in fitting}


@click.group(invoke_without_command=True, subcommand_metavar="COMMAND [ARGS]...")
@click.option("--url", help="Without a command: the models of the fleet behind this gateway, as headrace models ps.")
@click.option("--json", "as_json", is_flag=True, help="With --url: print JSON.")
@watch_option
@operator_options
@click.pass_context
def models(ctx: click.Context, url: str | None, as_json: bool, watch_s: float | None, access: ApiAccess) -> None:
    """List, show and remove the models in the cache, list those with short names, and load and unload served ones.

    headrace models --url URL shows the models of a fleet.
    """
    if ctx.invoked_subcommand is not None:
        if url is not None or as_json or watch_s is not None:
            raise click.UsageError(f"write --url, --json and --watch after `{ctx.invoked_subcommand}`")
    elif url is None and (as_json or watch_s is not None):
        raise click.UsageError("--json and --watch are for --url; headrace models list and ps show those of this host")
    elif url is None:
        raise click.exceptions.NoArgsIsHelpError(ctx)
    else:
        show_fleet_models(url, access, as_json=as_json, watch_s=watch_s)


for _command in (ps, load, unload, alias):
    models.add_command(_command)


@models.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def catalogue(as_json: bool) -> None:
    """List the models with short names.

    The table shows source, licence, size and memory.

    Sizes are approximate. Memory is that of one worker with one context of 8192 and of 32768 tokens; "-" if the model's
    context is shorter. Tests run smollm2-135m. Of the others they check the architecture or the reader of GGUF files
    with small random weights; their own weights were not run.
    """
    rows = _catalogue_rows()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    print_columns([_CATALOGUE_TITLES, *map(_catalogue_cells, rows)])


def _catalogue_rows() -> list[dict[str, Any]]:
    """The models as JSON: sizes in bytes, memory in GiB."""
    own = [
        (entry.name, entry.distribution, entry.license, entry.wheel_bytes, entry.shape, "", "run by tests")
        for entry in CATALOGUE.values()
    ]
    named = [
        (name, str(model.reference), model.license, int(model.weight_gb * 1e9), model.shape, model.tools, model.checked)
        for name, model in SHORT_NAMES.items()
    ]
    return [
        {
            "name": name,
            "source": source,
            "license": license_name,
            "weight_bytes": weight_bytes,
            "context_tokens": None if shape is None else shape.context_tokens,
            "kv_bytes_per_token": None if shape is None else shape.kv_bytes_per_token,
            "memory_gib": {} if shape is None else _memory(weight_bytes, shape),
            "tools": tools or None,
            "checked": checked,
        }
        for name, source, license_name, weight_bytes, shape, tools, checked in (*own, *named)
    ]


def _catalogue_cells(row: dict[str, Any]) -> list[str]:
    memory = [row["memory_gib"].get(str(length)) for length in _CONTEXTS]
    return [
        row["name"],
        row["source"],
        row["license"],
        f"{row['weight_bytes'] / 1e9:.1f} GB",
        str(row["context_tokens"] or "-"),
        *("-" if gib is None else f"{gib:.1f} GiB" for gib in memory),
        row["tools"] or "-",
        row["checked"],
    ]


@models.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(as_json: bool) -> None:
    """List the models in the cache.

    The table shows their size, what they take (text, images), and their source.
    """
    found = [cached_model(name) for name in cached_names()]
    if as_json:
        click.echo(json.dumps([_row(model) for model in found], indent=2))
        return
    if not found:
        click.echo("no models; headrace pull or headrace serve fetches one", err=True)
    print_columns([_cells(model) for model in found])


def _cells(model: CachedModel) -> tuple[str, str, str, str]:
    origin = "damaged" if model.problem else model.origin
    return model.name, f"{model.num_bytes / 1e9:.2f} GB", " + ".join(model.modalities), origin


@models.command()
@click.argument("name", shell_complete=complete_cached_models)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str, as_json: bool) -> None:
    """Show a model's source, size and memory needs."""
    model = cached_model(name)
    if as_json:
        click.echo(json.dumps(_row(model), indent=2))
        return
    for title, text in _details(model):
        click.echo(f"{title:<14}{text}")


def _details(model: CachedModel) -> Iterator[tuple[str, str]]:
    yield "name", model.name
    yield "directory", str(model.directory)
    yield "source", model.origin
    if commit := model.source.get("commit"):
        yield "commit", commit
    if quantisation := model.source.get("quantisation"):
        yield "quantisation", quantisation
    yield "on disk", f"{model.num_bytes / 1e9:.2f} GB"
    if held := _held_bytes(model):
        yield "downloads", f"{held / 1e9:.2f} GB in the Hub's cache"
    if architecture := model.config.get("model_type"):
        yield "architecture", str(architecture)
    if model.heads is None:
        yield "takes", " + ".join(model.modalities)
    shape = model.shape
    if model.heads is not None:
        yield "heads", f"{model.heads.value}, for --draft-model"
    elif shape is None:
        memory = worker_bytes(model.weight_bytes, model.vision_bytes) / GIB
        yield "memory", f"{memory:.1f} GiB plus the KV cache"
    else:
        if shape.context_tokens:
            yield "context", f"{shape.context_tokens} tokens"
        yield "KV cache", f"{shape.kv_bytes_per_token / 1e3:.1f} KB per token (u8)"
        for length, gib in _memory(model.weight_bytes, shape, model.vision_bytes).items():
            yield "memory", f"{gib:.1f} GiB with one context of {length} tokens"
    if model.problem:
        yield "problem", model.problem


@models.command()
@click.argument("names", nargs=-1, required=True, shell_complete=complete_cached_models)
@click.option("--force", is_flag=True, help="Remove a model even while it is being served.")
@click.option(
    "--downloads", is_flag=True, help="Also remove its files from the Hub's cache, which other programs share."
)
def rm(names: tuple[str, ...], force: bool, downloads: bool) -> None:
    """Remove models from the cache. If a name refers to a directory elsewhere, only the name is removed.

    What was fetched from a hub stays in the Hub's cache (HF_HOME), unless --downloads is given.
    """
    for model in [cached_model(name) for name in names]:
        served = [record.url for record in running_serves() if model.name in record.models]
        if served and not force:
            raise CommandError(f"{model.name} is being served at {served[0]}; stop that first, or use --force")
        held = _held_bytes(model)
        with model_lock(model.name, lambda name=model.name: say(f"{name}: waiting for a pull of it")):  # type: ignore[misc]
            remove_path(model.directory)
        freed = "only the name" if model.source.get("kind") == "link" else f"{model.num_bytes / 1e9:.2f} GB"
        click.echo(f"removed {model.name} ({freed})")
        if held:
            _settle_downloads(model, held, remove=downloads)


def _held_bytes(model: CachedModel) -> int:
    """Bytes of the model's files in the Hub's cache."""
    if model.source.get("kind") != "hub":
        return 0
    from headrace.cli.models.hub import held_bytes

    return held_bytes(model.source.get("repository", ""), model.source.get("commit", ""))


def _settle_downloads(model: CachedModel, held: int, *, remove: bool) -> None:
    """Remove the model's files from the Hub's cache, or tell the user that they stay there."""
    from headrace.cli.models.hub import hub_cache, remove_held

    files = (
        f"the files of {model.source['repository']} at {model.source['commit'][:12]} in the Hub's cache {hub_cache()}"
    )
    if remove:
        num_bytes = remove_held(model.source["repository"], model.source["commit"])
        click.echo(f"removed {files} ({num_bytes / 1e9:.2f} GB)")
    else:
        say(f"{files} stay ({held / 1e9:.2f} GB), since other programs may use them; --downloads removes them too")


@models.command()
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
def prune(dry_run: bool) -> None:
    """Remove what interrupted pulls have left.

    Names whose directory no longer exists are removed too.

    Models that can be served stay. The next pull of an interrupted model starts from the beginning.
    """
    with no_pulls():
        total = 0
        for path in _leftovers():
            num_bytes = _bytes_of(path)
            total += num_bytes
            click.echo(f"{'would remove' if dry_run else 'removed'} {path} ({num_bytes / 1e6:.1f} MB)")
            if not dry_run:
                remove_path(path)
    click.echo(f"{total / 1e9:.2f} GB {'to free' if dry_run else 'freed'}")


def _leftovers() -> list[Path]:
    downloads = cache_directory() / "downloads"
    folder = cache_directory() / "models"
    found = sorted(downloads.iterdir()) if downloads.is_dir() else []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".") or (path.is_symlink() and not path.exists()):
            found.append(path)
    return found


def _bytes_of(path: Path) -> int:
    if path.is_symlink():
        return 0
    return (
        path.stat().st_size
        if path.is_file()
        else sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    )
