"""Convert a GGUF file into a model directory: `python -m headrace.cli.models.convert GGUF OUTDIR`.

It runs as a separate process, to isolate the converter's libraries and memory. If the file cannot be converted, the
exit status is 2, with one `error:` line on standard error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.models.selection import PIECE
from headrace.common.model_files.gguf_files import GgufError, metadata_of, open_gguf
from headrace.common.model_files.names import NAMED_TEMPLATE_FILES, TEMPLATE_FILES
from headrace.common.model_files.score_cap import SCORE_CAP

if TYPE_CHECKING:
    from headrace.cli.gguf.architectures import Shape
    from headrace.cli.gguf.vocabulary import Vocabulary

_TOKENIZER_KEY = "tokenizer.ggml."
_REMEDY = "take an OpenVINO version of the model (optimum-cli export openvino makes one of the original)"
# The architecture of llama.cpp's files with the networks for images.
_OF_IMAGES = "clip"
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Architectures whose graphs openvino-genai makes. It reads matrices of these kinds exactly, and rounds the minima of
# other kinds (docs/decisions/models.md).
_ARCHITECTURES_OF_GENAI = {"llama", "qwen2", "qwen3"}
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
        config |= _write_model(metadata, tensors, out_directory / "openvino_model.xml")
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
    from headrace.cli.gguf.architectures import ArchitectureError, check_shape, unknown_tensor
    from headrace.cli.gguf.vocabulary import VocabularyError, check_tokenizer

    architecture = metadata.get("general.architecture")
    if architecture == _OF_IMAGES:
        raise ConversionError(
            "it has the networks for images of a model (mmproj), not the model; for its text, name the GGUF file "
            f"beside it, and for images, {_REMEDY}"
        )
    try:
        check_shape(metadata)
        check_tokenizer(metadata)
    except (ArchitectureError, VocabularyError) as error:
        raise ConversionError(f"{error}; {_REMEDY}") from None
    if unknown := unknown_tensor(str(architecture), tensors):
        raise ConversionError(f"it has {unknown}, which a plain {architecture} model does not have; {_REMEDY}")


def can_genai_read(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
    """Whether openvino-genai makes the graph of such a file: it knows its architecture, its tokenizer and all kinds of
    matrices, and nothing is scaled. It also rounds the minima of narrow models, for speed."""
    architecture = metadata.get("general.architecture")
    is_plain = (
        architecture in _ARCHITECTURES_OF_GENAI
        and metadata.get(f"{_TOKENIZER_KEY}model") == "gpt2"
        and metadata.get(f"{architecture}.rope.scaling.type", "none") == "none"
        and not metadata.get(f"{architecture}.rope.scaling.factor")
        and not metadata.get(f"{architecture}.expert_count")
        and "rope_freqs.weight" not in tensors
    )
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    is_narrow = metadata.get(f"{architecture}.embedding_length", 0) < _WIDTH_FOR_MINIMA
    return is_plain and kinds <= _KINDS_OF_GENAI | (_KINDS_IT_ROUNDS if is_narrow else set())


def config_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """The contents of config.json, from the metadata of a GGUF file. Raises ConversionError if a required value is
    missing."""
    from headrace.cli.gguf.architectures import ArchitectureError, Metadata, head_size_of, model_type_of, score_cap_of

    values = Metadata(metadata)
    try:
        heads = values.whole("attention.head_count")
        config = {
            "model_type": model_type_of(values.architecture),
            "max_position_embeddings": values.whole(_CONTEXT_KEY),
            "num_hidden_layers": values.whole("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": values.whole("attention.head_count_kv", heads),
            "head_dim": head_size_of(values),
            "hidden_size": values.whole("embedding_length"),
            "vocab_size": values.get("vocab_size") or metadata.get("tokenizer.ggml.tokens.count"),
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
            SCORE_CAP: score_cap_of(values) or None,
        }
    except ArchitectureError as error:
        raise ConversionError(str(error)) from None
    return {key: value for key, value in config.items() if value is not None}


def config_of_shape(shape: Shape) -> dict[str, Any]:
    """Further entries of config.json, for layers with a sliding window and for two sets of rotary factors."""
    found: dict[str, Any] = {}
    if shape.window:
        kinds = ("full_attention", "sliding_attention")
        found = {"sliding_window": shape.window, "layer_types": [kinds[layer.window > 0] for layer in shape.layers]}
    for layer in shape.layers:
        if layer.rotation is not None and layer.rotation.long_frequencies is not None:
            original = layer.rotation.original_context
            found |= {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": original}
    return found


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


def _write_model(metadata: dict[str, Any], tensors: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Write the graph. Returns what config.json has to say of it."""
    import openvino

    from headrace.cli.gguf.architectures import ArchitectureError, shape_of
    from headrace.cli.gguf.graph import GraphBuilder
    from headrace.cli.gguf.weights import Matrices, vectors_of

    try:
        vectors = vectors_of(tensors)
        shape = shape_of(metadata, vectors)
        model = GraphBuilder(shape, Matrices(tensors), vectors).build()
    except ArchitectureError as error:
        raise ConversionError(f"{error}; {_REMEDY}") from None
    except KeyError as error:
        raise ConversionError(f"it lacks the tensor {error.args[0]}; download it again") from None
    except NotImplementedError:
        kinds = sorted({tensor.tensor_type.name for tensor in tensors.values()})
        raise ConversionError(f"its weights are of the types {', '.join(kinds)}, one of which is unknown") from None
    openvino.save_model(model, path, compress_to_fp16=False)
    return config_of_shape(shape)


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
