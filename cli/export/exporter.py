"""Exports a checkpoint in safetensors form. Run as a file, by a Python that has the packages of headrace[export], which
need not have headrace:

    exporter.py check DIRECTORY                                  can a model with this config.json be exported?
    exporter.py export DIRECTORY OUTDIR MODE GROUP_SIZE RATIO MEMORY_BYTES [VISION_MODE VISION_NETWORK ...]

Of a multimodal model, the parts for text are kept, which are the language model and the embeddings of tokens, and those
networks for images that are named, with weights of VISION_MODE.

MODE is bf16, or one of nncf's modes. The process takes at most MEMORY_BYTES of private memory. Standard output gets one
line for each stage. If something cannot be done, the exit status is 2 with one `error:` line on standard error; 3 says
that packages are missing.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import json
import os
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TASK = "text-generation-with-past"
_MULTIMODAL_TASK = "image-text-to-text"
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
_UNCOMPRESSED = "bf16"
_PACKED_BY = ("awq", "gptq")
_OUT_OF_MEMORY = ("allocate memory", "bad_alloc", "bad allocation", "Cannot allocate")
_REASON_CHARACTERS = 300


class ExportError(Exception):
    """Why a checkpoint cannot be exported, in one sentence."""


def check(directory: Path) -> None:
    """Raise ExportError if no model of this configuration can be exported. Reads config.json alone."""
    from transformers import AutoConfig

    raw = _config_of(directory)
    model_type = raw.get("model_type")
    task = check_type(model_type) if model_type else _TASK
    if task == _MULTIMODAL_TASK and _packing(raw) in _PACKED_BY:
        raise ExportError(f"it is multimodal, and its weights are packed ({_packing(raw)}), which is not supported")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ExportError(f"transformers cannot read its config.json: {_first_line(error)}") from None
    if config.model_type != model_type:
        check_type(config.model_type)


def check_type(model_type: str) -> str:
    """The task that the architecture is exported for. Raises ExportError if optimum-intel cannot export it, or not with
    this version of transformers."""
    import transformers
    from optimum.exporters.tasks import TasksManager
    from packaging.version import Version

    try:
        tasks = TasksManager.get_supported_tasks_for_model_type(model_type, "openvino", library_name=_LIBRARY)
    except KeyError:
        tasks = {}
    task = next((name for name in (_TASK, _MULTIMODAL_TASK) if name in tasks), None)
    if task is None:
        raise ExportError(f"optimum-intel exports no text-generating models of its architecture ({model_type})")
    kind = tasks[task].func
    least, most = (Version(str(limit)) if limit else None for limit in _limits(kind))
    installed = Version(transformers.__version__)
    if (least and installed < least) or (most and installed > most):
        wanted = " and ".join(f"{what} {limit}" for what, limit in (("at least", least), ("at most", most)) if limit)
        raise ExportError(
            f"optimum-intel exports its architecture ({model_type}) with transformers of {wanted}, and this Python has "
            f"{installed}; set HEADRACE_EXPORT_PYTHON to a Python with such a version"
        )
    return task


def _limits(kind: Any) -> tuple[Any, Any]:
    return getattr(kind, "MIN_TRANSFORMERS_VERSION", None), getattr(kind, "MAX_TRANSFORMERS_VERSION", None)


def export(
    directory: Path,
    out: Path,
    mode: str,
    group_size: int,
    ratio: float,
    vision_mode: str,
    vision: Sequence[str],
) -> None:
    """Write model, tokenizers and the JSON files. OpenVINO maps the weights, and compression takes one at a time."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    whole, plain = out / ".uncompressed", out / ".plain"
    task = check_type(str(_config_of(directory).get("model_type")))
    packed = _packed_checkpoint(directory)
    if packed is not None:
        _stage("unpacking the weights")
        packed.write_plain(plain)
    _stage("reading the weights and tracing the graph")
    main_export(
        directory if packed is None else plain,
        output=whole,
        task=task,
        ov_config=OVConfig(),
        convert_tokenizer=True,
        local_files_only=True,
        model_loading_kwargs={"torch_dtype": "bfloat16"} if mode == _UNCOMPRESSED and packed is None else None,
    )
    gc.collect()
    shutil.rmtree(plain, ignore_errors=True)
    missing = [name for name in _TOKENIZERS if not (whole / name).is_file()]
    if missing:
        raise ExportError("its tokenizer cannot be converted")
    networks = _keep_served(directory, whole, task, vision)
    if mode != _UNCOMPRESSED or packed is not None:
        _stage(f"compressing the weights to {mode}" if packed is None else f"packing the weights, the others to {mode}")
        for network in networks:
            network_mode = vision_mode if network.name in vision else mode
            _compress(network, out / network.name, network_mode, group_size, ratio, packed)
            network.unlink()
            network.with_suffix(".bin").unlink()
    for path in whole.iterdir():
        path.replace(out / path.name)
    shutil.rmtree(whole)


