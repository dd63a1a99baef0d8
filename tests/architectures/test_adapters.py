"""Requests with adapters get the log-probabilities of transformers with merged weights, regardless of their batch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from headrace.worker.adapters.peft import _tensors, read_peft
from headrace.worker.adapters.reader import Layers, read_adapter
from headrace.worker.engine.build import build_engine
from headrace.worker.kv.cache import GroupBudget
from headrace.worker.kv.groups.recurrent import StateBudget
from headrace.worker.kv.groups.window import WindowBudget
from headrace.worker.model.adapter_memory import floats_of
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import step_limits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from tests.architectures.exports import PYTHON, exported, exported_adapters
from tests.architectures.gguf_model import HEADS, KV_HEADS, write_converted
from tests.worker.adapters.gguf_files import write_gguf_adapter
from tests.worker.conftest import CHEAP_STEPS

# Some keep states of recurrent layers, or only the windows of some layers.
NAMES = ["llama", "qwen2", "gpt2", "phi3-longrope", "lfm2", "gemma3_text"]
TOLERANCE = 1e-4
# Of a model whose weights are in half precision.
HALF_TOLERANCE = 0.05
NUM_BLOCKS, NUM_SLOTS, MAX_RANK = 400, 13, 64
NUM_PARTS, STATES = 200, StateBudget(160, 64)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


class Adapted:
    """A compiled model with all of its adapters in memory, and their reference."""

    def __init__(self, name: str, model_dir: Path | None = None) -> None:
        directory = exported_adapters(NAMES)[name]
        self.runner = OpenVINOModelRunner(
            model_dir or exported(NAMES)[name],
            threads=2,
            kv_precision="f32",
            execution_mode="accuracy",
            max_adapters=NUM_SLOTS,
            has_parts=True,
        )
        self.groups: list[GroupBudget] = []
        if self.runner.has_parts:
            self.groups.append(WindowBudget(self.runner.windows.num_tokens, NUM_PARTS, NUM_PARTS // 2))
        self.runner.allocate(NUM_BLOCKS, NUM_PARTS if self.runner.has_parts else 0)
        if self.runner.state_tables is not None:
            self.groups.append(STATES)
            self.runner.allocate_states(STATES.num_slots)
        with np.load(directory / "reference.npz") as reference:
            self.reference: dict[str, npt.NDArray[np.float32]] = dict(reference)
        self.tokens: list[int] = self.reference.pop("tokens").tolist()
        self.adapters = [adapter for adapter in self.reference if adapter != "base"]
        assert self.runner.adapters is not None
        self.runner.adapters = self.runner.adapters.with_rank(MAX_RANK, [])
        for slot, adapter in enumerate(self.adapters):
            self.runner.adapters.write(slot, read_peft(directory / adapter, self.runner.linears).weights)

    def request(self, adapter: str, length: int, *, with_prompt: bool = True) -> Request:
        sampling = SamplingParams(
            max_tokens=1, seed=0, temperature=0.0, num_logprobs=1, num_prompt_logprobs=0 if with_prompt else None
        )
        slot = -1 if adapter == "base" else self.adapters.index(adapter)
        return Request(f"{adapter}-{length}", self.tokens[:length], sampling, slot + 2, adapter_slot=slot)

    def run(self, requests: list[Request], budget: int) -> dict[str, float]:
        """Run them together; the log-probability of each one's first token, which is the best."""
        limits = step_limits(64, budget, budget, exact_rows=self.runner.exact_rows)
        engine = build_engine(
            self.runner, BatchSampler(), NUM_BLOCKS, limits, step_costs=CHEAP_STEPS, groups=self.groups
        )
        for request in requests:
            engine.scheduler.add(request)
        outputs = []
        while engine.scheduler.has_requests:
            outputs += engine.step()
        return {output.request.request_id: output.logprobs[0].logprob for output in outputs if output.logprobs}


@lru_cache(maxsize=1)
def adapted(name: str) -> Adapted:
    return Adapted(name)


