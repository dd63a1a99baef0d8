"""Exports a checkpoint in safetensors form. Run as a file, by a Python that has the packages of headrace[export], which
need not have headrace:

    exporter.py check DIRECTORY TASK              can a model with this config.json be exported?
    exporter.py export DIRECTORY OUTDIR OPTIONS   OPTIONS: the fields of `Options` as JSON

TASK is what the model is for: text, vectors or scores. Of a multimodal model, the parts for text are kept, which are
the language model and the embeddings of tokens, and those networks for images that are named.

The process takes at most `memory_bytes` of private memory. Standard output gets one line for each stage. If something
cannot be done, the exit status is 2 with one `error:` line on standard error; 3 says that packages are missing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT, VECTORS, SCORES = "text", "vectors", "scores"
_TASK = "text-generation-with-past"
_MULTIMODAL_TASK = "image-text-to-text"
_TASKS = {TEXT: (_TASK, _MULTIMODAL_TASK), VECTORS: ("feature-extraction",), SCORES: ("text-classification",)}
_NOT_EXPORTED = {
    TEXT: "optimum-intel exports no text-generating models of its architecture",
    VECTORS: "optimum-intel exports no embedders of its architecture",
    SCORES: "optimum-intel exports no rerankers of its architecture",
}
_LIBRARY = "transformers"
_NETWORK = "openvino_model.xml"
_MULTIMODAL_NETWORKS = (
    "openvino_language_model.xml",
    "openvino_text_embeddings_model.xml",
    "openvino_text_embeddings_per_layer_model.xml",
)
# optimum-intel does not write these if only the processor of texts and images has them.
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
_TOKENIZERS = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
_PACKAGES = ("torch", "transformers", "openvino", "openvino_tokenizers", "nncf", "optimum.exporters.openvino")
# The modes of 16 bits, with PyTorch's names of the numbers.
_UNCOMPRESSED = {"bf16": "bfloat16", "fp16": "float16"}
# Texts of a data set are cut to this length, and this many are read.
_SAMPLE_TOKENS = 512
_NUM_SAMPLES = 128
# Files that say how an encoder makes vectors or scores.
_ENCODER_FILES = ("1_Pooling/config.json", "modules.json", "sentence_bert_config.json", "tokenizer.json")
# Multimodal architectures whose text is exported alone: nothing else of them is served, and the whole needs timm.
_TEXT_ALONE = {"gemma3n": "gemma3n_text"}
# Multimodal architectures whose text may be of any architecture that can be exported.
_OF_ANY_TEXT = ("llava", "llava_next", "mistral3")
_OUT_OF_MEMORY = ("allocate memory", "bad_alloc", "bad allocation", "Cannot allocate")
_REASON_CHARACTERS = 300


class ExportError(Exception):
    """A checkpoint cannot be exported. The text says why in one sentence."""


@dataclass(frozen=True)
class Options:
    """How a checkpoint is exported. `mode` is bf16, fp16 or one of nncf's modes. With 4 bits, `group_size` weights
    share a scale (-1: a whole row), and `ratio` of the layers have 4 bits; `awq` and `scale_estimation` choose the
    numbers with more care, by the texts in `dataset` if there is one. The networks `vision` for images get weights of
    `vision_mode`."""

    mode: str
    memory_bytes: int
    task: str = TEXT
    group_size: int = 128
    ratio: float = 1.0
    awq: bool = False
    scale_estimation: bool = False
    dataset: str | None = None
    vision_mode: str = "int8_asym"
    vision: Sequence[str] = ()


def check(directory: Path, task: str = TEXT) -> None:
    """Raise ExportError if no model of this configuration can be exported for the task. Reads config.json alone."""
    from transformers import AutoConfig

    raw = _config_of(directory)
    model_type = raw.get("model_type")
    if model_type and _needs_code(raw):
        raise ExportError(
            f"its architecture ({model_type}) needs code from its repository, which headrace does not run"
        )
    if model_type in _TEXT_ALONE and task == TEXT:
        check_type(_TEXT_ALONE[model_type], task)
        return
    found = check_type(model_type, task) if model_type else _TASKS[task][0]
    if model_type in _OF_ANY_TEXT and (text_type := (raw.get("text_config") or {}).get("model_type")):
        check_type(text_type, task)
    if found == _MULTIMODAL_TASK and _packing(raw):
        raise ExportError(f"it is multimodal, and its weights are quantised ({_packing(raw)}), which is not supported")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ExportError(f"transformers cannot read its config.json: {_first_line(error)}") from None
    if config.model_type != model_type:
        check_type(config.model_type, task)


def check_type(model_type: str, task: str = TEXT) -> str:
    """optimum-intel's name of the task, for the architecture. Raises ExportError if it cannot export it, or not with
    this version of transformers."""
    import transformers
    from optimum.exporters.tasks import TasksManager
    from packaging.version import Version

    # Versions of optimum-intel that lack what it builds on export what they know.
    with contextlib.suppress(ImportError):
        _module("further_types").register()
    try:
        tasks = TasksManager.get_supported_tasks_for_model_type(model_type, "openvino", library_name=_LIBRARY)
    except KeyError:
        tasks = {}
    found = next((name for name in _TASKS[task] if name in tasks), None)
    if found is None:
        raise ExportError(f"{_NOT_EXPORTED[task]} ({model_type})")
    kind = tasks[found].func
    least, most = (Version(str(limit)) if limit else None for limit in _limits(kind))
    if least and most and least > most:
        raise ExportError(f"optimum-intel exports its architecture ({model_type}) with no version of transformers")
    installed = Version(transformers.__version__)
    if (least and installed < least) or (most and installed > most):
        wanted = " and ".join(f"{what} {limit}" for what, limit in (("at least", least), ("at most", most)) if limit)
        raise ExportError(
            f"optimum-intel exports its architecture ({model_type}) with transformers of {wanted}, and this Python has "
            f"{installed}; set HEADRACE_EXPORT_PYTHON to a Python with such a version"
        )
    return found


def _needs_code(config: Mapping[str, Any]) -> bool:
    """Whether transformers reads a model with this config.json only by running code from its repository."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return "AutoConfig" in (config.get("auto_map") or {}) and config["model_type"] not in CONFIG_MAPPING


