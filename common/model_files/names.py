"""Names of the files of a model directory."""

from __future__ import annotations

BUNDLE_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "openvino_detokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_tokenizer.xml",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
"""The files of the tokenizer bundle, which a worker serves as far as they exist."""
