"""Which draft models are refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.worker.__main__ import check_speculation
from headrace.worker.config import ConfigurationError
from headrace.worker.speculation import load
from headrace.worker.speculation.load import load_draft


class Compiled:
    """Stands for a compiled model."""

    block_bytes = 1024

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


def write_tokenizer(directory: Path, vocabulary: bytes, version: str) -> Path:
    directory.mkdir()
    for kind in ("tokenizer", "detokenizer"):
        (directory / f"openvino_{kind}.bin").write_bytes(vocabulary)
        (directory / f"openvino_{kind}.xml").write_text(version)
    return directory


def test_a_draft_model_has_the_tokens_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_tokenizer(tmp_path / "target", b"a b c", "2026.1")
    same = write_tokenizer(tmp_path / "same", b"a b c", "2026.4")
    other = write_tokenizer(tmp_path / "other", b"a b d", "2026.1")
    monkeypatch.setattr(load, "read_model_dir", lambda path: None)
    monkeypatch.setattr(load, "_compile", lambda path, threads: Compiled(32))
    runner: Any = Compiled(32)
    assert load_draft(same, runner, target, threads=1).block_size == 32
    with pytest.raises(ConfigurationError, match="--draft-model: the tokenizer of .*other is not that of .*target"):
        load_draft(other, runner, target, threads=1)
    with pytest.raises(
        ConfigurationError, match="--draft-model: KV blocks .* have 32 tokens, and the target's have 16"
    ):
        load_draft(same, Compiled(16), target, threads=1)  # type: ignore[arg-type]


def test_flags_that_contradict_each_other_are_refused() -> None:
    for speculation, draft_model in ((None, None), (None, Path("x")), ("draft", Path("x")), ("auto", None)):
        check_speculation(speculation, draft_model)
    with pytest.raises(ConfigurationError, match="--speculation draft needs .* --draft-model"):
        check_speculation("draft", None)
    for speculation in ("auto", "ngram", "off"):
        with pytest.raises(ConfigurationError, match=f"--speculation {speculation} does not use --draft-model"):
            check_speculation(speculation, Path("x"))
