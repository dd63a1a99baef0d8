"""Encrypted KV blocks on a disk: nothing can be read or changed without the key, and wrong keys are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from headrace.worker.config import ConfigurationError
from headrace.worker.kv import disk_cipher
from headrace.worker.kv.disk_cipher import BlockCipher, read_key
from headrace.worker.kv.disk_store import DiskStore
from tests.worker.kv.test_disk_tier import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    KEY,
    PROMPT,
    Worker,
    content,
    data_of,
    read,
    store_in,
    write,
)

OTHER_KEY = bytes(32 * [7])


def files_of(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.iterdir()))


def test_nothing_on_the_disk_tells_what_was_asked(tmp_path: Path) -> None:
    for directory, key in ((tmp_path / "plain", None), (tmp_path / "encrypted", KEY)):
        assert write(store_in(directory, key=key), 1)
        block_hash, _, tokens, _ = content(1)
        assert block_hash is not None
        secrets = [tokens, block_hash.to_bytes(8, "little"), data_of(1).tobytes()[100:132]]
        assert [secret in files_of(directory) for secret in secrets] == [key is None] * 3
        assert KEY not in files_of(directory)


def test_the_same_block_looks_different_each_time(tmp_path: Path) -> None:
    sealed = []
    for name in ("one", "other"):
        write(store_in(tmp_path / name, key=KEY), 1)
        sealed.append(next((tmp_path / name).glob("*.blocks")).read_bytes()[:BLOCK_BYTES])
    assert not np.equal(*(np.frombuffer(raw, np.uint8) for raw in sealed)).mean() > 0.1


def test_another_process_with_the_key_finds_what_was_written(tmp_path: Path) -> None:
    store, other = store_in(tmp_path, key=KEY), store_in(tmp_path, key=KEY)
    for number in range(5):
        assert write(store, number)
        assert not write(store, number)
    other.refresh()
    assert all(other.has(content(number).block_hash or 0) for number in range(5))
    assert [read(other, number) for number in range(6)] == [True] * 5 + [False]
    assert [read(store_in(tmp_path, key=KEY), number) for number in range(5)] == [True] * 5


@pytest.mark.parametrize("place", [0, 11, 12, 40, 5000, 12 + BLOCK_BYTES])
def test_a_changed_bit_is_found_and_the_block_forgotten(tmp_path: Path, place: int) -> None:
    store = store_in(tmp_path, 1, KEY)
    write(store, 1)
    path = next(tmp_path.glob("*.blocks"))
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    assert not read(store, 1)
    assert store.num_blocks == 0
    assert write(store, 1)
    assert read(store, 1)


def test_a_block_in_the_place_of_another_is_not_taken(tmp_path: Path) -> None:
    store = store_in(tmp_path, key=KEY)
    for number in (1, 2):
        write(store, number)
    path = next(tmp_path.glob("*.blocks"))
    raw = path.read_bytes()
    half = 12_288
    path.write_bytes(raw[half : 2 * half] + raw[:half] + raw[2 * half :])
    assert [read(store, number) for number in (1, 2)] == [False, False]


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (KEY, OTHER_KEY, "created with another key; name that one with --kv-disk-key, or remove the file"),
        (KEY, None, "created with a key; name that one with --kv-disk-key, or remove the file"),
        (None, KEY, "created without a key; leave --kv-disk-key out, or remove the file"),
    ],
)
def test_files_of_another_key_are_refused(
    tmp_path: Path, first: bytes | None, then: bytes | None, message: str
) -> None:
    write(store_in(tmp_path, key=first), 1)
    size = next(tmp_path.glob("*.blocks")).stat().st_size
    with pytest.raises(ConfigurationError, match=message):
        DiskStore(tmp_path, "id", size, BLOCK_BYTES, BLOCK_SIZE, then)
    assert read(store_in(tmp_path, key=first), 1), "nothing was changed"


@pytest.mark.parametrize("key", [None, KEY])
def test_a_truncated_index_loses_blocks_and_nothing_else(tmp_path: Path, key: bytes | None) -> None:
    write(store_in(tmp_path, key=key), 1)
    path = next(tmp_path.glob("*.index"))
    path.write_bytes(path.read_bytes()[:40])
    store = store_in(tmp_path, key=key)
    assert not read(store, 1)
    assert write(store, 1)
    assert read(store_in(tmp_path, key=key), 1)


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 1000, 1001, 5000])
def test_a_block_is_one_message_in_parts(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lacks the key cannot cut it, or change the order of its parts."""
    monkeypatch.setattr(disk_cipher, "_PART_BYTES", 1000)
    cipher, record = BlockCipher(KEY, "id"), b"a record of a block"
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    sealed = cipher.seal(record, data).tobytes()
    assert len(sealed) == len(record) + num_bytes + cipher.OVERHEAD_BYTES
    whole = AESGCM(disk_cipher._derived(KEY, "blocks", "id", 32)).decrypt(sealed[:12], sealed[12:], None)
    assert whole == record + data.tobytes()
    opened = np.zeros(num_bytes, np.uint8)
    assert cipher.open(sealed, opened) == record
    assert (opened == data).all()
    start = 12 + len(record)
    swapped = (
        sealed[:start] + sealed[start + 1000 : start + 2000] + sealed[start : start + 1000] + sealed[start + 2000 :]
    )
    for wrong in (b"", sealed[:20], sealed[:-1], sealed[:-17], sealed + b"\0", swapped if num_bytes == 5000 else b""):
        assert cipher.open(wrong, opened) is None


