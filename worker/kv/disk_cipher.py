"""Encryption of KV blocks on a disk (AES-256-GCM), with keys derived from a key file."""

from __future__ import annotations

import logging
import os
import re
import stat
from hashlib import blake2b
from pathlib import Path

from headrace.worker.config import ConfigurationError

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-fA-F]{64}")
_NONCE_BYTES, _TAG_BYTES = 12, 16
CHECK_BYTES = 16


class BlockCipher:
    """Encrypts and authenticates the blocks of one store. Hashes of blocks are replaced by keyed ones, because a plain
    hash would reveal whether somebody sent a given prompt. `identity` is that of the store, so that no two stores have
    the same keys."""

    OVERHEAD_BYTES = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, key: bytes, identity: str) -> None:
        """Derive the keys from a key of 32 bytes. Raises ConfigurationError if the package `cryptography` is not
        installed."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigurationError(
                "--kv-disk-key needs the package cryptography; install headrace[encryption]"
            ) from None
        self._invalid = InvalidTag
        self._cipher = AESGCM(_derived(key, "blocks", identity, 32))
        self._index_key = _derived(key, "index", identity, 32)
        self.check = _derived(key, "check", identity, CHECK_BYTES)
        """Identifies the key without revealing it."""

    def name_of(self, block_hash: int) -> int:
        """The number of a block in the index; never 0."""
        digest = blake2b(block_hash.to_bytes(8, "little"), key=self._index_key, digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1

    def seal(self, data: bytes) -> bytes:
        """Encrypt `data`, which becomes longer by `OVERHEAD_BYTES`."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, None)

    def open(self, sealed: bytes) -> bytes | None:
        """Decrypt. None if the data is damaged or was encrypted with another key."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except (self._invalid, ValueError):
            return None


def read_key(path: Path) -> bytes:
    """The key in a file: 64 hexadecimal digits. Raises ConfigurationError. If others can read the file, the log warns.
    Secrets of containers often look like this, so it is no error."""
    try:
        text = path.read_text(encoding="ascii").strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ConfigurationError(f"--kv-disk-key {path} cannot be read ({reason})") from None
    if not _KEY.fullmatch(text):
        raise ConfigurationError(f"--kv-disk-key {path} must have 64 hexadecimal digits (openssl rand -hex 32)")
    if mode & 0o077:
        log.warning("--kv-disk-key %s can be read by other users (mode %04o); run chmod 600 on it", path, mode)
    return bytes.fromhex(text)


def _derived(key: bytes, use: str, identity: str, num_bytes: int) -> bytes:
    return blake2b(f"{use} {identity}".encode(), key=key, digest_size=num_bytes, person=b"headrace-kv-disk").digest()
