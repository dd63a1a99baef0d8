"""Models of many architectures give transformers' log-probabilities, regardless of chunks and batch, or are refused
with a message."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.model.fused_projections import fuse_projections, is_constant
from headrace.worker.model.paging import read_paged
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import step_limits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.weights.file_memory import FileMemory
from tests.architectures.exports import PYTHON, exported
from tests.architectures.families import CONTEXT, FAMILIES
from tests.worker.conftest import CHEAP_STEPS

ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
NAMES = [name for name, family in FAMILIES.items() if ALL or family.is_short]
SERVED = [name for name in NAMES if not FAMILIES[name].refused]
REFUSED = [name for name in NAMES if FAMILIES[name].refused]
TOLERANCE = 1e-3
NUM_BLOCKS = 300
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


def context_of(name: str) -> int:
    """The longest context of a family's model."""
    length: int = FAMILIES[name].whole_config.get("max_position_embeddings", CONTEXT)
    return length


class Served:
    """A compiled model with its reference. Each engine over it has its own cache."""

    def __init__(self, directory: Path, max_context_tokens: int | None = None) -> None:
        self.runner = OpenVINOModelRunner(
            directory, threads=2, kv_precision="f32", execution_mode="accuracy", max_context_tokens=max_context_tokens
        )
        self.runner.allocate(NUM_BLOCKS)
        with np.load(directory / "reference.npz") as reference:
            self.tokens: list[int] = reference["tokens"].tolist()
            self.short, self.long = reference["short"], reference["long"]
            self.prompt = self.tokens[int(reference["start"]) :][:300]
            self.greedy: list[int] = reference["greedy"].tolist()
            self.greedy_logprobs = reference["greedy_logprobs"]

    def engine(self, budget: int, num_blocks: int = NUM_BLOCKS) -> Engine:
        """An engine with steps of up to `budget` tokens."""
        limits = step_limits(8, budget, budget, exact_rows=self.runner.exact_rows)
        return build_engine(self.runner, BatchSampler(), num_blocks, limits, step_costs=CHEAP_STEPS)

    def run(self, engine: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
        """Run them to their ends."""
        for request in requests:
            engine.scheduler.add(request)
        outputs = []
        while engine.scheduler.has_requests:
            outputs += engine.step()
            engine.scheduler.check()
        return outputs


@lru_cache(maxsize=1)
def served(name: str) -> Served:
    return Served(exported(NAMES) / name)


def scored(tokens: Sequence[int]) -> Request:
    """A request for the log-probabilities of its prompt."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, num_prompt_logprobs=0)
    return Request(f"scored-{len(tokens)}", tokens, sampling, 1)


def continued(model: Served, given: Sequence[int] = ()) -> Request:
    """A request for the answer of the reference. A failure may have cut it off after `given`."""
    sampling = SamplingParams(max_tokens=len(model.greedy), seed=0, temperature=0.0, num_logprobs=0)
    return Request(f"continued-{len(given)}", model.prompt, sampling, 1, resume_token_ids=given)


def assert_greedy(request: Request, outputs: Sequence[RequestOutput], model: Served) -> None:
    """Its tokens and their log-probabilities are those of the reference."""
    assert list(request.token_ids[request.num_prompt_tokens :]) == model.greedy
    found = [entry.logprob for output in outputs if output.request is request for entry in output.logprobs]
    expected = model.greedy_logprobs[len(request.resume_token_ids) :]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def assert_close(request: Request, reference: npt.NDArray[np.float32]) -> None:
    tokens = np.array(request.prompt_token_ids)
    expected = np.take_along_axis(reference[: len(tokens) - 1], tokens[1:, None], 1)[:, 0]
    found = np.array([entry.logprob for entry in request.prompt_logprobs])
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("name", SERVED)
def test_log_probabilities_are_those_of_transformers(name: str, budget: int) -> None:
    """Two prompts of 20 and 300 tokens run at once, so the long one's chunks share steps with the short one."""
    model = served(name)
    requests = [scored(model.tokens[:300]), scored(model.tokens[:20])]
    model.run(model.engine(budget), requests)
    for request in requests:
        assert_close(request, model.short)


@pytest.mark.parametrize("name", SERVED)
def test_what_comes_behind_a_hit_is_that_of_transformers(name: str) -> None:
    model = served(name)
    engine = model.engine(128)
    for _ in range(2):
        request = continued(model)
        assert_greedy(request, model.run(engine, [request]), model)
    assert request.num_cached_tokens > 200


@pytest.mark.parametrize("name", SERVED)
def test_what_comes_behind_a_preemption_or_a_failure_is_that_of_transformers(name: str) -> None:
    """The first request soon takes the block that the second needs, so that is computed again. Then it goes on as after
    the death of its worker."""
    model = served(name)
    block_size = model.runner.block_size
    in_blocks = 300 // block_size * block_size + block_size - 1
    other = Request("other", model.tokens[400:][:in_blocks], SamplingParams(24, seed=0, temperature=0.0), 1)
    preempted = continued(model)
    outputs = model.run(model.engine(1024, 2 * (300 // block_size + 1)), [other, preempted])
    assert preempted.num_preemptions > 0 or len(model.greedy) < 4
    assert_greedy(preempted, outputs, model)
    resumed = continued(model, model.greedy[: len(model.greedy) // 2])
    assert_greedy(resumed, model.run(model.engine(512), [resumed, scored(model.tokens[:200])]), model)


@pytest.mark.skipif(not ALL, reason="make test-architectures")
@pytest.mark.parametrize("name", [name for name in SERVED if context_of(name) == CONTEXT])
def test_long_prompts_are_those_of_transformers(name: str) -> None:
    """Prompts run in chunks of 512, together with a short prompt. Models with two sets of rotary factors must use the
    second."""
    model = Served(exported(NAMES) / name, max_context_tokens=CONTEXT)
    requests = [scored(model.tokens), scored(model.tokens[:20])]
    model.run(model.engine(512), requests)
    for request in requests:
        assert_close(request, model.long)


@pytest.mark.parametrize("name", [name for name in NAMES if name in {"phi3-longrope", "phi4-mini"}])
def test_one_request_does_not_change_the_rotary_factors_of_another(name: str) -> None:
    """If the context needs the second set of factors, every prompt uses it, alone and in a batch."""
    model = Served(exported(NAMES) / name, max_context_tokens=CONTEXT)
    assert model.runner.depends_on_context
    alone, beside, longer = scored(model.tokens[:300]), scored(model.tokens[:300]), scored(model.tokens)
    model.run(model.engine(512), [alone])
    model.run(model.engine(256), [longer, beside])
    for request in (alone, beside, longer):
        assert_close(request, model.long)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(ConfigurationError, match=FAMILIES[name].refused):
        read_paged(ov.Core(), exported(NAMES) / name)


@pytest.mark.parametrize("name", [name for name in SERVED if name in {"gpt2", "phi3", "bloom", "falcon", "gpt_neox"}])
def test_a_product_that_gives_query_key_and_value_is_computed_once(name: str) -> None:
    model = read_paged(ov.Core(), exported(NAMES) / name).graph
    before = num_weights(model)
    fuse_projections(model, FileMemory([]))
    assert num_weights(model) <= before


def test_a_table_of_positions_has_an_end() -> None:
    directory = exported(NAMES) / "gpt2"
    read_paged(ov.Core(), directory, CONTEXT)
    with pytest.raises(ConfigurationError, match=f"{CONTEXT} positions"):
        read_paged(ov.Core(), directory, CONTEXT + 1)


def num_weights(model: ov.Model) -> int:
    """Numbers that products multiply with."""
    products = [node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    weights = [node.input_value(1) for node in products if is_constant(node.input_value(1))]
    return sum(int(np.prod(list(output.get_shape()))) for output in weights)
