"""Heads converted from small checkpoints in the published format of Medusa compute what numpy computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest

from headrace.common.model_files.heads import HeadsKind, heads_kind
from headrace.worker.check import check_servable
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads.medusa_files import read_medusa
from headrace.worker.draft_heads.medusa_runner import LastStates, MedusaRunner, build_head
from tests.worker.adapters.files import safetensors
from tests.worker.draft_heads.files import (
    eagle_config,
    eagle_tensors,
    medusa_reference,
    medusa_tensors,
    write_heads,
)

SIZE, VOCAB_SIZE, NUM_HEADS = 64, 200, 3
CONFIG = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 2}


def write_medusa(directory: Path, config: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "medusa_lm_head.safetensors").write_bytes(safetensors(tensors))
    return directory


def logits_of(directory: Path, states: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    core = ov.Core()
    return [
        core.compile_model(build_head(head), "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})(states)[0]
        for head in read_medusa(directory).heads
    ]


def test_each_head_computes_what_the_files_say(tmp_path: Path) -> None:
    tensors = medusa_tensors(SIZE, VOCAB_SIZE, NUM_HEADS, 2)
    states = np.random.default_rng(1).standard_normal((5, SIZE)).astype(np.float32)
    found = logits_of(write_medusa(tmp_path, CONFIG, tensors), states)
    assert heads_kind(tmp_path) is HeadsKind.MEDUSA
    for head in range(NUM_HEADS):
        np.testing.assert_allclose(found[head], medusa_reference(tensors, states, head, 2), atol=1e-3)


def test_names_of_other_libraries_are_understood(tmp_path: Path) -> None:
    tensors = {
        name: values for name, values in medusa_tensors(SIZE, VOCAB_SIZE, NUM_HEADS, 2).items() if "bias" not in name
    }
    states = np.random.default_rng(1).standard_normal((2, SIZE)).astype(np.float32)
    renamed = {}
    for name, values in tensors.items():
        head, layer, *rest = name.split(".")
        renamed[f"blocks.{head}.layers.{layer}.weight" if len(rest) > 1 else f"lm_heads.{head}.weight"] = values
    config = {"model_type": "medusa", "num_heads": NUM_HEADS, "num_hidden_layers": 2}
    found = logits_of(write_medusa(tmp_path, config, renamed), states)
    assert heads_kind(tmp_path) is HeadsKind.MEDUSA
    np.testing.assert_allclose(found[1], medusa_reference(tensors, states, 1, 2), atol=1e-3)


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({"medusa_num_heads": 4, "medusa_num_layers": 2}, {}, "have no 3.0.linear.weight"),
        ({"medusa_num_heads": 0, "medusa_num_layers": 2}, {}, "must have the numbers"),
        (CONFIG, {"1.2.weight": np.zeros((VOCAB_SIZE, 8), np.float32)}, "head 1 in .* has weights of shapes"),
        (CONFIG, {"0.0.linear.weight": np.zeros((8, 8), np.float32)}, "head 0 in .* states of size 64 and 200 tokens"),
    ],
)
def test_other_heads_are_refused(tmp_path: Path, config: dict[str, Any], tensors: Any, problem: str) -> None:
    given = {**medusa_tensors(SIZE, VOCAB_SIZE, NUM_HEADS, 2), **tensors}
    with pytest.raises(ConfigurationError, match=problem):
        read_medusa(write_medusa(tmp_path, config, given))


def test_pulled_heads_are_checked_by_reading_them(tmp_path: Path) -> None:
    config = eagle_config(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, vocab_size=1000)
    config |= {"intermediate_size": 32, "draft_vocab_size": 50}
    eagle = write_heads(tmp_path / "eagle", config, eagle_tensors(config))
    (tmp_path / "medusa").mkdir()
    medusa = write_medusa(tmp_path / "medusa", CONFIG, medusa_tensors(SIZE, VOCAB_SIZE, NUM_HEADS, 2))
    for directory, weights, problem in (
        (eagle, "model.safetensors", "there is no model.safetensors"),
        (medusa, "medusa_lm_head.safetensors", "there is no medusa_lm_head.safetensors"),
    ):
        check_servable(directory)
        (directory / weights).unlink()
        with pytest.raises(ConfigurationError, match=problem):
            check_servable(directory)


def test_heads_of_another_vocabulary_and_other_files_are_refused(tmp_path: Path) -> None:
    files = read_medusa(write_medusa(tmp_path, CONFIG, medusa_tensors(SIZE, VOCAB_SIZE, NUM_HEADS, 2)))
    with pytest.raises(ConfigurationError, match="a vocabulary of 200 tokens, and this model has 201"):
        MedusaRunner(files, LastStates(files), threads=1, vocab_size=201, block_size=32)
    (tmp_path / "medusa_lm_head.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ConfigurationError, match=r"save the weights with safetensors, since .pt files"):
        read_medusa(tmp_path)
