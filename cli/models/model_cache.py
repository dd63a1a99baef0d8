"""The user's cache of models: its location, the files of a complete model directory, and how a directory is built.

    CACHE/models/NAME/          a complete model directory with headrace.json, or a link to one elsewhere
    CACHE/models/.NAME.XXXX/    one being built; renamed into place when complete
    CACHE/downloads/            parts of wheels, kept to be resumed, with locks while they are in use
    CACHE/locks/                one lock a model, one that every pull shares, and those of created models

CACHE is $HEADRACE_CACHE, $XDG_CACHE_HOME/headrace or ~/.cache/headrace. Files of a hub are downloaded into the Hub's
cache (`hub`). This module imports nothing slow: `headrace serve` uses it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from headrace.common.commands import CommandError
from headrace.common.model_files import cache
from headrace.common.model_files.heads import HeadsKind, heads_kind, heads_weights
from headrace.common.model_files.names import IMAGE_FILES, TEMPLATES
from headrace.common.model_files.networks import TEXT_NETWORK, empty_files, has_network
from headrace.common.model_files.task import missing_of_model

GENERATION_CONFIG_NAME = "generation_config.json"
OPTIONAL_FILES = (
    *TEMPLATES,
    *IMAGE_FILES,
    "config.json",
    GENERATION_CONFIG_NAME,
    "special_tokens_map.json",
    "tokenizer_config.json",
)
ENCODER_FILES = ("1_Pooling/config.json", "modules.json", "sentence_bert_config.json", "tokenizer.json")
"""Files with which encoders say how texts become vectors and scores."""
MANIFEST_NAME = "headrace.json"
CONVERTER = {"converter": "2"}
"""Edition of the converter of GGUF files, in the source of what it made."""
_PART = "[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(f"{_PART}(/{_PART})?(:{_PART})?(@{_PART})?")
_ALL_PULLS = ".pulls"
# The suffixes of a model's unfinished directories: from mkdtemp, or from a step of replacing it.
_UNFINISHED = "[a-z0-9_]{8}|old|link"
_HASH_CHUNK_BYTES = 1 << 20


offline_option = click.option(
    "--offline",
    is_flag=True,
    envvar="HF_HUB_OFFLINE",
    help="Take models from the cache and from files only; fetch nothing.",
)
"""Keeps a command off the network."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a model directory as it was when the model was pulled. `sha256` is hex."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The origin of a pulled model, stored as headrace.json. `source` has "kind" and the values that identify the
    source."""

    name: str
    source: dict[str, str]
    headrace_version: str
    files: tuple[FileRecord, ...]


def cache_directory() -> Path:
    """The cache folder; it need not exist."""
    try:
        return cache.cache_directory()
    except RuntimeError:
        raise CommandError("the cache cannot be found: there is no home directory; set HEADRACE_CACHE") from None


def expanded(path: str) -> Path:
    """A path with ~ or ~USER at its beginning replaced. Raises CommandError if that user has no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CommandError(f"{path} cannot be found: there is no home directory; give the whole path") from None


def downloads_directory() -> Path:
    """The folder for downloads under way; made if missing."""
    return _made(cache_directory() / "downloads")


def locks_directory() -> Path:
    """The folder for locks; made if missing."""
    return _made(cache_directory() / "locks")


def model_directory(name: str) -> Path:
    """The directory of the model with this name, whether or not it exists. OWNER/NAME is stored as OWNER--NAME. Raises
    CommandError if no model can have this name."""
    if not is_model_name(name):
        raise CommandError(
            f"{name!r} cannot be the name of a model (letters, digits, '.', '_', '-', at most one '/', and a "
            "':QUANTISATION' or '@REVISION' at its end); "
            "--name gives it another"
        )
    return cache.directory_in(cache_directory(), name)


def is_model_name(name: str) -> bool:
    """Whether a model can have this name."""
    return _NAME.fullmatch(name) is not None


def cached_names() -> list[str]:
    """Names of the models in the cache, sorted."""
    folder = cache_directory() / "models"
    if not folder.is_dir():
        return []
    return sorted(_name_of(entry) for entry in folder.iterdir() if not entry.name.startswith("."))


def _name_of(directory: Path) -> str:
    """The name that a pull gave to the model. A link is named by its file name."""
    manifest = None if directory.is_symlink() else read_manifest(directory)
    return manifest.name if manifest is not None else directory.name.replace("--", "/", 1)


def heads_in(directory: Path) -> HeadsKind | None:
    """The format of the heads in a directory; None if it has a model."""
    return None if has_network(directory) else heads_kind(directory)


def check_cached_directory(directory: Path) -> None:
    """Check a directory with a model, or with heads. Raises CommandError that names the problem."""
    if heads_in(directory) is None:
        check_model_directory(directory)
    else:
        check_heads_directory(directory)


def check_heads_directory(directory: Path) -> None:
    """Check that heads have weights, of the size that they were pulled with. Raises CommandError."""
    if not heads_weights(directory):
        raise CommandError(f"the heads in {directory} have no model.safetensors; copy it there")
    _check_sizes(directory)


