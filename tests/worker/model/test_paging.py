"""Graphs that no worker can serve are refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.config import ConfigurationError
from headrace.worker.model.paging import read_paged


def tokens() -> ov.Node:
    node: ov.Node = opset13.parameter([-1, -1], np.int64, "input_ids")
    node.output(0).get_tensor().set_names({"input_ids"})
    return node


def without_cache() -> ov.Model:
    """Tokens to numbers, as an export without a KV cache."""
    taken = tokens()
    return ov.Model([opset13.convert(taken, "f32")], [taken], "plain")


def recurrent() -> ov.Model:
    """A sum over all tokens so far, kept from step to step as in Mamba."""
    taken = tokens()
    state = opset13.read_value(opset13.constant(np.zeros((1, 1), np.float32)), "cache_params.past.ssm.0")
    added = opset13.reduce_sum(opset13.convert(taken, "f32"), np.int64(1), keep_dims=True)
    summed = opset13.add(state, added)
    kept = opset13.assign(summed, "cache_params.past.ssm.0")
    return ov.Model([opset13.result(summed)], [kept], [taken], "recurrent")


def refusal_of(model: ov.Model, kind: str, directory: Path) -> str:
    """What `read_paged` says of a directory with this network."""
    ov.save_model(model, directory / "openvino_model.xml")
    (directory / "config.json").write_text(json.dumps({"model_type": kind, "max_position_embeddings": 64}))
    with pytest.raises(ConfigurationError) as raised:
        read_paged(ov.Core(), directory)
    return str(raised.value)


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    assert refusal_of(recurrent(), "mamba", tmp_path) == (
        f"the model in {tmp_path} cannot be served: its architecture (mamba) has only recurrent layers, or unknown "
        "ones; only decoder-only text models with attention can be served"
    )


def test_an_export_without_a_cache_is_refused(tmp_path: Path) -> None:
    assert "it has no KV cache state" in refusal_of(without_cache(), "llama", tmp_path)


def test_a_context_beyond_a_chunk_of_attention_is_refused(tmp_path: Path) -> None:
    ov.save_model(recurrent(), tmp_path / "openvino_model.xml")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4_text", "attention_chunk_size": 64}))
    with pytest.raises(ConfigurationError, match="see chunks of 64 tokens, .*; say --max-context-tokens 64 or less"):
        read_paged(ov.Core(), tmp_path, 65)
    with pytest.raises(ConfigurationError, match="only recurrent layers"):
        read_paged(ov.Core(), tmp_path, 64)


def test_a_network_that_is_no_network_is_refused(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_text("<net>")
    with pytest.raises(ConfigurationError, match=r"is corrupt or incomplete: .*; pull the model again"):
        read_paged(ov.Core(), tmp_path)
