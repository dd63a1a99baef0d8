"""Finds how a model with PagedAttention is divided among ranks: heads, columns of the feed-forward layers, and tokens.

A region is a part of the graph whose values are divided along one axis. It begins at products whose outputs are divided
(rows of their weights), ends at products whose inputs are (columns of their weights), and holds everything between:

    product by rows --> attention, activations, rotations, gates, norms of heads --> product by columns --> partial sum
                        recurrent layers with their tables of states

The division of one value determines that of its neighbours, operation by operation. A region in which two of them
disagree, or which reaches an operation that is not known here, stays whole; that of an attention may not. The results
of products by columns are partial: the model's value is the sum of those of all ranks. Linear operations on them come
before the sum, so that experts of one layer, and an attention beside its feed-forward layer, have one sum together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov

from headrace.worker.config import ConfigurationError
from headrace.worker.model.state_tables import is_table
from headrace.worker.model.window_tables import attentions
from headrace.worker.ranks.constants import LEAST_GROUP, keeps_groups
from headrace.worker.ranks.owners import (
    Owners,
    Share,
    has_one_owner,
    owners_of_heads,
    owners_of_parts,
    positions_of,
    reshaped,
)
from headrace.worker.sampling.reduction import run_length

Key = tuple[str, int]
# A set or mapping, and what was added to it.
Added = tuple[Any, object]

ELEMENTWISE = {
    *("Add", "Subtract", "Multiply", "Divide", "Power", "Maximum", "Minimum", "SquaredDifference"),
    *("Sqrt", "Exp", "Negative", "Abs", "Convert", "Clamp", "Select"),
    *("Swish", "Gelu", "Sigmoid", "Tanh", "Relu", "SoftPlus", "Mish", "HSwish", "Erf"),
}
REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2"}
SELECTIONS = {"Slice", "StridedSlice", "VariadicSplit", "Split", "Gather"}
# Operations whose result is the sum of their results for the parts of the first input, if the others are not divided.
_LINEAR = {"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Negative", "Broadcast", *SELECTIONS}
_SCATTERS = {"ScatterElementsUpdate": 2, "ScatterNDUpdate": 2}
# Columns are divided in units that suit the kernels; larger ones where groups of weights need it, smaller ones where
# there are few columns.
_UNITS = (32, 64, 128, 256, 16, 8, 4, 2, 1)
# The most of the weights of products that may stay whole.
_MOST_WHOLE = 0.1
_QUERY, _KEY, _VALUE = range(3)


class _Recurrent(NamedTuple):
    """The inputs of an operator of recurrent layers that have a value for each head along axis 1, or along axis 0 if
    they have one axis only. Those in `shared` have one for each group of heads, as keys of an attention have."""

    own: tuple[int, ...]
    shared: tuple[int, ...]
    of_heads: int
    """The input whose second dimension is the number of heads."""


SHORT_CONVOLUTION = "PagedCausalConv1D"
RECURRENT = {
    "PagedGatedDeltaNet": _Recurrent(own=(2, 3, 4, 5), shared=(0, 1), of_heads=2),
    "PagedSelectiveSSM": _Recurrent(own=(0, 1, 3, 5), shared=(2, 4), of_heads=3),
}
# Its states and their table have channels along axis 1, its weights and biases along axis 0.
CONVOLVED, CONVOLVED_TABLE, KERNELS, BIASES = range(4)


class Division(NamedTuple):
    """A divided model. `shares` has the divided values. `rows` and `columns` are the names of the products that are
    divided by the rows or columns of their weights. `means` has the means over a divided axis, with the length of the
    axis. `sums` are the values that are summed up over the ranks, in order. `vocabulary` has the owners of logits; None
    if every rank has all of them or none. `whole_share` is the share of the products' weights that every rank has."""

    num_ranks: int
    shares: Mapping[Key, Share]
    rows: frozenset[str]
    columns: frozenset[str]
    means: Mapping[str, int]
    heads: Mapping[str, Owners]
    key_heads: Mapping[str, Owners]
    sums: tuple[Key, ...]
    vocabulary: Owners | None
    whole_share: float

    @property
    def run(self) -> int | None:
        """The length of the runs in the ranks' parts of the vocabulary, the same as in the whole vocabulary; 0 if a run
        would be split. None if the vocabulary is not divided."""
        if self.vocabulary is None:
            return None
        run = run_length(self.vocabulary.size)
        sizes = [positions_of(self.vocabulary, rank).size for rank in range(self.num_ranks)]
        return run if run and all(size % run == 0 for size in sizes) else 0

    def share_of(self, output: ov.Output) -> Share | None:
        """How a value is divided; None if every rank has it."""
        return self.shares.get(key_of(output))