def _keep_served(directory: Path, exported: Path, task: str, vision: Sequence[str]) -> list[Path]:
    """Remove the parts of a multimodal model that neither text nor the networks in `vision` need, and add its template
    and the settings of its images. Returns the networks."""
    names = (_NETWORK,) if task == _TASK else _MULTIMODAL_NETWORKS
    networks = [exported / name for name in names if (exported / name).is_file()]
    if not networks:
        raise ExportError("its export has no language model of its own")
    if task == _TASK:
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
            shutil.copyfile(source / name, target / name)


def _config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    return config


def _packing(config: dict[str, Any]) -> str | None:
    """The format that packs the weights of a checkpoint; None if they are not packed, or the format is not named."""
    method: str | None = (config.get("quantization_config") or {}).get("quant_method")
    return method


def _packed_checkpoint(directory: Path) -> Any:
    """The checkpoint if its weights are packed, by AWQ or GPTQ."""
    is_packed = _packing(_config_of(directory)) in _PACKED_BY
    return _packed_module().Checkpoint(directory) if is_packed else None


@functools.cache
def _packed_module() -> Any:
    """The file beside this one: an isolated Python does not find it by its name."""
    found = importlib.util.spec_from_file_location("packed", Path(__file__).with_name("packed.py"))
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _compress(source: Path, target: Path, mode: str, group_size: int, ratio: float, packed: Any) -> None:
    """Compress the weights that are not `packed`. Weights of packed layers become those of their checkpoint."""
    import nncf
    import openvino

    options: dict[str, Any] = {}
    if mode.startswith("int4"):
        fallback = nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST  # for layers whose width is not a multiple
        )
        options = {"group_size": group_size, "ratio": ratio, "advanced_parameters": fallback}
    graph = openvino.Core().read_model(source)
    if packed is not None:
        _packed_module().keep_packed(graph, packed)
    if mode != _UNCOMPRESSED:
        graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode(mode), **options)
    openvino.save_model(graph, target, compress_to_fp16=False)


def _stage(what: str) -> None:
    os.write(_stages, f"{what}\n".encode())


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_REASON_CHARACTERS].rstrip(".")


def _missing_packages() -> list[str]:
    # Without this stub every import is reported over the network.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    missing = []
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(error.name or name)
    return missing


def _run(arguments: list[str]) -> None:
    command, directory = arguments[0], Path(arguments[1])
    if command == "check":
        check(directory)
        return
    out, mode, group_size, ratio, memory_bytes, *of_images = arguments[2:]
    vision_mode, *vision = of_images or [mode]
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
    try:
        export(directory, Path(out), mode, int(group_size), float(ratio), vision_mode, vision)
    except ExportError:
        raise
    except Exception as error:
        if type(error).__name__ == "PackedError":
            raise ExportError(str(error)) from None
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise ExportError(
                f"the export takes more than the {int(memory_bytes) / (1 << 30):.1f} GiB of memory that are available"
            ) from None
        raise ExportError(f"optimum-intel cannot export it: {_first_line(error)}") from error


def main() -> None:
    """Entry point."""
    missing = _missing_packages()
    if missing:
        print(f"error: it lacks {', '.join(dict.fromkeys(missing))}", file=sys.stderr)
        sys.exit(3)
    try:
        _run(sys.argv[1:])
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    # Libraries print tables to standard output, which is reserved for the stages.
    _stages = os.dup(1)
    os.dup2(2, 1)
    main()
