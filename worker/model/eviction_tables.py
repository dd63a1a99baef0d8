"""The graph of a model whose sequences may evict KV blocks: block tables for each layer, and scores of attention.

OpenVINO's transformation makes an input and an output for each layer. Here they become one of each, because setting 30
inputs and reading 30 outputs takes longer than dividing one.

    input   block_tables               i32 [layers, blocks]      instead of block_indices
    input   score_aggregation_window   i32 [sequences]           how many of the last queries are summed up
    output  scores                     f32 [layers, tokens]      for each sequence, its tokens in the cache
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.kv.exclusions import ALIBI, EVICTION, impossible
from headrace.worker.kv.layers import LayerKind
from headrace.worker.model.window_tables import attentions, has_alibi, has_window

BLOCK_TABLES = "block_tables"
SCORE_WINDOWS = "score_aggregation_window"
SCORES = "scores"
# Flags of OpenVINO's transformation.
TRANSFORMATION = {"use_block_indices_inputs": True, "use_score_outputs": True, "allow_score_aggregation": True}


def merge_layers(model: ov.Model) -> None:
    """Give a model with PagedAttention, transformed with TRANSFORMATION, the ports above. ConfigurationError if its
    sequences cannot evict blocks."""
    _check(model)
    tables = sorted((port for port in model.inputs if port.any_name.startswith("block_indices.")), key=layer_of)
    scores = sorted((port for port in model.outputs if port.any_name.startswith("scores.")), key=layer_of)
    parameter = opset13.parameter([len(tables), -1], np.int32, BLOCK_TABLES)
    parameter.output(0).get_tensor().set_names({BLOCK_TABLES})
    model.add_parameters([parameter])
    first_axis = opset13.constant(np.int64(0))
    for layer, port in enumerate(tables):
        row = opset13.gather(parameter.output(0), opset13.constant(np.int64(layer)), first_axis)
        node = port.get_node()
        port.replace(row.output(0))
        model.remove_parameter(node)
    rows = []
    for port in scores:
        result = port.get_node()
        rows.append(opset13.unsqueeze(result.input_value(0), first_axis))
        model.remove_result(result)
    merged = opset13.concat(rows, 0)
    merged.output(0).get_tensor().set_names({SCORES})
    model.add_results([opset13.result(merged.output(0))])
    model.validate_nodes_and_infer_types()


def layer_of(port: ov.Output) -> int:
    """The number of the layer that an input or output belongs to."""
    return int(port.any_name.rpartition(".")[2])


def _check(model: ov.Model) -> None:
    for node in attentions(model):
        if has_window(node):
            raise impossible(EVICTION, LayerKind.WINDOW)
        if has_alibi(node):
            raise impossible(EVICTION, ALIBI)
    if any(port.any_name.startswith("la.") for port in model.inputs):
        raise impossible(EVICTION, LayerKind.RECURRENT)