def _limits(kind: Any) -> tuple[Any, Any]:
    return getattr(kind, "MIN_TRANSFORMERS_VERSION", None), getattr(kind, "MAX_TRANSFORMERS_VERSION", None)


def export(directory: Path, out: Path, options: Options) -> None:
    """Write model, tokenizers and the JSON files. OpenVINO maps the weights, and compression takes one at a time."""
    whole, plain = out / ".uncompressed", out / ".plain"
    if _config_of(directory).get("model_type") in _TEXT_ALONE:
        directory = _text_alone(directory, out / ".text")
    config = _config_of(directory)
    task = check_type(str(config.get("model_type")), options.task)
    packed = _packed_checkpoint(directory)
    source = directory
    if packed is not None:
        _stage("unpacking the weights")
        packed.write_plain(plain)
        source = plain
    reranker = _reranker(directory) if options.task == SCORES and _is_causal(config) else None
    if reranker is not None:
        reranker.write_classifier(source, out / ".classifier")
        source = out / ".classifier"
    _stage("reading the weights and tracing the graph")
    keeps = packed is not None and packed.has_kept(options.mode)
    _export_whole(source, whole, task, options, keeps_type=keeps)
    gc.collect()
    for folder in (plain, out / ".classifier", out / ".text"):
        shutil.rmtree(folder, ignore_errors=True)
    missing = [name for name in _TOKENIZERS if not (whole / name).is_file()]
    if missing and (options.task == TEXT or _TOKENIZERS[0] in missing):
        raise ExportError("its tokenizer cannot be converted")
    networks = _keep_served(directory, whole, task, options.vision)
    if reranker is not None:
        reranker.complete(whole)
    elif options.task != TEXT:
        _copy(_ENCODER_FILES, directory, whole)
    if options.mode not in _UNCOMPRESSED or keeps:
        mode = options.mode
        _stage(f"packing the weights, the others to {mode}" if keeps else f"compressing the weights to {mode}")
        for network in networks:
            network_mode = options.vision_mode if network.name in options.vision else mode
            _compress(network, out / network.name, network_mode, options, packed if keeps else None)
            network.unlink()
            network.with_suffix(".bin").unlink()
    for path in whole.iterdir():
        path.replace(out / path.name)
    shutil.rmtree(whole)


