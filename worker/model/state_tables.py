"""The memory of states: a table of slots for each recurrent layer, as OpenVINO's operators read and write it.

conv_state_table.N          [slots, channels, kernel]     the last inputs of a short convolution
gated_delta_state_table.N   [slots, heads, values, keys]  the sum of a gated delta rule
selective_ssm_state_table.N [slots, heads, size, states]  the sum of a state space
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import openvino as ov
from openvino import opset13

from headrace.worker.config import ConfigurationError
from headrace.worker.kv.arena import KVArena
from headrace.worker.request.step import FIRST_STATE_SLOT

_SUMS = ("gated_delta_state_table.", "selective_ssm_state_table.")
_OPERATORS = ("PagedCausalConv1D", "PagedGatedDeltaNet", "PagedSelectiveSSM")
_BEGINS = "subsequence_begins"
STATE_TABLES = ("conv_state_table.", *_SUMS)


def set_table_types(model: ov.Model) -> None:
    """Set the element types of the tables of states in the graph, which OpenVINO leaves open until it compiles it."""
    tables = [node for node in model.get_parameters() if any(map(is_table, node.output(0).get_names()))]
    for parameter in tables:
        parameter.set_element_type(ov.Type.f32)
    if tables:
        model.validate_nodes_and_infer_types()


def give_own_sequences(model: ov.Model) -> None:
    """Give the operators of recurrent layers their own division of a step's tokens into sequences. That of attention
    has a sequence for each token of a draft."""
    shared = next((node for node in model.get_parameters() if _BEGINS in node.output(0).get_names()), None)
    readers = [node for node in model.get_ordered_ops() if node.get_type_name() in _OPERATORS]
    if shared is None or not readers:
        return
    own = opset13.parameter([-1], ov.Type.i32, f"la.{_BEGINS}")
    own.output(0).get_tensor().set_names({f"la.{_BEGINS}"})
    model.add_parameters([own])
    for node in readers:
        for port in node.inputs():
            if port.get_source_output().get_node().get_friendly_name() == shared.get_friendly_name():
                port.replace_source_output(own.output(0))
    model.validate_nodes_and_infer_types()


def has_states(model: ov.Model) -> bool:
    """Whether a model with PagedAttention has recurrent layers."""
    return any(port.any_name.startswith(STATE_TABLES) for port in model.inputs)


def has_sums(model: ov.Model) -> bool:
    """Whether some states are sums over all tokens. In bfloat16 these become less exact with each step."""
    return any(port.any_name.startswith(_SUMS) for port in model.inputs)


class StateTables:
    """The tables of one compiled model. `slot_bytes` is the size of a slot over all layers."""

    def __init__(self, model: ov.CompiledModel) -> None:
        self.ports = [port for port in model.inputs if port.any_name.startswith(STATE_TABLES)]
        self.slot_bytes = sum(map(bytes_of, self.ports))
        self.precisions = ", ".join(sorted({port.element_type.get_type_name() for port in self.ports}))
        self._arena: KVArena | None = None
        self._tensors: list[ov.Tensor] = []

    @property
    def layout(self) -> Sequence[tuple[str, str]]:
        """Names and types, in order. Graphs with the same layout can share the tables."""
        return sorted((port.any_name, f"{port.element_type} {port.partial_shape}") for port in self.ports)

    def allocate(self, num_slots: int, requests: Iterable[ov.InferRequest], *, huge_pages: bool) -> None:
        """Make the tables for `num_slots` slots and the slots that belong to no request, all zero, and set them in the
        inference requests. ConfigurationError if there is no memory."""
        num_slots += FIRST_STATE_SLOT
        size_bytes = num_slots * self.slot_bytes
        try:
            arena = self._arena = KVArena(size_bytes, len(self.ports), huge_pages=huge_pages)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"no memory for {size_bytes / (1 << 30):.1f} GiB of states of recurrent layers; ask for less with "
                "--max-num-seqs or --kv-cache-gb"
            ) from error
        self._tensors = []
        for port in self.ports:
            piece = arena.take(num_slots * bytes_of(port))
            shape = ov.Shape([num_slots, *dims_of(port)])
            self._tensors.append(ov.Tensor(piece, shape, port.element_type))
        for request in requests:
            for port, tensor in zip(self.ports, self._tensors, strict=True):
                request.set_tensor(port.any_name, tensor)


def is_table(name: str) -> bool:
    """Whether an input of this name is a table of states."""
    return name.startswith(STATE_TABLES)


def dims_of(port: ov.Output) -> list[int]:
    """Dimensions of an input that has a table's slots or a cache's blocks, after their number. Of a cache: heads,
    tokens, head size with scales of quantisation."""
    return [int(dimension.get_length()) for dimension in list(port.partial_shape)[1:]]


def bytes_of(port: ov.Output) -> int:
    """The bytes of one slot or block of an input whose first dimension counts these."""
    return math.prod(dims_of(port)) * int(port.element_type.bitwidth) // 8
