"""Gemma 4: a state for each square of 3 x 3 patches of an image of any size.

    pixel_values [1, patches, numbers], image_position_ids [1, patches, 2] --vision_embeddings--> [tokens, hidden]

transformers fills images up to the patches of the longest one, and masks these. Here an image is computed alone, by its
own patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.multimodal.towers.network import Network
from headrace.worker.multimodal.towers.tower import Pixels
from headrace.worker.request.images import ImageStates

_AXES, _RANK = 2, 4
_BETWEEN = {"OneHot", "Convert", "Transpose"}


class Gemma4:
    """Encodes images with the tower of Gemma 4."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def encode(self, images: Sequence[Pixels]) -> Sequence[ImageStates]:
        """See `Tower`."""
        return [ImageStates(self._network(**image)[0]) for image in images]


def look_up_places(model: ov.Model) -> None:
    """Look up the embeddings of places in their table. The exported network multiplies the table by rows with a single
    1, which gives the same numbers, but takes 40 KB a patch for each of a few arrays with the tables of 10,240 rows of
    the published models. Does nothing to a graph of another form."""
    product = _product_of_places(model)
    if product is None:
        return
    (positions,) = (node for node in model.get_parameters() if "image_position_ids" in node.output(0).get_names())
    first, along = opset13.constant(np.int64(0)), opset13.constant(np.int64(1))
    of_axis = opset13.transpose(opset13.gather(positions, first, first), opset13.constant(np.array([1, 0])))
    found = opset13.gather(product.input_value(1), of_axis, along, batch_dims=1)  # [2, patches, size]
    product.output(0).replace(opset13.unsqueeze(found, first).output(0))
    model.validate_nodes_and_infer_types()


def _product_of_places(model: ov.Model) -> ov.Node | None:
    """The product of rows with a single 1 with a table for columns and one for rows of patches."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "OneHot" or node.get_output_partial_shape(0).rank.get_length() != _RANK:
            continue
        while node.get_type_name() in _BETWEEN and len(users := node.output(0).get_target_inputs()) == 1:
            node = next(iter(users)).get_node()
        if node.get_type_name() == "MatMul" and node.get_output_partial_shape(0)[1] == ov.Dimension(_AXES):
            return node
    return None