class _Weights(NamedTuple):
    """The weights of a product: its name, and their number."""

    name: str
    size: int
    is_divided: bool


class DivisionError(Exception):
    """Why a region cannot be divided, as the end of a sentence that begins with the model."""


def key_of(output: ov.Output) -> Key:
    """Identifies a value of a graph."""
    return output.get_node().get_name(), output.get_index()


def attention_heads(attention: ov.Node) -> tuple[int, int, int, int]:
    """Query heads and KV heads of an attention, and the sizes of a head of keys and of values."""
    sizes = attention.rt_info
    num_kv_heads, key_size, value_size = (
        int(sizes[name].astype(int)) for name in ("num_k_heads", "k_head_size", "v_head_size")
    )
    return _num_queries(attention.input_value(_QUERY), key_size), num_kv_heads, key_size, value_size


def _num_queries(queries: ov.Output, size: int) -> int:
    """The number of heads of queries `[tokens, heads * size]`. If the graph does not say how long these are, it says so
    of the value `[..., heads, size]` from which they are made."""
    if queries.get_partial_shape()[1].is_dynamic and queries.get_node().get_type_name() == "Reshape":
        shape = list(queries.get_node().input_value(0).get_partial_shape())
        if len(shape) > 2 and all(axis.is_static for axis in shape[-2:]) and shape[-1].get_length() == size:
            return int(shape[-2].get_length())
    return _length(queries, 1) // size


def divide(model: ov.Model, num_ranks: int) -> Division:
    """Divide a model with PagedAttention among ranks. Changes nothing. ConfigurationError if it cannot be divided."""
    divider = _Divider(model, num_ranks)
    division = divider.divide(has_logits=True)
    _check_share(divider.weights, num_ranks)
    return division


def divide_stage(model: ov.Model, head: ov.Model | None, num_ranks: int) -> tuple[Division, Division | None]:
    """As `divide`, for the layers of a pipeline stage and for its `head`, which computes logits from hidden states, if
    it has one. Every rank has the hidden states with which the layers begin and end."""
    of_layers = _Divider(model, num_ranks)
    division = of_layers.divide(has_logits=False)
    if head is None:
        _check_share(of_layers.weights, num_ranks)
        return division, None
    of_head = _Divider(head, num_ranks)
    division_of_head = of_head.divide(has_logits=True)
    _check_share(of_layers.weights + of_head.weights, num_ranks)
    return division, division_of_head


def _check_share(weights: Sequence[_Weights], num_ranks: int) -> None:
    """ConfigurationError if a large part of the weights stays whole."""
    share = _whole_share(weights)
    if share > _MOST_WHOLE:
        largest = max((each for each in weights if not each.is_divided), key=lambda each: each.size)
        raise _refused(
            f"{int(100 * share)} % of its weights are in layers of a form that cannot be divided, such as "
            f"{largest.name!r}",
            num_ranks,
        )


def _whole_share(weights: Sequence[_Weights]) -> float:
    """The part of the weights that stays whole."""
    whole = sum(each.size for each in weights if not each.is_divided)
    return whole / max(1, sum(each.size for each in weights))


def _refused(why: str, num_ranks: int) -> ConfigurationError:
    return ConfigurationError(
        f"the model cannot be divided among {num_ranks} ranks: {why}; divide it among another number, or serve it whole"
    )


