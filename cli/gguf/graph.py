"""Builds the graph of a decoder from the tensors of a GGUF file.

The graph has the form that OpenVINO's attention paging and fusions recognise: stateful keys and values, rotated halves,
windows as in exports of gpt-oss, and weights that are decompressed directly before their products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13
from openvino.utils.node_factory import NodeFactory

from headrace.cli.gguf.architectures import ArchitectureError, Layer, Rotation, Shape
from headrace.cli.gguf.weights import Matrices, Weights, matrix_of, product_of, rows_of, with_rows
from headrace.common.model_files.gguf_files import MODULES, halves_of_pairs

_Array = npt.NDArray[Any]
_LOWEST = np.float32(-65504.0)
_END = np.iinfo(np.int64).max
# Modules that have the matrices of several others.
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GATED = ("gate", "up", "down")
_Rotated = tuple[ov.Node, ov.Node]


class GraphBuilder:
    """Builds one model. `matrices` and `vectors` (f32) are by their names in the file."""

    def __init__(self, shape: Shape, matrices: Matrices, vectors: Mapping[str, _Array]) -> None:
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
        rotations = {id(layer.rotation): layer.rotation for layer in shape.layers if layer.rotation is not None}
        self._rotations = {key: self._cosines_and_sines(rotation) for key, rotation in rotations.items()}

    def build(self) -> ov.Model:
        """The model, with the inputs and outputs that optimum-intel's exports have."""
        shape = self._shape
        hidden = _times(rows_of(self._matrices["token_embd.weight"], self._tokens.output(0)), shape.embedding_scale)
        for number, layer in enumerate(shape.layers):
            attended = self._attention(number, layer, self._norm(hidden, f"blk.{number}.attn_norm"))
            hidden = self._added(hidden, attended, f"blk.{number}.post_attention_norm")
            states = self._norm(hidden, f"blk.{number}.{shape.feed_forward_norm}")
            fed = self._experts(number, states) if shape.experts else self._feed_forward(number, states)
            hidden = self._added(hidden, fed, f"blk.{number}.post_ffw_norm")
        head = self._matrices["output.weight" if "output.weight" in self._matrices else "token_embd.weight"]
        # The scale of the logits is in the norm, so that the graph ends with a product.
        states = self._norm(hidden, "output_norm", factor=shape.logit_scale)
        logits = opset13.matmul(states, matrix_of(head), False, True)
        if shape.logit_cap:
            cap = _floats(np.full((1, 1, 1), shape.logit_cap))
            logits = opset13.multiply(opset13.tanh(opset13.divide(logits, cap)), cap)
        logits.output(0).set_names({"logits"})
        inputs = [self._tokens, self._mask, self._positions, self._beams]
        return ov.Model([opset13.result(logits)], self._assigned, inputs, "gguf")

    def _added(self, states: ov.Output, change: ov.Output, norm: str) -> ov.Output:
        """The states after a part of a layer, whose result may be normalised or scaled."""
        if self._shape.has_norms_behind:
            change = self._norm(change, norm)
        return opset13.add(states, _times(change, self._shape.residual_scale)).output(0)

    def _product(self, states: ov.Output, layer: int, part: str) -> ov.Output:
        """States times the transposed weights, and the bias if there is one."""
        name = f"blk.{layer}.{part}"
        weights = self._matrices[f"{name}.weight"]
        bias = self._vectors.get(f"{name}.bias")
        order = self._order_of_rows(part, weights.shape[0])
        if order is not None:
            weights, bias = with_rows(weights, order), None if bias is None else bias[order]
        is_fused = part == "attn_qkv" or (part == "ffn_up" and f"blk.{layer}.ffn_gate.weight" not in self._matrices)
        result = self._linear(states, weights, layer, (_FUSED if is_fused else MODULES)[part])
        return result if bias is None else opset13.add(result, _floats(bias.reshape(1, 1, -1))).output(0)

    def _order_of_rows(self, part: str, rows: int) -> _Array | None:
        """The order in which rows of queries and keys are rotated by halves; None if they are already in it."""
        shape = self._shape
        rotated = {"attn_q": rows, "attn_k": rows, "attn_qkv": (shape.heads + shape.kv_heads) * shape.head_size}
        if not shape.has_interleaved_heads or part not in rotated:
            return None
        order = halves_of_pairs(rotated[part], shape.head_size, shape.rotated)
        return np.concatenate([order, np.arange(len(order), rows)])

    def _linear(self, states: ov.Output, weights: Weights, layer: int, module: str) -> ov.Output:
        """States times the transposed weights of a module."""
        product, result = product_of(states, weights, partial(self._sums_of, states))
        # The name that exporters give it after its module, by which adapters find it.
        product.set_friendly_name(f"__module.model.layers.{layer}.{module}/aten::linear/MatMul")
        return result

    def _sums_of(self, states: ov.Output, size: int) -> ov.Output:
        """The sums of `size` neighbours each. Products of the same states share them."""
        key = states.get_node().get_friendly_name(), size
        if key not in self._sums:
            kept = [0] * (len(states.get_partial_shape()) - 1)
            groups = opset13.reshape(states, _integers(*kept, -1, size), True)
            sums = opset13.reduce_sum(groups, _integers(-1), True)
            self._sums[key] = opset13.reshape(sums, _integers(*kept, -1), True).output(0)
        return self._sums[key]

    def _norm(self, states: ov.Output, name: str, rank: int = 3, factor: float = 1.0) -> ov.Output:
        """Root mean square normalisation of the last dimension, times `factor`."""
        ones = [1] * rank
        squares = opset13.power(states, _floats(np.full(ones, 2.0)))
        mean = opset13.reduce_mean(squares, _integers(-1), True)
        root = opset13.sqrt(opset13.add(mean, _floats(np.full(ones, self._shape.epsilon))))
        normal = opset13.multiply(opset13.divide(_floats(np.ones(ones)), root), states)
        weight = self._vectors[f"{name}.weight"] * np.float32(factor)
        return opset13.multiply(normal, _floats(weight.reshape(*ones[:-1], -1))).output(0)

    def _cosines_and_sines(self, rotation: Rotation) -> _Rotated:
        """Cosines and sines of the positions: [batch, 1, tokens, rotated numbers]."""
        columns = opset13.broadcast(
            self._frequencies(rotation),
            opset13.concat([self._batch, _integers(1), _integers(1)], 0),
            broadcast_spec="BIDIRECTIONAL",
        )
        positions = opset13.convert(opset13.unsqueeze(self._positions, opset13.constant(np.int64(1))), "f32")
        angles = opset13.transpose(opset13.matmul(columns, positions, False, False), _integers(0, 2, 1))
        both = opset13.concat([angles, angles], -1)
        axis = opset13.constant(np.int64(1))
        cosines, sines = (_times(turned.output(0), rotation.scale) for turned in (opset13.cos(both), opset13.sin(both)))
        return opset13.unsqueeze(cosines, axis), opset13.unsqueeze(sines, axis)

    def _frequencies(self, rotation: Rotation) -> ov.Node:
        """[1, pairs, 1]. With two sets, the longest context in the batch chooses, as in transformers: a worker puts the
        longest context that it serves in the place of the largest position."""
        short = _floats(rotation.frequencies.reshape(1, -1, 1))
        if rotation.long_frequencies is None:
            return short
        long = _floats(rotation.long_frequencies.reshape(1, -1, 1))
        length = opset13.add(opset13.reduce_max(self._positions, _integers(0, 1), False), opset13.constant(np.int64(1)))
        is_long = opset13.greater(length, opset13.constant(np.int64(rotation.original_context)))
        return opset13.select(is_long, long, short)

    def _rotated(self, values: ov.Output, rotation: Rotation) -> ov.Output:
        """Values [batch, heads, tokens, head size] whose first numbers are rotated."""
        cosines, sines = self._rotations[id(rotation)]
        half, rotated = self._shape.rotated // 2, self._shape.rotated
        is_whole = rotated == self._shape.head_size
        turned_part = values if is_whole else _slice(values, 0, rotated)
        first, second = _slice(turned_part, 0, half), _slice(turned_part, half, _END)
        turned = opset13.concat([opset13.multiply(second, _floats(np.full((1, 1, 1, 1), -1.0))), first], -1)
        found = opset13.add(opset13.multiply(turned_part, cosines), opset13.multiply(turned, sines))
        return (found if is_whole else opset13.concat([found, _slice(values, rotated, _END)], -1)).output(0)

    def _attention(self, number: int, layer: Layer, states: ov.Output) -> ov.Output:
        shape = self._shape
        query, key, value = self._heads(number, states)
        if layer.rotation is not None:
            query, key = (self._rotated(values, layer.rotation) for values in (query, key))
        keys = self._kept(f"past_key_values.{number}.keypresent.{number}.key", key)
        values = self._kept(f"past_key_values.{number}.valuepresent.{number}.key", value)
        mask = self._window_mask(states, keys, layer.window) if layer.window else self._causal_mask(states, keys)
        inputs = [query, self._for_all_heads(keys), self._for_all_heads(values), mask]
        inputs.append(opset13.constant(np.float32(shape.attention_scale)).output(0))
        if (sinks := self._vectors.get(f"blk.{number}.attn_sinks.weight")) is not None:
            inputs.append(_floats(sinks.reshape(1, -1, 1, 1)).output(0))
        # The function of opset13 takes no sinks.
        attended = NodeFactory("opset13").create("ScaledDotProductAttention", inputs, {"causal": False})
        rows = opset13.transpose(attended, _integers(0, 2, 1, 3))
        joined = opset13.reshape(rows, _integers(0, 0, shape.heads * shape.head_size), True)
        return self._product(joined.output(0), number, "attn_output")

    def _heads(self, layer: int, states: ov.Output) -> Sequence[ov.Output]:
        """Queries, keys and values, [batch, heads, tokens, head size] each, before they are rotated."""
        shape = self._shape
        prefix = f"blk.{layer}"
        counts = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        if f"{prefix}.attn_qkv.weight" in self._matrices:
            lengths = _integers(*(heads * shape.head_size for heads in counts.values()))
            products = self._product(states, layer, "attn_qkv")
            parts = opset13.variadic_split(products, opset13.constant(np.int64(-1)), lengths).outputs()
        else:
            parts = [self._product(states, layer, f"attn_{part}") for part in counts]
        found = []
        for (part, heads), values in zip(counts.items(), parts, strict=True):
            values = opset13.reshape(values, _integers(0, 0, heads, shape.head_size), True).output(0)
            if f"{prefix}.attn_{part}_norm.weight" in self._vectors:
                values = self._norm(values, f"{prefix}.attn_{part}_norm", rank=4)
            found.append(opset13.transpose(values, _integers(0, 2, 1, 3)).output(0))
        return found

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

    def _places(self, states: ov.Output, keys: ov.Output) -> tuple[ov.Node, ov.Node, ov.Node, ov.Node]:
        """Numbers of new tokens and of tokens so far; places of queries [tokens, 1], and of keys [1, tokens so far]."""
        zero, one = opset13.constant(np.int64(0)), opset13.constant(np.int64(1))
        total = opset13.gather(opset13.shape_of(keys), opset13.constant(np.int64(2)), zero)
        new = opset13.gather(opset13.shape_of(states), one, zero)
        columns = opset13.unsqueeze(opset13.range(zero, total, one, "i64"), zero)
        rows = opset13.unsqueeze(opset13.range(opset13.subtract(total, new), total, one, "i64"), one)
        return new, total, rows, columns

    def _causal_mask(self, states: ov.Output, keys: ov.Output) -> ov.Output:
        """The causal mask [batch, 1, tokens, tokens so far]: 0 for visible positions, else the lowest number."""
        _new, _total, rows, columns = self._places(states, keys)
        is_before = opset13.less_equal(columns, rows)
        is_text = opset13.unsqueeze(opset13.convert(self._mask, "boolean"), _integers(1, 2))
        seen = opset13.logical_and(is_text, is_before)
        return opset13.select(seen, opset13.constant(np.float32(0)), opset13.constant(_LOWEST)).output(0)

    def _window_mask(self, states: ov.Output, keys: ov.Output, window: int) -> ov.Output:
        """The causal mask of a layer with a window. Paging finds the window in this chain of operations, which is that
        of exports."""
        new, total, rows, columns = self._places(states, keys)
        true = opset13.constant(np.array(True))
        is_near = opset13.greater(columns, opset13.add(rows, opset13.constant(np.int64(-window))))
        is_text = opset13.unsqueeze(opset13.convert(self._mask, "boolean"), _integers(1, 2))
        seen = opset13.bitwise_and(true, is_near)
        seen = opset13.bitwise_and(seen, opset13.less_equal(columns, rows))
        seen = opset13.bitwise_and(true, seen)
        seen = opset13.bitwise_and(seen, is_text)
        axis = opset13.constant(np.int64(0))
        sizes = [self._batch, _integers(1), opset13.unsqueeze(new, axis), opset13.unsqueeze(total, axis)]
        shown = opset13.broadcast(seen, opset13.concat(sizes, 0))
        mask = opset13.select(shown, opset13.constant(np.float32(0)), opset13.constant(_LOWEST))
        return _slice(mask.output(0), 0, _END)

    def _feed_forward(self, layer: int, states: ov.Output) -> ov.Output:
        if f"blk.{layer}.ffn_gate.weight" in self._matrices:
            gate, up = (self._product(states, layer, part) for part in ("ffn_gate", "ffn_up"))
        else:
            both = self._product(states, layer, "ffn_up")
            gate, up = opset13.split(both, opset13.constant(np.int64(-1)), 2).outputs()
        return self._product(self._gated(gate, up), layer, "ffn_down")

    def _gated(self, gate: ov.Output, up: ov.Output) -> ov.Output:
        return _ACTIVATIONS[self._shape.activation](gate, up).output(0)

    def _experts(self, layer: int, states: ov.Output) -> ov.Output:
        """The experts of each token, weighted by the router.

        The rows of an expert are the states of the tokens that chose it, and the results of all experts lie one after
        the other. Where a token finds the result of an expert follows from the number of choices before it.
        """
        shape = self._shape
        prefix = f"blk.{layer}"
        axis, last = opset13.constant(np.int64(0)), opset13.constant(np.int64(-1))
        width = int(states.get_partial_shape()[-1].get_length())
        rows = opset13.reshape(states, _integers(-1, width), False).output(0)
        scores = self._linear(rows, self._matrices[f"{prefix}.ffn_gate_inp.weight"], layer, "mlp.gate")
        scores = _plus(scores, self._vectors.get(f"{prefix}.ffn_gate_inp.bias"))
        used = opset13.constant(np.int64(shape.used_experts))
        best = opset13.topk(opset13.softmax(scores, -1), used, -1, "max", "value", "i64")
        chosen = best.output(1)
        weights = opset13.divide(best.output(0), opset13.reduce_sum(best.output(0), _integers(-1), True))
        # Whether each token chose each expert, [experts, tokens].
        none = opset13.broadcast(opset13.constant(np.int32(0)), opset13.shape_of(scores))
        one = opset13.broadcast(opset13.constant(np.int32(1)), opset13.shape_of(chosen))
        marked = opset13.scatter_elements_update(none, chosen, one, opset13.constant(np.int64(1)))
        choices = opset13.transpose(marked, _integers(1, 0))
        results = []
        names = [f"{prefix}.ffn_{part}_exps.weight" for part in _GATED]
        counts = [self._matrices.num_experts(name) for name in names]
        if not 0 < shape.used_experts <= shape.experts or set(counts) != {shape.experts}:
            raise ArchitectureError(
                f"each token uses {shape.used_experts} of {shape.experts} experts, as its metadata say, and layer "
                f"{layer} has {', '.join(map(str, counts))} of their matrices"
            )
        matrices = zip(*map(self._matrices.experts, names), strict=True)
        biases = zip(*(self._biases_of_experts(f"{prefix}.ffn_{part}_exps.bias") for part in _GATED), strict=True)
        for expert, of_expert in enumerate(zip(matrices, biases, strict=True)):
            places = opset13.non_zero(opset13.gather(choices, opset13.constant(np.int64(expert)), axis))
            own = opset13.gather(rows, opset13.squeeze(places, axis), axis).output(0)
            results.append(self._expert(own, layer, f"mlp.experts.{expert}", *of_expert))
        before = opset13.cum_sum(opset13.reshape(choices, _integers(-1), False), axis, exclusive=True)
        of_experts = opset13.transpose(opset13.reshape(before, opset13.shape_of(choices), False), _integers(1, 0))
        found = opset13.gather_elements(of_experts, chosen, 1)
        of_tokens = opset13.gather(opset13.concat(results, 0), found, axis)
        weighted = opset13.multiply(of_tokens, opset13.unsqueeze(weights, last))
        mixed = opset13.reduce_sum(weighted, _integers(1), False)
        return opset13.reshape(mixed, opset13.shape_of(states), False).output(0)

    def _expert(
        self, states: ov.Output, layer: int, name: str, matrices: Sequence[Weights], biases: Sequence[_Array | None]
    ) -> ov.Output:
        """The result of an expert for the states [rows, numbers] of its tokens."""

        def product(number: int, values: ov.Output) -> ov.Output:
            module = f"{name}.{_GATED[number]}_proj"
            return _plus(self._linear(values, matrices[number], layer, module), biases[number])

        return product(2, self._gated(product(0, states), product(1, states)))

    def _biases_of_experts(self, name: str) -> Sequence[_Array | None]:
        if name not in self._matrices:
            return [None] * self._shape.experts
        biases = self._matrices[name].floats
        assert biases is not None
        return list(biases.astype(np.float32))


