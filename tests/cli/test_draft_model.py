"""Finding the model of --draft-model."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.hosting import finding
from headrace.cli.hosting.finding import find_draft_model
from headrace.cli.models.model_cache import model_directory
from headrace.common.commands import CommandError


def test_a_draft_model_is_a_cached_name_or_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    checked: list[Path] = []
    monkeypatch.setattr(finding, "check_cached_directory", checked.append)
    cached, other = model_directory("small"), tmp_path / "other"
    for directory in (cached, other):
        directory.mkdir(parents=True)
    assert [find_draft_model("small"), find_draft_model(str(other))] == [cached, other] == checked
    with pytest.raises(CommandError, match=r"'absent' is neither .* headrace pull, or name one on a hub"):
        find_draft_model("absent")


def test_heads_need_no_files_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    with pytest.raises(CommandError, match=r"the heads in .* have no model.safetensors"):
        find_draft_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert find_draft_model(str(tmp_path)) == tmp_path
