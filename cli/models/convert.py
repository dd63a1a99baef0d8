"""Convert a GGUF file into a model directory: `python -m headrace.cli.models.convert GGUF OUTDIR`.

It runs as a separate process, to isolate the converter's libraries and memory. If the file cannot be converted, the
exit status is 2, with one `error:` line on standard error.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.models.selection import PIECE
from headrace.common.model_files.gguf_files import ARCHITECTURES, INTERLEAVED, GgufError, metadata_of, open_gguf
from headrace.common.model_files.names import NAMED_TEMPLATE_FILES, TEMPLATE_FILES

if TYPE_CHECKING:
    from headrace.cli.gguf.vocabulary import Vocabulary

_TOKENIZER_KEY = "tokenizer.ggml."
_REMEDY = "take an OpenVINO version of the model (optimum-cli export openvino makes one of the original)"
# The architecture of llama.cpp's files with the networks for images.
_OF_IMAGES = "clip"
_KNOWN_TENSOR = re.compile(
    r"(token_embd|output_norm|output|rope_freqs)\.weight"
    r"|blk\.\d+\.(attn_(norm|q|k|v|output|q_norm|k_norm)|ffn_(norm|gate|up|down))\.(weight|bias)"
)
_UNKNOWN_SCALES = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale", "expert_count")
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# openvino-genai reads matrices of these kinds exactly, and rounds the minima of other kinds (docs/decisions/models.md).
_KINDS_OF_GENAI = {"F16", "Q4_0", "Q8_0", "Q6_K"}
_KINDS_IT_ROUNDS = {"Q4_1", "Q4_K"}
# In narrower models, exact minima take 1.1 to 1.35 times the time of a step.
_WIDTH_FOR_MINIMA = 1024
_CONTEXT_KEY = "context_length"
_TEMPLATE_KEY = "tokenizer.chat_template"


class ConversionError(Exception):
    """Why a file cannot be converted, in one sentence."""


def convert(gguf_path: Path, out_directory: Path) -> None:
    """Write the OpenVINO model, tokenizer and detokenizer, chat template and the two JSON files into the directory."""
    # Without this module OpenVINO uses a stub. With it, OpenVINO would report every import over the network.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    paths = pieces_of(gguf_path)
    readers, metadata = _opened(paths)
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    check_convertible(metadata, tensors)
    config = config_of(metadata)
    embeddings = tensors.get("token_embd.weight")
    num_ids = config["vocab_size"] if embeddings is None else int(embeddings.shape[-1])
    vocabulary = _write_tokenizer(readers[0], metadata, num_ids, out_directory)
    if len(paths) == 1 and can_genai_read(metadata, tensors):
        _write_model_with_genai(paths[0], out_directory)
    else:
        _write_model(metadata, config, tensors, out_directory / "openvino_model.xml")
    for file, template in chat_templates_of(metadata, vocabulary.first_text).items():
        (out_directory / file).parent.mkdir(exist_ok=True)
        (out_directory / file).write_text(template, encoding="utf-8")
    _write_json(out_directory / "config.json", config)
    _write_json(out_directory / "generation_config.json", generation_config_of(metadata, vocabulary.end_ids))


def pieces_of(gguf_path: Path) -> list[Path]:
    """All files of a model in pieces, given the first one. Raises ConversionError if one is missing."""
    matched = PIECE.search(gguf_path.stem)
    if gguf_path.suffix != ".gguf" or matched is None:
        return [gguf_path]
    stem, total = gguf_path.stem[: matched.start()], matched[2]
    if int(matched[1]) != 1:
        first = f"{stem}-00001-of-{total}.gguf"
        raise ConversionError(f"it is piece {int(matched[1])} of {int(total)}; name the first one, {first}")
    paths = [gguf_path.with_name(f"{stem}-{number:05}-of-{total}.gguf") for number in range(1, int(total) + 1)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConversionError(f"it is one of {int(total)} pieces, and {missing[0]} is not beside it")
    return paths


def check_convertible(metadata: dict[str, Any], tensors: Iterable[str]) -> None:
    """Raise ConversionError if the model cannot be converted exactly. The error names the model's type, the supported
    types, and a remedy."""
    from headrace.cli.gguf.vocabulary import VocabularyError, check_tokenizer

    architecture = metadata.get("general.architecture")
    if architecture == _OF_IMAGES:
        raise ConversionError(
            "it has the networks for images of a model (mmproj), not the model; for its text, name the GGUF file "
            f"beside it, and for images, {_REMEDY}"
        )
    if architecture not in ARCHITECTURES:
        raise ConversionError(
            f"its architecture is {architecture}, and GGUF files of {', '.join(ARCHITECTURES)} can be converted "
            f"(Llama, Mistral, SmolLM, Qwen 2 and 3); {_REMEDY}"
        )
    try:
        check_tokenizer(metadata)
    except VocabularyError as error:
        raise ConversionError(f"{error}; {_REMEDY}") from None
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ConversionError(
            f"its rotary frequencies are scaled by {scaling}, and linear scaling and Llama 3's factors can be "
            f"converted; {_REMEDY}"
        )
    size = _head_size(metadata)
    if metadata.get(f"{architecture}.rope.dimension_count", size) != size or size != _head_size(metadata, "value"):
        raise ConversionError(f"its heads are rotated in part, or keys and values differ in size; {_REMEDY}")
    scaled = [key for key in _UNKNOWN_SCALES if metadata.get(f"{architecture}.{key}")]
    unknown = sorted(name for name in tensors if not _KNOWN_TENSOR.fullmatch(name))
    if scaled or unknown:
        what = f"{architecture}.{scaled[0]}" if scaled else unknown[0]
        raise ConversionError(f"it has {what}, which a plain {architecture} model does not have; {_REMEDY}")


def can_genai_read(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
    """Whether openvino-genai makes the graph of such a file: it knows its tokenizer and all kinds of matrices, and
    nothing is scaled. It also rounds the minima of narrow models, for speed."""
    architecture = metadata.get("general.architecture")
    is_plain = (
        metadata.get(f"{_TOKENIZER_KEY}model") == "gpt2"
        and metadata.get(f"{architecture}.rope.scaling.type", "none") == "none"
        and "rope_freqs.weight" not in tensors
    )
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    is_narrow = metadata.get(f"{architecture}.embedding_length", 0) < _WIDTH_FOR_MINIMA
    return is_plain and kinds <= _KINDS_OF_GENAI | (_KINDS_IT_ROUNDS if is_narrow else set())


def _head_size(metadata: dict[str, Any], part: str = "key") -> int:
    architecture = metadata["general.architecture"]
    stated = metadata.get(f"{architecture}.attention.{part}_length")
    return int(stated or _number(metadata, "embedding_length") // _number(metadata, "attention.head_count"))


def _number(metadata: dict[str, Any], key: str) -> int:
    architecture = metadata["general.architecture"]
    value = metadata.get(f"{architecture}.{key}")
    if not isinstance(value, int):
        raise ConversionError(f"its metadata has no {architecture}.{key}")
    return value


def config_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """The contents of config.json, from the metadata of a GGUF file. Raises ConversionError if a required value is
    missing."""
    architecture = metadata.get("general.architecture")
    vocabulary = metadata.get(f"{architecture}.vocab_size", metadata.get("tokenizer.ggml.tokens.count"))
    heads = _number(metadata, "attention.head_count")
    config = {
        "model_type": architecture,
        "max_position_embeddings": _number(metadata, _CONTEXT_KEY),
        "num_hidden_layers": _number(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{architecture}.attention.head_count_kv", heads),
        "head_dim": _head_size(metadata),
        "hidden_size": _number(metadata, "embedding_length"),
        "vocab_size": vocabulary,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def generation_config_of(metadata: dict[str, Any], more_ends: Sequence[int] = ()) -> dict[str, Any]:
    """generation_config.json: the tokens for beginning, padding and end. Several end tokens become a list."""
    ends = list(dict.fromkeys([*(metadata[key] for key in _END_KEYS if key in metadata), *more_ends]))
    config = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    return {key: value for key, value in config.items() if value is not None}


def chat_templates_of(metadata: Mapping[str, Any], bos: str) -> dict[str, str]:
    """The chat templates, by the files in which they are kept: the default one, and those for tools and documents.
    `bos`: the token that comes before every text, or an empty text. Tools that add it themselves use templates without
    it, but the gateway takes what a template writes as it is."""
    named = {f"{_TEMPLATE_KEY}.{name}": file for name, file in NAMED_TEMPLATE_FILES.items()}
    found = {}
    for key, file in {_TEMPLATE_KEY: TEMPLATE_FILES[0], **named}.items():
        template = metadata.get(key)
        if isinstance(template, str) and template:
            writes_it = not bos or "bos_token" in template or bos in template
            found[file] = template if writes_it else f"{{{{ bos_token }}}}{template}"
    return found


def _opened(paths: Sequence[Path]) -> tuple[list[Any], dict[str, Any]]:
    """Readers of the files, and the metadata of the first."""
    try:
        readers = [open_gguf(path) for path in paths]
        return readers, metadata_of(readers[0])
    except GgufError as error:
        raise ConversionError(str(error)) from None


def _write_model(metadata: dict[str, Any], config: dict[str, Any], tensors: Mapping[str, Any], path: Path) -> None:
    import openvino

    from headrace.cli.gguf.graph import GraphBuilder, Shape
    from headrace.cli.gguf.weights import Matrices, vectors_of

    architecture = metadata["general.architecture"]
    linear = metadata.get(f"{architecture}.rope.scaling.type") == "linear"
    shape = Shape(
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        rope_base=float(metadata.get(f"{architecture}.rope.freq_base", 10_000.0)),
        rope_factor=float(metadata.get(f"{architecture}.rope.scaling.factor", 1.0)) if linear else 1.0,
        epsilon=float(metadata.get(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)),
        has_interleaved_heads=architecture in INTERLEAVED,
    )
    try:
        model = GraphBuilder(shape, Matrices(tensors), vectors_of(tensors)).build()
    except KeyError as error:
        raise ConversionError(f"it lacks the tensor {error.args[0]}; download it again") from None
    except NotImplementedError:
        kinds = sorted({tensor.tensor_type.name for tensor in tensors.values()})
        raise ConversionError(f"its weights are of the types {', '.join(kinds)}, one of which is unknown") from None
    openvino.save_model(model, path, compress_to_fp16=False)


def _write_tokenizer(reader: Any, metadata: dict[str, Any], num_ids: int, directory: Path) -> Vocabulary:
    from headrace.cli.gguf.tokenizer import write_tokenizer
    from headrace.cli.gguf.vocabulary import VocabularyError, read_vocabulary

    if f"{_TOKENIZER_KEY}pre" not in metadata and metadata.get(f"{_TOKENIZER_KEY}model") == "gpt2":
        print("warning: it names no pre-tokenizer, and the default one is taken", file=sys.stderr)
    try:
        vocabulary = read_vocabulary(reader, metadata)
        write_tokenizer(vocabulary, directory, metadata.get(f"{_TOKENIZER_KEY}padding_token_id"), num_ids)
    except VocabularyError as error:
        raise ConversionError(f"{error}; {_REMEDY}") from None
    return vocabulary


def _write_model_with_genai(path: Path, directory: Path) -> None:
    import openvino_genai

    # The converter writes next to its input file, so give it a link in a separate directory.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".convert.") as folder:
        link = Path(folder) / path.name
        link.symlink_to(path.absolute())
        try:
            openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        except Exception as error:
            print(error, file=sys.stderr)
            raise ConversionError(f"its model or tokenizer cannot be read; {_REMEDY}") from None
        written = list(Path(folder).glob("openvino_model.*"))
        if not written:
            raise ConversionError(f"openvino-genai wrote no model for {path.name}")
        for file in written:
            file.replace(directory / file.name)


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
