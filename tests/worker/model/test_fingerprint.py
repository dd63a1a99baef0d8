"""The fingerprint of a model depends on every byte of its weights, and on nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.common.model_files.networks import TEXT_NETWORK
from headrace.worker.model import fingerprint
from headrace.worker.model.fingerprint import fingerprint_of, for_context, for_ranks, for_stages

PIECE_BYTES = 4096


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A network and weights of several pieces, the last one short."""
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(fingerprint, "_READ_BYTES", 1000)
    network, weights = tmp_path / TEXT_NETWORK, tmp_path / "openvino_model.bin"
    network.write_text("<net/>")
    weights.write_bytes(os.urandom(5 * PIECE_BYTES + 7))
    return network, weights


def test_a_model_that_depends_on_its_context_is_another_one_for_each() -> None:
    plain = "a" * 64
    assert len({plain, for_context(plain, 4096), for_context(plain, 8192), for_context("b" * 64, 4096)}) == 4
    assert for_context(plain, 4096) == for_context(plain, 4096)


def test_one_flipped_bit_anywhere_is_another_model(files: tuple[Path, Path]) -> None:
    _, weights = files
    content = bytearray(weights.read_bytes())
    seen = {fingerprint_of(weights.parent, 2)}
    places = range(0, len(content), 997)
    for place in places:
        content[place] ^= 1
        weights.write_bytes(content)
        seen.add(fingerprint_of(weights.parent, 2))
        content[place] ^= 1
    assert len(seen) == 1 + len(places)


def test_every_network_of_a_multimodal_model_counts(tmp_path: Path) -> None:
    names = ("openvino_language_model", "openvino_text_embeddings_model", "openvino_text_embeddings_per_layer_model")
    names += ("openvino_vision_embeddings_model",)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    files = [tmp_path / f"{name}.{suffix}" for name in names for suffix in ("xml", "bin")]
    seen = []
    for file in files:
        file.write_bytes(b"0")
    for file in (*files, None):
        seen.append(fingerprint_of(tmp_path, 2))
        if file is not None:
            file.write_bytes(b"1")
    assert len(set(seen)) == len(files) + 1


def test_order_size_and_network_count_and_threads_do_not(files: tuple[Path, Path]) -> None:
    network, weights = files
    content = weights.read_bytes()
    before = fingerprint_of(weights.parent, 1)
    assert fingerprint_of(weights.parent, 3) == before
    weights.write_bytes(content[PIECE_BYTES : 2 * PIECE_BYTES] + content[:PIECE_BYTES] + content[2 * PIECE_BYTES :])
    swapped = fingerprint_of(weights.parent, 3)
    weights.write_bytes(content[:-1])
    shorter = fingerprint_of(weights.parent, 3)
    weights.write_bytes(content)
    network.write_text("<net />")
    assert len({before, swapped, shorter, fingerprint_of(weights.parent, 3)}) == 4


def test_the_numbers_of_stages_and_of_ranks_of_each_and_what_stages_exchange_are_in_the_fingerprint() -> None:
    divisions = [(1, 1), (1, 1, 1), (2, 2), (2, 1), (1, 2), (2, 2, 2)]
    found = {for_stages("f", ranks) for ranks in divisions} | {for_ranks("f", ranks) for ranks in (2, 3)} | {"f"}
    found |= {for_stages("f", ranks, bfloat16_states=True) for ranks in divisions}
    assert len(found) == 2 * len(divisions) + 3
