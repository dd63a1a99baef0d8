"""The part of LoRA adapters that a rank has: for each linear layer, the part that matches its part of the layer's
weights.

divided by rows       A whole, the rank's rows of B       y + (x A) B is divided like y
divided by columns    the rank's inputs of A, B whole     the parts are summed up with those of the product
"""

from __future__ import annotations

import openvino as ov

from headrace.worker.model.adapter_memory import Cut, Positions
from headrace.worker.ranks.division import Division
from headrace.worker.ranks.owners import Owners, Share, positions_of


def cuts_of(model: ov.Model, division: Division, rank: int) -> dict[str, Cut]:
    """A rank's cuts, by the friendly names of the divided products. Call it before the model is cut."""
    made: dict[bytes, Positions] = {}

    def positions(share: Share | None) -> Positions:
        # Layers of one form share an array: a large model has hundreds.
        assert share is not None
        owners: Owners = share.owners
        return made.setdefault(owners.tobytes(), positions_of(owners, rank))

    found: dict[str, Cut] = {}
    for node in model.get_ordered_ops():
        if node.get_name() in division.rows:
            found[node.get_friendly_name()] = Cut(outputs=positions(division.share_of(node.output(0))))
        elif node.get_name() in division.columns:
            found[node.get_friendly_name()] = Cut(inputs=positions(division.share_of(node.input_value(0))))
    return found
