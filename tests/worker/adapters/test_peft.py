"""Reading adapters as PEFT writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.worker.adapters.files import AdapterError
from headrace.worker.adapters.peft import read_peft
from headrace.worker.model.adapter_memory import bfloat16_of, floats_of
from tests.worker.adapters.files import LINEARS, tensors_of, write_adapter

Q, DOWN = (linear.name for linear in LINEARS)
Q_KEY = f"base_model.model.model.{Q}.lora_A.weight"


def test_weights_are_scaled_by_alpha_over_rank(tmp_path: Path) -> None:
    files = read_peft(write_adapter(tmp_path / "a"), LINEARS)
    expected = tensors_of()
    assert set(files.weights) == {Q, DOWN}
    np.testing.assert_array_equal(files.weights[Q].a, expected[Q_KEY])
    np.testing.assert_array_equal(files.weights[Q].b, 2 * expected[Q_KEY.replace("lora_A", "lora_B")])
    assert files.rank == 4
    assert files.num_bytes == 4 * 4 * (12 + 20 + 30 + 12)


def test_rank_stabilised_weights_are_scaled_by_alpha_over_the_root_of_the_rank(tmp_path: Path) -> None:
    files = read_peft(write_adapter(tmp_path / "a", use_rslora=True), LINEARS)
    expected = tensors_of()[Q_KEY.replace("lora_A", "lora_B")]
    np.testing.assert_allclose(files.weights[Q].b, 4 * expected, rtol=1e-6)


def test_patterns_give_a_layer_its_own_alpha_and_rank(tmp_path: Path) -> None:
    fields = {"r": 9, "rank_pattern": {"q_proj": 4, r"layers\.\d\.mlp\.down_proj": 4}, "alpha_pattern": {"q_proj": 4.0}}
    files = read_peft(write_adapter(tmp_path / "a", **fields), LINEARS)
    expected = tensors_of()
    np.testing.assert_array_equal(files.weights[Q].b, expected[Q_KEY.replace("lora_A", "lora_B")])
    down = f"base_model.model.model.{DOWN}.lora_B.weight"
    np.testing.assert_array_equal(files.weights[DOWN].b, 2 * expected[down])


def test_a_rank_that_the_configuration_contradicts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="has rank 4, but .* says 8; the files do not belong together"):
        read_peft(write_adapter(tmp_path / "a", r=8), LINEARS)


def test_halves_and_bfloat16_are_read(tmp_path: Path) -> None:
    whole = tensors_of()
    halves = write_adapter(tmp_path / "h", tensors={name: values.astype(np.float16) for name, values in whole.items()})
    np.testing.assert_allclose(read_peft(halves, LINEARS).weights[Q].a, whole[Q_KEY], rtol=1e-3)
    brain = write_adapter(tmp_path / "b", tensors={name: bfloat16_of(values) for name, values in whole.items()})
    found = read_peft(brain, LINEARS).weights[Q]
    np.testing.assert_allclose(floats_of(found.a), whole[Q_KEY], rtol=1 / 256)
    np.testing.assert_allclose(found.b, 2 * whole[Q_KEY.replace("lora_A", "lora_B")], rtol=1 / 256)


def test_the_hash_is_that_of_both_files(tmp_path: Path) -> None:
    hashes = [
        read_peft(write_adapter(tmp_path / str(number), **fields), LINEARS).sha256
        for number, fields in enumerate([{}, {}, {"lora_alpha": 3}, {"seed": 1}])
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"use_dora": True}, "use_dora: weights of DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: whole layers"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": "four"}, "numbers r and lora_alpha"),
        ({"alpha_pattern": {"q_proj": "four"}}, "rank 4 and alpha 'four'"),
        ({"rank": 0}, "rank 0"),
        ({"alpha_pattern": {"(": 1}}, r"pattern '\(', which is not a regular expression"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(AdapterError, match=problem):
        read_peft(write_adapter(tmp_path / "a", **fields), LINEARS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({Q_KEY: np.zeros((4, 13), np.float32)}, "12 inputs and 20 outputs; it was made for another model"),
        ({Q_KEY: np.full((4, 12), np.nan, np.float32)}, "not finite numbers"),
        ({Q_KEY: np.full((4, 12), 0xFF80, np.uint16)}, "not finite numbers"),
        ({Q_KEY: np.zeros((4, 12), np.int32)}, "in I32"),
        ({Q_KEY.replace(".0.", ".7."): np.zeros((4, 12), np.float32)}, "only one of lora_A and lora_B"),
        ({"base_model.model.lm_head.lora_embedding_A": np.zeros((4, 12), np.float32)}, "not a LoRA weight of a linear"),
        (
            {Q_KEY.replace("lora_A", "lora_magnitude_vector"): np.zeros((4,), np.float32)},
            "not a LoRA weight of a linear",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(AdapterError, match=problem):
        read_peft(write_adapter(tmp_path / "a", tensors={**tensors_of(), **change}), LINEARS)


@pytest.mark.parametrize("module", ["model.visual.blocks", "model.vision_tower.vision_model.encoder"])
def test_what_an_adapter_changes_of_images_does_not_concern_text(tmp_path: Path, module: str) -> None:
    """A layer of the tower that sees may have the name, from its layer on, of one of the language model."""
    seen = {
        f"base_model.model.{module}.{Q}.lora_{side}.weight": np.ones_like(
            tensors_of()[Q_KEY.replace("lora_A", f"lora_{side}")]
        )
        for side in "AB"
    }
    files = read_peft(write_adapter(tmp_path / "a", tensors={**tensors_of(), **seen}), LINEARS)
    assert set(files.weights) == {Q, DOWN}
    np.testing.assert_array_equal(files.weights[Q].a, tensors_of()[Q_KEY])


def test_a_layer_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=f"adapts {DOWN}, which is no linear layer of this model"):
        read_peft(write_adapter(tmp_path / "a"), LINEARS[:1])


def test_a_rank_over_256_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="rank 257 .*ranks from 1 to 256"):
        read_peft(write_adapter(tmp_path / "a", rank=257), LINEARS)


@pytest.mark.parametrize("cut", [0, 4, 40, -1])
def test_a_damaged_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = write_adapter(tmp_path / "a") / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(AdapterError, match="no whole safetensors file"):
        read_peft(path.parent, LINEARS)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"there is no .*adapter_config\.json"):
        read_peft(tmp_path, LINEARS)
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(AdapterError, match="save the adapter with safetensors"):
        read_peft(directory, LINEARS)
