"""Chooses the files of a repository that form the model: an OpenVINO export, one of its GGUF quantisations, or a
checkpoint in safetensors form; or the files of heads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.cli.export.weights import EXPORTED
from headrace.cli.models.encoders import CHECKPOINT_ENCODER_FILES
from headrace.cli.models.model_cache import ENCODER_FILES, GENERATION_CONFIG_NAME, OPTIONAL_FILES
from headrace.cli.models.reference import HubReference
from headrace.common.commands import CommandError
from headrace.common.model_files.heads import HEADS_CONFIG, MTP_TENSORS, HeadsKind
from headrace.common.model_files.names import IMAGE_FILES, TEMPLATES
from headrace.common.model_files.networks import LANGUAGE_NETWORK, networks_among, required_files
from headrace.common.model_files.vision_networks import files_of_networks

# Default quantisations, best first: good answers with few bytes, then larger ones.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "F16", "BF16", "F32")
_QUANTISATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+(?:_[0-9A-Z]+)*|TQ\d_\d|BF16|F(?:P)?16|F(?:P)?32|MXFP4(?:_MOE)?))(?=$|[-._/])",
    re.IGNORECASE,
)
PIECE = re.compile(r"-(\d{5})-of-(\d{5})$")
"""Number and total of a piece, at the end of a GGUF file's name without .gguf."""
# GGUF files that are not models: networks for images, statistics of the quantisation, vocabularies.
_OF_IMAGES = "mmproj"
_NOT_THE_MODEL = (_OF_IMAGES, "imatrix", "ggml-vocab")
_MOST_NAMED = 12
# Files that an export reads besides the weights.
_CHECKPOINT_FILES = (
    *TEMPLATES,
    *IMAGE_FILES,
    *CHECKPOINT_ENCODER_FILES,
    "added_tokens.json",
    "config.json",
    GENERATION_CONFIG_NAME,
    "merges.txt",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_WEIGHTS = re.compile(r"model(-\d{5}-of-(\d{5}))?\.safetensors")
_PICKLES = re.compile(r"pytorch_model.*\.bin")
_PICKLES_OF_HEADS = re.compile(r"[^/]+\.(bin|pt|pth)")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `sha256` (hex) is known for large files only."""

    path: str
    num_bytes: int | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubListing:
    """The files of a repository at one commit."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]


@dataclass(frozen=True, slots=True)
class HubChoice:
    """The files to download: an OpenVINO model, one GGUF model to be converted, a checkpoint to be exported, or heads.
    `quantisation` is taken from the GGUF file's name; empty if the name has none."""

    files: tuple[HubFile, ...]
    gguf: bool
    quantisation: str = ""
    checkpoint: bool = False
    heads: HeadsKind | None = None

    @property
    def num_bytes(self) -> int:
        """Total size of the files whose size the hub reports."""
        return sum(file.num_bytes or 0 for file in self.files)

    @property
    def safetensors_bytes(self) -> int:
        """Size of the weights of a checkpoint or of heads."""
        return sum(file.num_bytes or 0 for file in self.files if file.path.endswith(".safetensors"))

    def form(self, exported: str) -> str:
        """A short description of the download. `exported` says which weights a checkpoint is exported with."""
        if self.heads is not None:
            return f"{self.heads.value} heads, for --draft-model"
        if self.checkpoint:
            return f"safetensors, to be exported with weights in {exported}"
        return f"GGUF {self.quantisation}".rstrip() if self.gguf else "OpenVINO"


def choose_files(
    listing: HubListing,
    quantisation: str | None = None,
    *,
    exports: bool = False,
    vision_networks: Sequence[str] = (),
) -> HubChoice:
    """Choose the GGUF file of the given quantisation. Without one, choose an OpenVINO model if there is one, otherwise
    the most common quantisation, otherwise a checkpoint. int4, int8 and bf16 choose a checkpoint if no GGUF file has
    this name, and `exports` always does. An OpenVINO model comes with its networks for images. Raises CommandError that
    lists the choices."""
    by_path = {file.path: file for file in listing.files}
    variants = _variants(listing)
    named = {variant.quantisation.lower() for variant in variants}
    wants_export = (quantisation or "").lower() in EXPORTED and (quantisation or "").lower() not in named
    if exports or (wants_export and any(_WEIGHTS.fullmatch(path) for path in by_path)):
        return _checkpoint(listing)
    network = networks_among(by_path)[0]
    if network in by_path and not (quantisation and variants):
        if quantisation:
            raise CommandError(
                f"{listing.repository} is an OpenVINO model with weights of one kind; leave out :{quantisation}"
            )
        required = required_files(by_path)
        if missing := [name for name in required if name not in by_path]:
            raise CommandError(f"{listing.repository} has {network} but lacks {', '.join(missing)}")
        # Models that generate text do not need tokenizer.json, which may be large.
        encoder_files = ENCODER_FILES if GENERATION_CONFIG_NAME not in by_path else ()
        wanted = (*OPTIONAL_FILES, *encoder_files, *required, *files_of_networks(vision_networks))
        return HubChoice(tuple(by_path[name] for name in wanted if name in by_path), False)
    if not variants and not quantisation:
        if not any(map(_WEIGHTS.fullmatch, by_path)) and (of_images := gguf_of_images(listing)):
            raise CommandError(
                f"{listing.repository} has only {of_images}, the networks for images beside a GGUF model, which are "
                "not read; for images, pull an OpenVINO version or the safetensors of the model"
            )
        return _checkpoint(listing)
    if not variants:
        raise CommandError(
            f"{listing.repository} has no GGUF files, so there is no {quantisation}; leave out :{quantisation}, or say "
            f"one of {', '.join(EXPORTED)} if it has safetensors"
        )
    return _with_all_pieces(listing.repository, _chosen(listing.repository, variants, quantisation))


def _checkpoint(listing: HubListing) -> HubChoice:
    """The checkpoint in safetensors form, with all its pieces. Raises CommandError if there is none."""
    by_path = {file.path: file for file in listing.files}
    pieces = {path: found for path in by_path if (found := _WEIGHTS.fullmatch(path))}
    if not pieces:
        why = "it has pickles of PyTorch, which may run code and are not read" if _has_pickles(by_path) else ""
        raise CommandError(
            f"{listing.repository} has neither openvino_model.xml (an OpenVINO export) nor a .gguf file nor "
            f"model.safetensors (looked through {len(listing.files)} files{'; ' + why if why else ''}); look on the "
            "hub for a GGUF or OpenVINO version of it"
        )
    if "config.json" not in by_path:
        raise CommandError(f"{listing.repository} has {next(iter(pieces))} but lacks config.json")
    total = max(int(found[2] or 1) for found in pieces.values())
    if len(pieces) < total:
        raise CommandError(f"{listing.repository} has its weights in {total} pieces and lacks {total - len(pieces)}")
    wanted = (*_CHECKPOINT_FILES, *sorted(pieces))
    return HubChoice(tuple(by_path[path] for path in wanted if path in by_path), False, checkpoint=True)


def gguf_of_images(listing: HubListing) -> str:
    """The name of the GGUF file with the networks for images, which llama.cpp loads in addition to the model; empty if
    there is none."""
    names = (file.path for file in listing.files if file.path.endswith(".gguf"))
    return next((name for name in names if _OF_IMAGES in name.rpartition("/")[2].lower()), "")


def has_text_model(listing: HubListing) -> bool:
    """Whether the repository has an OpenVINO model of text or GGUF files, whatever its config.json describes."""
    names = {file.path for file in listing.files}
    network = networks_among(names)[0]
    return bool(_variants(listing)) or (network in names and network != LANGUAGE_NETWORK)


def choose_heads(
    listing: HubListing, kind: HeadsKind, reference: HubReference, *, exports: bool, index: bytes | None = None
) -> HubChoice:
    """Choose the files of heads; of a checkpoint, those that its `index` names for them. Raises CommandError if their
    weights are not in safetensors form, or if the user requests other weights."""
    if exports or reference.quantisation is not None:
        other = "--weights" if exports else f":{reference.quantisation}"
        if kind is HeadsKind.MTP:
            raise CommandError(
                f"the model in {listing.repository} needs code from its repository, which headrace does not run; take "
                f"a GGUF or OpenVINO version of it, and leave out {other} for its layer that predicts more tokens"
            )
        raise CommandError(f"{listing.repository} has {kind.value} heads, used as they are; leave out {other}")
    weights = [file for file in listing.files if re.fullmatch(r"[^/]+\.safetensors", file.path)]
    if index is not None and kind is HeadsKind.MTP:
        wanted = _files_of_mtp(index)
        weights = [file for file in weights if file.path in wanted]
    if not weights:
        pickles = [file.path for file in listing.files if _PICKLES_OF_HEADS.fullmatch(file.path)]
        found = f"only {pickles[0]}, which may run code and is not read" if pickles else "no weights"
        raise CommandError(
            f"the {kind.value} heads in {listing.repository} have {found}; save them as model.safetensors, and name "
            "their directory with --draft-model"
        )
    config = [file for file in listing.files if file.path == HEADS_CONFIG]
    return HubChoice((*config, *weights), False, heads=kind)


def _files_of_mtp(index: bytes) -> set[str]:
    """The files of a checkpoint that contain a layer that predicts more tokens, and the vocabulary that the layer
    shares."""
    try:
        places = json.loads(index)["weight_map"].items()
        return {str(file) for name, file in places if name.startswith(MTP_TENSORS)}
    except (ValueError, KeyError, AttributeError):
        return set()


def _has_pickles(paths: Iterable[str]) -> bool:
    return any(_PICKLES.fullmatch(path) for path in paths)


def _variants(listing: HubListing) -> list[HubChoice]:
    """The GGUF models of a repository, smallest first, each with its pieces in order."""
    by_stem: dict[str, list[HubFile]] = {}
    for file in sorted(listing.files, key=lambda file: file.path):
        stem, dot, suffix = file.path.rpartition(".")
        basename = stem.rpartition("/")[2].lower()
        if suffix == "gguf" and dot and not any(word in basename for word in _NOT_THE_MODEL):
            by_stem.setdefault(PIECE.sub("", stem), []).append(file)
    found = [HubChoice(tuple(files), True, _quantisation_of(stem)) for stem, files in by_stem.items()]
    return sorted(found, key=lambda variant: variant.num_bytes)


def _quantisation_of(stem: str) -> str:
    found = _QUANTISATION.findall(stem)
    return found[-1] if found else ""


def _chosen(repository: str, variants: Sequence[HubChoice], quantisation: str | None) -> HubChoice:
    if quantisation is None:
        return _most_wanted(repository, variants)
    wanted = quantisation.upper()
    fitting = [variant for variant in variants if variant.quantisation.upper() == wanted]
    fitting = fitting or [variant for variant in variants if _stem(variant).upper() == wanted]
    if not fitting:
        raise CommandError(f"{repository} has no GGUF file {quantisation}; there are {_listed(variants)}")
    if len(fitting) > 1:
        names = ", ".join(_stem(variant) for variant in fitting)
        raise CommandError(f"{repository} has several GGUF files {quantisation}; name one of {names}")
    return fitting[0]


def _most_wanted(repository: str, variants: Sequence[HubChoice]) -> HubChoice:
    for label in _PREFERRED:
        for variant in variants:
            if variant.quantisation.upper() == label:
                return variant
    if len(variants) > 1:
        raise CommandError(
            f"{repository} has several GGUF files: {_listed(variants)}; say which, such as "
            f"{repository}:{variants[0].quantisation or _stem(variants[0])}"
        )
    return variants[0]


def _stem(variant: HubChoice) -> str:
    """The name of the file without its folder, its number and .gguf."""
    return PIECE.sub("", variant.files[0].path.rpartition("/")[2].removesuffix(".gguf"))


def _listed(variants: Iterable[HubChoice]) -> str:
    names = [f"{variant.quantisation or _stem(variant)} ({variant.num_bytes / 1e9:.1f} GB)" for variant in variants]
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")


def _with_all_pieces(repository: str, variant: HubChoice) -> HubChoice:
    numbers = [PIECE.search(file.path.removesuffix(".gguf")) for file in variant.files]
    present = {int(number[1]) for number in numbers if number}
    total = max((int(number[2]) for number in numbers if number), default=0)
    missing = sorted(set(range(1, total + 1)) - present)
    if missing:
        raise CommandError(
            f"{repository} has {_stem(variant)} in {total} pieces and lacks number {missing[0]}; choose another "
            "quantisation"
        )
    return variant
