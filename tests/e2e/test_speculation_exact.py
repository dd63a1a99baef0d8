"""Speculative decoding on the real model: in accuracy mode every token and log-probability is that of a run without. In
performance mode every token is, where decode steps have the same bits in batches of any size.

HEADRACE_SOAK=1 runs all layers of the model and 500 prompts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from headrace.cli.models.model_cache import model_directory
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.grammar.compiler import Grammars
from headrace.worker.grammar.constraint import Constraint, ConstraintSource
from headrace.worker.grammar.vocabulary import read_vocabulary
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput
from headrace.worker.sampling.sampler import BatchSampler
from tests.e2e.serving import MODEL
from tests.e2e.small_model import small_model
from tests.worker.conftest import CHEAP_STEPS, KnownCosts

pytestmark = pytest.mark.e2e
SOAK = os.environ.get("HEADRACE_SOAK") == "1"
NUM_BLOCKS = 900
MAX_TOKENS = 40
NUM_PROMPTS = 500 if SOAK else 8
SCHEMA = (
    '{"type":"object","properties":{"first_name":{"type":"string","maxLength":12},"age":{"type":"integer"}},'
    '"required":["first_name","age"],"additionalProperties":false}'
)
KINDS = ("plain", "schema", "penalties")
PROPOSERS = ("ngram", "draft")
# The controller then asks the smaller model for drafts in every step.
FREE_STEPS = KnownCosts(1e-6, 1e-8)


@pytest.fixture(scope="module")
def directory() -> Path:
    small = small_model()
    return model_directory(MODEL) if SOAK else small


@pytest.fixture(scope="module")
def runner(directory: Path) -> OpenVINOModelRunner:
    runner = OpenVINOModelRunner(directory, threads=2, kv_precision="u8", execution_mode="accuracy")
    runner.allocate(NUM_BLOCKS)
    return runner


@pytest.fixture(scope="module")
def smaller() -> OpenVINOModelRunner:
    """The first layers of the model, as a draft model."""
    runner = OpenVINOModelRunner(small_model(), threads=2, kv_precision="u8", execution_mode="performance")
    runner.allocate(NUM_BLOCKS)
    return runner


@pytest.fixture(scope="module")
def constraint(directory: Path) -> Constraint:
    grammars = Grammars(lambda: read_vocabulary(directory), 49_152, [2])
    return asyncio.run(grammars.constrain(ConstraintSource("json_schema", (SCHEMA,)), end_token_ids=[2]))


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    """Pieces of the documentation, each with its beginning once more at its end."""
    import openvino_tokenizers  # noqa: F401  it registers its operators

    documents = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    tokenizer = ov.Core().compile_model(directory / "openvino_tokenizer.xml", "CPU")
    token_ids = tokenizer(["\n".join(document.read_text() for document in documents)])["input_ids"][0]
    starts = np.linspace(0, len(token_ids) - 100, NUM_PROMPTS).astype(int)
    return [[*token_ids[at : at + 60].tolist(), *token_ids[at : at + 6].tolist()] for at in starts.tolist()]


def answers(
    runner: OpenVINOModelRunner,
    prompts: Sequence[Sequence[int]],
    batch: int,
    speculation: str,
    smaller: OpenVINOModelRunner | None = None,
    **sampling: Any,
) -> tuple[list[tuple[Any, ...]], list[Request]]:
    """Tokens and log-probabilities of each prompt, with this many prompts at a time."""
    limits = StepLimits(batch, 1024, 1024, is_exact=True)
    sampler = BatchSampler()
    draft = Draft(smaller, BatchSampler(), FREE_STEPS) if smaller is not None and speculation == "draft" else None
    engine = build_engine(
        runner, sampler, NUM_BLOCKS, limits, step_costs=CHEAP_STEPS, speculation=speculation, draft=draft
    )
    given: dict[Request, list[RequestOutput]] = {}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": number, **sampling})
        request = Request(str(number), list(prompt), params, number % 3, arrival_s=number)
        given[request] = []
        engine.scheduler.add(request)
    while engine.scheduler.has_requests:
        for output in engine.step():
            given[output.request].append(output)
        engine.scheduler.check()
    found = [
        (
            [token_id for output in outputs for token_id in output.token_ids],
            [entry for output in outputs for entry in output.logprobs],
            outputs[-1].finish,
        )
        for outputs in given.values()
    ]
    return found, list(given)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_in_performance_mode_a_stream_is_the_same_with_drafts_alone_and_in_company(
    directory: Path, prompts: list[list[int]], temperature: float
) -> None:
    runner = OpenVINOModelRunner(directory, threads=2, kv_precision="u8", execution_mode="performance", speculates=True)
    runner.allocate(NUM_BLOCKS)
    sampling = {"temperature": temperature, "num_logprobs": 1}
    in_company, _ = answers(runner, prompts, 8, "off", **sampling)
    if answers(runner, prompts, 4, "off", **sampling)[0] != in_company:
        pytest.skip("on this CPU the bits of a decode step depend on its size")
    for batch in (1, 8):
        with_drafts, requests = answers(runner, prompts, batch, "ngram", **sampling)
        assert_alike(with_drafts, in_company)
        assert sum(request.num_accepted for request in requests) > 0
    assert_alike(answers(runner, prompts, 1, "off", **sampling)[0], in_company)


def assert_alike(found: Sequence[tuple[Any, ...]], expected: Sequence[tuple[Any, ...]]) -> None:
    """The same tokens. The sums behind log-probabilities are added up in another order where there are few rows."""
    for (token_ids, logprobs, finish), (of_expected, others, of_finish) in zip(found, expected, strict=True):
        assert (token_ids, finish) == (of_expected, of_finish)
        assert [entry.logprob for entry in logprobs] == pytest.approx([entry.logprob for entry in others], abs=1e-6)


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("batch", [1, 8, 64] if SOAK else [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_bit_for_bit_those_without(
    runner: OpenVINOModelRunner,
    smaller: OpenVINOModelRunner,
    prompts: list[list[int]],
    constraint: Constraint,
    kind: str,
    temperature: float,
    batch: int,
    proposer: str,
) -> None:
    sampling: dict[str, Any] = {
        "plain": {"num_logprobs": 2},
        "schema": {"constraint": constraint, "num_logprobs": 0, "stop_token_ids": frozenset([2])},
        "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "num_logprobs": 1},
    }[kind]
    chosen = prompts if batch > 1 or SOAK else prompts[:3]
    without, _ = answers(runner, chosen, batch, "off", temperature=temperature, **sampling)
    with_drafts, requests = answers(runner, chosen, batch, proposer, smaller, temperature=temperature, **sampling)
    assert with_drafts == without
    num_drafted, num_accepted = (sum(values) for values in zip(*map(_draft_tokens, requests), strict=True))
    print(f"{kind} at {temperature}, {batch} together, {proposer}: {num_accepted} of {num_drafted} accepted")
    assert num_drafted > 0
    if proposer == "draft" and not SOAK:
        assert num_accepted > 0.5 * num_drafted, "the same model in another precision is nearly always right"
    elif proposer == "draft" or kind != "penalties":
        assert num_accepted > 0


def _draft_tokens(request: Request) -> tuple[int, int]:
    return request.num_drafted, request.num_accepted
