"""Reads a model directory: checks that it is complete, and finds the length of the context and the stop tokens.

openvino_model.xml/.bin           the network, stateful, as optimum-intel and openvino-genai write it; that of a
                                  multimodal model is in parts (headrace.common.model_files.networks)
openvino_tokenizer.xml/.bin       text to ids, for the gateway
openvino_detokenizer.xml/.bin     ids to text, for the gateway
config.json                       length of the context, rotary factors, eos_token_id  (if there)
generation_config.json            eos_token_id and recommended sampling            (if there)
chat_template.jinja, ...          for the gateway                                  (if there)
openvino_vision_*.xml/.bin, ...   networks for images (headrace.common.model_files.vision_networks), and with them
preprocessor_config.json, processor_config.json    how images become pixels and tokens, for the gateway
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from headrace.common.model_files.config import text_part
from headrace.common.model_files.names import BUNDLE_FILES, IMAGE_FILES
from headrace.common.model_files.networks import empty_files, weights_in
from headrace.common.model_files.score_cap import SCORE_CAP, WITHOUT_SCORE_CAP, needs_score_cap
from headrace.common.model_files.task import missing_of_model
from headrace.common.model_files.vision_networks import vision_networks_in
from headrace.protos.sampling_fields import NUMBERS
from headrace.worker.config import ConfigurationError

log = logging.getLogger(__name__)

CONFIG = "config.json"
UNKNOWN_CONTEXT_TOKENS = 2048
# Names of the layers that see a part of the context. Llama 4's see chunks of it.
_IN_WINDOWS = {"sliding_attention", "local", "chunked_attention"}
# Names of the length of the context: in most models; in GPT-2; in MPT; in BLOOM and ChatGLM; in others.
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "n_ctx",
)
_MOST_DIGITS = 20
_LARGEST_UINT32 = (1 << 32) - 1
# The recommended values that are used.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "top_n_sigma", "repetition_penalty")
_TWO_SETS_OF_FACTORS = {"longrope", "su"}
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class ModelDir:
    """The content of a model's files. `sampling` has the recommended values that the files contain: temperature, top_p,
    top_k, min_p, repetition_penalty and max_tokens."""

    path: Path
    tokenizer_bundle: bytes
    tokenizer_sha256: str
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float]
    created_s: int


def read_model_dir(path: Path) -> ModelDir:
    """Read and verify a directory. ConfigurationError names each file that is missing, invalid or unreadable."""
    try:
        return _verified(path)
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or path} cannot be read: {error.strerror}; let the user of this process read it, or pull "
            "the model again"
        ) from error


def _verified(path: Path) -> ModelDir:
    if not path.is_dir():
        raise ConfigurationError(
            f"there is no model directory {path}, nor a model of this name in the cache; `headrace pull` fetches one"
        )
    wrong = [f"{name} is missing" for name in missing_of_model(path)]
    wrong += [f"{name} is empty" for name in empty_files(path)]
    configs = {}
    of_images = IMAGE_FILES if vision_networks_in(path) else ()
    for name in (CONFIG, "generation_config.json", "tokenizer_config.json", *of_images):
        try:
            configs[name] = _read_json(path / name)
        except ValueError as error:
            wrong.append(f"{name} is not JSON ({error})")
    try:
        rt_info = _read_rt_info(path / "openvino_tokenizer.xml") if not wrong else {}
    except ElementTree.ParseError as error:
        wrong.append(f"openvino_tokenizer.xml is not XML ({error})")
    if wrong:
        raise ConfigurationError(f"the model directory {path} cannot be used: {'; '.join(wrong)}; pull the model again")
    if needs_score_cap(configs[CONFIG]):
        raise ConfigurationError(f"the model in {path} cannot be served: {WITHOUT_SCORE_CAP}")
    if text_part(configs[CONFIG]).get(SCORE_CAP):
        log.warning(
            "config.json caps the scores of attention (%s), and no graph that is served does: answers may differ from "
            "those of the model's authors",
            SCORE_CAP,
        )
    bundle = _bundle(path, (*BUNDLE_FILES, *of_images))
    return ModelDir(
        path=path,
        tokenizer_bundle=bundle,
        tokenizer_sha256=hashlib.sha256(bundle).hexdigest(),
        max_context_tokens=context_of(configs[CONFIG], path),
        eos_token_ids=_eos_token_ids(
            [configs["generation_config.json"], configs[CONFIG], text_part(configs[CONFIG]), rt_info]
        ),
        sampling=_recommended_sampling(configs["generation_config.json"]),
        created_s=int(weights_in(path)[0].stat().st_mtime),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _read_rt_info(path: Path) -> dict[str, Any]:
    """The integers among the runtime information that the tokenizer's converter left in its XML."""
    info = ElementTree.parse(path).getroot().find("rt_info")
    found = {}
    for element in () if info is None else info:
        value = element.get("value", "")
        if value.isdecimal() and len(value) < _MOST_DIGITS:
            found[element.tag] = int(value)
    return found


