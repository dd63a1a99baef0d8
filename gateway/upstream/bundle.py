"""The tokenizer bundle that a worker hands out: an uncompressed tar of a model's tokenizer files (pure, no I/O).

Only members with the names below are read, and nothing is written to disk.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.common.model_files.names import BUNDLE_FILES

MAX_BUNDLE_BYTES = 256 * 1024 * 1024
MAX_MEMBERS = 64

# Variables of a chat template that contain special tokens.
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class BundleError(Exception):
    """A bundle that cannot be used; the message says which file and why."""


def read_bundle(raw: bytes) -> dict[str, bytes]:
    """Content of the bundle's known files, by name. Raises `BundleError` if it is no tar archive or too large."""
    if len(raw) > MAX_BUNDLE_BYTES:
        raise BundleError(f"the tokenizer bundle has {len(raw)} bytes; the maximum is {MAX_BUNDLE_BYTES}")
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            for position, member in enumerate(archive):
                if position >= MAX_MEMBERS:
                    raise BundleError(f"the tokenizer bundle has more than {MAX_MEMBERS} members")
                if member.name not in BUNDLE_FILES or not member.isreg():
                    continue
                content = archive.extractfile(member)
                assert content is not None
                files[member.name] = content.read()
    except tarfile.TarError as error:
        raise BundleError(f"the tokenizer bundle is not a tar archive: {error}") from error
    return files


def json_file(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in a JSON file of the bundle; empty if there is no such file. Raises `BundleError`."""
    raw = files.get(name)
    if raw is None:
        return {}
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{name} in the tokenizer bundle is not a JSON object: {error}") from error


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Texts of the special tokens in the bundle's JSON files, by their name in templates (`bos_token`, ...)."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = json_file(files, name)
        for key in _SPECIAL_TOKEN_NAMES:
            value = config.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[key] = value
    return found


def template_sources(files: Mapping[str, bytes]) -> dict[str, str]:
    """Chat templates by name; the one to use is `default`. Empty if the bundle's files have none.

    `chat_template.jinja` takes precedence over `chat_template` of chat_template.json, and that over the one of
    tokenizer_config.json. In JSON it is a text or a list of `{"name", "template"}`. Raises `BundleError` for anything
    else.
    """
    named: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        named.update(_templates_in(json_file(files, name).get("chat_template")))
    if "chat_template.jinja" in files:
        try:
            named["default"] = files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise BundleError(f"chat_template.jinja in the tokenizer bundle is not UTF-8: {error}") from error
    return named


def _templates_in(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        return {str(e.get("name", "default")): e["template"] for e in entries if isinstance(e.get("template"), str)}
    if isinstance(value, dict):
        return {str(name): source for name, source in value.items() if isinstance(source, str)}
    return {}
