"""Models from GGUF files, of each kind of attention and in each format, divided among ranks in one process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from gguf import GGMLQuantizationType as Kind

from headrace.cli.models.convert import convert
from headrace.worker.config import ConfigurationError
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.model.paging import read_paged
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import step_limits
from headrace.worker.ranks.division import divide, is_product
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from tests.gguf_models import TinyModel, write_gguf
from tests.worker.conftest import CHEAP_STEPS, KnownCosts
from tests.worker.ranks.exactness import ASKED, NUM_BLOCKS, Computed, assert_exact, divided, whole
from tests.worker.ranks.group import Group

MODELS = {
    "4 bits": TinyModel("llama", Kind.Q4_0, tied=True),
    "4 bits with minima and biases": TinyModel("qwen2", Kind.Q4_1, heads=6, kv_heads=3),
    "5 bits": TinyModel("llama", Kind.Q5_0, heads=4, kv_heads=4),
    "5 bits with minima": TinyModel("llama", Kind.Q5_1, heads=8, kv_heads=2, head_size=32, rope_factors=True),
    "8 bits, one KV head, norms of heads": TinyModel("qwen3", Kind.Q8_0, heads=6, kv_heads=1),
    "16 bits": TinyModel("llama", Kind.F16, heads=4, kv_heads=2),
}
LENGTHS = (20, 300, 2000)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for number, (name, model) in enumerate(MODELS.items()):
        directory = tmp_path_factory.mktemp(f"model-{number}")
        convert(write_gguf(model, directory / "m.gguf"), directory)
        made[name] = directory
    return made


@lru_cache(maxsize=1)
def undivided(directory: Path) -> Computed:
    return whole(directory)


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(0, 256, length).tolist() for length in lengths]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_divided_model_has_the_log_probabilities_of_the_whole(
    name: str, num_ranks: int, directories: dict[str, Path]
) -> None:
    of_group, group = divided(directories[name], num_ranks)
    assert group.division.vocabulary is not None
    # A single KV head is not divided.
    assert group.division.whole_share < (0.06 if MODELS[name].kv_heads == 1 else 1e-9)
    assert len(group.division.sums) == 2 * MODELS[name].layers
    lengths = LENGTHS if num_ranks == 2 else LENGTHS[:2]
    assert_exact(undivided(directories[name]), of_group, prompts(*lengths))
    assert group.sums.num_sums > 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_has_its_part_of_the_weights_and_of_the_cache(num_ranks: int, directories: dict[str, Path]) -> None:
    directory = directories["4 bits with minima and biases"]
    _, group = divided(directory, num_ranks)
    heads = [rank.num_kv_heads for rank in group.ranks]
    assert sum(heads) == MODELS["4 bits with minima and biases"].kv_heads
    assert min(heads) > 0
    per_head = {rank.block_bytes // rank.num_kv_heads for rank in group.ranks}
    assert len(per_head) == 1
    assert sum(rank.block_bytes for rank in group.ranks) == undivided(directory).block_bytes
    assert sum(rank.vocab_size for rank in group.ranks) == group.vocab_size


def test_drafts_of_a_model_that_is_not_divided_change_no_token(directories: dict[str, Path]) -> None:
    directory = directories["4 bits with minima and biases"]
    group, smaller = Group(directory, 2, **ASKED), OpenVINOModelRunner(directory, threads=1, **ASKED)
    group.allocate(NUM_BLOCKS)
    smaller.allocate(NUM_BLOCKS)
    # With known costs, whether tokens are proposed does not depend on the speed of the machine.
    draft = Draft(smaller, BatchSampler(), KnownCosts(1e-6, 1e-8))
    without, _ = answered(group, None)
    found, requests = answered(group, draft)
    assert found == without
    assert all(request.num_accepted > 0.8 * request.num_drafted > 0 for request in requests)


def answered(group: Group, draft: Draft | None) -> tuple[dict[str, list[int]], list[Request]]:
    """Greedy answers to three prompts at once, and their requests."""
    limits = step_limits(8, 512, 512, exact_rows=group.exact_rows)
    speculation = "off" if draft is None else "draft"
    engine = build_engine(
        group, BatchSampler(), NUM_BLOCKS, limits, step_costs=CHEAP_STEPS, speculation=speculation, draft=draft
    )
    sampling = SamplingParams(max_tokens=24, seed=0, temperature=0.0)
    requests = [Request(str(number), tokens, sampling, 2) for number, tokens in enumerate(prompts(20, 90, 300))]
    for request in requests:
        engine.scheduler.add(request)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.scheduler.has_requests:
        for output in engine.step():
            found[output.request.request_id] += output.token_ids
    return found, requests


def test_more_ranks_than_heads_are_refused_in_a_sentence(directories: dict[str, Path]) -> None:
    model = read_paged(ov.Core(), directories["8 bits, one KV head, norms of heads"]).graph
    with pytest.raises(ConfigurationError, match="among 7 ranks: its layers have 6 heads of attention and 1 of keys"):
        divide(model, 7)


def test_dividing_changes_nothing(directories: dict[str, Path]) -> None:
    model = read_paged(ov.Core(), directories["4 bits"]).graph
    before = [(node.get_name(), str(node.outputs())) for node in model.get_ordered_ops()]
    divide(model, 2)
    assert [(node.get_name(), str(node.outputs())) for node in model.get_ordered_ops()] == before


def test_every_product_is_divided_once(directories: dict[str, Path]) -> None:
    model = read_paged(ov.Core(), directories["4 bits"]).graph
    division = divide(model, 2)
    constants = {node.get_name() for node in model.get_ordered_ops() if not depends_on_inputs(node)}
    products = {node.get_name() for node in model.get_ordered_ops() if is_product(node, constants)}
    assert division.rows | division.columns == products
    assert not division.rows & division.columns
    # Query, key and value, and gate and up, of each layer, and the head.
    assert len(division.rows) == 5 * MODELS["4 bits"].layers + 1


def depends_on_inputs(node: ov.Node) -> bool:
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if part.get_type_name() == "Parameter":
            return True
        waiting += [value.get_node() for value in part.input_values()]
    return False