def _bundle(path: Path, names: Iterable[str]) -> bytes:
    """The files with these names as a tar archive, the same bytes for the same files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(names):
            if (path / name).is_file():
                content = (path / name).read_bytes()
                member = tarfile.TarInfo(name)
                member.size = len(content)
                member.mode = 0o644
                tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.json in a model directory; empty if there is none. Raises ConfigurationError."""
    try:
        return _read_json(path / CONFIG)
    except ValueError as error:
        raise ConfigurationError(f"{path / CONFIG} is not JSON ({error}); pull the model again") from error


def context_of(config: Mapping[str, Any], path: Path) -> int:
    """The longest context: that of the model, or the part that its first set of rotary factors covers."""
    for source in (config, text_part(config)):
        longest = next((value for name in _CONTEXT_NAMES if _is_length(value := source.get(name))), 0)
        if longest:
            original = _original_context(source)
            if 0 < original < longest:
                log.info(
                    "%s has rotary factors for contexts of up to %d tokens, and others for up to %d: serving %d tokens "
                    "with the former. With a larger --max-context-tokens every prompt gets the latter",
                    path,
                    original,
                    longest,
                    original,
                )
            chunk = chunk_of(config)
            if 0 < chunk < longest:
                log.info("some layers of %s see chunks of %d tokens: serving contexts of up to one chunk", path, chunk)
                return chunk
            return original or longest
    log.warning(
        "%s does not say how long the context is (config.json: max_position_embeddings); taking %d tokens. "
        "Set --max-context-tokens if that is wrong",
        path,
        UNKNOWN_CONTEXT_TOKENS,
    )
    return UNKNOWN_CONTEXT_TOKENS


def uses_alibi(config: Mapping[str, Any]) -> bool:
    """Whether attention encodes positions with ALiBi."""
    config = text_part(config)
    kind, attention = config.get("model_type"), config.get("attn_config")
    is_in_attention = isinstance(attention, dict) and attention.get("alibi", kind == "mpt") is True
    named = config.get("position_embedding_type") == "alibi"
    return kind == "bloom" or config.get("alibi") is True or named or is_in_attention


def has_windows(config: Mapping[str, Any]) -> bool:
    """Whether some layers see only a window of the context, or chunks of it."""
    layers = [text_part(config).get(name) for name in ("layer_types", "attention_layers")]
    return any(isinstance(kinds, list) and not _IN_WINDOWS.isdisjoint(kinds) for kinds in layers)


def chunk_of(config: Mapping[str, Any]) -> int:
    """The tokens of each chunk of the context, if some layers see one chunk only, as Llama 4's do; otherwise 0. Within
    the first chunk, they see all of it."""
    chunk = text_part(config).get("attention_chunk_size")
    return chunk if isinstance(chunk, int) and chunk > 0 else 0


def _is_length(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _original_context(config: Mapping[str, Any]) -> int:
    """With LongRoPE, the longest context for the first set of factors; 0 for other models."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _TWO_SETS_OF_FACTORS:
            original = config.get(_ORIGINAL, rope.get(_ORIGINAL))
            return original if isinstance(original, int) and original > 0 else 0
    return 0


def _eos_token_ids(sources: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """The first answer found: one id or a list of them. Some files have -1 for none."""
    for source in sources:
        value = source.get("eos_token_id")
        values: list[Any] = value if isinstance(value, list) else [value]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            found = tuple(item for item in values if 0 <= item <= _LARGEST_UINT32)
            if found:
                return found
    return ()


def _recommended_sampling(config: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name in _RECOMMENDED:
        number = NUMBERS[name]
        value = config.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        is_over = value > number.least or not number.open_below_on_wire
        if is_over and number.least <= value <= number.greatest:
            found[name] = max(0.0, float(value))
        else:
            log.warning(
                "generation_config.json recommends a %s of %.20s, which no request may have; it is not used",
                name,
                value,
            )
    longest = config.get("max_new_tokens")
    if isinstance(longest, int) and not isinstance(longest, bool) and 0 < longest <= _LARGEST_UINT32:
        found["max_tokens"] = longest
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
