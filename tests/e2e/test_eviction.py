"""Eviction on real models: the tokens of OpenVINO GenAI with the same settings, within the maximum.

GenAI has no prefix cache here and computes prompts in the same chunks. As a soak, 50 prompts on the whole demo model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.models.model_cache import model_directory
from headrace.gateway.text.tokenizer import load_tokenizer
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.kv.groups.evicting import EvictionBudget
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.eviction import Aggregation, Eviction, EvictionRule
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from tests.e2e.genai_answers import answers_of_genai
from tests.e2e.serving import MODEL
from tests.e2e.small_model import small_model
from tests.worker.conftest import CHEAP_STEPS

SOAK = os.environ.get("HEADRACE_SOAK") == "1"
RULE = EvictionRule(192, start_size=32, recent_size=64)
NUM_BLOCKS = 256 if SOAK else 60
# A step that ends within the last 8 tokens of a prompt changes GenAI's scores (docs/decisions/kv-cache.md). None ends
# there.
BUDGET = 240
ANSWER = 60
# No document that people edit: with some prompts these few layers answer the same without the blocks that are given up.
TEXT = Path(__file__).parents[2] / "LICENSE"
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def directory() -> Path:
    """The demo model's first layers, or as a soak all of it."""
    small = small_model()
    return model_directory(MODEL) if SOAK else small


@pytest.fixture(scope="module")
def runner(directory: Path) -> OpenVINOModelRunner:
    runner = OpenVINOModelRunner(directory, threads=2, kv_precision="f32", execution_mode="accuracy", evicts=True)
    runner.allocate(NUM_BLOCKS)
    return runner


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    """Parts of a long text, below and above the maximum."""
    tokenizer = load_tokenizer({file.name: file.read_bytes() for file in directory.glob("openvino_*tokenizer.*")})
    tokens = tokenizer.encode(TEXT.read_text(), add_special_tokens=True)
    lengths = [100 + 31 * number for number in range(50)] if SOAK else [180, 600]
    starts = np.random.default_rng(0).integers(0, len(tokens) - max(lengths), len(lengths)).tolist()
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def engine_of(runner: OpenVINOModelRunner, num_blocks: int = NUM_BLOCKS) -> Engine:
    limits = StepLimits(16, BUDGET, BUDGET, is_exact=True)
    return build_engine(runner, BatchSampler(), num_blocks, limits, step_costs=CHEAP_STEPS, groups=[EvictionBudget()])


def request_of(
    prompt: Sequence[int], max_tokens: int, rule: EvictionRule | None = RULE, resume: Sequence[int] = ()
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
    eviction = None if rule is None else Eviction(rule)
    return Request("r", list(prompt), sampling, 1, resume_token_ids=resume, eviction=eviction)


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Their answers."""
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_requests:
        engine.step()
        engine.scheduler.check()
    return [list(request.token_ids[request.num_prompt_tokens :]) for request in requests]


@pytest.mark.parametrize("name", ["SUM", "NORM_SUM"])
def test_tokens_are_those_of_openvino_genai(
    runner: OpenVINOModelRunner, directory: Path, prompts: Sequence[Sequence[int]], name: str
) -> None:
    sizes = RULE.start_size, RULE.recent_size, RULE.max_cache_size
    theirs = answers_of_genai(directory, prompts, name, sizes, max_tokens=ANSWER, num_blocks=NUM_BLOCKS, budget=BUDGET)
    rule = RULE._replace(aggregation=Aggregation[name])
    ours = [run(engine_of(runner), [request_of(prompt, ANSWER, rule)])[0] for prompt in prompts]
    equal = [one == other for one, other in zip(ours, theirs, strict=True)]
    assert all(equal), f"{equal.count(False)} of {len(equal)} answers differ"
    whole = run(engine_of(runner), [request_of(prompts[-1], ANSWER, None)])[0]
    assert whole != ours[-1], "eviction changes nothing"


def test_a_stream_far_longer_than_the_pool_runs_in_it(runner: OpenVINOModelRunner) -> None:
    num_tokens, num_blocks = (100_000, 256) if SOAK else (600, 8)
    rule = RULE._replace(max_cache_size=32 * (num_blocks - 1))
    (answer,) = run(engine_of(runner, num_blocks), [request_of([1, 2, 3, 4], num_tokens, rule)])
    assert len(answer) == num_tokens


def test_a_resumed_answer_goes_on_with_the_same_tokens(
    runner: OpenVINOModelRunner, prompts: Sequence[Sequence[int]]
) -> None:
    """Beside other requests, which have the same tokens as alone."""
    whole = [run(engine_of(runner), [request_of(prompt, 90)])[0] for prompt in prompts[:4]]
    resumed = [request_of(prompt, 90, resume=answer[:70]) for prompt, answer in zip(prompts, whole, strict=False)]
    assert run(engine_of(runner), resumed) == whole
