"""The engine on the real model: hits and chunking give the cold run's bits; in accuracy mode also the same text.

The seams that remain are in docs/decisions/exactness.md#prompt-chunks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino._offline_transformations import paged_attention_transformation

from headrace.worker.config import ConfigurationError
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.engine.step_cost import StepCostModel
from headrace.worker.model import lm_head as vocabulary_head
from headrace.worker.model import runner as model_runner
from headrace.worker.model.batch import Batch
from headrace.worker.model.fused_projections import fuse_projections
from headrace.worker.model.lm_head import replace_head
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.sampled_rows import gathered
from headrace.worker.model.step_limits import ROOM_FOR_PROMPTS, StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.logits import Logits, float_of
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.weights.file_memory import FileMemory
from tests.e2e.serving import pulled_model
from tests.e2e.small_model import small_model
from tests.worker.conftest import CHEAP_STEPS

NUM_BLOCKS = 600
SOAK = os.environ.get("HEADRACE_SOAK") == "1"
IS_BFLOAT16 = ov.Core().get_property("CPU", "INFERENCE_PRECISION_HINT") == ov.Type.bf16
pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Cold:
    """What a run of one prompt by itself, in steps as large as possible, has computed: logits, keys and values."""

    logits: list[npt.NDArray[np.float32]]
    blocks: list[npt.NDArray[np.generic]]


@dataclass
class RealEngine:
    """Fresh schedulers and pools over one compiled model, whose logits are recorded."""

    runner: OpenVINOModelRunner

    def __post_init__(self) -> None:
        self.logits: dict[Request, list[npt.NDArray[np.float32]]] = {}
        self._cold: dict[tuple[int, int, int], Cold] = {}
        self._sampled: Sequence[Request] = ()
        self._bind, self._run = self.runner.bind, self.runner.run
        self.runner.bind = self._note  # type: ignore[method-assign]
        self.runner.run = self._record  # type: ignore[method-assign]

    def _note(self, batch: Batch, *, keeps_logits: bool) -> None:
        self._sampled = batch.sampled
        self._bind(batch, keeps_logits=keeps_logits)

    def _record(self) -> Logits:
        logits = self._run()
        for request, row in zip(self._sampled, logits.values, strict=True):
            self.logits.setdefault(request, []).append(row.copy())
        return logits

    def fresh(self, *, num_blocks: int = NUM_BLOCKS, budget: int = 256, max_num_seqs: int = 64) -> Engine:
        """An engine with an empty cache and steps of at most `budget` tokens, or fewer if prompts would not be exact on
        this CPU, regardless of their time."""
        budget = min(budget, self.runner.exact_rows)
        max_num_seqs = min(max_num_seqs, budget - ROOM_FOR_PROMPTS)
        limits = StepLimits(max_num_seqs, budget, budget, is_exact=True)
        return build_engine(self.runner, BatchSampler(), num_blocks, limits, step_costs=CHEAP_STEPS)

    def run(self, engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> list[Request]:
        """Run greedy requests to their end, checked after every step."""
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        requests = [Request(str(i), list(prompt), sampling, 1, arrival_s=i) for i, prompt in enumerate(prompts)]
        for request in requests:
            engine.scheduler.add(request)
        while engine.scheduler.has_requests:
            engine.step()
            engine.scheduler.check()
        return requests

    def cold(self, seed: int, length: int, budget: int) -> Cold:
        """The cold run of `prompt_of(seed, length)`, computed once for all tests."""
        key = seed, length, budget
        if key not in self._cold:
            engine, prompt = self.fresh(budget=budget), prompt_of(seed, length)
            (request,) = self.run(engine, [prompt])
            self._cold[key] = Cold(self.logits[request], self.blocks_of(engine, prompt))
        return self._cold[key]

    def blocks_of(self, engine: Engine, prompt: Sequence[int]) -> list[npt.NDArray[np.generic]]:
        """Keys and values of a prompt's full blocks, over all layers, as they are in the cache now."""
        request = Request("look", [*prompt, 0, 0], SamplingParams(max_tokens=1, seed=0), 1)
        engine.scheduler.kv_cache.reuse(request)
        table = list(request.block_table)
        assert len(table) == len(prompt) // self.runner.block_size
        found = [view[table].copy() for view in self.runner._cache_views]
        engine.scheduler.kv_cache.free(request)
        return found


def real_engine(
    execution_mode: str, kv_precision: str = "u8", *, decode_graph: bool = False, directory: Path | None = None
) -> RealEngine:
    runner = OpenVINOModelRunner(
        directory or pulled_model(),
        threads=2,
        kv_precision=kv_precision,
        execution_mode=execution_mode,
        decode_graph=decode_graph,
    )
    runner.allocate(NUM_BLOCKS)
    return RealEngine(runner)


