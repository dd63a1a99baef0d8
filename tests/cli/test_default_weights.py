"""The rule that chooses the weights of an export, and what it says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.export.exporter import SCORES, TEXT, VECTORS
from headrace.cli.models.default_weights import default_weights
from headrace.cli.models.shape import shape_of
from headrace.common.host_memory import GIB, node_bytes

LLAMA_8B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}
NUM_WEIGHTS = 8_030_000_000


def chosen(node_gib: float, config: dict[str, Any], num_bytes: int, task: str = TEXT) -> tuple[str, str]:
    weights, reason = default_weights(config, num_bytes, int(node_gib * GIB), task=task, shape=shape_of(config))
    return weights.kind, reason


def test_a_model_that_fits_a_node_gets_int8() -> None:
    kind, reason = chosen(64, LLAMA_8B, 2 * NUM_WEIGHTS)
    assert kind == "int8"
    # 1.65 times 7.5 GiB, half a GiB, and a context of 8192 tokens with 69,632 bytes each.
    assert "they take 13.4 GiB of the 64.0 GiB of a NUMA node" in reason
    assert re.search(r"--weights int4 takes 7\.\d GiB and about half the time per token, with more loss", reason)
    assert "bf16 takes 25.7 GiB and twice the time" in reason


def test_int4_is_chosen_if_int8_does_not_fit() -> None:
    kind, reason = chosen(12, LLAMA_8B, 2 * NUM_WEIGHTS)
    assert kind == "int4"
    assert "because int8 would take 13.4 GiB, more than a NUMA node has" in reason
    assert "of the 12.0 GiB of a NUMA node, with more loss; --weights int8 is closer" in reason


def test_a_model_that_does_not_fit_at_all_is_said_to() -> None:
    kind, reason = chosen(6, LLAMA_8B, 2 * NUM_WEIGHTS)
    assert kind == "int4"
    assert "too large for a NUMA node" in reason
    assert "of 6.0 GiB; a smaller model, or more nodes (--tensor-parallel), would do" in reason


def test_of_a_quantised_checkpoint_the_reason_is_what_is_kept() -> None:
    packed = {**LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4}}
    kind, reason = chosen(6, packed, NUM_WEIGHTS // 2)
    assert (kind, "the integers of its quantised layers are kept" in reason) == ("int8", True)
    experts = {**LLAMA_8B, "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    kind, reason = chosen(64, experts, NUM_WEIGHTS // 2)
    assert (kind, "int8, which keeps the values of its experts" in reason) == ("int8", True)


@pytest.mark.parametrize("task", [VECTORS, SCORES])
def test_models_that_encode_get_16_bits(task: str) -> None:
    assert chosen(64, LLAMA_8B, 2 * NUM_WEIGHTS, task)[0] == "bf16"
    kind, reason = chosen(64, {**LLAMA_8B, "torch_dtype": "float32"}, 4 * NUM_WEIGHTS, task)
    assert kind == "fp16"
    assert "fewer bits would not make a model that encodes texts faster" in reason


def test_the_memory_of_a_node_is_that_of_the_largest_within_the_limits_of_cgroups(tmp_path: Path) -> None:
    assert node_bytes(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       400 kB\nMemAvailable:    5 kB\n")
    assert node_bytes(tmp_path) == 400 * 1024
    for number, size in ((0, 150), (1, 250)):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       {size} kB\nNode {number} MemFree:  7 kB\n")
    assert node_bytes(tmp_path) == 250 * 1024
    group = tmp_path / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    for name, content in (("memory.max", "102400"), ("memory.current", "0"), ("memory.stat", "inactive_file 0")):
        (group / name).write_text(content)
    assert node_bytes(tmp_path) == 102400