def _export_whole(source: Path, whole: Path, task: str, options: Options, *, keeps_type: bool) -> None:
    """Write the graph with weights of 16 bits if that is the mode, otherwise as the checkpoint has them."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    kind = None if keeps_type else _UNCOMPRESSED.get(options.mode)
    main_export(
        source,
        output=whole,
        task=task,
        ov_config=OVConfig(),
        convert_tokenizer=True,
        local_files_only=True,
        library_name=_LIBRARY,
        stateful=options.task == TEXT,
        model_loading_kwargs={"torch_dtype": kind} if kind else None,
    )


def _text_alone(directory: Path, target: Path) -> Path:
    """Make a directory with the configuration of a multimodal checkpoint's text, and links to its files. transformers
    finds the weights under the names that they have there."""
    config = _config_of(directory)
    text = {**config["text_config"], "model_type": _TEXT_ALONE[config["model_type"]]}
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(text))
    for path in directory.iterdir():
        if path.name not in ("config.json", *_IMAGE_FILES):
            (target / path.name).symlink_to(path.absolute())
    return target


def _is_causal(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint generates text, whatever it is exported for."""
    return any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or [])


def _reranker(directory: Path) -> Any:
    """A causal language model that scores."""
    from transformers import AutoTokenizer

    return _module("rerankers").Reranker(directory, AutoTokenizer.from_pretrained(directory, local_files_only=True))


def _keep_served(directory: Path, exported: Path, task: str, vision: Sequence[str]) -> list[Path]:
    """Remove the parts of a multimodal model that neither text nor the networks in `vision` need. Add its template and
    its image settings. Returns the networks."""
    names = _MULTIMODAL_NETWORKS if task == _MULTIMODAL_TASK else (_NETWORK,)
    networks = [exported / name for name in names if (exported / name).is_file()]
    if not networks:
        raise ExportError("its export has no language model of its own")
    if task != _MULTIMODAL_TASK:
        return networks
    if missing := [name for name in vision if not (exported / name).is_file()]:
        raise ExportError(f"its export has no {missing[0]}, which its images need")
    networks += [exported / name for name in vision]
    kept = {Path(name).stem for name in (*_TOKENIZERS, *(path.name for path in networks))}
    for path in exported.glob("openvino_*"):
        if path.stem not in kept:
            path.unlink()
    if not any((exported / name).is_file() for name in _TEMPLATES):
        _copy(_TEMPLATES, directory, exported)
    # Another version of transformers may have written them in other words.
    _copy(_IMAGE_FILES, directory, exported)
    return networks


def _copy(names: Sequence[str], source: Path, target: Path) -> None:
    """Copy the files that exist."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


def _config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    return config


def _packing(config: dict[str, Any]) -> str | None:
    """The format of a checkpoint's quantised weights; None if they are not quantised, or the format is not named."""
    method: str | None = (config.get("quantization_config") or {}).get("quant_method")
    return method


def _packed_checkpoint(directory: Path) -> Any:
    """The checkpoint if its weights are quantised. Raises PackedError if they are, and config.json does not say so."""
    if _packing(_config_of(directory)) is None:
        _module("packed").check_plain(directory)
        return None
    return _module("packed").Checkpoint(directory)


