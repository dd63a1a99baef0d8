"""Heads converted from small checkpoints in the published format compute what numpy computes from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13

from headrace.common.model_files.heads import HeadsKind, heads_kind
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads.eagle_files import layers_to_read, read_eagle
from headrace.worker.draft_heads.eagle_graph import build_eagle
from tests.worker.draft_heads.files import FloatArray, eagle_config, eagle_reference, eagle_tensors, write_heads

SIZE, VOCAB_SIZE, BLOCK_SIZE = 64, 300, 32
SMALL = eagle_config(
    hidden_size=SIZE,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB_SIZE,
    draft_vocab_size=100,
)
NUM_TOKENS = 40


def target_with(table: FloatArray, num_logits: int = 1) -> ov.Model:
    """The beginning of a model, token ids, one for each sequence, to embeddings, and an end with so many logits."""
    tokens = opset13.parameter([-1], np.int64, "input_ids")
    tokens.output(0).get_tensor().set_names({"input_ids"})
    apart = opset13.unsqueeze(tokens, opset13.constant(np.int64(1)))
    found = opset13.gather(opset13.constant(table), apart, opset13.constant(np.int64(0)))
    head = opset13.constant(np.zeros((num_logits, table.shape[1]), np.float32))
    logits = opset13.matmul(opset13.multiply(found, found), head, False, True)
    return ov.Model([opset13.result(logits), opset13.result(found)], [tokens], "target")


class Heads:
    """Compiled heads with a cache of a few blocks, in float32."""

    def __init__(self, model: ov.Model) -> None:
        properties = {"KV_CACHE_PRECISION": ov.Type.f32, "EXECUTION_MODE_HINT": "ACCURACY"}
        compiled = ov.Core().compile_model(model, "CPU", properties)
        self.request = compiled.create_infer_request()
        for port in compiled.inputs:
            if "_cache." in port.any_name:
                shape = [3, *(int(each.get_length()) for each in list(port.partial_shape)[1:])]
                assert shape[2] == BLOCK_SIZE
                self.request.set_tensor(port.any_name, ov.Tensor(port.element_type, ov.Shape(shape)))

    def run(self, past: int, tokens: npt.NDArray[np.int64], features: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Logits and states after each token, which follow `past` others in blocks 2 and 0."""
        end = past + len(tokens)
        blocks = np.array([2, 0][: -(-end // BLOCK_SIZE)], np.int32)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": np.arange(past, end),
            "past_lens": np.array([past], np.int32),
            "subsequence_begins": np.array([0, len(tokens)], np.int32),
            "block_indices": blocks,
            "block_indices_begins": np.array([0, len(blocks)], np.int32),
            "max_context_len": np.array(end, np.int32),
            "features": features,
            "rows": np.arange(len(tokens)),
        }
        for name, values in inputs.items():
            self.request.set_tensor(name, ov.Tensor(values.copy()))
        self.request.infer()
        logits, states = (self.request.get_tensor(name).data.copy() for name in ("logits", "states"))
        return logits, states


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"num_key_value_heads": 4, "head_dim": 32},
        {"target_hidden_size": 80},
    ],
)
def test_the_graph_computes_what_the_files_say(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {**SMALL, **changes}
    tensors = eagle_tensors(config)
    rng = np.random.default_rng(1)
    table = rng.standard_normal((VOCAB_SIZE, SIZE)).astype(np.float32)
    features = rng.standard_normal((NUM_TOKENS, SIZE)).astype(np.float32)
    tokens = rng.integers(0, VOCAB_SIZE, NUM_TOKENS)
    wanted = eagle_reference(config, tensors, table[tokens], features)
    heads = Heads(build_eagle(read_eagle(write_heads(tmp_path, config, tensors)), target_with(table)))
    at_once = heads.run(0, tokens, features)
    for found, expected in zip(at_once, wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-3)
    first = heads.run(0, tokens[:30], features[:30])
    singly = [heads.run(past, tokens[past : past + 1], features[past : past + 1]) for past in range(30, NUM_TOKENS)]
    for part, expected in enumerate(wanted):
        joined = np.concatenate([first[part], *(each[part] for each in singly)])
        np.testing.assert_allclose(joined, expected, atol=2e-3)


def test_heads_may_have_embeddings_of_their_own_and_weights_in_bfloat16(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    own = (rng.integers(-100, 100, (VOCAB_SIZE, SIZE)) / 64).astype(np.float32)
    tensors: dict[str, Any] = {**eagle_tensors(SMALL), "embed_tokens.weight": own}
    features, tokens = rng.standard_normal((5, SIZE)).astype(np.float32), rng.integers(0, VOCAB_SIZE, 5)
    halved = {
        name: (values.view(np.uint32) >> 16).astype(np.uint16) if values.dtype == np.float32 else values
        for name, values in tensors.items()
    }
    truncated = {
        name: (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values
        for name, values in halved.items()
    }
    wanted, _ = eagle_reference(SMALL, truncated, own[tokens], features)
    files = read_eagle(write_heads(tmp_path, SMALL, halved))
    heads = Heads(build_eagle(files, target_with(np.zeros((VOCAB_SIZE, SIZE), np.float32))))
    found, _ = heads.run(0, tokens, features)
    np.testing.assert_allclose(found, wanted, atol=0.1)
    assert np.corrcoef(found.reshape(-1), wanted.reshape(-1))[0, 1] > 0.999


def test_names_and_settings_of_other_libraries_are_understood(tmp_path: Path) -> None:
    tensors = eagle_tensors(SMALL)
    layer = {
        name: SMALL[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": {**layer, "vocab_size": VOCAB_SIZE, "rope_theta": 500_000.0},
    }
    renamed = {name.replace("midlayer.", "layers.0."): values for name, values in tensors.items()}
    files = read_eagle(write_heads(tmp_path, config, renamed))
    assert files.shape.frequencies[1] == pytest.approx(500_000.0 ** (-2 / 16))
    assert set(files.weights) == {name.removeprefix("midlayer.") for name in tensors}
    np.testing.assert_array_equal(files.token_ids, np.flatnonzero(tensors["t2d"]))
    assert heads_kind(tmp_path) is HeadsKind.EAGLE3


def test_layers_to_read_are_the_usual_or_named_by_input_or_by_output(tmp_path: Path) -> None:
    tensors = eagle_tensors(SMALL)

    def layers(**config: Any) -> tuple[int, ...]:
        plain = {name: value for name, value in SMALL.items() if name != "eagle_aux_hidden_state_layer_ids"}
        return layers_to_read(read_eagle(write_heads(tmp_path, {**plain, **config}, tensors)).shape, 32)

    assert layers() == (2, 16, 29)
    assert layers(eagle_aux_hidden_state_layer_ids=[20, 3, 9]) == (3, 9, 20)
    assert layers(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}) == (2, 47, 91)


def test_rotary_factors_of_llama3_slow_down_long_waves_only(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tensors = eagle_tensors(SMALL)
    config = {**SMALL, "rope_theta": 500_000.0}
    plain = read_eagle(write_heads(tmp_path, config, tensors)).shape.frequencies
    scaled = read_eagle(write_heads(tmp_path, {**config, "rope_scaling": scaling}, tensors)).shape.frequencies
    np.testing.assert_allclose(scaled[0], plain[0])
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8)
    turns = 8192 * plain / (2 * np.pi)
    between = (turns > 1) & (turns < 4)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    linear = read_eagle(write_heads(tmp_path, {**config, "rope_scaling": {"type": "linear", "factor": 2}}, tensors))
    np.testing.assert_allclose(linear.shape.frequencies, plain / 2)


@pytest.mark.parametrize(
    ("changes", "tensors", "problem"),
    [
        ({"num_hidden_layers": 2}, {}, "have 2 layers; one is supported"),
        ({"hidden_act": "gelu"}, {}, "activation gelu"),
        ({"hidden_size": None}, {}, "must have the number hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn"}}, {}, "rotary factors of the type 'yarn'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, {}, "names 2 layers to read"),
        (
            {"num_attention_heads": 8, "head_dim": 16},
            {},
            "q_proj.weight of shape .64, 128., and .* makes it .128, 128.",
        ),
        ({}, {"fc.weight": None}, "have no fc.weight"),
        ({}, {"d2t": None}, "a draft vocabulary of 100 tokens, but no d2t"),
        ({}, {"d2t": np.full(100, 250)}, "d2t .* does not map to tokens"),
        ({}, {"fc.bias": np.zeros(64, np.float32)}, "have fc.bias; heads with biases"),
    ],
)
def test_other_heads_are_refused(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Any], problem: str
) -> None:
    chosen = {name: values for name, values in {**eagle_tensors(SMALL), **tensors}.items() if values is not None}
    with pytest.raises(ConfigurationError, match=problem):
        read_eagle(write_heads(tmp_path, {**SMALL, **changes}, chosen))


def test_incomplete_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no .*config.json"):
        read_eagle(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        read_eagle(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigurationError, match="save the weights with safetensors"):
        read_eagle(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigurationError, match="no whole safetensors file"):
        read_eagle(tmp_path)
