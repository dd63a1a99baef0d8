"""Encryption of KV blocks on a disk (AES-256-GCM), with keys derived from a key file."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.worker.config import ConfigurationError

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-fA-F]{64}")
_NONCE_BYTES = 12
_TAG_BYTES = 16
CHECK_BYTES = 16
_PART_BYTES = 256 << 10


class BlockCipher:
    """Encrypts and authenticates the blocks of one store. Hashes of blocks are replaced by keyed ones, because a plain
    hash would reveal whether a given prompt was sent. `identity` is that of the store, so that no two stores have the
    same keys."""

    OVERHEAD_BYTES = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, key: bytes, identity: str) -> None:
        """Derive the keys from a key of 32 bytes. Raises ConfigurationError if the package `cryptography` is not
        installed."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:
            raise ConfigurationError(
                "--kv-disk-key needs the package cryptography; install headrace[encryption]"
            ) from None
        self._invalid = InvalidTag
        algorithm = algorithms.AES(_derived(key, "blocks", identity, 32))
        self._encryptor = lambda nonce: Cipher(algorithm, modes.GCM(nonce)).encryptor()
        self._decryptor = lambda nonce, tag: Cipher(algorithm, modes.GCM(nonce, tag)).decryptor()
        self._index_key = _derived(key, "index", identity, 32)
        self.check = _derived(key, "check", identity, CHECK_BYTES)
        """Identifies the key without revealing it."""

    def name_of(self, block_hash: int) -> int:
        """The 64-bit name of a block in the index, from which its hash cannot be told without the key; never 0."""
        digest = blake2b(block_hash.to_bytes(8, "little"), key=self._index_key, digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1

    def seal(self, record: bytes, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Encrypt a record and the bytes of a block as one message, which is longer by `OVERHEAD_BYTES`."""
        nonce = os.urandom(_NONCE_BYTES)
        encryptor = self._encryptor(nonce)
        head = nonce + encryptor.update(record)
        sealed = np.empty(len(record) + len(data) + self.OVERHEAD_BYTES, np.uint8)
        sealed[: len(head)] = np.frombuffer(head, np.uint8)
        _transform(encryptor.update, data, sealed[len(head) : -_TAG_BYTES])
        encryptor.finalize()
        sealed[-_TAG_BYTES:] = np.frombuffer(encryptor.tag, np.uint8)
        return sealed

    def open(self, sealed: bytes, data: npt.NDArray[np.uint8]) -> bytes | None:
        """Decrypt a message, whose block goes to `data`. Returns the record. None if the message is damaged or was
        encrypted with another key; `data` then has no meaning."""
        start = len(sealed) - _TAG_BYTES - len(data)
        if start < _NONCE_BYTES:
            return None
        decryptor = self._decryptor(sealed[:_NONCE_BYTES], sealed[-_TAG_BYTES:])
        record: bytes = decryptor.update(sealed[_NONCE_BYTES:start])
        _transform(decryptor.update, np.frombuffer(sealed, np.uint8, len(data), start), data)
        try:
            decryptor.finalize()
        except self._invalid:
            return None
        return record


def read_key(path: Path) -> bytes:
    """The key in a file: 64 hexadecimal digits. Raises ConfigurationError. If others can read the file, the log warns.
    This is not an error, because secrets of containers often have such permissions."""
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


def _transform(
    update: Callable[[memoryview], bytes], source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]
) -> None:
    """Encrypt or decrypt in parts. The package keeps the GIL for a part; the copy of a part lets other threads run."""
    for start in range(0, len(source), _PART_BYTES):
        part = update(source[start : start + _PART_BYTES].data)
        target[start : start + _PART_BYTES] = np.frombuffer(part, np.uint8)