def _swish(gate: ov.Output, up: ov.Output) -> ov.Node:
    return opset13.multiply(opset13.swish(gate), up)


def _gelu(gate: ov.Output, up: ov.Output) -> ov.Node:
    """GELU as ggml computes it, with the hyperbolic tangent."""
    return opset13.multiply(opset13.gelu(gate, "tanh"), up)


def _clamped(gate: ov.Output, up: ov.Output) -> ov.Node:
    """The clamped activation of gpt-oss, with its constants."""
    limit, slope = 7.0, opset13.constant(np.float32(1.702))
    opened = opset13.swish(opset13.minimum(gate, _floats(np.full((1, 1), limit))), slope)
    return opset13.multiply(opset13.add(opset13.clamp(up, -limit, limit), _floats(np.ones((1, 1)))), opened)


_ACTIVATIONS: Mapping[str, Callable[[ov.Output, ov.Output], ov.Node]] = {
    "swish": _swish,
    "gelu": _gelu,
    "clamped": _clamped,
}


def _plus(values: ov.Output, bias: _Array | None) -> ov.Output:
    """Rows of numbers plus a bias, if there is one."""
    return values if bias is None else opset13.add(values, _floats(bias.reshape(1, -1))).output(0)


def _times(values: ov.Output, factor: float) -> ov.Output:
    """Values [batch, tokens, numbers] times a factor."""
    return values if factor == 1 else opset13.multiply(values, _floats(np.full((1, 1, 1), factor))).output(0)


def _slice(values: ov.Output, begin: int, end: int) -> ov.Output:
    """A part of the last of four axes."""
    return opset13.slice(values, _integers(begin), _integers(end), _integers(1), _integers(3)).output(0)


def _parameter(name: str, dimensions: list[int], kind: type[np.generic]) -> ov.Node:
    parameter = opset13.parameter(dimensions, kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _integers(*values: int) -> ov.Node:
    return opset13.constant(np.array(values, np.int64))


def _floats(values: _Array) -> ov.Node:
    return opset13.constant(np.ascontiguousarray(values, np.float32))
