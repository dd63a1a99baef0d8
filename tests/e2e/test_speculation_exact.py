"""Speculative decoding on the real model: in accuracy mode every token and log-probability is that of a run without. In
performance mode every token is, where decode steps have the same bits in batches of any size.

HEADRACE_SOAK=1 runs all layers of the model and 500 prompts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from headrace.cli.models.model_cache import model_directory
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads.eagle_runner import EagleHeads, EagleRunner
from headrace.worker.draft_heads.features import FeatureStore
from headrace.worker.draft_heads.hidden_states import states_before
from headrace.worker.draft_heads.medusa_runner import MedusaHeads, MedusaRunner
from headrace.worker.engine.build import Draft, LearnedDraftTimes, build_engine
from headrace.worker.grammar.compiler import Grammars, read_vocabulary
from headrace.worker.grammar.constraint import Constraint, ConstraintSource
from headrace.worker.loading import load_model
from headrace.worker.model.batch import Batch
from headrace.worker.model.paging import read_paged
from headrace.worker.model.runner import OpenVINOModelRunner, StateReader
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.draft_model import DraftModel
from headrace.worker.speculation.eagle import EagleModel, MtpModel
from headrace.worker.speculation.eagle_trees import EagleTrees, MtpTrees, num_spare_blocks
from headrace.worker.speculation.medusa import MedusaModel
from headrace.worker.speculation.proposer import Source
from headrace.worker.speculation.tree import TreeShape
from tests.e2e.serving import MODEL
from tests.e2e.small_model import small_model
from tests.worker.adapters.files import random_adapter
from tests.worker.configs import worker_config
from tests.worker.conftest import KnownCosts
from tests.worker.draft_heads.files import (
    TARGET_SIZE,
    VOCAB_SIZE,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    mtp_config,
    mtp_tensors,
    write_heads,
)

pytestmark = pytest.mark.e2e
SOAK = os.environ.get("HEADRACE_SOAK") == "1"
NUM_BLOCKS = 900
MAX_TOKENS = 40
PROMPT_TOKENS = 66
NUM_PROMPTS = 500 if SOAK else 8
SCHEMA = (
    '{"type":"object","properties":{"first_name":{"type":"string","maxLength":12},"age":{"type":"integer"}},'
    '"required":["first_name","age"],"additionalProperties":false}'
)
KINDS = ("plain", "schema", "penalties")
PROPOSERS = ("ngram", "draft", "eagle3", "trees", "medusa")
TREE = TreeShape(10, 3, 2)
CASES = [
    (proposer, batch)
    for batch in ([1, 8, 64] if SOAK else [1, 8])
    for proposer in PROPOSERS
    if SOAK or (proposer, batch) != ("trees", 1)
]
# The controller then asks for drafts in every step. Those of 64 streams pay only if their tokens cost less.
STEPS, FREE_STEPS = KnownCosts(0.001, 1e-7 if SOAK else 1e-5), KnownCosts(1e-6, 1e-10 if SOAK else 1e-8)


@pytest.fixture(scope="module")
def directory() -> Path:
    small = small_model()
    return model_directory(MODEL) if SOAK else small


class SeenHeads:
    """Random heads that compute all their steps. Most of their logits are then replaced by the right token, if `right`
    has the answers to requests by their ids. With `is_second`, it is often the second best."""

    def __init__(self, runner: EagleRunner) -> None:
        self.is_second = False
        self.spare_blocks, self.copy = runner.spare_blocks, runner.copy
        self.right: dict[str, Sequence[int]] = {}
        self.vocab_size, self.block_size = runner.vocab_size, runner.block_size
        self._runner = runner
        self._sampled: Sequence[Request] = ()
        self._random = np.random.default_rng(0)

    @property
    def store(self) -> FeatureStore:
        return self._runner.store

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        self._sampled = batch.sampled
        self._runner.bind(batch, keeps_logits=keeps_logits)

    def run(self) -> Logits:
        values = self._runner.run().values
        for row, request in zip(values, self._sampled, strict=True):
            place = request.num_tokens + 1 - PROMPT_TOKENS
            answer = self.right.get(request.request_id, ())
            if place < len(answer) and self._random.random() < 0.8:
                row[answer[place]] = 1e6
                if self.is_second and self._random.random() < 0.5:
                    row[answer[place] - 1] = 1e6 + 1
        return Logits(values)


class SeenMedusa:
    """The same with heads in the format of Medusa. A request is known by its last hidden state. The right token is
    often the second of the first head."""

    def __init__(self, runner: MedusaRunner) -> None:
        self.right: dict[str, Sequence[int]] = {}
        self.vocab_size, self.block_size = runner.vocab_size, runner.block_size
        self.num_heads, self.size = runner.num_heads, runner.size
        self._runner = runner
        self._request_of: dict[bytes, Request] = {}
        self._random = np.random.default_rng(0)

    @property
    def states(self) -> SeenMedusa:
        return self

    def of(self, request: Request) -> Any:
        found = self._runner.states.of(request)
        if found is not None:
            self._request_of[found.tobytes()] = request
        return found

    def compute(self, head: int, states: Any) -> Logits:
        values = self._runner.compute(head, states).values.copy()
        for row, state in zip(values, states, strict=True):
            request = self._request_of[state.tobytes()]
            place, answer = request.num_generated_tokens + head, self.right.get(request.request_id, ())
            if place < len(answer) and self._random.random() < 0.8:
                row[answer[place]] = 1e6
                if head == 0 and self._random.random() < 0.4:
                    row[answer[place] - 1] = 2e6
        return Logits(values)


class BothStates:
    """Reads what heads of both formats need."""

    computes_all_states = False

    def __init__(self, *readers: StateReader) -> None:
        self._readers = readers

    def prepare(self, model: ov.Model) -> None:
        for reader in self._readers:
            reader.prepare(model)

    def add_outputs(self, model: ov.Model) -> None:
        for reader in self._readers:
            reader.add_outputs(model)

    def read(self, batch: Batch, request: ov.InferRequest) -> None:
        for reader in self._readers:
            reader.read(batch, request)


@pytest.fixture(scope="module")
def heads(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> EagleHeads:
    config = eagle_config()
    path = write_heads(tmp_path_factory.mktemp("heads"), config, eagle_tensors(config))
    return EagleHeads.read(path, partial(num_spare_blocks, TREE))


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> MedusaHeads:
    tensors = medusa_tensors(TARGET_SIZE, VOCAB_SIZE, 3, 1)
    path = write_heads(tmp_path_factory.mktemp("medusa"), {"medusa_num_heads": 3, "medusa_num_layers": 1}, tensors)
    return MedusaHeads.read(path)


@pytest.fixture(scope="module")
def seen_medusa(directory: Path, medusa: MedusaHeads, runner: OpenVINOModelRunner) -> SeenMedusa:
    return SeenMedusa(medusa.compile(directory, 2, runner))


@pytest.fixture(scope="module")
def runner(directory: Path, heads: EagleHeads, medusa: MedusaHeads) -> OpenVINOModelRunner:
    runner = OpenVINOModelRunner(
        directory,
        threads=2,
        kv_precision="u8",
        execution_mode="accuracy",
        states=BothStates(heads.reader, medusa.reader),
        max_adapters=2,
    )
    runner.allocate(NUM_BLOCKS)
    assert runner.adapters is not None
    for slot in range(2):
        runner.adapters.write(slot, random_adapter(runner.linears, 8, slot))
    return runner


@pytest.fixture(scope="module")
def fast(directory: Path) -> OpenVINOModelRunner:
    """The model without heads, as workers compute it by default."""
    runner = OpenVINOModelRunner(directory, threads=2, kv_precision="u8", execution_mode="performance", speculates=True)
    runner.allocate(NUM_BLOCKS)
    return runner


@pytest.fixture(scope="module")
def seen_heads(directory: Path, heads: EagleHeads) -> SeenHeads:
    runner = heads.compile(directory, 2)
    runner.allocate(NUM_BLOCKS)
    return SeenHeads(runner)


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


@pytest.fixture(scope="module")
def known_answers() -> dict[Any, list[tuple[Any, ...]]]:
    """Answers without drafts that were computed before."""
    return {}


def answers(
    runner: OpenVINOModelRunner,
    prompts: Sequence[Sequence[int]],
    batch: int,
    speculation: str,
    draft: Draft | None = None,
    adapter_slots: Sequence[int] = (),
    **sampling: Any,
) -> tuple[list[tuple[Any, ...]], list[Request]]:
    """Tokens and log-probabilities of each prompt, with this many prompts at a time, and with the adapters in these
    slots; -1 for none."""
    most = min(1024, runner.exact_rows)
    limits = StepLimits(batch, most, most, is_exact=True)
    sampler = BatchSampler()
    engine = build_engine(runner, sampler, NUM_BLOCKS, limits, step_costs=STEPS, speculation=speculation, draft=draft)
    given: dict[Request, list[RequestOutput]] = {}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": number, **sampling})
        slot = adapter_slots[number] if adapter_slots else -1
        request = Request(str(number), list(prompt), params, number % 3, arrival_s=number, adapter_slot=slot)
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
    fast: OpenVINOModelRunner, prompts: list[list[int]], temperature: float
) -> None:
    sampling = {"temperature": temperature, "num_logprobs": 1}
    in_company, _ = answers(fast, prompts, 8, "off", **sampling)
    if not are_alike(answers(fast, prompts, 4, "off", **sampling)[0], in_company):
        pytest.skip("on this CPU the bits of a decode step depend on its size")
    for batch in (1, 8):
        with_drafts, requests = answers(fast, prompts, batch, "ngram", **sampling)
        assert are_alike(with_drafts, in_company)
        assert sum(request.num_accepted for request in requests) > 0
    assert are_alike(answers(fast, prompts, 1, "off", **sampling)[0], in_company)


def are_alike(found: Sequence[tuple[Any, ...]], expected: Sequence[tuple[Any, ...]]) -> bool:
    """Whether the tokens are the same. The sums behind log-probabilities are added up in another order where there are
    few rows."""
    return all(
        (token_ids, finish) == (of_expected, of_finish)
        and [entry.logprob for entry in logprobs] == pytest.approx([entry.logprob for entry in others], abs=1e-6)
        for (token_ids, logprobs, finish), (of_expected, others, of_finish) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(("proposer", "batch"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_bit_for_bit_those_without(
    runner: OpenVINOModelRunner,
    smaller: OpenVINOModelRunner,
    seen_heads: SeenHeads,
    seen_medusa: SeenMedusa,
    prompts: list[list[int]],
    constraint: Constraint,
    known_answers: dict[Any, list[tuple[Any, ...]]],
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
    key = kind, temperature, batch
    if key not in known_answers:
        known_answers[key] = answers(runner, chosen, batch, "off", temperature=temperature, **sampling)[0]
    without = known_answers[key]
    draft = {
        "ngram": None,
        "draft": Draft(smaller, BatchSampler(), FREE_STEPS, DraftModel),
        "eagle3": Draft(seen_heads, BatchSampler(), FREE_STEPS, EagleModel),
        "trees": Draft(seen_heads, BatchSampler(), FREE_STEPS, partial(EagleTrees, shape=TREE)),
        "medusa": Draft(seen_medusa, BatchSampler(), FREE_STEPS, MedusaModel),
    }[proposer]
    seen_heads.right = {str(number): token_ids for number, (token_ids, *_) in enumerate(without)}
    seen_medusa.right = seen_heads.right
    seen_heads.is_second = proposer == "trees"
    speculation = "eagle3" if proposer == "trees" else proposer
    with_drafts, requests = answers(runner, chosen, batch, speculation, draft, temperature=temperature, **sampling)
    assert with_drafts == without
    num_drafted, num_accepted = (sum(values) for values in zip(*map(_draft_tokens, requests), strict=True))
    print(f"{kind} at {temperature}, {batch} together, {proposer}: {num_accepted} of {num_drafted} accepted")
    assert num_drafted > 0
    if proposer == "draft" and not SOAK:
        assert num_accepted > 0.5 * num_drafted, "the same model in another precision is nearly always right"
    elif proposer == "trees" and not SOAK:
        assert num_accepted > 0.2 * len(requests) * MAX_TOKENS or kind == "schema", "the right token is in most trees"
    elif proposer in ("eagle3", "medusa") and not SOAK:
        share = 0.3 if proposer == "eagle3" else 0.2
        assert num_accepted > share * num_drafted, "the right token is proposed in most rows"
    elif proposer != "ngram" or kind != "penalties":
        assert num_accepted > 0


def _draft_tokens(request: Request) -> tuple[int, int]:
    return request.num_drafted, request.num_accepted


@pytest.mark.parametrize("proposer", ["ngram", "eagle3", "trees", "medusa"])
def test_requests_with_adapters_beside_plain_ones_get_the_tokens_that_they_get_without_drafts(
    runner: OpenVINOModelRunner,
    seen_heads: SeenHeads,
    seen_medusa: SeenMedusa,
    prompts: list[list[int]],
    known_answers: dict[Any, list[tuple[Any, ...]]],
    proposer: str,
) -> None:
    """The same prompts without an adapter and with two, in one batch. The heads know nothing of adapters."""
    slots = [-1, 0, 1] * 2
    chosen = [prompt for prompt in prompts[:2] for _ in range(3)]
    sampling: dict[str, Any] = {"temperature": 0.0, "num_logprobs": 1, "max_tokens": 24}
    run = partial(answers, runner, chosen, len(chosen), adapter_slots=slots, **sampling)
    if "adapters" not in known_answers:
        known_answers["adapters"] = run("off")[0]
    without = known_answers["adapters"]
    assert len({tuple(token_ids) for token_ids, *_ in without}) == len(chosen), "the adapters change answers"
    draft = {
        "ngram": None,
        "eagle3": Draft(seen_heads, BatchSampler(), FREE_STEPS, EagleModel),
        "trees": Draft(seen_heads, BatchSampler(), FREE_STEPS, partial(EagleTrees, shape=TREE)),
        "medusa": Draft(seen_medusa, BatchSampler(), FREE_STEPS, MedusaModel),
    }[proposer]
    seen_heads.right = seen_medusa.right = {str(number): token_ids for number, (token_ids, *_) in enumerate(without)}
    seen_heads.is_second = proposer == "trees"
    with_drafts, requests = run("eagle3" if proposer == "trees" else proposer, draft)
    assert are_alike(with_drafts, without)
    for slot in (-1, 0, 1) if draft is not None else ():
        assert sum(request.num_accepted for request in requests if request.adapter_slot == slot) > 0
    assert any(request.num_drafted for request in requests)


def test_neither_heads_nor_their_outputs_of_the_model_change_a_bit_of_answers(
    directory: Path, runner: OpenVINOModelRunner, seen_heads: SeenHeads, prompts: list[list[int]]
) -> None:
    plain = OpenVINOModelRunner(directory, threads=2, kv_precision="u8", execution_mode="accuracy")
    plain.allocate(NUM_BLOCKS)
    expected, _ = answers(plain, prompts[:8], 4, "off", num_logprobs=1)
    seen_heads.right = {}
    draft = Draft(seen_heads, BatchSampler(), FREE_STEPS, EagleModel)
    found, requests = answers(runner, prompts[:8], 4, "eagle3", draft, num_logprobs=1)
    assert found == expected
    assert all(request.num_drafted > 0 for request in requests)


def test_features_are_the_mixed_hidden_states_before_the_named_layers(
    directory: Path, runner: OpenVINOModelRunner, heads: EagleHeads, prompts: list[list[int]]
) -> None:
    """The states before a layer are the sums that the exporter named after the layer before. With them as features, the
    compiled heads compute what numpy does."""
    graph = read_paged(ov.Core(), directory).graph
    for layer in (1, 2):
        assert states_before(graph, layer).get_node().get_friendly_name().endswith(f"add1.layer{layer - 1}")
    prompt = prompts[0]
    engine = build_engine(runner, BatchSampler(), NUM_BLOCKS, StepLimits(1, 1024, 1024, is_exact=True))
    request = Request("0", prompt, SamplingParams(2, 0, temperature=0.0), 1)
    engine.scheduler.add(request)
    engine.step()
    store = heads.reader.store
    assert store is not None
    table, slots = np.array(request.block_table, np.int32), np.arange(len(prompt))
    features = store.read(table[slots // store.block_size], slots % store.block_size)
    states = _hidden_states(directory, prompt)
    wanted = np.concatenate(states, -1) @ heads.files.vector("fc.weight").T
    np.testing.assert_allclose(features, wanted, rtol=2**-7, atol=0.02 * np.abs(wanted).max())


def _hidden_states(directory: Path, prompt: Sequence[int]) -> list[Any]:
    """The hidden states of a prompt before each layer, from the graph as it was exported."""
    model = ov.Core().read_model(directory / "openvino_model.xml")
    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    names = ["model.layers.self_attn.add1.layer0", "model.layers.self_attn.add1.layer1"]
    embedding = next(
        port.get_node()
        for node in nodes.values()
        if node.get_type_name() == "Power"
        for port in [node.input_value(0)]
        if port.get_node().get_type_name() == "Gather"
    )
    model.add_outputs([embedding.output(0), *(nodes[name].output(0) for name in names)])
    compiled = ov.Core().compile_model(model, "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    count = len(prompt)
    inputs = {
        "input_ids": np.array([prompt]),
        "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    found = compiled.create_infer_request().infer(inputs)
    return [found[index][0] for index in range(1, 4)]


def test_a_worker_loads_medusa_heads_and_refuses_those_of_another_model(directory: Path, tmp_path: Path) -> None:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    path = write_heads(tmp_path / "heads", config, medusa_tensors(TARGET_SIZE, VOCAB_SIZE, 2, 1))
    worker = worker_config(directory, threads=2, draft_model=path)
    worker = replace(worker, kv_cache_bytes=64 << 20, huge_pages=False, speculation="medusa")
    model = load_model(worker)
    speculation = model.engine.scheduler.speculation
    assert speculation is not None
    assert speculation.model_drafts is not None
    assert (speculation.model_drafts.source, speculation.model_drafts.max_tokens) == (Source.MEDUSA, 2)
    model.close()
    write_heads(path, config, medusa_tensors(TARGET_SIZE - 64, VOCAB_SIZE, 2, 1))
    with pytest.raises(ConfigurationError, match="hidden states of size 512, and this model's have 576"):
        load_model(worker)


def test_a_layer_that_predicts_more_tokens_drafts_and_changes_no_bit_of_answers(
    directory: Path, tmp_path: Path, runner: OpenVINOModelRunner, prompts: list[list[int]]
) -> None:
    """The graph then computes the last hidden states of all tokens."""
    config = mtp_config()
    heads = EagleHeads.read_mtp(
        write_heads(tmp_path / "heads", config, mtp_tensors(config)), partial(num_spare_blocks, TREE)
    )
    target = OpenVINOModelRunner(
        directory, threads=2, kv_precision="u8", execution_mode="accuracy", states=heads.reader, max_adapters=2
    )
    target.allocate(NUM_BLOCKS)
    assert target.adapters is not None
    for slot in range(2):
        target.adapters.write(slot, random_adapter(target.linears, 8, slot))
    layer = heads.compile(directory, 2)
    layer.allocate(NUM_BLOCKS)
    expected, _ = answers(runner, prompts[:3], 3, "off", num_logprobs=1)
    for kind in (MtpModel, partial(MtpTrees, shape=TREE)):
        draft = Draft(layer, BatchSampler(), FREE_STEPS, kind)
        found, requests = answers(target, prompts[:3], 3, "mtp", draft, num_logprobs=1)
        assert found == expected
        assert all(request.num_drafted > 0 for request in requests)
    # The same prompt without an adapter and with two. The layer knows nothing of adapters.
    run = partial(answers, prompts=[prompts[0]] * 3, batch=3, adapter_slots=[-1, 0, 1], temperature=0.0, num_logprobs=1)
    expected, _ = run(runner, speculation="off")
    assert len({tuple(token_ids) for token_ids, *_ in expected}) == 3, "the adapters change answers"
    seen = SeenHeads(layer)
    seen.right = {str(number): token_ids for number, (token_ids, *_) in enumerate(expected)}
    for kind in (MtpModel, partial(MtpTrees, shape=TREE)):
        found, requests = run(target, speculation="mtp", draft=Draft(seen, BatchSampler(), FREE_STEPS, kind))
        assert are_alike(found, expected)
        assert all(request.num_accepted > 0 for request in requests)


def test_a_worker_loads_heads_and_refuses_those_of_another_model(directory: Path, tmp_path: Path) -> None:
    config = eagle_config()
    path = write_heads(tmp_path / "heads", config, eagle_tensors(config))
    worker = worker_config(directory, threads=2, draft_model=path)
    worker = replace(worker, kv_cache_bytes=64 << 20, huge_pages=False)
    model = load_model(worker)
    speculation = model.engine.scheduler.speculation
    assert speculation is not None
    assert speculation.model_drafts is not None
    assert speculation.model_drafts.source is Source.EAGLE3
    # Whether drafts are worth their time on this machine is not the question.
    speculation.model_drafts._model.times = LearnedDraftTimes(FREE_STEPS, 64)
    request = Request("0", list(range(100, 160)), SamplingParams(24, 0, temperature=0.0), 1)
    model.engine.scheduler.add(request)
    while model.engine.scheduler.has_requests:
        model.engine.step()
    assert request.num_generated_tokens == 24
    assert speculation.counters["eagle3_tokens_drafted"] > 0
    model.close()
    other = eagle_config(target_hidden_size=600)
    write_heads(path, other, eagle_tensors(other))
    with pytest.raises(ConfigurationError, match="hidden states of size 600, and this model's have 576"):
        load_model(worker)