class _Divider:
    """Finds the regions of a model, one after another."""

    def __init__(self, model: ov.Model, num_ranks: int) -> None:
        self._model = model
        self._num_ranks = num_ranks
        self._nodes = list(model.get_ordered_ops())
        self._constants = _constants(self._nodes)
        self._by_name = {node.get_name(): node for node in self._nodes}
        self._found = _Region(num_ranks, self._constants)
        self._heads: dict[str, Owners] = {}
        self._key_heads: dict[str, Owners] = {}
        self.weights: list[_Weights] = []
        """The weights of all products, from when the model is divided."""

    def divide(self, *, has_logits: bool) -> Division:
        for node in attentions(self._model):
            self._divide_attention(node)
        for node in self._nodes:
            if node.get_type_name() in RECURRENT:
                self._divide_recurrent(node)
        vocabulary = self._divide_vocabulary() if has_logits else None
        for product in self._closed_products():
            self._divide_columns(product)
        self.weights = self._weights()
        found = self._found
        sums = sums_of(self._nodes, found.partials)
        return Division(
            self._num_ranks,
            found.shares,
            frozenset(found.rows),
            frozenset(found.columns),
            found.means,
            self._heads,
            self._key_heads,
            tuple(sums),
            vocabulary,
            _whole_share(self.weights),
        )

    def _divide_attention(self, node: ov.Node) -> None:
        num_heads, num_kv_heads, key_size, value_size = attention_heads(node)
        owners = owners_of_heads(num_heads, num_kv_heads, self._num_ranks)
        if owners is None or num_heads < self._num_ranks:
            raise _refused(
                f"its layers have {num_heads} heads of attention and {num_kv_heads} of keys and values", self._num_ranks
            )
        name = node.get_name()
        self._heads[name], self._key_heads[name] = owners
        region = self._found
        try:
            with region.attempt():
                region.attentions.add(name)
                region.set(node.input_value(_QUERY), 1, np.repeat(owners.queries, key_size))
                region.set(node.input_value(_KEY), 1, np.repeat(owners.keys, key_size))
                region.set(node.input_value(_VALUE), 1, np.repeat(owners.keys, value_size))
                region.set(node.output(0), 1, np.repeat(owners.queries, value_size))
                region.complete()
        except DivisionError as error:
            raise _refused(str(error), self._num_ranks) from error

    def _divide_recurrent(self, node: ov.Node) -> None:
        """Divide a recurrent layer by heads. If that is not possible, every rank computes the whole layer."""
        form = RECURRENT[node.get_type_name()]
        num_heads, num_groups = (_length(node.input_value(port), 1) for port in (form.of_heads, form.shared[0]))
        owners = owners_of_heads(num_heads, num_groups, self._num_ranks)
        if owners is None or num_heads < self._num_ranks:
            return
        region = self._found
        try:
            with region.attempt():
                region.recurrent.add(node.get_name())
                region.set(node.output(0), 1, owners.queries)
                for port in form.own:
                    value = node.input_value(port)
                    region.set(value, min(1, len(value.get_partial_shape()) - 1), owners.queries)
                for port in form.shared:
                    region.set(node.input_value(port), 1, owners.keys)
                region.complete()
        except DivisionError:
            region.recurrent.discard(node.get_name())
            return
        self._heads[node.get_name()] = owners.queries

    def _divide_vocabulary(self) -> Owners | None:
        """Divide the last product by tokens, in whole runs of the summary for sampling if there are any."""
        result = next((node for node in self._model.get_results() if "logits" in _names_of(node)), None)
        if result is None:
            result = self._model.get_results()[0]
        logits = result.input_value(0)
        shape = logits.get_partial_shape()
        if shape.rank.is_dynamic or shape[len(shape) - 1].is_dynamic:
            return None
        length = shape[len(shape) - 1].get_length()
        owners = owners_of_parts(length, self._num_ranks, run_length(length) or 1)
        if any(positions_of(owners, rank).size == 0 for rank in range(self._num_ranks)):
            owners = owners_of_parts(length, self._num_ranks)
        self._found.results.add(result.get_name())
        try:
            with self._found.attempt():
                self._found.set(logits, len(shape) - 1, owners)
                self._found.complete()
        except DivisionError:
            return None
        return owners

    def _divide_columns(self, product: ov.Node) -> None:
        states = product.input_value(0)
        axis = _axis_of_states(product)
        length = _length(states, axis)
        # Groups of weights stay whole if that is possible.
        for unit, least in [*((unit, 0) for unit in _UNITS), *((unit, LEAST_GROUP) for unit in _UNITS[:5])]:
            if length % unit or length // unit < self._num_ranks:
                continue
            owners = owners_of_parts(length, self._num_ranks, unit)
            try:
                with self._found.attempt() as added:
                    self._found.set(states, axis, owners)
                    self._found.complete()
                    self._check_groups(added, least)
            except DivisionError:
                continue
            return

    def _check_groups(self, added: Sequence[Added], least: int) -> None:
        """DivisionError if a group of weights of a product that was `added` would be split, or into parts of fewer than
        `least` weights."""
        for container, name in added:
            if container is self._found.columns and not self._fits_groups(self._by_name[str(name)], least):
                raise DivisionError("groups of weights would be split")

    def _fits_groups(self, product: ov.Node, least: int) -> bool:
        share = self._found.shares.get(key_of(product.input_value(0)))
        _, axis = axes_of_weights(product)
        return share is None or keeps_groups(product.input_value(1), Share(axis, share.owners), least)

    def _closed_products(self) -> Iterator[ov.Node]:
        """Products whose states come from other products only, in the graph's order: the last ones of feed-forward
        layers. Each is offered once, unless a region already has it."""
        closed: dict[str, bool] = {}
        for node in self._nodes:
            name = node.get_name()
            if is_product(node, self._constants):
                is_offered = closed.get(node.input_value(0).get_node().get_name(), False)
                closed[name] = True
                if is_offered and name not in self._found.columns and name not in self._found.rows:
                    yield node
                continue
            values = [value.get_node().get_name() for value in node.input_values()]
            values = [value for value in values if value not in self._constants]
            kind = node.get_type_name()
            if kind in ("Parameter", "PagedAttentionExtension") or not values:
                closed[name] = False
            elif kind in ("Reshape", SHORT_CONVOLUTION) or kind in SELECTIONS:
                closed[name] = closed[node.input_value(0).get_node().get_name()]
            else:
                closed[name] = all(closed.get(value, False) for value in values)

    def _weights(self) -> list[_Weights]:
        return [
            _Weights(
                node.get_friendly_name(),
                math.prod(node.input_value(1).get_shape()),
                node.get_name() in self._found.rows or node.get_name() in self._found.columns,
            )
            for node in self._nodes
            if is_product(node, self._constants)
        ]


