"""Builds the graph of EAGLE-3 heads, with PagedAttention over their own keys and values.

    token t+1 -> embedding -> norm --+
                                     +--> attention of doubled width -> MLP -> states -> norm -> logits
    features of token t ----> norm --+                                            |
                                          features of token t+1, if it is proposed too

Features are the target's hidden states after `fc`, which is in the target's graph (`features`). For proposed tokens
they are the heads' own states. Weights are 8-bit integers with a scale for each row, because their precision affects
only how often a proposal is right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13
from openvino.op import _PagedAttentionExtension

from headrace.common.model_files.safetensors import floats
from headrace.worker.draft_heads.eagle_files import EagleFiles
from headrace.worker.draft_heads.hidden_states import embeddings_of
from headrace.worker.model.sampled_rows import states_of_rows

_Array = npt.NDArray[Any]
_STEP = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
_ROWS_AT_ONCE = 4096


def product(states: ov.Output | ov.Node, weights: _Array) -> ov.Output:
    """States `[..., columns]` times the transposed weights `[rows, columns]`, rounded to 8-bit integers."""
    integers = np.empty(weights.shape, np.int8)
    scales = np.empty((len(weights), 1), np.float32)
    for first in range(0, len(weights), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        values = floats(weights[part])
        scales[part] = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
        integers[part] = np.rint(values / np.where(scales[part], scales[part], 1))
    stored = opset13.convert(opset13.constant(integers), "f32")
    matrix = opset13.multiply(stored, opset13.constant(scales))
    return opset13.matmul(states, matrix, False, True).output(0)


def build_eagle(files: EagleFiles, target: ov.Model) -> ov.Model:
    """The graph, with the inputs of `Batch`, `features` f32 [tokens, size] and `rows` i64 [n], and the outputs `logits`
    [n, draft vocabulary] and `states` [n, size]. `target` is a graph of the target with PagedAttention; it cannot be
    used afterwards."""
    return _Builder(files, target).build()


def build_mtp(files: EagleFiles, target: ov.Model) -> ov.Model:
    """As `build_eagle`, for a layer that predicts more tokens (MTP). Its features are the target's last hidden states
    and, for proposed tokens, its own; both are normalised."""
    return _MtpBuilder(files, target).build()


class _Builder:
    def __init__(self, files: EagleFiles, target: ov.Model) -> None:
        self._files = files
        self._shape = files.shape
        self._tokens = target.input("input_ids").get_node()
        self._embeddings = self._embedded(target)
        self._positions = _parameter("position_ids", [-1], ov.Type.i64)
        self._features = _parameter("features", [-1, self._shape.size], ov.Type.f32)
        self._rows = _parameter("rows", [-1], ov.Type.i64)
        self._step = [_parameter(name, [-1], ov.Type.i32) for name in _STEP]
        self._longest = _parameter("max_context_len", [], ov.Type.i32)
        self._caches = [
            _parameter(name, [-1, -1, -1, -1], ov.Type.dynamic) for name in ("key_cache.0", "value_cache.0")
        ]

    def build(self) -> ov.Model:
        states = self._states()
        inputs = [self._tokens, self._positions, self._features, self._rows, *self._step, self._longest, *self._caches]
        whole = ov.Model([opset13.result(states)], inputs, "eagle3")
        of_rows = states_of_rows(states, self._rows.output(0), whole)
        logits = self._product(self._for_logits(of_rows), "lm_head")
        for name, output in (("logits", logits), ("states", of_rows)):
            output.get_tensor().set_names({name})
        return ov.Model([opset13.result(logits), opset13.result(of_rows)], inputs, "eagle3")

    def _states(self) -> ov.Output:
        """The states of the step's tokens, `[tokens, size]`."""
        features = self._features.output(0)
        mixed = self._norm(features, "hidden_norm")
        residual = mixed if self._shape.norms_residual else features
        both = opset13.concat([self._norm(self._embeddings, "input_layernorm"), mixed], -1).output(0)
        return self._layer(residual, both)

    def _layer(self, residual: ov.Output, states: ov.Output) -> ov.Output:
        """The layer: attention of `states`, added to `residual`, then the output of the MLP, added too."""
        attended = opset13.add(residual, self._product(self._attention(states), "self_attn.o_proj")).output(0)
        fed = self._feed_forward(self._norm(attended, "post_attention_layernorm"))
        return opset13.add(attended, fed).output(0)

    def _for_logits(self, states: ov.Output) -> ov.Output:
        """The states that are multiplied with the vocabulary's weights to give logits."""
        return self._norm(states, "norm")

    def _embedded(self, target: ov.Model) -> ov.Output:
        """Embeddings of the step's tokens, `[tokens, size]`: the heads' own, or the target's."""
        table = self._files.weights.get("embed_tokens.weight")
        if table is None:
            found = embeddings_of(target)
        else:
            kind = ov.Type.bf16 if table.dtype == np.uint16 else ov.Type(table.dtype)
            tensor = ov.Tensor(kind, ov.Shape(list(table.shape)))
            tensor.data.reshape(-1).view(np.uint8)[:] = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
            stored = opset13.convert(opset13.constant(tensor), "f32")
            found = opset13.gather(stored, self._tokens, opset13.constant(np.int64(0))).output(0)
        return opset13.reshape(found, opset13.constant(np.array([-1, self._shape.size])), False).output(0)

    def _attention(self, states: ov.Output) -> ov.Output:
        shape = self._shape
        query, key, value = (self._product(states, f"self_attn.{name}_proj") for name in ("q", "k", "v"))
        cosines, sines = self._rotations()
        query = self._rotated(query, shape.num_heads, cosines, sines)
        key = self._rotated(key, shape.num_kv_heads, cosines, sines)
        nothing = {kind: opset13.constant(np.zeros(0, kind)) for kind in (np.float32, np.int32, np.uint8)}
        zero = opset13.constant(np.int32(0))
        none = nothing[np.int32]
        given = [query, key, value, *self._caches, *self._step]
        given += [opset13.constant(np.float32(shape.head_size**-0.5)), zero, nothing[np.float32], self._longest]
        given += [none, none, none, nothing[np.float32], nothing[np.float32], zero, zero]  # scores, rotation, sparsity
        given += [opset13.constant(np.zeros((0, 0, 0, 0), np.float32)), zero, none, none, none, none]
        given += [nothing[np.uint8], none]  # no mask among new tokens
        node = _PagedAttentionExtension([each.output(0) if isinstance(each, ov.Node) else each for each in given])
        for name in ("k", "v"):
            node.get_rt_info()[f"{name}_head_size"] = shape.head_size
            node.get_rt_info()[f"num_{name}_heads"] = shape.num_kv_heads
        return node.output(0)

    def _rotations(self) -> tuple[ov.Node, ov.Node]:
        """Cosines and sines of each token's position, `[tokens, 1, head size / 2]`."""
        positions = opset13.unsqueeze(opset13.convert(self._positions, "f32"), opset13.constant(np.array([1, 2])))
        angles = opset13.multiply(positions, _floats(self._shape.frequencies.reshape(1, 1, -1)))
        return opset13.cos(angles), opset13.sin(angles)

    def _rotated(self, states: ov.Output, num_heads: int, cosines: ov.Node, sines: ov.Node) -> ov.Output:
        """Queries or keys `[tokens, heads x size]`, rotated: the halves of each head form the pairs."""
        size = self._shape.head_size
        heads = opset13.reshape(states, opset13.constant(np.array([-1, num_heads, size])), False)
        halves = opset13.split(heads, opset13.constant(np.int64(2)), 2)
        first, second = halves.output(0), halves.output(1)
        left = opset13.subtract(opset13.multiply(first, cosines), opset13.multiply(second, sines))
        right = opset13.add(opset13.multiply(second, cosines), opset13.multiply(first, sines))
        joined = opset13.concat([left, right], -1)
        return opset13.reshape(joined, opset13.constant(np.array([-1, num_heads * size])), False).output(0)

    def _feed_forward(self, states: ov.Output) -> ov.Output:
        gate = opset13.swish(self._product(states, "mlp.gate_proj"))
        gated = opset13.multiply(gate, self._product(states, "mlp.up_proj"))
        return self._product(gated.output(0), "mlp.down_proj")

    def _product(self, states: ov.Output, name: str) -> ov.Output:
        found, bias = product(states, self._files.weights[f"{name}.weight"]), f"{name}.bias"
        if bias in self._files.weights:
            return opset13.add(found, _floats(self._files.vector(bias).reshape(1, -1))).output(0)
        return found

    def _norm(self, states: ov.Output, name: str) -> ov.Output:
        """Root mean square normalisation."""
        mean = opset13.reduce_mean(opset13.multiply(states, states), opset13.constant(np.array([-1])), True)
        root = opset13.sqrt(opset13.add(mean, _floats(np.full((1, 1), self._shape.epsilon))))
        weights = _floats(self._files.vector(f"{name}.weight").reshape(1, -1))
        return opset13.multiply(opset13.divide(states, root), weights).output(0)


class _MtpBuilder(_Builder):
    """
    token t+1 -> embedding -> norm ---+
                                      +--> product -> a layer of the model -> norm -> states -> logits
    last states of token t -> norm ---+                                                 |
                                         last states of token t+1, if it is proposed too
    """

    def _states(self) -> ov.Output:
        known = self._norm(self._features.output(0), "hidden_layernorm")
        both = opset13.concat([known, self._norm(self._embeddings, "token_layernorm")], -1).output(0)
        mixed = self._product(both, "input_proj")
        return self._norm(self._layer(mixed, self._norm(mixed, "input_layernorm")), "final_layernorm")

    def _for_logits(self, states: ov.Output) -> ov.Output:
        return states


def _parameter(name: str, shape: list[int], kind: ov.Type) -> ov.Node:
    parameter = opset13.parameter(shape, kind, name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def _floats(values: _Array) -> ov.Node:
    return opset13.constant(np.ascontiguousarray(values, np.float32))
