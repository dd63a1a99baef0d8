"""Models of many architectures give transformers' log-probabilities, regardless of chunks and batch, or are refused
with a message."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest

from headrace.common.model_files.networks import networks_in
from headrace.worker.config import ConfigurationError
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.kv.cache import GroupBudget
from headrace.worker.kv.groups.recurrent import StateBudget
from headrace.worker.kv.groups.window import WindowBudget
from headrace.worker.loading import load_model
from headrace.worker.model.fused_projections import fuse_projections, is_constant
from headrace.worker.model.paging import read_paged
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import step_limits
from headrace.worker.multimodal.joining import join
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.tiers import NO_TIERS
from headrace.worker.weights.file_memory import FileMemory
from tests.architectures.exports import PYTHON, exported
from tests.architectures.families import CONTEXT, FAMILIES
from tests.worker.configs import worker_config
from tests.worker.conftest import CHEAP_STEPS

ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
NAMES = [name for name, family in FAMILIES.items() if ALL or family.is_short]
SERVED = [name for name in NAMES if not FAMILIES[name].refused]
REFUSED = [name for name in NAMES if FAMILIES[name].refused]
RECURRENT = [name for name in SERVED if FAMILIES[name].is_recurrent]
TOLERANCE = 1e-3
NUM_BLOCKS = 300
STATES = StateBudget(num_slots=24, interval=64)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


def context_of(name: str) -> int:
    """The longest context of a family's model."""
    config = FAMILIES[name].whole_config
    length: int = config.get("attention_chunk_size", config.get("max_position_embeddings", CONTEXT))
    return length


