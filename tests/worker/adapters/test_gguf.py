"""GGUF adapters are what the same adapters are in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from headrace.worker.adapters.files import AdapterError, AdapterFiles
from headrace.worker.adapters.peft import read_peft
from headrace.worker.adapters.reader import Layers, read_adapter
from headrace.worker.model.adapter_memory import Linear
from tests.architectures.gguf_model import NAMES
from tests.worker.adapters.files import safetensors
from tests.worker.adapters.gguf_files import write_gguf_adapter

# Queries of three heads of size 8, keys of one.
LINEARS = [
    Linear("layers.0.self_attn.q_proj", "q", 32, 24),
    Linear("layers.0.self_attn.k_proj", "k", 32, 8),
    Linear("layers.0.self_attn.v_proj", "v", 32, 8),
    Linear("layers.0.self_attn.o_proj", "o", 24, 32),
    Linear("layers.11.mlp.gate_proj", "gate", 32, 64),
    Linear("layers.11.mlp.up_proj", "up", 32, 64),
    Linear("layers.11.mlp.down_proj", "down", 64, 32),
]
LAYERS = Layers(LINEARS, 1)
RANK = 32


def tensors_of(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for linear in LINEARS:
        key = f"base_model.model.model.{linear.name}"
        found[f"{key}.lora_A.weight"] = rng.standard_normal((RANK, linear.num_inputs)).astype(np.float32)
        found[f"{key}.lora_B.weight"] = rng.standard_normal((linear.num_outputs, RANK)).astype(np.float32)
    return found


def peft(directory: Path, alpha: float = 8.0) -> AdapterFiles:
    directory.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(safetensors(tensors_of()))
    return read_peft(directory, LINEARS)


def written(path: Path, **fields: Any) -> Path:
    heads = {"q_proj": 3, "k_proj": 1}
    return write_gguf_adapter(path, tensors_of(), **{"alpha": 8.0, "heads": heads, **fields})


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_adapter_is_that_of_peft(architecture: str, tmp_path: Path) -> None:
    expected = peft(tmp_path / "peft").weights
    found = read_adapter(written(tmp_path / "a.gguf", architecture=architecture), LAYERS)
    assert set(found.weights) == set(expected)
    assert found.rank == RANK
    for name, (a, b) in expected.items():
        np.testing.assert_array_equal(found.weights[name].a, a)
        np.testing.assert_array_equal(found.weights[name].b, b)


@pytest.mark.parametrize(("kind", "tolerance"), [(Type.F16, 0.002), (Type.BF16, 0.02), (Type.Q8_0, 0.03)])
def test_other_types_of_tensors_are_read(kind: Type, tolerance: float, tmp_path: Path) -> None:
    expected = peft(tmp_path / "peft").weights
    # Rows of o_proj's A have 24 numbers, which are no whole block of Q8_0.
    found = read_adapter(written(tmp_path / "a.gguf", kind=kind, but=("o_proj",)), LAYERS).weights
    for name, low_rank in found.items():
        np.testing.assert_allclose(low_rank.a, expected[name].a, rtol=0, atol=tolerance)
        np.testing.assert_allclose(low_rank.b, expected[name].b, rtol=0, atol=tolerance)
    assert len(found) == len(expected) - 1


def test_an_alpha_of_0_scales_nothing(tmp_path: Path) -> None:
    expected = peft(tmp_path / "peft", alpha=RANK).weights
    found = read_adapter(written(tmp_path / "a.gguf", alpha=0.0), LAYERS).weights
    for name in expected:
        np.testing.assert_array_equal(found[name].b, expected[name].b)


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{number}.gguf", alpha=alpha) for number, alpha in enumerate((8.0, 8.0, 9.0))]
    hashes = [read_adapter(path, LAYERS).sha256 for path in paths]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"general_type": "model"}, "general.type 'model'; an adapter has general.type 'adapter'"),
        ({"adapter_type": "control_vector"}, "adapter.type 'control_vector'"),
        ({"architecture": "gemma3"}, "for the architecture gemma3; GGUF adapters of llama, qwen2, qwen3 are supported"),
        ({"alpha": None}, "must have the number adapter.lora.alpha"),
        ({"alora": [1, 2]}, "adapter.alora.invocation_tokens: the adapter begins in the middle"),
        (
            {"more": {"token_embd.weight.lora_a": np.zeros((4, 32), np.float32)}},
            "token_embd.weight.lora_a, which",
        ),
        ({"more": {"blk.0.attn_norm.weight": np.zeros(32, np.float32)}}, "blk.0.attn_norm.weight, which is not a LoRA"),
        ({"more": {"blk.5.attn_v.weight.lora_a": np.zeros((4, 32), np.float32)}}, "only one of lora_a and lora_b"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: Mapping[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=problem):
        read_adapter(written(tmp_path / "a.gguf", **fields), LAYERS)


def test_files_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf")
    path.write_bytes(b"none of it")
    with pytest.raises(AdapterError, match=r"it is no readable GGUF file .*; copy it again"):
        read_adapter(path, LAYERS)
    whole = written(tmp_path / "b.gguf").read_bytes()
    for size in (0, 8, 20, 100, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(AdapterError, match=r"it is no readable GGUF file \(it is damaged or cut off\)"):
            read_adapter(path, LAYERS)
    with pytest.raises(AdapterError, match="cannot be read: No such file"):
        read_adapter(tmp_path / "none.gguf", LAYERS)
    with pytest.raises(AdapterError, match="is a file; give the directory that PEFT wrote"):
        read_adapter(path.rename(tmp_path / "adapter.bin"), LAYERS)


def test_heads_of_unknown_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"layers\.0\.self_attn\.q_proj, whose heads are of no known size"):
        read_adapter(written(tmp_path / "a.gguf"), Layers(LINEARS, 3))


def test_every_matrix_of_a_layer_has_its_module() -> None:
    assert {linear.name.partition(".")[2].partition(".")[2] for linear in LINEARS} == {
        module for module in NAMES if "norm" not in module
    }