@pytest.fixture(scope="module")
def default() -> RealEngine:
    return real_engine("performance")


@pytest.fixture(scope="module")
def accurate() -> RealEngine:
    """A model with few layers, except in soaks, because float32 products are slow, especially on CPUs with AMX."""
    return real_engine("accuracy", directory=None if SOAK else small_model())


def prompt_of(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(100, 49_000, length).tolist()
    return tokens


def assert_same_bits(left: Sequence[npt.NDArray[np.generic]], right: Sequence[npt.NDArray[np.generic]]) -> None:
    """Compare without pytest's own comparison, which takes minutes for a megabyte."""
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        if one.tobytes() != other.tobytes():
            num_other = np.count_nonzero(np.ascontiguousarray(one) != np.ascontiguousarray(other))
            pytest.fail(f"array {index}: {num_other} of {one.size} values differ")


@pytest.mark.parametrize("length", [65, 100, 333, 1000])
@pytest.mark.parametrize("budget", [37, 70, 97, 256, 640])
def test_any_chunking_gives_the_bits_of_the_whole(default: RealEngine, length: int, budget: int) -> None:
    """Or of the largest steps that are exact on this CPU."""
    if budget > default.runner.exact_rows:
        pytest.skip(f"on this CPU steps are exact up to {default.runner.exact_rows} tokens")
    prompt = prompt_of(length, length)
    cold, cut = default.cold(length, length, 1024), default.fresh(budget=budget)
    (chunked,) = default.run(cut, [prompt])
    assert_same_bits(default.logits[chunked], cold.logits)
    assert_same_bits(default.blocks_of(cut, prompt), cold.blocks)


@pytest.mark.parametrize("shared", [64, 70, 95, 150, 198, 199, 200])
def test_a_hit_gives_the_bits_of_the_cold_run(default: RealEngine, shared: int) -> None:
    prompt = prompt_of(1, 200)
    cold, engine = default.cold(1, 200, 256), default.fresh()
    default.run(engine, [prompt[:shared] + prompt_of(2, 40)])
    (hit,) = default.run(engine, [prompt])
    assert hit.num_cached_tokens == min(shared, 198)
    assert_same_bits(default.logits[hit], cold.logits)
    assert_same_bits(default.blocks_of(engine, prompt), cold.blocks)


def test_what_else_is_in_the_batch_changes_no_bit_of_a_prompt(default: RealEngine) -> None:
    prompt = prompt_of(3, 150)
    (alone,) = default.run(default.fresh(), [prompt])
    together = default.run(default.fresh(budget=100), [*(prompt_of(10 + i, 30 + i) for i in range(20)), prompt])
    assert_same_bits(default.logits[together[-1]], default.logits[alone])


def test_sixteen_identical_prompts_at_once_are_computed_once(default: RealEngine) -> None:
    """1,000 tokens, and for each of the other fifteen the two that a hit leaves."""
    engine = default.fresh()
    default.run(engine, [prompt_of(5, 1000)] * 16)
    assert engine.scheduler.stats.prompt_tokens_computed == 1000 + 15 * 2


def test_a_graph_made_anew_gives_the_bits_of_the_model_as_it_is(
    default: RealEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where query, key and value are three products, and all rows go through the last layer."""
    # How many sequences decode together decides on the bits of some CPUs; that must not depend on times.
    monkeypatch.setattr(StepCostModel, "change_ms", 0.0)
    monkeypatch.setattr(model_runner, "fuse_projections", lambda model, memory: 0)
    monkeypatch.setattr(vocabulary_head, "states_of_rows", lambda states, rows, model: gathered(states, rows))
    plain = real_engine("performance")
    prompts = [prompt_of(50 + i, 3 + 40 * i) for i in range(6)]
    ours, theirs = (engine.run(engine.fresh(budget=100), prompts, 5) for engine in (default, plain))
    assert texts(ours) == texts(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(default.logits[one], plain.logits[other])


def test_the_graph_has_one_product_for_query_key_and_value_and_one_layer_of_sampled_rows(default: RealEngine) -> None:
    model = ov.Core().read_model(pulled_model() / "openvino_model.xml")
    paged_attention_transformation(model)
    num_layers = sum(node.get_type_name() == "PagedAttentionExtension" for node in model.get_ops())
    assert fuse_projections(model, FileMemory([])) == num_layers == 30
    replace_head(model, is_bfloat16=False)
    nodes = model.get_ordered_ops()
    rows = next(node for node in nodes if "rows" in node.output(0).get_names())
    where = [port.get_node().get_friendly_name() for port in rows.output(0).get_target_inputs()]
    names = [node.get_friendly_name() for node in nodes]
    products = [index for index, node in enumerate(nodes) if node.get_type_name() == "MatMul"]
    # What the last attention gives, and the states beside it; then come the layer's other products, and the logits.
    assert len(where) == 2
    assert sum(index > max(map(names.index, where)) for index in products) == 4 + 1


def texts(requests: Sequence[Request]) -> list[list[int]]:
    return [list(request.token_ids[request.num_prompt_tokens :]) for request in requests]


def test_in_accuracy_mode_greedy_text_is_the_same_whatever_happens(accurate: RealEngine) -> None:
    """Alone, in one batch, cut into chunks, after hits, and in a pool so small that requests are preempted."""
    prompts = [prompt_of(100 + i, 20 + 7 * i) for i in range(12)]
    alone = [texts(accurate.run(accurate.fresh(), [prompt], 14))[0] for prompt in prompts]
    engine = accurate.fresh()
    assert texts(accurate.run(engine, prompts, 14)) == alone
    again = accurate.run(engine, prompts, 14)
    assert texts(again) == alone
    assert all(request.num_cached_tokens == request.num_prompt_tokens - 2 for request in again)
    assert texts(accurate.run(accurate.fresh(budget=40, max_num_seqs=12), prompts, 14)) == alone
    tight = accurate.fresh(num_blocks=14)
    assert texts(accurate.run(tight, prompts, 14)) == alone
    assert tight.scheduler.stats.preemptions > 0


def test_with_a_pool_for_eight_sixty_four_requests_get_the_tokens_of_an_ample_one(accurate: RealEngine) -> None:
    prompts = [prompt_of(200 + i, 22 + i % 9) for i in range(64)]
    ample = texts(accurate.run(accurate.fresh(), prompts, 12))
    tight = accurate.fresh(num_blocks=8 * 2)
    assert texts(accurate.run(tight, prompts, 12)) == ample
    assert tight.scheduler.stats.requests_finished == 64
    assert tight.scheduler.stats.preemptions > 0


@pytest.mark.parametrize(("precision", "mode"), [("u4", "performance"), ("bf16", "performance"), ("f32", "accuracy")])
def test_a_hit_gives_the_cold_bits_at_every_precision_of_the_cache(precision: str, mode: str) -> None:
    if precision == "bf16" and not IS_BFLOAT16:
        pytest.skip("this CPU does not compute in bfloat16")
    engine_of = real_engine(mode, precision, directory=None if SOAK else small_model())
    assert engine_of.runner.kv_precision == precision
    prompt = prompt_of(4, 120)
    (cold,) = engine_of.run(engine_of.fresh(), [prompt], 8)
    warm = engine_of.fresh()
    engine_of.run(warm, [prompt[:90]])
    (hit,) = engine_of.run(warm, [prompt], 8)
    assert hit.num_cached_tokens == 90
    assert_same_bits(engine_of.logits[hit], engine_of.logits[cold])


def test_a_graph_of_their_own_for_small_decode_steps_leaves_prompts_their_bits(default: RealEngine) -> None:
    """Both graphs use one cache. Their decode results are nearly the same."""
    one, two = default, real_engine("performance", decode_graph=True)
    prompts = [prompt_of(300 + i, 30 + 40 * i) for i in range(4)]
    engines = one.fresh(), two.fresh()
    ours, theirs = (real.run(engine, prompts, 5) for real, engine in zip((two, one), engines[::-1], strict=True))
    assert two.runner.small_decode > 4 > one.runner.small_decode
    differences = []
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_bits(two.logits[mine][:1], one.logits[other][:1])
        pairs = zip(*texts([mine]), *texts([other]), strict=True)
        num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for left, right in list(zip(two.logits[mine], one.logits[other], strict=True))[1 : num_same + 1]:
            differences.append(np.abs(as_float(left) - as_float(right)).mean())
            assert np.corrcoef(as_float(left).ravel(), as_float(right).ravel())[0, 1] > 0.99
    # Tokens beside a prompt come from the same graph. Where the CPU computes in float32, both graphs are the same.
    assert (max(differences) > 0) == IS_BFLOAT16
    for prompt in prompts:
        assert_same_bits(two.blocks_of(engines[1], prompt), one.blocks_of(engines[0], prompt))


def as_float(logits: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    return float_of(logits) if logits.dtype == np.uint16 else logits.astype(np.float32)


@pytest.mark.parametrize(("precision", "mode"), [("f32", "performance"), ("bf16", "performance"), ("bf16", "accuracy")])
def test_a_cache_in_another_precision_than_the_model_is_computed_in_is_refused(precision: str, mode: str) -> None:
    computes_in = "bf16" if mode == "performance" and IS_BFLOAT16 else "f32"
    if precision == computes_in:
        pytest.skip(f"this CPU computes in {precision}")
    with pytest.raises(ConfigurationError) as refusal:
        real_engine(mode, precision)
    assert f"--kv-precision {precision} is not possible: this CPU computes in {computes_in}" in str(refusal.value)
    assert f"choose u8, u4 or {computes_in}" in str(refusal.value)