class Served:
    """A compiled model with its reference. Each engine over it has its own cache. With `num_slots`, layers with a
    sliding window keep no more than their windows."""

    def __init__(self, directory: Path, max_context_tokens: int | None = None, num_slots: int = 0) -> None:
        self.runner = OpenVINOModelRunner(
            directory,
            threads=2,
            kv_precision="f32",
            execution_mode="accuracy",
            max_context_tokens=max_context_tokens,
            has_parts=num_slots > 0,
        )
        self.runner.allocate(NUM_BLOCKS, num_slots)
        self.num_slots = num_slots
        self.states = None if self.runner.state_tables is None else STATES
        if self.states is not None:
            self.runner.allocate_states(self.states.num_slots)
        with np.load(directory / "reference.npz") as reference:
            self.tokens: list[int] = reference["tokens"].tolist()
            self.short, self.long = reference["short"], reference["long"]
            self.prompt = self.tokens[int(reference["start"]) :][:300]
            self.greedy: list[int] = reference["greedy"].tolist()
            self.greedy_logprobs = reference["greedy_logprobs"]

    def engine(self, budget: int, num_blocks: int = NUM_BLOCKS, speculation: str = "off") -> Engine:
        """An engine with steps of up to `budget` tokens."""
        limits = step_limits(8, budget, budget, exact_rows=self.runner.exact_rows)
        groups: list[GroupBudget] = [] if self.states is None else [self.states]
        if self.num_slots:
            of_step = -(-limits.max_num_batched_tokens // self.runner.block_size)
            groups.append(WindowBudget(self.runner.windows.num_tokens, self.num_slots, of_step))
        return build_engine(
            self.runner,
            BatchSampler(),
            num_blocks,
            limits,
            step_costs=CHEAP_STEPS,
            groups=groups,
            speculation=speculation,
        )

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
    return Served(exported(NAMES)[name])


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


@pytest.mark.parametrize("name", RECURRENT)
def test_states_of_preempted_and_resumed_requests_are_those_of_the_unpaged_model(name: str) -> None:
    """Four requests that share beginnings do not fit the cache together. The last continues an answer."""
    model = served(name)
    engine = model.engine(96, num_blocks=17)
    sampling = SamplingParams(max_tokens=50, seed=0, temperature=0.0, num_logprobs=0)
    starts, lengths = (0, 0, 0, 40), (70, 150, 200, 90)
    prompts = [model.tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    prompts[1][100:] = model.tokens[400:450]
    requests = [Request(f"r{index}", prompt, sampling, 1) for index, prompt in enumerate(prompts)]
    found = answers_of(engine, requests)
    resumed = Request("resumed", prompts[2], sampling, 1, resume_token_ids=[token for token, _ in found[2][:21]])
    found += answers_of(engine, [resumed])
    assert engine.scheduler.stats.preemptions > 0
    assert engine.scheduler.stats.prompt_tokens_cached > 0
    np.testing.assert_allclose(found[4], found[2][21:], rtol=0, atol=TOLERANCE)
    for prompt, answer in zip(prompts, found, strict=False):
        tokens = [token for token, _ in answer]
        expected = unpaged(name, [*prompt, *tokens])[len(prompt) - 1 : -1]
        of_tokens = np.take_along_axis(expected, np.array(tokens)[:, None], 1)[:, 0]
        np.testing.assert_allclose([logprob for _, logprob in answer], of_tokens, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(of_tokens, expected.max(1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", RECURRENT)
def test_drafts_change_no_bit_of_answers_with_recurrent_states(name: str) -> None:
    """A step writes the state after each token of a draft, and the request continues from that of the last accepted
    one. Every eleventh token of the drafts is wrong."""
    model = served(name)
    answers: list[list[list[tuple[int, float]]]] = []
    for speculation in ("off", "ngram"):
        requests = []
        for number in range(3):
            prediction = [token for token, _ in answers[0][number]] if answers else []
            for place in range(5, len(prediction), 11):
                prediction[place] = (prediction[place] + 1) % 500
            sampling = SamplingParams(40, seed=number, temperature=0.8 * (number == 2), num_logprobs=1)
            prompt = model.tokens[40 * number :][:90]
            requests.append(Request(f"r{number}", prompt, sampling, 1, prediction=prediction))
        outputs = model.run(model.engine(64, speculation=speculation), requests)
        answers.append(
            [
                [
                    (token, entry.logprob)
                    for output in outputs
                    if output.request is request
                    for token, entry in zip(output.token_ids, output.logprobs, strict=True)
                ]
                for request in requests
            ]
        )
        if speculation == "ngram":
            assert all(0 < request.num_accepted < request.num_drafted for request in requests)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", RECURRENT[:1])
def test_a_worker_loads_a_model_with_states_and_says_where_they_are_saved(name: str, tmp_path: Path) -> None:
    config = worker_config(exported(NAMES)[name], kv_cache_bytes=1 << 24, threads=2)
    model = load_model(config)
    figures = model.engine.scheduler.kv_cache.figures()
    slots, saved = figures.num_state_slots, figures.num_saved_states
    assert model.card.state_interval_tokens == 256
    assert model.max_num_seqs == model.engine.scheduler.max_num_seqs
    assert slots > 2 * model.max_num_seqs
    assert saved == 0
    assert not model.card.kv_layout
    assert model.tiers == NO_TIERS
    with pytest.raises(ConfigurationError, match="--kv-disk"):
        load_model(replace(config, kv_disk=tmp_path))


@pytest.mark.skipif(not ALL, reason="make test-architectures")
@pytest.mark.parametrize("name", [name for name in SERVED if context_of(name) == CONTEXT])
def test_long_prompts_are_those_of_transformers(name: str) -> None:
    """Prompts run in chunks of 512, together with a short prompt. Models with two sets of rotary factors must use the
    second."""
    model = Served(exported(NAMES)[name], max_context_tokens=CONTEXT)
    requests = [scored(model.tokens), scored(model.tokens[:20])]
    model.run(model.engine(512), requests)
    for request in requests:
        assert_close(request, model.long)


@pytest.mark.parametrize("name", [name for name in NAMES if name in {"phi3-longrope", "phi4-mini"}])
def test_one_request_does_not_change_the_rotary_factors_of_another(name: str) -> None:
    """If the context needs the second set of factors, every prompt uses it, alone and in a batch."""
    model = Served(exported(NAMES)[name], max_context_tokens=CONTEXT)
    assert model.runner.depends_on_context
    alone, beside, longer = scored(model.tokens[:300]), scored(model.tokens[:300]), scored(model.tokens)
    model.run(model.engine(512), [alone])
    model.run(model.engine(256), [longer, beside])
    for request in (alone, beside, longer):
        assert_close(request, model.long)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(ConfigurationError, match=FAMILIES[name].refused):
        read_paged(ov.Core(), exported(NAMES)[name])


@pytest.mark.parametrize("name", [name for name in SERVED if name in {"gpt2", "phi3", "bloom", "falcon", "gpt_neox"}])
def test_a_product_that_gives_query_key_and_value_is_computed_once(name: str) -> None:
    model = read_paged(ov.Core(), exported(NAMES)[name]).graph
    before = num_weights(model)
    fuse_projections(model, FileMemory([]))
    assert num_weights(model) <= before


def test_a_table_of_positions_has_an_end() -> None:
    directory = exported(NAMES)["gpt2"]
    read_paged(ov.Core(), directory, CONTEXT)
    with pytest.raises(ConfigurationError, match=f"{CONTEXT} positions"):
        read_paged(ov.Core(), directory, CONTEXT + 1)


def answers_of(engine: Engine, requests: Sequence[Request]) -> list[list[tuple[int, float]]]:
    """Run the requests to their ends. Returns the tokens of each answer with their log-probabilities."""
    found: dict[Request, list[tuple[int, float]]] = {request: [] for request in requests}
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_requests:
        for output in engine.step():
            logprobs = [entry.logprob for entry in output.logprobs]
            found[output.request] += zip(output.token_ids, logprobs, strict=True)
        engine.scheduler.check()
    return list(found.values())


def unpaged(name: str, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """Log-probabilities after each token, computed by the exported model as it is: [tokens, vocabulary]."""
    core = ov.Core()
    properties = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32"}
    model, *embeddings = [core.read_model(path) for path in networks_in(exported(NAMES)[name])]
    if embeddings:
        join(model, embeddings)
    compiled = core.compile_model(model, "CPU", properties)
    inputs = {
        "input_ids": np.array([tokens], np.int64),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
        "position_ids": np.arange(len(tokens), dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    inputs = {input_name: value for input_name, value in inputs.items() if input_name in names_of_inputs(model)}
    logits = compiled.create_infer_request().infer(inputs)["logits"][0].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    logprobs: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return logprobs


def names_of_inputs(model: ov.Model) -> set[str]:
    return {name for port in model.inputs for name in port.get_names()}


def num_weights(model: ov.Model) -> int:
    """Numbers that products multiply with."""
    products = [node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    weights = [node.input_value(1) for node in products if is_constant(node.input_value(1))]
    return sum(int(np.prod(list(output.get_shape()))) for output in weights)
