"""Where models are cut between layers, and how layers are divided among stages."""

from __future__ import annotations

from pathlib import Path

import openvino as ov
import pytest
from gguf import GGMLQuantizationType as Kind
from openvino import opset13

from headrace.worker.config import ConfigurationError
from headrace.worker.model.paging import read_paged
from headrace.worker.model.runner import HIDDEN_STATES as STATES
from headrace.worker.model.window_tables import attentions
from headrace.worker.pipeline.cutting import divide, find_cuts, keep_layers, take_head
from tests.gguf_models import TinyModel

MODEL = TinyModel("qwen2", Kind.Q4_1, layers=4)


@pytest.mark.parametrize(
    ("costs", "head_cost", "speeds", "expected"),
    [
        ([1.0] * 8, 0.0, [1.0, 1.0], [4]),
        ([1.0] * 8, 2.0, [1.0, 1.0], [3]),
        ([1.0] * 8, 0.0, [3.0, 1.0], [6]),
        ([1.0] * 9, 0.0, [1.0, 1.0, 1.0], [3, 6]),
        ([4.0, 1.0, 1.0, 1.0, 1.0], 0.0, [1.0, 1.0], [1]),
        ([1.0] * 3, 100.0, [1.0, 1.0, 1.0], [1, 2]),
    ],
)
def test_the_slowest_stage_is_as_fast_as_possible(
    costs: list[float], head_cost: float, speeds: list[float], expected: list[int]
) -> None:
    assert divide(costs, head_cost, speeds) == expected


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="it has 2 layers for 3 stages"):
        divide([1.0, 1.0], 0.0, [1.0] * 3)


def test_a_cut_is_the_whole_state_between_two_layers(directory: Path) -> None:
    cuts = find_cuts(read_paged(ov.Core(), directory).graph)
    assert cuts.num_layers == 4
    assert [list(value.get_partial_shape())[-1].get_length() for value in cuts.values] == [256] * 3
    assert len(set(cuts.costs)) == 1
    # Of four products of attention and three of the feed-forward layer.
    assert cuts.costs[0] == 256 * (2 * 256 + 2 * 128) + 3 * 256 * 512
    assert cuts.head_cost > 0


@pytest.mark.parametrize(("bfloat16", "kind"), [(False, ov.Type.f32), (True, ov.Type.bf16)])
def test_a_stage_has_only_its_layers(directory: Path, bfloat16: bool, kind: ov.Type) -> None:
    inputs = {}
    for first, end in ((0, 1), (1, 3), (3, 4)):
        model = read_paged(ov.Core(), directory).graph
        cuts = find_cuts(model)
        head = take_head(model, bfloat16_states=bfloat16)
        keep_layers(model, cuts, first, end, bfloat16_states=bfloat16)
        assert len(attentions(model)) == end - first
        names = {name for port in model.inputs for name in port.get_names()}
        caches = {name for name in names if name.startswith(("key_cache.", "value_cache."))}
        assert caches == {f"{kind}_cache.{layer}" for kind in ("key", "value") for layer in range(first, end)}
        inputs[first] = names - caches
        assert [STATES in port.get_names() for port in head.inputs] == [True]
        given = [port for port in (*model.inputs, *head.inputs) if STATES in port.get_names()]
        assert [port.get_element_type() for port in given] == [kind] * (2 if first else 1)
    assert "input_ids" in inputs[0]
    assert STATES not in inputs[0]
    assert inputs[1] == inputs[3]
    assert STATES in inputs[1]


def test_a_layer_that_reads_more_than_the_one_before_it_is_refused(directory: Path) -> None:
    """As models whose later layers read keys of earlier ones."""
    model = read_paged(ov.Core(), directory).graph
    first, _, third = find_cuts(model).values
    users = list(third.get_target_inputs())
    added = opset13.add(third, first)
    for user in users:
        user.replace_source_output(added.output(0))
    with pytest.raises(ConfigurationError, match="layer 2 reads more than the hidden states of the layer before it"):
        find_cuts(model)