def is_product(node: ov.Node, constants: Iterable[str]) -> bool:
    """Whether a node multiplies states with constant weights."""
    if node.get_type_name() != "MatMul":
        return False
    states, weights = (value.get_node().get_name() for value in node.input_values())
    return weights in constants and states not in constants


def _is_known_product(product: ov.Node) -> bool:
    """Whether a product has weights `[outputs, inputs]`, or, for states `[experts, ...]`, those of each expert."""
    shape, states = product.input_value(1).get_shape(), product.input_value(0).get_partial_shape()
    if len(shape) == 3 and len(states) == 3:
        return bool(states[0].is_static and states[0].get_length() == shape[0])
    return len(shape) == 2


def _axis_of_states(product: ov.Node) -> int:
    """The axis of a product's states over which it sums."""
    rank = len(product.input_value(0).get_partial_shape())
    return rank - 2 if product.get_attributes()["transpose_a"] else rank - 1


def axes_of_weights(product: ov.Node) -> tuple[int, int]:
    """The axes of a product's weights: that of its outputs, and that of its inputs."""
    rank = len(product.input_value(1).get_shape())
    is_transposed = bool(product.get_attributes()["transpose_b"])
    return (rank - 2, rank - 1) if is_transposed else (rank - 1, rank - 2)


