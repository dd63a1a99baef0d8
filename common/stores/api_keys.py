"""API keys as they are stored, in a file or in Redis. `headrace keys` writes them and gateways read them.

A key is a random text of 256 bits and is shown once, when it is made. Only its SHA-256 is stored. A random key needs
no slow hash, salt or pepper, because guessing is hopeless at any speed, and a slow hash would let strangers keep a
gateway busy. A key is found by its hash, so no comparison reveals how near a guess is.

In a file: {"keys": [JSON, ...]}. In Redis: the hash `headrace:api-keys` has a field for each key, its id, with the
key's JSON, and `headrace:api-keys:version` is another random text after each change.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headrace.common.stores.files import replace_file

REDIS_KEYS = "headrace:api-keys"
REDIS_VERSION = "headrace:api-keys:version"
PREFIX = "hr-"
MAX_PER_MINUTE = 100_000_000
MAX_CONCURRENT = 1_000_000
MAX_NAME_CHARS = 100
MAX_KEYS = 100_000
MAX_FILE_BYTES = 64 * 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[^\x00-\x1f\x7f]*")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key. `None` means no limit; no models means all models."""

    id: str
    sha256: str
    name: str
    tenant: str
    """The owner of requests in fair queueing, and of stored responses."""
    created_s: int
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_priority: int = 0
    """The highest priority that requests may ask for."""
    models: tuple[str, ...] = ()
    cache_group: str | None = None
    """Keys of one group share cached prefixes, whatever their tenants; by default the keys of one tenant do."""

    def __post_init__(self) -> None:
        """Raises ValueError if it is not a valid key."""
        for name in ("id", "name", "tenant", "cache_group"):
            value = getattr(self, name)
            if name == "cache_group" and value is None:
                continue
            if not isinstance(value, str) or len(value) > MAX_NAME_CHARS or not _NAME.fullmatch(value):
                raise ValueError(f"{name} must be a text of at most {MAX_NAME_CHARS} characters on one line")
        if not self.id or not isinstance(self.sha256, str) or not _SHA256.fullmatch(self.sha256):
            raise ValueError("a key needs an id and a sha256 in hexadecimal digits")
        _check_number("requests_per_minute", self.requests_per_minute, 1, MAX_PER_MINUTE)
        _check_number("tokens_per_minute", self.tokens_per_minute, 1, MAX_PER_MINUTE)
        _check_number("max_concurrent", self.max_concurrent, 1, MAX_CONCURRENT)
        for name, value in (("max_priority", self.max_priority), ("created_s", self.created_s)):
            if value is None:
                raise ValueError(f"{name} must be a number")
            _check_number(name, value, -(2**31), 2**53)
        if not all(isinstance(model, str) for model in self.models):
            raise ValueError("models must be names")


def _check_number(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
        raise ValueError(f"{name} must be a whole number from {least} to {most}")


def new_secret() -> str:
    """A new key: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def new_id() -> str:
    """A new random id of a key, which may be shown and logged."""
    return f"key_{secrets.token_hex(6)}"


def sha256_of(secret: str | bytes) -> str:
    """The stored hash of a key, in hexadecimal digits."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).hexdigest()


def dump_key(key: ApiKey) -> str:
    """A key as JSON."""
    return json.dumps(asdict(key), ensure_ascii=False)


def load_key(raw: str | bytes) -> ApiKey:
    """A key from its JSON. Raises ValueError."""
    return _key_of(json.loads(raw))


def _key_of(value: Any) -> ApiKey:
    known = {field.name for field in fields(ApiKey)}
    if not isinstance(value, dict) or not isinstance(value.get("models", []), list):
        raise ValueError("a key must be an object, and its models a list")
    unknown = value.keys() - known
    if unknown:
        # An unknown field may be a limit that must be enforced.
        raise ValueError(f"a key has a field that is not known: {sorted(unknown)[0][:50]!r}")
    try:
        return ApiKey(**{**value, "models": tuple(value.get("models", []))})
    except TypeError:
        raise ValueError("a key lacks one of id, sha256, name, tenant, created_s") from None


def checked(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """The keys. Raises ValueError if two have one id or one hash, or there are too many."""
    found = tuple(keys)
    if len(found) > MAX_KEYS:
        raise ValueError(f"there are more than {MAX_KEYS} keys")
    if len({key.id for key in found}) < len(found) or len({key.sha256 for key in found}) < len(found):
        raise ValueError("two keys have the same id or the same sha256")
    return found


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in a file. Raises OSError if it cannot be read, ValueError if it has no valid keys."""
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"the file is larger than {MAX_FILE_BYTES} bytes")
    try:
        value = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict) or not isinstance(value.get("keys"), list):
        raise ValueError('it must be {"keys": [...]}')
    return checked(map(_key_of, value["keys"]))


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file as a whole; only its owner may read it. Raises OSError."""
    lines = ",\n".join(map(dump_key, checked(keys)))
    found = path.stat() if path.exists() else None
    # A gateway of another user may be allowed to read it.
    mode = 0o600 if found is None else found.st_mode & 0o777
    owner = None if found is None else (found.st_uid, found.st_gid)
    replace_file(path, f'{{"keys": [\n{lines}\n]}}\n'.encode(), mode, owner)
