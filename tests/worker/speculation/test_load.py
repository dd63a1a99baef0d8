"""Which draft models are refused, and with which words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.worker.__main__ import check_speculation
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads import eagle_runner, features
from headrace.worker.draft_heads.eagle_runner import EagleHeads
from headrace.worker.kv.exclusions import refuse_for_model
from headrace.worker.kv.layers import LayerGroup, LayerKind
from headrace.worker.model.paging import PagedModel
from headrace.worker.speculation import load
from headrace.worker.speculation.draft_model import DraftModel
from headrace.worker.speculation.eagle import EagleModel, MtpModel
from headrace.worker.speculation.eagle_trees import MOST_TREES, EagleTrees, MtpTrees, num_spare_blocks
from headrace.worker.speculation.load import (
    DEFAULT_DEPTH,
    kind_of_drafts,
    load_draft,
    read_heads,
    speculation_for,
    tree_for,
    weights_of_draft,
)
from headrace.worker.speculation.tree import TreeShape
from tests.worker.configs import worker_config
from tests.worker.draft_heads.files import (
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    mtp_config,
    mtp_tensors,
    write_heads,
)
from tests.worker.draft_heads.test_eagle_graph import target_with
from tests.worker.draft_heads.test_medusa_heads import CONFIG as MEDUSA_CONFIG
from tests.worker.draft_heads.test_medusa_heads import write_medusa


class Compiled:
    """Stands for a compiled model."""

    block_bytes = 1024
    state_tables = None

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
    found = load_draft(same, runner, target, threads=1)
    assert found is not None
    assert found.block_size == 32
    assert load_draft(None, runner, target, threads=1) is None
    with pytest.raises(ConfigurationError, match="--draft-model: the tokenizer of .*other is not that of .*target"):
        load_draft(other, runner, target, threads=1)
    with pytest.raises(
        ConfigurationError, match="--draft-model: KV blocks .* have 32 tokens, and the target's have 16"
    ):
        load_draft(same, Compiled(16), target, threads=1)  # type: ignore[arg-type]


def test_flags_that_contradict_each_other_are_refused() -> None:
    given: tuple[tuple[str | None, Path | None], ...] = (
        (None, None),
        (None, Path("x")),
        ("draft", Path("x")),
        ("eagle3", Path("x")),
        ("auto", None),
    )
    for speculation, draft_model in given:
        check_speculation(speculation, draft_model)
    for needing in ("draft", "eagle3"):
        with pytest.raises(ConfigurationError, match=f"--speculation {needing} needs .* --draft-model"):
            check_speculation(needing, None)
    for speculation in ("auto", "ngram", "off"):
        with pytest.raises(ConfigurationError, match=f"--speculation {speculation} does not use --draft-model"):
            check_speculation(speculation, Path("x"))


def test_heads_are_known_by_their_files(tmp_path: Path) -> None:
    path = write_heads(tmp_path / "heads", eagle_config(), eagle_tensors(eagle_config()))
    config = worker_config(tmp_path, draft_model=path)
    assert speculation_for(config, with_amx=True) == "eagle3"
    heads = read_heads(path, "eagle3")
    assert heads is not None
    assert heads.files.shape.num_kv_heads == 3
    assert kind_of_drafts(heads) is EagleModel
    assert weights_of_draft(path) == [path / "model.safetensors"]
    assert read_heads(tmp_path, "draft") is None
    assert kind_of_drafts(None) is DraftModel
    assert weights_of_draft(tmp_path) == [tmp_path / "openvino_model.bin"]
    runner: Any = Compiled(32)
    with pytest.raises(ConfigurationError, match="--draft-model: .* has heads, not a model; say --speculation eagle3"):
        load_draft(path, runner, tmp_path, threads=1)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="--draft-model: there is no model.safetensors"):
        read_heads(path, "eagle3")


def test_a_drafter_that_is_none_of_the_known_heads_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}))
    runner: Any = Compiled(32)
    with pytest.raises(ConfigurationError, match="--draft-model: .* has a DFlash drafter, .*; use EAGLE-3 heads or"):
        load_draft(tmp_path, runner, tmp_path, threads=1)


def test_a_layer_that_predicts_more_tokens_is_known_by_its_checkpoint(tmp_path: Path) -> None:
    config = mtp_config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
    path = write_heads(tmp_path / "mimo", config, mtp_tensors(config, 48))
    worker = worker_config(tmp_path, draft_model=path)
    assert speculation_for(worker, with_amx=False) == "mtp"
    heads = read_heads(path, "mtp")
    assert kind_of_drafts(heads) is MtpModel
    shape = tree_for(replace(worker, draft_tree_tokens=8), "mtp")
    kind: Any = kind_of_drafts(read_heads(path, "mtp", shape), shape)
    assert kind.func is MtpTrees
    with pytest.raises(ConfigurationError, match="--speculation mtp is not possible with a model that has recurrent"):
        refuse_for_model(worker, [LayerGroup(LayerKind.FULL, 8), LayerGroup(LayerKind.RECURRENT, 8)])


def test_trees_are_for_eagle_heads_and_have_spare_blocks(tmp_path: Path) -> None:
    path = write_heads(tmp_path / "heads", eagle_config(), eagle_tensors(eagle_config()))
    plain = worker_config(tmp_path, draft_model=path)
    assert tree_for(plain, "eagle3") is None
    with pytest.raises(ConfigurationError, match="--draft-tree-depth and --draft-tree-top-k need --draft-tree-tokens"):
        tree_for(replace(plain, draft_tree_depth=3), "eagle3")
    config = replace(plain, draft_tree_tokens=16, draft_tree_top_k=3)
    with pytest.raises(ConfigurationError, match="--draft-tree-tokens is for heads in the format of EAGLE-3"):
        tree_for(config, "medusa")
    shape = tree_for(config, "eagle3")
    assert shape == TreeShape(16, DEFAULT_DEPTH, 3)
    heads: Any = read_heads(path, "eagle3", shape)
    assert heads.num_spare(32) == num_spare_blocks(shape, 32) == MOST_TREES * 2 * 2
    kind: Any = kind_of_drafts(heads, shape)
    assert (kind.func, kind.keywords) == (EagleTrees, {"shape": shape})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab_size": 49_153}, "for a vocabulary of 49153 tokens, and this model has 49152"),
        ({"hidden_size": 612}, "embeddings .* have another size than 612"),
    ],
)
def test_heads_of_another_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], problem: str
) -> None:
    config = eagle_config(**changes)
    path = write_heads(tmp_path / "heads", config, eagle_tensors(config))
    graph = target_with(np.zeros((49_152, 576), np.float32), num_logits=49_152)
    monkeypatch.setattr(eagle_runner, "read_paged", lambda core, path: PagedModel(graph, depends_on_context=False))
    runner: Any = Compiled(32)
    with pytest.raises(ConfigurationError, match=f"--draft-model: .*{problem}"):
        load_draft(path, runner, tmp_path, EagleHeads.read(path), threads=1)


def test_eagle_heads_are_refused_beside_recurrent_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers of layers would mean others. The graph is refused before its outputs are added."""
    path = write_heads(tmp_path / "heads", eagle_config(), eagle_tensors(eagle_config()))
    config = worker_config(tmp_path, draft_model=path)
    refusal = "--speculation eagle3 is not possible with a model that has recurrent layers: the heads name the layers"
    with pytest.raises(ConfigurationError, match=refusal):
        refuse_for_model(config, [LayerGroup(LayerKind.FULL, 8), LayerGroup(LayerKind.RECURRENT, 8)])
    refuse_for_model(config, [LayerGroup(LayerKind.FULL, 8)])
    monkeypatch.setattr(features, "has_states", lambda model: True)
    graph: Any = None
    with pytest.raises(ConfigurationError, match=refusal):
        EagleHeads.read(path).reader.prepare(graph)


def test_medusa_heads_draft_beside_recurrent_layers_without_branches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_medusa(tmp_path, MEDUSA_CONFIG, medusa_tensors(8, 16, 2, 1))
    config = worker_config(tmp_path, draft_model=path)
    refuse_for_model(config, [LayerGroup(LayerKind.FULL, 8), LayerGroup(LayerKind.RECURRENT, 8)])
    assert "the branch of Medusa's drafts has no effect on a model that has recurrent layers" in caplog.text
