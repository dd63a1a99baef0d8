"""Pipelines whose stages are divided among ranks, which are processes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import openvino as ov
from gguf import GGMLQuantizationType as Kind

from headrace.worker.model.paging import read_paged
from headrace.worker.model.runner import Layers
from headrace.worker.pipeline.cutting import cut_stage, find_cuts
from headrace.worker.ranks.division import divide, divide_stage
from tests.gguf_models import TinyModel
from tests.worker.pipeline.local import staged
from tests.worker.ranks.exactness import assert_exact, whole

# Three KV heads for two ranks, and a vocabulary of 288 tokens, which has runs of 32.
MODEL = TinyModel("qwen2", Kind.Q4_1, layers=3, heads=6, kv_heads=3, spare_tokens=25)


def test_stages_of_ranks_have_the_log_probabilities_of_the_whole(directory: Path) -> None:
    of_stages, runner = staged(directory, 2, 2)
    of_whole = whole(directory)
    with closing(runner):
        prompts = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (20, 300)]
        assert_exact(of_whole, of_stages, prompts)
        runner.end_warm_up()
        assert runner.ranks_of_stages == (2, 2)
        reports = runner.stages()
        assert sum(stage.num_layers for stage in reports) == MODEL.layers
        assert reports[0].ranks == runner.ranks()
        for stage in reports:
            assert len(stage.ranks) == 2
            assert all(rank.step_s > rank.waited_s >= 0 for rank in stage.ranks)
        # The layers of the first stage, with the parts of both ranks.
        assert runner.block_bytes * MODEL.layers == of_whole.block_bytes * reports[0].num_layers
        assert runner.vocab_size == 288


def test_a_stage_is_divided_as_its_layers_are_in_the_whole(directory: Path) -> None:
    def graph() -> ov.Model:
        return read_paged(ov.Core(), directory).graph

    of_whole = divide(graph(), 2)
    divisions = []
    for layers in map(Layers, (0, 1, 2), (1, 2, None), (True, True, True)):
        model = graph()
        part = cut_stage(model, find_cuts(model), layers)
        of_layers, of_head = divide_stage(model, part.head, 2)
        assert of_layers.vocabulary is None
        assert (of_head is None) == (layers.first > 0)
        divisions += [of_layers] if of_head is None else [of_layers, of_head]
    for field in ("rows", "columns", "sums", "heads"):
        assert sum(len(getattr(each, field)) for each in divisions) == len(getattr(of_whole, field)), field
    np.testing.assert_array_equal(divisions[1].vocabulary, of_whole.vocabulary)
    assert divisions[1].run == of_whole.run == 32
