"""A change of the graph or of OpenVINO's properties that may change keys and values needs another KV_NUMERICS_VERSION.

The graph is taken as it goes to the compiler, so it is the same on every CPU. Its digest covers everything from which
keys and values are computed. It does not cover the head.
"""

from __future__ import annotations

import importlib.metadata
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.model import runner as model_runner
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.numerics import KV_NUMERICS_VERSION

ROOT = Path(__file__).parents[2]
# For each version, the digest with the version of OpenVINO in constraints.txt.
DIGESTS = {1: "f80fcc785ece50ab"}
CHANGED = (
    "The graph or the properties from which OpenVINO computes keys and values have changed: {digest}. If the bits of "
    "keys or values may be others, raise KV_NUMERICS_VERSION and store the digest for that version, so that blocks of "
    "before are not taken back. If they are the same for sure, or if only OpenVINO has changed, replace the digest."
)
HEADS, HEAD_SIZE, VOCABULARY, LAYERS = 4, 128, 32, 2
HIDDEN = HEADS * HEAD_SIZE
_KEY_VALUE = (1, 2)


class _ReachedCompilerError(Exception):
    """The graph is complete."""


def pattern(kind: type, *shape: int) -> Any:
    return (np.arange(np.prod(shape)) % 251).astype(kind).reshape(shape)


def weights(rows: int, columns: int) -> ov.Node:
    """Weights of 8 bits in groups of 32, as exporters store them."""
    shape = (rows, columns // 32, 32)
    stored = opset13.convert(opset13.constant(pattern(np.uint8, *shape)), "f16")
    zeros = opset13.convert(opset13.constant(np.full((*shape[:2], 1), 128, np.uint8)), "f16")
    scales = opset13.constant(pattern(np.float16, *shape[:2], 1))
    scaled = opset13.multiply(opset13.subtract(stored, zeros), scales)
    flat = opset13.reshape(scaled, opset13.constant(np.array([rows, columns])), False)
    return opset13.convert(flat, "f32")


def parameter(name: str, shape: list[int]) -> ov.Node:
    node: ov.Node = opset13.parameter(shape, np.int32 if name == "beam_idx" else np.int64, name)
    node.output(0).get_tensor().set_names({name})
    return node


class _Decoder:
    """A decoder with rotary positions, in the form of optimum-intel's exports."""

    def __init__(self) -> None:
        self.inputs = [parameter(name, [-1, -1]) for name in ("input_ids", "attention_mask", "position_ids")]
        self.beams = parameter("beam_idx", [-1])
        self.sinks: list[ov.Node] = []

    def build(self) -> ov.Model:
        tokens = self.inputs[0]
        table = opset13.convert(opset13.constant(pattern(np.float16, VOCABULARY, HIDDEN)), "f32")
        states = opset13.gather(table, tokens, opset13.constant(np.int64(0)))
        for layer in range(LAYERS):
            states = opset13.add(states, self._attention(states, layer))
        logits = opset13.matmul(states, opset13.constant(pattern(np.float32, VOCABULARY, HIDDEN)), False, True)
        logits.output(0).get_tensor().set_names({"logits"})
        return ov.Model([opset13.result(logits)], self.sinks, [*self.inputs, self.beams], "decoder")

    def _attention(self, states: ov.Node, layer: int) -> ov.Node:
        query, key, value = (self._heads(opset13.matmul(states, weights(HIDDEN, HIDDEN), False, True)) for _ in "qkv")
        key, value = self._past(self._rotated(key), f"{layer}.key"), self._past(value, f"{layer}.value")
        # No token is masked here; the pages' attention has its own mask.
        shape = opset13.shape_of(self.inputs[1], "i64")
        length = opset13.gather(shape, opset13.constant(np.array([1])), opset13.constant(np.int64(0)))
        ones = opset13.constant(np.array([1, 1]))
        mask = opset13.broadcast(opset13.constant(np.float32(0)), opset13.concat([ones, length, length], 0))
        attended = opset13.scaled_dot_product_attention(self._rotated(query), key, value, mask)
        order = opset13.constant(np.array([0, 2, 1, 3]))
        shape = opset13.constant(np.array([0, 0, HIDDEN]))
        return opset13.reshape(opset13.transpose(attended, order), shape, True)

    def _heads(self, states: ov.Node) -> ov.Node:
        shape = opset13.constant(np.array([0, 0, HEADS, HEAD_SIZE]))
        return opset13.transpose(opset13.reshape(states, shape, True), opset13.constant(np.array([0, 2, 1, 3])))

    def _rotated(self, states: ov.Node) -> ov.Node:
        positions = opset13.unsqueeze(opset13.convert(self.inputs[2], "f32"), opset13.constant(np.array([1, 3])))
        return opset13.multiply(states, opset13.cos(positions))

    def _past(self, states: ov.Node, name: str) -> ov.Node:
        name, axis = f"past_key_values.{name}", opset13.constant(np.int64(0))
        batch = opset13.gather(opset13.shape_of(self.inputs[0], "i64"), opset13.constant(np.array([0])), axis)
        sizes = [batch, *(opset13.constant(np.array([size])) for size in (HEADS, 0, HEAD_SIZE))]
        empty = opset13.broadcast(opset13.constant(np.float32(0)), opset13.concat(sizes, 0))
        past = opset13.gather(opset13.read_value(empty, name), self.beams, axis)
        whole = opset13.concat([past, states], 2)
        self.sinks.append(opset13.assign(whole, name))
        return whole


def digest_of(model: ov.Model, properties: dict[str, object]) -> str:
    """A digest of what keys and values are computed from. The names of nodes and their order do not matter."""
    found: dict[str, str] = {}
    caches = []
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        parts: list[object] = [kind]
        if kind == "Parameter":
            parts.append(sorted(node.output(0).get_names()))
        elif kind == "Constant":
            parts.append(sha256(np.ascontiguousarray(node.data).tobytes()).hexdigest())
        else:
            parts.append(sorted((name, str(value)) for name, value in node.get_attributes().items()))
        inputs = [(found[value.get_node().get_friendly_name()], value.get_index()) for value in node.input_values()]
        parts += [
            inputs,
            [(str(output.get_element_type()), str(output.get_partial_shape())) for output in node.outputs()],
        ]
        found[node.get_friendly_name()] = sha256(json.dumps(parts).encode()).hexdigest()
        if kind == "PagedAttentionExtension":
            caches.append([inputs[index] for index in _KEY_VALUE])
    assert len(caches) == LAYERS
    of_properties = sorted((name, str(value)) for name, value in properties.items())
    return sha256(json.dumps([caches, of_properties]).encode()).hexdigest()[:16]


def test_a_change_of_keys_and_values_has_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("openvino=="))
    if pinned != f"openvino=={importlib.metadata.version('openvino')}":
        pytest.skip(f"the digest is of {pinned}")
    ov.save_model(_Decoder().build(), tmp_path / "openvino_model.xml", compress_to_fp16=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    compiled: list[str] = []

    def compile_model(_: ov.Core, model: ov.Model, asked: Any, more: Any) -> ov.CompiledModel:
        compiled.append(digest_of(model, {**asked.properties, **more}))
        raise _ReachedCompilerError

    monkeypatch.setattr(model_runner, "_compile", compile_model)
    monkeypatch.setattr(model_runner, "exact_rows", lambda *_: 8)
    with pytest.raises(_ReachedCompilerError):
        OpenVINOModelRunner(tmp_path, threads=1, kv_precision="u8", execution_mode="performance")
    (digest,) = compiled
    assert DIGESTS.get(KV_NUMERICS_VERSION) == digest, CHANGED.format(digest=digest)