@functools.cache
def _module(name: str) -> Any:
    """The file of this name beside this one: an isolated Python does not find it by its name."""
    found = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _compress(source: Path, target: Path, mode: str, options: Options, packed: Any) -> None:
    """Compress the weights that are not `packed`. Weights of packed layers become those of their checkpoint."""
    import nncf
    import openvino

    of_mode: dict[str, Any] = {}
    if mode.startswith("int4"):
        fallback = nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST  # for layers whose width is not a multiple
        )
        of_mode = {"group_size": options.group_size, "ratio": options.ratio, "advanced_parameters": fallback}
        of_mode |= {"awq": options.awq, "scale_estimation": options.scale_estimation}
    graph = openvino.Core().read_model(source)
    if packed is not None:
        _module("packed").keep_packed(graph, packed)
    if mode not in _UNCOMPRESSED:
        if of_mode and options.dataset is not None:
            texts = _texts_of(Path(options.dataset))
            names = {name for port in graph.inputs for name in port.get_names()}
            of_mode["dataset"] = nncf.Dataset(list(_samples(source.parent, names, texts)))
        graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode(mode), **of_mode)
    openvino.save_model(graph, target, compress_to_fp16=False)


def _texts_of(path: Path) -> list[str]:
    """The texts of a data set: the lines of a file that are not empty."""
    texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [text for text in texts if text][:_NUM_SAMPLES]


def _samples(directory: Path, inputs: set[str], texts: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Inputs of a text-generating model with a state, for each text."""
    import numpy as np
    from nncf.definitions import NNCF_DATASET_RESET_STATE_KEY
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    for text in texts:
        tokens = np.array([tokenizer(text)["input_ids"][:_SAMPLE_TOKENS]], np.int64)
        values = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "position_ids": np.arange(tokens.shape[1], dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        if tokens.size:
            yield {**{name: values[name] for name in values if name in inputs}, NNCF_DATASET_RESET_STATE_KEY: True}


def _stage(what: str) -> None:
    os.write(_stages, f"{what}\n".encode())


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_REASON_CHARACTERS].rstrip(".")


def missing_packages() -> list[str]:
    """Import the packages, and return those that are not there. Raises ExportError if one is there and does not work,
    as when its parts are of different builds."""
    # Without this stub every import is reported over the network.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    _hide_what_does_not_work("torchvision")
    missing = []
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except Exception as error:
            first = _first_of(error)
            if not isinstance(first, ModuleNotFoundError):
                raise ExportError(f"{sys.executable} cannot import {name}: {_first_line(first)}") from error
            missing.append(first.name or name)
    return missing


def _hide_what_does_not_work(name: str) -> None:
    """Let transformers find a package missing, which no export needs, rather than fail with it. So does torchvision if
    it was built for another torch: that of GPUs, which comes with optimum-intel, beside the torch for CPUs."""
    try:
        importlib.import_module(name)
    except Exception:
        sys.modules[name] = None  # type: ignore[assignment]


def _first_of(error: BaseException) -> BaseException:
    """The error that this one came of."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _run(arguments: list[str]) -> None:
    command, directory = arguments[0], Path(arguments[1])
    if command == "check":
        check(directory, arguments[2])
        return
    options = Options(**json.loads(arguments[3]))
    resource.setrlimit(resource.RLIMIT_DATA, (options.memory_bytes, options.memory_bytes))
    try:
        export(directory, Path(arguments[2]), options)
    except ExportError:
        raise
    except Exception as error:
        if type(error).__name__ in ("PackedError", "RerankerError"):
            raise ExportError(str(error)) from None
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
            most = options.memory_bytes / (1 << 30)
            raise ExportError(f"the export takes more than the {most:.1f} GiB of memory that are available") from None
        raise ExportError(f"optimum-intel cannot export it: {_first_line(error)}") from error


def main() -> None:
    """Entry point."""
    try:
        missing = missing_packages()
        if missing:
            print(f"error: it lacks {', '.join(dict.fromkeys(missing))}", file=sys.stderr)
            sys.exit(3)
        _run(sys.argv[1:])
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    # Libraries print tables to standard output, which is reserved for the stages.
    _stages = os.dup(1)
    os.dup2(2, 1)
    main()