class _Region:
    """Divided values, and the operations between them."""

    def __init__(self, num_ranks: int, constants: set[str]) -> None:
        self._all = (1 << num_ranks) - 1
        self._constants = constants
        self._waiting: deque[ov.Node] = deque()
        self.shares: dict[Key, Share] = {}
        self.whole: set[Key] = set()
        self.rows: set[str] = set()
        self.columns: set[str] = set()
        self.partials: set[Key] = set()
        self.means: dict[str, int] = {}
        self.attentions: set[str] = set()
        self.recurrent: set[str] = set()
        self.results: set[str] = set()
        self._added: list[Added] = []

    @contextmanager
    def attempt(self) -> Iterator[Sequence[Added]]:
        """Context manager: the list of what is added inside. After a DivisionError, all of it is removed again."""
        self._added.clear()
        try:
            yield self._added
        except DivisionError:
            for container, key in self._added:
                if isinstance(container, dict):
                    del container[key]
                else:
                    container.discard(key)
            self._waiting.clear()
            raise

    def _add(self, container: set[Any], key: object) -> None:
        if key not in container:
            container.add(key)
            self._added.append((container, key))

    def set(self, output: ov.Output, axis: int, owners: Owners) -> None:
        """Divide a value. Does nothing to a constant, or to a value that is repeated along the axis."""
        node = output.get_node()
        if node.get_name() in self._constants:
            return
        if (owners == self._all).all():
            self._set_whole(output)
            return
        length = output.get_partial_shape()[axis]
        if length.is_static and length.get_length() != owners.size:
            if length.get_length() == 1:
                return
            raise _conflict(node)
        key = key_of(output)
        known = self.shares.get(key)
        if known is not None:
            if known.axis != axis or not np.array_equal(known.owners, owners):
                raise _conflict(node)
            return
        if key in self.whole:
            raise _conflict(node)
        self.shares[key] = Share(axis, owners)
        self._added.append((self.shares, key))
        self._waiting.append(node)
        self._waiting += [port.get_node() for port in output.get_target_inputs()]

    def _set_whole(self, output: ov.Output) -> None:
        """Give every rank the whole of a value and of its inputs."""
        key = key_of(output)
        if key in self.shares:
            raise _conflict(output.get_node())
        if key not in self.whole:
            self._add(self.whole, key)
            self._waiting.append(output.get_node())

    def complete(self) -> None:
        """Divide all other values that must be divided. DivisionError if one cannot be."""
        while self._waiting:
            self._visit(self._waiting.popleft())

    def _visit(self, node: ov.Node) -> None:
        kind, name = node.get_type_name(), node.get_name()
        if kind in ("ShapeOf", "Parameter") or name in self._constants:
            is_input = kind == "Parameter" and not any(map(is_table, node.output(0).get_names()))
            if is_input and key_of(node.output(0)) in self.shares:
                raise _conflict(node)
            return
        if name in self.attentions or name in self.recurrent:
            return
        if kind == "Result" and name in self.results:
            return
        if kind == "MatMul":
            self._product(node)
        elif kind in ELEMENTWISE or kind == "Concat":
            self._elementwise(node)
        elif kind in SELECTIONS:
            self._selection(node)
        elif kind in REDUCTIONS:
            self._reduction(node)
        elif kind in ("Softmax", "MVN", "NormalizeL2"):
            self._along_other_axis(node)
        elif kind == "Reshape":
            self._reshape(node)
        elif kind == "Transpose":
            order = [int(axis) for axis in values_of(node.input_value(1))]
            self._moved(node, {source: place for place, source in enumerate(order)})
        elif kind in ("Unsqueeze", "Squeeze"):
            self._moved(node, _squeezed(node))
        elif kind == SHORT_CONVOLUTION:
            self._convolution(node)
        elif any(key_of(value) in self.shares for value in [*node.input_values(), *node.outputs()]):
            raise DivisionError(f"{kind} {node.get_friendly_name()!r} would work on a part of its values")

    def _convolution(self, node: ov.Node) -> None:
        """Divide a convolution by channels, with its table of states."""
        ports = [node.input_value(CONVOLVED), node.input_value(CONVOLVED_TABLE), node.output(0)]
        share = next((self.shares[key_of(port)] for port in ports if key_of(port) in self.shares), None)
        if share is not None and share.axis != 1:
            raise _conflict(node)
        for port in ports:
            if share is not None:
                self.set(port, 1, share.owners)
            elif key_of(node.output(0)) in self.whole and port != node.output(0):
                self._need_whole(port)

    def _product(self, node: ov.Node) -> None:
        states, output = node.input_value(0), node.output(0)
        of_states, of_output = self.shares.get(key_of(states)), self.shares.get(key_of(output))
        if of_states is None and of_output is None:
            return
        if not is_product(node, self._constants):
            raise _conflict(node)
        last = len(output.get_partial_shape()) - 1
        if not _is_known_product(node):
            raise DivisionError(f"the weights of {node.get_friendly_name()!r} have more than two dimensions")
        if of_output is not None and of_output.axis == last:
            if of_states is not None:
                raise _conflict(node)
            self._add(self.rows, node.get_name())
            return
        if of_states is None or of_states.axis != _axis_of_states(node) or of_output is not None:
            raise _conflict(node)
        if not has_one_owner(of_states.owners):
            raise _conflict(node)
        self._add(self.columns, node.get_name())
        self._add(self.partials, key_of(output))

    def _elementwise(self, node: ov.Node) -> None:
        ports = [*node.input_values(), node.output(0)]
        is_concat = node.get_type_name() == "Concat"
        found = next((port for port in ports if key_of(port) in self.shares), None)
        if found is None:
            if key_of(node.output(0)) in self.whole:
                for value in node.input_values():
                    self._need_whole(value)
            return
        share = self.shares[key_of(found)]
        from_right = share.axis - len(found.get_partial_shape())
        if is_concat and node.get_attributes()["axis"] % len(found.get_partial_shape()) == share.axis:
            self._concat(node, share.axis)
            return
        for port in ports:
            axis = len(port.get_partial_shape()) + from_right
            if axis >= 0:
                self.set(port, axis, share.owners)

    def _need_whole(self, value: ov.Output) -> None:
        if value.get_node().get_name() not in self._constants:
            self._set_whole(value)

    def _concat(self, node: ov.Node, axis: int) -> None:
        """Divide a concatenation along the divided axis."""
        values, output = node.input_values(), node.output(0)
        share = self.shares.get(key_of(output))
        if share is not None:
            start = 0
            for value in values:
                length = _length(value, axis)
                self.set(value, axis, share.owners[start : start + length])
                start += length
            return
        parts = [self._owners(value, axis) for value in values]
        if not any(part is None for part in parts):
            self.set(output, axis, np.concatenate([part for part in parts if part is not None]))

    def _owners(self, output: ov.Output, axis: int) -> Owners | None:
        """The ranks that have each position of a value along an axis; None while they are unknown."""
        key = key_of(output)
        if key in self.whole:
            return np.full(_length(output, axis), self._all, np.int64)
        share = self.shares.get(key)
        if share is not None and share.axis != axis:
            raise _conflict(output.get_node())
        return None if share is None else share.owners

    def _selection(self, node: ov.Node) -> None:
        source = node.input_value(0)
        share = self.shares.get(key_of(source))
        axis, parts = selected(node)
        if share is not None:
            for output, positions in zip(node.outputs(), parts, strict=True):
                if share.axis == axis:
                    if len(output.get_partial_shape()) != len(source.get_partial_shape()):
                        raise _conflict(node)
                    self.set(output, axis, share.owners[positions])
                else:
                    self.set(output, _kept_axis(node, share.axis, axis), share.owners)
            return
        for output in node.outputs():
            of_output = self.shares.get(key_of(output))
            if of_output is not None:
                place = _kept_axis(node, of_output.axis, axis, is_output=True)
                if place != axis:
                    self.set(source, place, of_output.owners)
                    return
        if axis is not None:
            self._gather(source, axis)

    def _gather(self, source: ov.Output, axis: int) -> None:
        """Divide a value once all of its users are known and each takes a part."""
        owners = np.zeros(_length(source, axis), np.int64)
        for port in source.get_target_inputs():
            user = port.get_node()
            if user.get_type_name() == "ShapeOf":
                continue
            if user.get_type_name() not in SELECTIONS or port.get_index():
                return
            other, parts = selected(user)
            if other != axis:
                return
            for output, positions in zip(user.outputs(), parts, strict=True):
                if not output.get_target_inputs():
                    continue
                of_output = self._owners(output, axis)
                if of_output is None:
                    return
                owners[positions] |= of_output
        self.set(source, axis, owners)

    def _reduction(self, node: ov.Node) -> None:
        source, output = node.input_value(0), node.output(0)
        share, of_output = self.shares.get(key_of(source)), self.shares.get(key_of(output))
        rank = len(source.get_partial_shape())
        axes = {int(axis) % rank for axis in values_of(node.input_value(1))}
        keeps = bool(node.get_attributes()["keep_dims"])
        kept = [axis for axis in range(rank) if keeps or axis not in axes]
        if share is not None and share.axis in axes:
            is_mean = node.get_type_name() == "ReduceMean"
            if not (is_mean or node.get_type_name() == "ReduceSum") or not has_one_owner(share.owners):
                raise DivisionError(f"{node.get_friendly_name()!r} would work on a part of its values")
            if is_mean and len(axes) != 1:
                raise _conflict(node)
            if is_mean:
                self.means[node.get_name()] = share.owners.size
                self._added.append((self.means, node.get_name()))
            self._add(self.partials, key_of(output))
        elif share is not None:
            self.set(output, kept.index(share.axis), share.owners)
        elif of_output is not None:
            self.set(source, kept[of_output.axis], of_output.owners)

    def _along_other_axis(self, node: ov.Node) -> None:
        source, output = node.input_value(0), node.output(0)
        found = next((port for port in (source, output) if key_of(port) in self.shares), None)
        if found is None:
            return
        share, rank = self.shares[key_of(found)], len(found.get_partial_shape())
        if node.get_type_name() == "Softmax":
            axes = {int(node.get_attributes()["axis"]) % rank}
        else:
            axes = {int(axis) % rank for axis in values_of(node.input_value(1))}
        if share.axis in axes:
            raise DivisionError(f"{node.get_friendly_name()!r} would work on a part of its values")
        self.set(source, share.axis, share.owners)
        self.set(output, share.axis, share.owners)

    def _reshape(self, node: ov.Node) -> None:
        source, output = node.input_value(0), node.output(0)
        for one, other in ((source, output), (output, source)):
            share = self.shares.get(key_of(one))
            if share is not None:
                found = reshaped(share, _dimensions(one), _dimensions(other))
                if found is None:
                    raise _conflict(node)
                self.set(other, found.axis, found.owners)
        if key_of(output) in self.whole:
            self._need_whole(source)

    def _moved(self, node: ov.Node, places: Mapping[int, int]) -> None:
        """Divide an operation that moves axes to other places."""
        source, output = node.input_value(0), node.output(0)
        share, of_output = self.shares.get(key_of(source)), self.shares.get(key_of(output))
        if share is not None:
            if share.axis not in places:
                raise _conflict(node)
            self.set(output, places[share.axis], share.owners)
        elif of_output is not None:
            back = {place: axis for axis, place in places.items()}
            if of_output.axis not in back:
                raise _conflict(node)
            self.set(source, back[of_output.axis], of_output.owners)
        elif key_of(output) in self.whole:
            self._need_whole(source)