def check_model_directory(directory: Path) -> None:
    """Check that every required file exists with the size that it was pulled with. Raises CommandError that names the
    problem."""
    if not directory.is_dir():
        raise CommandError(f"there is no model directory {directory}")
    if (kind := heads_in(directory)) is not None:
        raise CommandError(
            f"{directory} has {kind.value} heads and no model; serve the model that they were trained for, and name "
            "them with --draft-model"
        )
    missing = missing_of_model(directory)
    if other := _other_form(directory) if TEXT_NETWORK in missing else "":
        raise CommandError(f"{directory} is not a model directory of OpenVINO: it has {other}")
    if missing:
        raise CommandError(
            f"{directory} is not a complete model directory: missing {', '.join(missing)}; "
            "an OpenVINO export (optimum-cli export openvino) or headrace pull makes all of them"
        )
    if empty := empty_files(directory):
        raise CommandError(f"{directory} is not a usable model directory: {', '.join(empty)} is empty")
    _check_sizes(directory)


def _other_form(directory: Path) -> str:
    """The form of a model in another format in a directory, with a remedy; empty if there is none."""
    names = sorted(path.name for path in directory.iterdir())
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"GGUF files; name one of them, such as {directory / gguf[0]}"
    if checkpoint := [name for name in names if name.endswith((".safetensors", "pytorch_model.bin"))]:
        return f"a checkpoint ({checkpoint[0]}); optimum-cli export openvino --model {directory} DIRECTORY converts it"
    return ""


def _check_sizes(directory: Path) -> None:
    manifest = read_manifest(directory)
    if manifest is None:
        return
    for record in manifest.files:
        path = directory / record.name
        found = path.stat().st_size if path.is_file() else None
        if found != record.num_bytes:
            now = "is missing" if found is None else f"has {found} bytes instead of {record.num_bytes}"
            raise CommandError(f"{path} {now}: the model in the cache is damaged; {_remedy(manifest)} repairs it")


def _remedy(manifest: Manifest) -> str:
    source = manifest.source
    known = (source.get(key) for key in ("path", "reference", "repository", "name"))
    original = next((name for name in known if name), manifest.name)
    renamed = f" --name {manifest.name}" if source.get("name", manifest.name) != manifest.name else ""
    return f"headrace pull --force {original}{renamed}"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a pulled model, or None if there is no readable one."""
    try:
        raw = json.loads((directory / MANIFEST_NAME).read_text())
        files = tuple(FileRecord(**record) for record in raw["files"])
        return Manifest(raw["name"], dict(raw["source"]), raw["headrace_version"], files)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_manifest(directory: Path, name: str, source: dict[str, str], version: str) -> Manifest:
    """Record source and checksums of all files of the directory in headrace.json."""
    files = tuple(
        FileRecord(str(path.relative_to(directory)), path.stat().st_size, sha256_of(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    )
    manifest = Manifest(name, source, version, files)
    (directory / MANIFEST_NAME).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hex."""
    from hashlib import sha256

    digest = sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def model_lock(name: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the model's lock, which allows one pull of a model at a time. Calls `on_wait` if another pull holds it."""
    with (locks_directory() / f"{name.replace('/', '--')}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def download_lock(target: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a download, by the path of the finished file, until it has been used or removed. Calls `on_wait`
    if another pull holds it. The lock's file is removed afterwards."""
    path = target.with_name(f"{target.name}.lock")
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink == 0:
                continue  # its holder has removed it, so others do not see this lock
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def pulling() -> Iterator[None]:
    """Context manager that keeps `headrace models prune` from removing downloads and unfinished models."""
    with (locks_directory() / _ALL_PULLS).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def no_pulls() -> Iterator[None]:
    """Hold off new pulls. Raises CommandError if one is running."""
    with (locks_directory() / _ALL_PULLS).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError("a pull is running; try again when it has ended") from None
        yield


@contextmanager
def building(name: str) -> Iterator[Path]:
    """Yield an empty directory in which to build the model. It becomes the model's directory if the block does not
    raise.

    The caller holds the model's lock.
    """
    target = model_directory(name)
    _made(target.parent)
    with building_at(target) as fresh:
        yield fresh


@contextmanager
def building_at(target: Path) -> Iterator[Path]:
    """Yield an empty directory, which becomes `target` if the block does not raise. Leftovers of interrupted builds are
    removed first."""
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    # Do not remove those of another model whose name begins in the same way, such as NAME.5.
    unfinished = re.compile(rf"\.{re.escape(target.name)}\.({_UNFINISHED})")
    for leftover in [path for path in folder.iterdir() if unfinished.fullmatch(path.name)]:
        remove_path(leftover)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
    try:
        yield fresh
        fresh.chmod(0o755)
        _put_into_place(fresh, target)
    finally:
        remove_path(fresh)


def link_model(name: str, directory: Path) -> None:
    """Let the name refer to a model directory elsewhere. The caller holds the model's lock."""
    target = model_directory(name)
    link = _made(target.parent) / f".{target.name}.link"
    remove_path(link)
    link.symlink_to(directory.absolute(), target_is_directory=True)
    _put_into_place(link, target)


def _put_into_place(fresh: Path, target: Path) -> None:
    """Rename over the target. An existing directory is first moved aside, because rename cannot replace a non-empty
    one."""
    if target.is_symlink() or not target.exists():
        if target.is_symlink() and not fresh.is_symlink():
            target.unlink()
        fresh.rename(target)
        return
    aside = target.with_name(f".{target.name}.old")
    remove_path(aside)
    target.rename(aside)
    fresh.rename(target)
    remove_path(aside)


def link_or_copy(path: Path | str, target: Path | str) -> None:
    """Make a further name of a file; a copy of it on another file system."""
    try:
        os.link(os.path.realpath(path), target)
    except OSError:
        shutil.copyfile(path, target)


def remove_path(path: Path) -> None:
    """Remove a file, a link (but not its target) or a directory with its contents."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"the cache folder {folder} cannot be made ({error.strerror}); set HEADRACE_CACHE") from None
    return folder
