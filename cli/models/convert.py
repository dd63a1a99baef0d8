"""Convert a GGUF file into a model directory: `python -m headrace.cli.models.convert GGUF OUTDIR`.

Runs as a process of its own, so that the converter's libraries and memory never meet anything else. Its exit status is
2 with one `error:` line on standard error when the file cannot be converted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

_NEEDED = "converting a GGUF file needs openvino-genai and gguf; install them with: pip install 'headrace[convert]'"
# What openvino-genai reads.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FREQUENCIES = "rope_freqs.weight"
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class ConversionError(Exception):
    """Why a file cannot be converted, in one sentence."""


def convert(gguf_path: Path, out_directory: Path) -> None:
    """Write the OpenVINO model, tokenizer and detokenizer, chat template and the two JSON files into the directory."""
    metadata = read_metadata(gguf_path)
    check_convertible(metadata)
    with tempfile.TemporaryDirectory(dir=out_directory, prefix=".convert.") as folder:
        # The converter writes next to its input file: give it a link in a directory of our own.
        link = Path(folder) / "model.gguf"
        link.symlink_to(gguf_path.absolute())
        _write_openvino_files(link, gguf_path)
        for path in Path(folder).glob("openvino_*"):
            path.replace(out_directory / path.name)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        (out_directory / "chat_template.jinja").write_text(template)
    _write_json(out_directory / "config.json", config_of(metadata))
    _write_json(out_directory / "generation_config.json", generation_config_of(metadata))


def check_convertible(metadata: dict[str, Any]) -> None:
    """Raise ConversionError for what openvino-genai's converter cannot read, or would read wrongly."""
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ConversionError(
            f"its architecture is {architecture}, and only GGUF files of {', '.join(_ARCHITECTURES)} can be converted; "
            "export the original model with optimum-cli"
        )
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or metadata.get(_FREQUENCIES):
        raise ConversionError(
            "its rotary frequencies are scaled for long contexts, as those of Llama 3.1 are, and the converter would "
            "drop that; export the original model with optimum-cli"
        )


def config_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """config.json with what a GGUF file knows of it. Raises ConversionError if it does not know the context length."""
    architecture = metadata.get("general.architecture")
    context = metadata.get(f"{architecture}.context_length")
    if not isinstance(context, int):
        raise ConversionError(f"its metadata has no {architecture}.context_length")
    vocabulary = metadata.get(f"{architecture}.vocab_size", metadata.get("tokenizer.ggml.tokens.count"))
    config = {
        "model_type": architecture,
        "max_position_embeddings": context,
        "vocab_size": vocabulary,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def generation_config_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: the tokens that begin, pad and end. Several ends become a list."""
    ends = list(dict.fromkeys(metadata[key] for key in _END_KEYS if key in metadata))
    config = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    return {key: value for key, value in config.items() if value is not None}


def read_metadata(gguf_path: Path) -> dict[str, Any]:
    """The file's key-value pairs; of an array only its length, as KEY.count; and whether it has a tensor of rotary
    frequencies, as rope_freqs.weight. Raises ConversionError."""
    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError:
        raise ConversionError(_NEEDED) from None
    try:
        reader = GGUFReader(gguf_path)
        metadata: dict[str, Any] = {_FREQUENCIES: any(tensor.name == _FREQUENCIES for tensor in reader.tensors)}
        for key, field in reader.fields.items():
            if field.types and field.types[0] == GGUFValueType.ARRAY:
                metadata[f"{key}.count"] = len(field.data)
            else:
                metadata[key] = field.contents()
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ConversionError(f"it is no readable GGUF file ({str(error) or type(error).__name__})") from None
    return metadata


def _write_openvino_files(link: Path, gguf_path: Path) -> None:
    # Without this module OpenVINO takes a stub; with it, every import is reported over the network.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino_genai
    except ImportError:
        raise ConversionError(_NEEDED) from None
    try:
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ConversionError(f"OpenVINO cannot read this kind of GGUF ({reason})") from None
    if not (link.parent / "openvino_model.xml").is_file():
        raise ConversionError(f"openvino-genai wrote no model for {gguf_path.name}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Entry point of the converting process."""
    gguf_path, out_directory = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        convert(gguf_path, out_directory)
    except ConversionError as error:
        print(f"error: {gguf_path} cannot be converted: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
