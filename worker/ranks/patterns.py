"""Makes the patterns of Reshapes constant where the graph computes them from the shapes of other values.

The graphs of recurrent layers do so. Some of these values are needed for their shape only, and have another number of
heads than what they shape, so their parts would be of no use to a rank.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13


def settle_patterns(model: ov.Model) -> None:
    """Change the Reshapes of a graph whose result has at most one unknown dimension. No value changes."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Reshape":
            _skip_reshape_before(node)
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Reshape":
            _settle(node)
    model.validate_nodes_and_infer_types()


def _skip_reshape_before(reshape: ov.Node) -> None:
    """Let a Reshape take what the Reshape before it takes, unless it copies dimensions of its input."""
    before, pattern = reshape.input_value(0).get_node(), reshape.input_value(1).get_node()
    is_chain = before.get_type_name() == "Reshape" and pattern.get_type_name() == "Constant"
    if is_chain and (np.asarray(pattern.data) != 0).all():
        reshape.input(0).replace_source_output(before.input_value(0))


def _settle(reshape: ov.Node) -> None:
    if reshape.input_value(1).get_node().get_type_name() == "Constant":
        return
    shape = reshape.get_output_partial_shape(0)
    if shape.rank.is_dynamic:
        return
    lengths = [-1 if length.is_dynamic else length.get_length() for length in shape]
    if lengths.count(-1) < 2 and 0 not in lengths:
        reshape.input(1).replace_source_output(opset13.constant(np.array(lengths, np.int64)).output(0))