@pytest.mark.parametrize("budget", [96, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_each_row_equals_its_adapter_merged_into_the_weights(name: str, budget: int) -> None:
    """64 requests over eight adapters or more, and none, with prompts of unequal lengths."""
    model = adapted(name)
    choices = ["base", *model.adapters]
    requests = [model.request(choices[number % len(choices)], 60 - number % 50) for number in range(64)]
    first = model.run(requests, budget)
    for request in requests:
        reference = model.reference[request.request_id.partition("-")[0]]
        length = request.num_prompt_tokens
        expected = np.take_along_axis(reference[: length - 1], np.array(model.tokens[1:length])[:, None], 1)[:, 0]
        found = np.array([entry.logprob for entry in request.prompt_logprobs])
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        assert abs(first[request.request_id] - float(reference[length - 1].max())) < TOLERANCE


def test_adapters_make_a_difference() -> None:
    """The comparison above would see a row with another adapter or none."""
    reference = adapted("llama").reference
    for adapter in adapted("llama").adapters:
        others = [values for name, values in reference.items() if name != adapter]
        assert min(np.abs(values - reference[adapter]).max() for values in others) > 100 * TOLERANCE


def test_adapters_of_a_model_converted_from_gguf_are_those_of_transformers(tmp_path: Path) -> None:
    """Its graph has no names, and its file has the rows of queries and keys in another order."""
    directory = exported_adapters(NAMES)["llama"]
    with np.load(directory / "weights.npz") as weights:
        model = Adapted("llama", write_converted(tmp_path, weights))
    requests = [model.request(adapter, 60) for adapter in ["base", *model.adapters]]
    model.run(requests, 1024)
    for request in requests:
        reference = model.reference[request.request_id.partition("-")[0]]
        expected = np.take_along_axis(reference[:59], np.array(model.tokens[1:60])[:, None], 1)[:, 0]
        found = np.array([entry.logprob for entry in request.prompt_logprobs])
        np.testing.assert_allclose(found, expected, rtol=0, atol=HALF_TOLERANCE)


def test_gguf_adapters_are_those_of_transformers(tmp_path: Path) -> None:
    """The adapter of PEFT in llama.cpp's format, in a model that an exporter wrote."""
    model, adapter = adapted("llama"), "a3"
    directory = exported_adapters(NAMES)["llama"]
    weights = directory / adapter / "adapter_model.safetensors"
    tensors = {key: floats_of(values) for key, values in _tensors(weights.read_bytes(), weights).items()}
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    path = write_gguf_adapter(tmp_path / "a.gguf", tensors, alpha=16.0, heads=heads)
    assert model.runner.num_kv_heads == KV_HEADS
    files = read_adapter(path, Layers(model.runner.linears, model.runner.num_kv_heads))
    assert model.runner.adapters is not None
    model.runner.adapters.write(NUM_SLOTS - 1, files.weights)
    request = model.request(adapter, 60)
    request.adapter_slot = NUM_SLOTS - 1
    first = model.run([request], 1024)[request.request_id]
    assert abs(first - float(model.reference[adapter][59].max())) < TOLERANCE
    model.runner.adapters.write(
        NUM_SLOTS - 1, read_peft(directory / model.adapters[NUM_SLOTS - 1], model.runner.linears).weights
    )


def test_slots_of_a_step_follow_its_requests() -> None:
    """One request at a time over slots in any order, and an adapter that is written into a slot used before."""
    model = adapted("llama")
    for slot in (0, 5, 2, 12, 0, 1):
        request = model.request(model.adapters[slot], 40)
        first = model.run([request], 1024)[request.request_id]
        assert abs(first - float(model.reference[model.adapters[slot]][39].max())) < TOLERANCE
    directory = exported_adapters(NAMES)["llama"]
    assert model.runner.adapters is not None
    for other in (3, 0):
        files = read_peft(directory / model.adapters[other], model.runner.linears)
        model.runner.adapters.write(0, files.weights)
        request = model.request(model.adapters[0], 40)
        first = model.run([request], 1024)[request.request_id]
        assert abs(first - float(model.reference[model.adapters[other]][39].max())) < TOLERANCE
