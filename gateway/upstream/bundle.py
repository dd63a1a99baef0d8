"""The tokenizer bundle that a worker hands out: an uncompressed tar of a model's tokenizer files (pure, no I/O).

Only members with the names below are read, and nothing is written to disk.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import tarfile
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.common.model_files.names import BUNDLE_FILES, IMAGE_FILES, NAMED_TEMPLATE_FILES, TEMPLATE_FILES

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
    """Content of the bundle's known files, by name. Raises `BundleError` if it is not a tar archive, or too large."""
    if len(raw) > MAX_BUNDLE_BYTES:
        raise BundleError(f"the tokenizer bundle has {len(raw)} bytes; the maximum is {MAX_BUNDLE_BYTES}")
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            for position, member in enumerate(archive):
                if position >= MAX_MEMBERS:
                    raise BundleError(f"the tokenizer bundle has more than {MAX_MEMBERS} members")
                if member.name not in (*BUNDLE_FILES, *IMAGE_FILES) or not member.isreg():
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
        return msgspec.json.decode(text_of(raw), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{name} in the tokenizer bundle is not a JSON object: {error}") from error


def text_of(raw: bytes) -> str:
    """The text of a file as editors on any system write it: without a byte order mark, with line feeds between lines.
    Raises `UnicodeDecodeError`."""
    is_wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return plain_lines(raw.decode("utf-16" if is_wide else "utf-8"))


def plain_lines(text: str) -> str:
    """A text without a byte order mark, with line feeds between its lines."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


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


def eos_token_ids(files: Mapping[str, bytes]) -> frozenset[int]:
    """The tokens that end an answer, as far as the bundle's files name them."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = None
        with contextlib.suppress(BundleError):  # the worker has checked the files, and reads more kinds of numbers
            value = json_file(files, name).get("eos_token_id")
        found.update(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))
    return frozenset(found)


def template_sources(files: Mapping[str, bytes]) -> dict[str, str]:
    """Chat templates by name; the one to use is `default`. Empty if the bundle's files have none.

    Files with nothing but a template (`TEMPLATE_FILES`) take precedence over `chat_template` of chat_template.json, and
    that over the one of tokenizer_config.json. In JSON it is a text or a list of `{"name", "template"}`. Raises
    `BundleError` for anything else.
    """
    named: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        named.update(_templates_in(json_file(files, name).get("chat_template")))
    own = next((name for name in TEMPLATE_FILES if name in files), None)
    for name, file in {**NAMED_TEMPLATE_FILES, "default": own}.items():
        if file is not None and file in files:
            try:
                named[name] = text_of(files[file])
            except UnicodeDecodeError as error:
                raise BundleError(f"{file} in the tokenizer bundle is not UTF-8: {error}") from error
    return named


def _templates_in(value: object) -> dict[str, str]:
    if isinstance(value, str):
        value = {"default": value}
    elif isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {str(entry.get("name", "default")): entry.get("template") for entry in entries}
    if not isinstance(value, dict):
        return {}
    return {str(name): plain_lines(source) for name, source in value.items() if isinstance(source, str)}
