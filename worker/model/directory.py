"""Reading a model directory: is it whole, what is the model called, how long is its context, when does it stop.

openvino_model.xml/.bin           the network, stateful, as optimum-intel and openvino-genai write it
openvino_tokenizer.xml/.bin       text to ids, for the gateway
openvino_detokenizer.xml/.bin     ids to text, for the gateway
config.json                       max_position_embeddings, eos_token_id            (if there)
generation_config.json            eos_token_id and recommended sampling            (if there)
chat_template.jinja, ...          for the gateway                                  (if there)
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from headrace.common.model_files.names import BUNDLE_FILES
from headrace.worker.config import ConfigurationError

log = logging.getLogger(__name__)

NETWORK, WEIGHTS = "openvino_model.xml", "openvino_model.bin"
REQUIRED_FILES = (
    NETWORK,
    WEIGHTS,
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_detokenizer.bin",
)
UNKNOWN_CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ModelDir:
    """What the files of a model say. `sampling` has the makers' recommendation: temperature, top_p, top_k, min_p,
    repetition_penalty and max_tokens, those that are there."""

    path: Path
    tokenizer_bundle: bytes
    tokenizer_sha256: str
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float]
    created_s: int


def read_model_dir(path: Path) -> ModelDir:
    """Read and verify a directory. ConfigurationError names each file that is missing or not what it should be."""
    if not path.is_dir():
        raise ConfigurationError(f"there is no model directory {path}; `headrace pull` makes one")
    wrong = [f"{name} is missing" for name in REQUIRED_FILES if not (path / name).is_file()]
    wrong += [
        f"{name} is empty" for name in REQUIRED_FILES if (path / name).is_file() and not (path / name).stat().st_size
    ]
    configs = {}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
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
    bundle = _bundle(path)
    return ModelDir(
        path=path,
        tokenizer_bundle=bundle,
        tokenizer_sha256=hashlib.sha256(bundle).hexdigest(),
        max_context_tokens=_max_context_tokens(configs["config.json"], path),
        eos_token_ids=_eos_token_ids([configs["generation_config.json"], configs["config.json"], rt_info]),
        sampling=_recommended_sampling(configs["generation_config.json"]),
        created_s=int((path / WEIGHTS).stat().st_mtime),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _read_rt_info(path: Path) -> dict[str, Any]:
    """The integers among the runtime information that the tokenizer's converter left in its XML."""
    info = ElementTree.parse(path).getroot().find("rt_info")
    found = {}
    for element in () if info is None else info:
        value = element.get("value", "")
        if value.isdecimal():
            found[element.tag] = int(value)
    return found


def _bundle(path: Path) -> bytes:
    """The tokenizer's files as a tar archive, the same bytes for the same files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(BUNDLE_FILES):
            if (path / name).is_file():
                content = (path / name).read_bytes()
                member = tarfile.TarInfo(name)
                member.size = len(content)
                member.mode = 0o644
                tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def _max_context_tokens(config: dict[str, Any], path: Path) -> int:
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        value = source.get("max_position_embeddings")
        if isinstance(value, int) and value > 0:
            return value
    log.warning(
        "%s does not say how long the context is (config.json: max_position_embeddings); taking %d tokens. "
        "Say --max-context-tokens if you know better",
        path,
        UNKNOWN_CONTEXT_TOKENS,
    )
    return UNKNOWN_CONTEXT_TOKENS


def _eos_token_ids(sources: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    """The first answer found: one id or a list of them."""
    for source in sources:
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return tuple(value)
    return ()


def _recommended_sampling(config: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = config.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value)
    longest = config.get("max_new_tokens")
    if isinstance(longest, int) and not isinstance(longest, bool) and longest > 0:
        found["max_tokens"] = longest
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
