"""Small GGUF files that have a tokenizer and nothing else, for every pre-tokenizer and for SentencePiece."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from tests.gguf_models import byte_tokens

_LEARNED = json.loads(Path(__file__).with_suffix(".json").read_bytes())
MERGES: list[str] = _LEARNED["merges"]
"""Of byte-level BPE, learned from lines without splitting them."""
_SPACE = "\u2581"
# Tokens of every kind. Some overlap, so that it matters which are found first.
ADDED = {
    "<|bos|>": TokenType.CONTROL,
    "<|eos|>": TokenType.CONTROL,
    "<unk>": TokenType.UNKNOWN,
    "<tool_call>": TokenType.USER_DEFINED,
    "</tool_call>": TokenType.USER_DEFINED,
    "<unused0>": TokenType.UNUSED,
    "x<": TokenType.USER_DEFINED,
    "~~": TokenType.USER_DEFINED,
    "~~~": TokenType.USER_DEFINED,
    "~~~~": TokenType.USER_DEFINED,
    "\t\t": TokenType.USER_DEFINED,
}
# Tokens that no merges make.
UNREACHABLE = ("unbelievable", "Ġfor", "getElementById", "123", "...", "Ġ...", "ä¸Ģ")


def byte_level_tokens() -> dict[str, TokenType]:
    tokens = dict(ADDED)
    for token in (*byte_tokens(), *(merge.replace(" ", "") for merge in MERGES), *UNREACHABLE):
        tokens.setdefault(token, TokenType.NORMAL)
    return tokens


def sentencepiece_tokens() -> dict[str, TokenType]:
    tokens = dict(ADDED)
    tokens |= {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    for token in _LEARNED["pieces"]:
        tokens.setdefault(token, TokenType.NORMAL)
    return tokens


def write_byte_level(path: Path, pre: str | None, **settings: Any) -> Path:
    """A file with byte-level BPE. `settings`: further values of the metadata, by the last part of their names."""
    named = {} if pre is None else {"pre": pre}
    return write_file(path, byte_level_tokens(), {"model": "gpt2", **named, "merges": MERGES, **settings})


def write_sentencepiece(path: Path, **settings: Any) -> Path:
    tokens = sentencepiece_tokens()
    learned = len(tokens) - len(_LEARNED["pieces"])
    scores = [float(min(0, learned - token_id)) for token_id in range(len(tokens))]
    return write_file(path, tokens, {"model": "llama", "scores": scores, **settings})


def write_file(path: Path, tokens: Mapping[str, TokenType], settings: Mapping[str, Any]) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    for name, value in {"bos_token_id": 0, "eos_token_id": 1, **settings}.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