def sums_of(nodes: Sequence[ov.Node], partials: set[Key]) -> list[Key]:
    """The values to sum up over the ranks, in the order in which they are computed: each partial value as late as
    linear operations allow."""
    summed: set[Key] = set()
    while True:
        hoped = _partial_values(nodes, partials, summed)
        late = _sum_early(nodes, partials, summed, hoped)
        if not late:
            break
        summed |= late
    places = {node.get_name(): place for place, node in enumerate(nodes)}
    return sorted(summed, key=lambda key: (places[key[0]], key[1]))


def _partial_values(nodes: Iterable[ov.Node], partials: set[Key], summed: set[Key]) -> set[Key]:
    """The values that would be partial if no others were summed up."""
    found: set[Key] = set()
    for node in nodes:
        if node.get_type_name() != "ShapeOf" and _stays_partial(node, found):
            found |= set(map(key_of, node.outputs())) - summed
        found |= partials.intersection(map(key_of, node.outputs())) - summed
    return found


def _sum_early(nodes: Iterable[ov.Node], partials: set[Key], summed: set[Key], hoped: set[Key]) -> set[Key]:
    """Add to `summed` the partial values with a user that needs their sum, even if all of `hoped` were partial. Returns
    values whose sum is found to be needed only at a later user; then it has to be done again."""
    partial: set[Key] = set()
    for node in nodes:
        values = {key for key in map(key_of, node.input_values()) if key in partial}
        is_linear = _stays_partial(node, partial)
        if values and not is_linear and node.get_type_name() != "ShapeOf":
            return values
        for output in node.outputs():
            key = key_of(output)
            if not (is_linear or key in partials) or key in summed:
                continue
            users = [port.get_node() for port in output.get_target_inputs()]
            if all(user.get_type_name() == "ShapeOf" or _stays_partial(user, hoped) for user in users):
                partial.add(key)
            else:
                summed.add(key)
    return set()