def test_no_call_of_the_package_takes_a_whole_large_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call keeps the GIL, which the engine's thread needs."""
    lengths: list[int] = []

    class Counting:
        def __init__(self, context: Any) -> None:
            self.context = context

        def update(self, part: memoryview) -> bytes:
            lengths.append(len(part))
            return bytes(self.context.update(part))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.context, name)

    cipher = BlockCipher(KEY, "id")
    encryptor, decryptor = cipher._encryptor, cipher._decryptor
    monkeypatch.setattr(cipher, "_encryptor", lambda *args: Counting(encryptor(*args)))
    monkeypatch.setattr(cipher, "_decryptor", lambda *args: Counting(decryptor(*args)))
    data, opened = np.ones(1_000_000, np.uint8), np.zeros(1_000_000, np.uint8)
    assert cipher.open(cipher.seal(b"record", data).tobytes(), opened) == b"record"
    assert (opened == data).all()
    assert max(lengths) == 256 << 10
    assert len(lengths) == 10


def test_an_engine_gets_its_blocks_back_from_an_encrypted_disk(tmp_path: Path) -> None:
    worker = Worker(tmp_path, KEY)
    worker.ask(PROMPT)
    worker.evict_all()
    assert worker.ask(PROMPT).num_cached_tokens == 6 * BLOCK_SIZE
    worker.tier.stop()


@pytest.mark.parametrize("text", ["", "12", "z" * 64, "0" * 63, "0" * 65, "ü" * 64])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits|not ASCII"):
        read_key(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_key(tmp_path / "none")


def test_a_key_may_end_with_a_line_break(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY.hex() + "\n")
    assert read_key(path) == KEY


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o644, 0o440])
def test_a_key_that_others_can_read_gets_a_warning(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is not refused, because containers get their secrets like this."""
    path, link = tmp_path / "key", tmp_path / "link"
    path.write_text(KEY.hex())
    path.chmod(mode)
    link.symlink_to(path)
    assert read_key(link) == KEY
    assert (f"--kv-disk-key {link} can be read by other users (mode 0{mode:o})" in caplog.text) == (mode & 0o077 > 0)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigurationError, match=r"install headrace\[encryption\]"):
        store_in(tmp_path, key=KEY)
