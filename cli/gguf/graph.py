"""Builds the graph of a Llama-like model (llama, mistral, qwen2, qwen3) from the tensors of a GGUF file.

The graph has the form that OpenVINO's attention paging and fusions recognise: stateful keys and values, rotated halves,
and weights that are decompressed directly before their products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.cli.gguf.weights import Weights, matrix_of, product_of, rows_of, with_rows
from headrace.common.model_files.gguf_files import MODULES, halves_of_pairs

_Array = npt.NDArray[Any]
_LOWEST = np.float32(-65504.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's dimensions, from the metadata. `has_interleaved_heads`: rows of queries and keys are stored so that
    rotated pairs are neighbours, as llama.cpp wants it for the architecture llama."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    rope_base: float
    rope_factor: float
    epsilon: float
    has_interleaved_heads: bool


class GraphBuilder:
    """Builds one model. `matrices` and `vectors` (f32) are by their names in the file."""

    def __init__(self, shape: Shape, matrices: Mapping[str, Weights], vectors: Mapping[str, _Array]) -> None:
        self._shape = shape
        self._matrices = matrices
        self._vectors = vectors
        self._tokens = _parameter("input_ids", [-1, -1], np.int64)
        self._mask = _parameter("attention_mask", [-1, -1], np.int64)
        self._positions = _parameter("position_ids", [-1, -1], np.int64)
        self._beams = _parameter("beam_idx", [-1], np.int32)
        self._assigned: list[ov.Node] = []
        self._sums: dict[tuple[str, int], ov.Output] = {}
        self._batch = opset13.gather(opset13.shape_of(self._tokens), _integers(0), _integers(0))

    def build(self) -> ov.Model:
        """The model, with the inputs and outputs that optimum-intel's exports have."""
        hidden = rows_of(self._matrices["token_embd.weight"], self._tokens.output(0))
        rotations = self._rotations()
        for layer in range(self._shape.layers):
            prefix = f"blk.{layer}"
            attended = self._attention(layer, self._norm(hidden, f"{prefix}.attn_norm.weight"), rotations)
            hidden = opset13.add(hidden, attended).output(0)
            fed = self._feed_forward(layer, self._norm(hidden, f"{prefix}.ffn_norm.weight"))
            hidden = opset13.add(hidden, fed).output(0)
        head = self._matrices.get("output.weight", self._matrices["token_embd.weight"])
        logits = opset13.matmul(self._norm(hidden, "output_norm.weight"), matrix_of(head), False, True)
        logits.output(0).set_names({"logits"})
        inputs = [self._tokens, self._mask, self._positions, self._beams]
        return ov.Model([opset13.result(logits)], self._assigned, inputs, "gguf")

    def _product(self, states: ov.Output, layer: int, part: str) -> ov.Output:
        """States times the transposed weights, and the bias if there is one."""
        name = f"blk.{layer}.{part}"
        weights = self._matrices[f"{name}.weight"]
        bias = self._vectors.get(f"{name}.bias")
        if self._shape.has_interleaved_heads and part in ("attn_q", "attn_k"):
            order = halves_of_pairs(weights.shape[0], self._shape.head_size)
            weights, bias = with_rows(weights, order), None if bias is None else bias[order]
        product, result = product_of(states, weights, partial(self._sums_of, states))
        # The name that exporters give it after its module, by which adapters find it.
        product.set_friendly_name(f"__module.model.layers.{layer}.{MODULES[part]}/aten::linear/MatMul")
        return result if bias is None else opset13.add(result, _floats(bias.reshape(1, 1, -1))).output(0)

    def _sums_of(self, states: ov.Output, size: int) -> ov.Output:
        """The sums of `size` neighbours each. Products of the same states share them."""
        key = states.get_node().get_friendly_name(), size
        if key not in self._sums:
            groups = opset13.reshape(states, _integers(0, 0, -1, size), True)
            sums = opset13.reduce_sum(groups, _integers(-1), True)
            self._sums[key] = opset13.reshape(sums, _integers(0, 0, -1), True).output(0)
        return self._sums[key]

    def _norm(self, states: ov.Output, name: str, rank: int = 3) -> ov.Output:
        """Root mean square normalisation of the last dimension."""
        ones = [1] * rank
        squares = opset13.power(states, _floats(np.full(ones, 2.0)))
        mean = opset13.reduce_mean(squares, _integers(-1), True)
        root = opset13.sqrt(opset13.add(mean, _floats(np.full(ones, self._shape.epsilon))))
        normal = opset13.multiply(opset13.divide(_floats(np.ones(ones)), root), states)
        return opset13.multiply(normal, _floats(self._vectors[name].reshape(*ones[:-1], -1))).output(0)

    def _rotations(self) -> tuple[ov.Node, ov.Node]:
        """Cosines and sines of the positions: [batch, 1, tokens, head size]."""
        size = self._shape.head_size
        frequencies = 1.0 / self._shape.rope_base ** (np.arange(0, size, 2, dtype=np.float64) / size)
        frequencies /= self._shape.rope_factor
        if "rope_freqs.weight" in self._vectors:
            frequencies /= self._vectors["rope_freqs.weight"]
        columns = opset13.broadcast(
            _floats(frequencies.reshape(1, -1, 1)),
            opset13.concat([self._batch, _integers(1), _integers(1)], 0),
            broadcast_spec="BIDIRECTIONAL",
        )
        positions = opset13.convert(opset13.unsqueeze(self._positions, opset13.constant(np.int64(1))), "f32")
        angles = opset13.transpose(opset13.matmul(columns, positions, False, False), _integers(0, 2, 1))
        both = opset13.concat([angles, angles], -1)
        axis = opset13.constant(np.int64(1))
        return opset13.unsqueeze(opset13.cos(both), axis), opset13.unsqueeze(opset13.sin(both), axis)

    def _rotated(self, values: ov.Output, rotations: tuple[ov.Node, ov.Node]) -> ov.Output:
        half = self._shape.head_size // 2
        step = _integers(1)
        axis = _integers(3)
        first = opset13.slice(values, _integers(0), _integers(half), step, axis)
        second = opset13.slice(values, _integers(half), _integers(np.iinfo(np.int64).max), step, axis)
        turned = opset13.concat([opset13.multiply(second, _floats(np.full((1, 1, 1, 1), -1.0))), first], -1)
        return opset13.add(opset13.multiply(values, rotations[0]), opset13.multiply(turned, rotations[1])).output(0)

    def _attention(self, layer: int, states: ov.Output, rotations: tuple[ov.Node, ov.Node]) -> ov.Output:
        shape = self._shape
        prefix = f"blk.{layer}"
        found = []
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            split = _integers(0, 0, heads, shape.head_size)
            values = opset13.reshape(self._product(states, layer, f"attn_{part}"), split, True).output(0)
            if f"{prefix}.attn_{part}_norm.weight" in self._vectors:
                values = self._norm(values, f"{prefix}.attn_{part}_norm.weight", rank=4)
            found.append(opset13.transpose(values, _integers(0, 2, 1, 3)).output(0))
        query, key = (self._rotated(values, rotations) for values in found[:2])
        keys = self._kept(f"past_key_values.{layer}.keypresent.{layer}.key", key)
        values = self._kept(f"past_key_values.{layer}.valuepresent.{layer}.key", found[2])
        attended = opset13.scaled_dot_product_attention(
            query, self._for_all_heads(keys), self._for_all_heads(values), self._causal_mask(states, keys), causal=False
        )
        rows = opset13.transpose(attended, _integers(0, 2, 1, 3))
        joined = opset13.reshape(rows, _integers(0, 0, shape.heads * shape.head_size), True)
        return self._product(joined.output(0), layer, "attn_output")

    def _kept(self, name: str, values: ov.Output) -> ov.Output:
        """Append values to the state of that name: [batch, heads, tokens so far, head size]."""
        heads, size = self._shape.kv_heads, self._shape.head_size
        empty = opset13.concat([self._batch, _integers(heads), _integers(0), _integers(size)], 0)
        begin = opset13.broadcast(opset13.constant(np.float32(0)), empty)
        state = opset13.read_value(begin, name, ov.Type.f32, ov.PartialShape([-1, heads, -1, size]))
        chosen = opset13.gather(state, self._beams, opset13.constant(np.int64(0)))
        joined = opset13.concat([chosen, values], 2)
        self._assigned.append(opset13.assign(joined, name))
        return joined.output(0)

    def _for_all_heads(self, values: ov.Output) -> ov.Output:
        """Keys or values, each head repeated for the queries that share it."""
        shape = self._shape
        shared = shape.heads // shape.kv_heads
        apart = opset13.unsqueeze(values, opset13.constant(np.int64(2)))
        sizes = [_integers(shape.kv_heads), _integers(shared), _integers(1), _integers(shape.head_size)]
        repeated = opset13.broadcast(apart, opset13.concat([self._batch, *sizes], 0), broadcast_spec="BIDIRECTIONAL")
        return opset13.reshape(repeated, _integers(0, shape.heads, -1, shape.head_size), True).output(0)

    def _causal_mask(self, states: ov.Output, keys: ov.Output) -> ov.Output:
        """The causal mask [batch, 1, tokens, tokens so far]: 0 for visible positions, else the lowest number."""
        zero = opset13.constant(np.int64(0))
        one = opset13.constant(np.int64(1))
        total = opset13.gather(opset13.shape_of(keys), opset13.constant(np.int64(2)), zero)
        new = opset13.gather(opset13.shape_of(states), one, zero)
        columns = opset13.unsqueeze(opset13.range(zero, total, one, "i64"), zero)
        rows = opset13.unsqueeze(opset13.range(opset13.subtract(total, new), total, one, "i64"), one)
        is_before = opset13.less_equal(columns, rows)
        is_text = opset13.unsqueeze(opset13.convert(self._mask, "boolean"), _integers(1, 2))
        seen = opset13.logical_and(is_text, is_before)
        return opset13.select(seen, opset13.constant(np.float32(0)), opset13.constant(_LOWEST)).output(0)

    def _feed_forward(self, layer: int, states: ov.Output) -> ov.Output:
        gate = opset13.swish(self._product(states, layer, "ffn_gate"))
        gated = opset13.multiply(gate, self._product(states, layer, "ffn_up"))
        return self._product(gated.output(0), layer, "ffn_down")


def _parameter(name: str, dimensions: list[int], kind: type[np.generic]) -> ov.Node:
    parameter = opset13.parameter(dimensions, kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _integers(*values: int) -> ov.Node:
    return opset13.constant(np.array(values, np.int64))


def _floats(values: _Array) -> ov.Node:
    return opset13.constant(np.ascontiguousarray(values, np.float32))