def _stays_partial(node: ov.Node, partial: set[Key]) -> bool:
    """Whether the sum of an operation's results is its result for the sums of its partial inputs."""
    kind, values = node.get_type_name(), node.input_values()
    are_partial = [key_of(value) in partial for value in values]
    if not any(are_partial):
        return False
    if kind in ("Add", "Concat"):
        return all(are_partial)
    if kind == "Multiply":
        return sum(are_partial) == 1
    if kind == "ReduceSum":
        return are_partial[0]
    if kind in ("Divide", "Subtract"):
        return are_partial == [True, kind == "Subtract"]
    if kind == "Convert":
        return bool(node.get_output_element_type(0) == ov.Type.f32)
    if kind in _SCATTERS:
        is_sum = str(node.get_attributes().get("reduction", "")).lower() == "sum"
        return is_sum and are_partial[_SCATTERS[kind]] and (are_partial[0] or _is_zero(values[0]))
    return kind in _LINEAR and are_partial[0] and not any(are_partial[1:])


def _is_zero(value: ov.Output) -> bool:
    node = value.get_node()
    while node.get_type_name() in ("Broadcast", "Convert", "Reshape"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Constant" and not np.asarray(node.data).any()


def _constants(nodes: Iterable[ov.Node]) -> set[str]:
    """The names of nodes that depend on no input of the graph. The nodes are in their order."""
    found: set[str] = set()
    for node in nodes:
        kind = node.get_type_name()
        values = node.input_values()
        if kind == "Constant" or (values and all(value.get_node().get_name() in found for value in values)):
            found.add(node.get_name())
    return found


def selected(node: ov.Node) -> tuple[int | None, list[npt.NDArray[np.int64]]]:
    """The axis along which an operation takes parts of its first input, and the positions of each part; no axis if it
    is not known."""
    kind, source = node.get_type_name(), node.input_value(0)
    rank = len(source.get_partial_shape())
    unknown = [np.zeros(0, np.int64)] * node.get_output_size()
    try:
        if kind in ("VariadicSplit", "Split"):
            axis = int(values_of(node.input_value(1))[0]) % rank
            lengths = [_length(output, axis) for output in node.outputs()]
            ends = np.cumsum(lengths)
            return axis, [np.arange(end - part, end) for end, part in zip(ends, lengths, strict=True)]
        if kind == "Gather":
            axis = int(values_of(node.input_value(2))[0]) % rank
            return axis, [values_of(node.input_value(1)).astype(np.int64) % _length(source, axis)]
        return _sliced(node)
    except DivisionError:
        return None, unknown


def _sliced(node: ov.Node) -> tuple[int, list[npt.NDArray[np.int64]]]:
    """As `selected`, for a Slice or StridedSlice that takes a part along one axis."""
    source = node.input_value(0)
    rank = len(source.get_partial_shape())
    starts, stops = (values_of(value).astype(np.int64) for value in node.input_values()[1:3])
    has_steps = node.get_input_size() > 3
    steps = values_of(node.input_value(3)).astype(np.int64) if has_steps else np.ones_like(starts)
    if node.get_type_name() == "Slice":
        axes = values_of(node.input_value(4)) if node.get_input_size() > 4 else np.arange(starts.size)
        if axes.size != 1:
            raise _conflict(node)
        axis, number = int(axes[0]) % rank, 0
        start, stop = int(starts[0]), int(stops[0])
    else:
        attributes = node.get_attributes()
        if any(any(attributes.get(name, ())) for name in ("new_axis_mask", "shrink_axis_mask", "ellipsis_mask")):
            raise _conflict(node)
        free = [
            list(attributes[name]) + [0] * (starts.size - len(attributes[name])) for name in ("begin_mask", "end_mask")
        ]
        cut = [place for place in range(starts.size) if not (free[0][place] and free[1][place])]
        if len(cut) != 1:
            raise _conflict(node)
        axis = number = cut[0]
        start = 0 if free[0][number] else int(starts[number])
        stop = np.iinfo(np.int64).max if free[1][number] else int(stops[number])
    length = _length(source, axis)
    stop = min(stop, length) if stop >= 0 else stop
    return axis, [np.arange(length)[slice(start, stop, int(steps[number]))]]


def _kept_axis(node: ov.Node, axis: int, removed: int | None, *, is_output: bool = False) -> int:
    """The index of an axis after (or with `is_output`, before) an operation that may remove one."""
    has_fewer = len(node.output(0).get_partial_shape()) < len(node.input_value(0).get_partial_shape())
    if not has_fewer or removed is None:
        return axis
    if is_output:
        return axis + (axis >= removed)
    return axis - (axis > removed)


def _squeezed(node: ov.Node) -> dict[int, int]:
    """The axes to which an Unsqueeze or Squeeze moves the axes of its input."""
    few, many = node.input_value(0), node.output(0)
    is_squeeze = node.get_type_name() == "Squeeze"
    if is_squeeze:
        few, many = many, few
    rank = len(many.get_partial_shape())
    added = {int(axis) % rank for axis in values_of(node.input_value(1))}
    kept = [axis for axis in range(rank) if axis not in added]
    return {axis: place for place, axis in enumerate(kept)} if is_squeeze else dict(enumerate(kept))


def values_of(value: ov.Output) -> npt.NDArray[np.generic]:
    """The numbers of a constant. DivisionError if it is none."""
    node = value.get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        raise DivisionError(f"{node.get_friendly_name()!r} determines how values are divided and is not constant")
    return np.asarray(node.data).reshape(-1)


def _dimensions(output: ov.Output) -> list[int | None]:
    return [None if size.is_dynamic else int(size.get_length()) for size in output.get_partial_shape()]


def _length(output: ov.Output, axis: int) -> int:
    size = output.get_partial_shape()[axis]
    if size.is_dynamic:
        raise _conflict(output.get_node())
    return int(size.get_length())


def _names_of(result: ov.Node) -> set[str]:
    return set(result.output(0).get_names()) | set(result.input_value(0).get_names())


def _conflict(node: ov.Node) -> DivisionError:
    return DivisionError(
        f"{node.get_type_name()} {node.get_friendly_name()!r} has a form that is not known and would mix what ranks "
        "have"
    )
