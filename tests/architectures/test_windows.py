"""Layers with a sliding window that keep no more than their windows give transformers' log-probabilities."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.engine import fetching as fetching_module
from headrace.worker.engine.engine import Engine
from headrace.worker.engine.fetching import Fetching
from headrace.worker.kv.disk_tier import DiskTier
from headrace.worker.kv.host_memory import HostMemory
from headrace.worker.loading import load_model
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.ranks.group import GroupRunner
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput
from tests.architectures.exports import PYTHON, exported
from tests.architectures.families import FAMILIES
from tests.architectures.test_architectures import (
    NAMES,
    Served,
    assert_close,
    assert_greedy,
    continued,
    scored,
)
from tests.patience import until
from tests.worker.configs import worker_config
from tests.worker.kv.test_window_tiers import is_written

WINDOW = 64
WINDOWED = [name for name in NAMES if FAMILIES[name].config.get("sliding_window") == WINDOW]
# For the windows of three requests and a step of 64 tokens.
NUM_SLOTS = 20
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


@lru_cache(maxsize=1)
def windowed(name: str) -> Served:
    """A model with few slots. What blocks without a part show to the kernels is huge."""
    model = Served(exported(NAMES)[name], num_slots=NUM_SLOTS)
    for port, cache in zip(model.runner._caches, model.runner._cache_views, strict=True):
        if int(port.any_name.rpartition(".")[2]) in model.runner.windows.layers:
            assert len(cache) == NUM_SLOTS + 1
            cache[NUM_SLOTS].view(np.float32)[:] = 1e30
    return model


@pytest.mark.parametrize("name", WINDOWED)
def test_prompts_beyond_the_window_are_those_of_transformers(name: str) -> None:
    """The whole prompt of 2,000 tokens, and shorter ones beside it, in slots for an eighth of it."""
    model = windowed(name)
    engine = model.engine(64)
    requests = [scored(model.tokens), scored(model.tokens[:300]), scored(model.tokens[:20])]
    for request in requests:
        engine.scheduler.add(request)
    most = 0
    while engine.scheduler.has_requests:
        engine.step()
        engine.scheduler.check()
        most = max(most, engine.scheduler.kv_cache.figures().num_held_window_slots)
    assert len(model.tokens) // model.runner.block_size > 2 * NUM_SLOTS
    assert most <= NUM_SLOTS
    for request in requests:
        assert_close(request, model.long)


@pytest.mark.parametrize("name", WINDOWED)
def test_answers_behind_hits_and_preemptions_are_those_of_transformers(name: str) -> None:
    """From an empty cache, from a hit, beside choices that copy a block, again after another prompt took the slots,
    after a preemption, and after the death of a worker."""
    model = windowed(name)
    engine = model.engine(64)
    for num_cached in (0, 256):
        request = continued(model)
        assert_greedy(request, model.run(engine, [request]), model)
        assert request.num_cached_tokens >= num_cached
    choices = [continued(model) for _ in range(3)]
    outputs = model.run(engine, choices)
    for request in choices:
        assert_greedy(request, outputs, model)
    model.run(engine, [Request("other", model.tokens[500:1300], SamplingParams(1, seed=0, temperature=0.0), 1)])
    request = continued(model)
    assert_greedy(request, model.run(engine, [request]), model)
    small = model.engine(64, 2 * (300 // model.runner.block_size + 1))
    in_blocks = 300 // model.runner.block_size * model.runner.block_size + model.runner.block_size - 1
    sampling = SamplingParams(24, seed=0, temperature=0.0)
    other, preempted = Request("other", model.tokens[400:][:in_blocks], sampling, 1), continued(model)
    assert_greedy(preempted, model.run(small, [other, preempted]), model)
    assert preempted.num_preemptions > 0 or len(model.greedy) < 4
    resumed = continued(model, model.greedy[: len(model.greedy) // 2])
    assert_greedy(resumed, model.run(small, [resumed]), model)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", WINDOWED[:1])
def test_a_worker_trims_windows_and_holds_more_tokens(name: str, num_ranks: int) -> None:
    """In 8-bit blocks, with answers that do not change by a bit; whole, and divided among processes."""
    cpu = min(os.sched_getaffinity(0))
    whole = worker_config(
        exported(NAMES)[name],
        kv_cache_bytes=1 << 23,
        threads=1,
        max_num_seqs=8,
        tensor_parallel=num_ranks,
        rank_cpus=((cpu,),) * num_ranks if num_ranks > 1 else (),
    )
    trimmed = replace(whole, trims_windows=True)
    answers, sizes = [], []
    for config in (whole, trimmed):
        model = load_model(config)
        prompt = [int(token) for token in np.random.default_rng(0).integers(3, 500, 700)]
        requests = [Request(str(end), prompt[:end], SamplingParams(40, seed=0), 1) for end in (300, 700)]
        for request in requests:
            model.engine.scheduler.add(request)
        while model.engine.scheduler.has_requests:
            model.engine.step()
        answers.append([list(request.token_ids) for request in requests])
        sizes.append(model.engine.scheduler.kv_cache.pool.num_blocks)
        assert len(model.ranks()) == (num_ranks if num_ranks > 1 else 0)
        if isinstance(model.engine.runner, GroupRunner):
            model.engine.runner.close()
    assert answers[0] == answers[1]
    assert sizes[1] > 1.3 * sizes[0]
    assert model.card.kv_layout
    with pytest.raises(ConfigurationError, match="--cache-eviction is not possible|not possible with --cache-eviction"):
        load_model(replace(trimmed, cache_eviction="on-request"))


@pytest.mark.parametrize("name", [name for name in WINDOWED if name in {"gemma3_text", "gpt_oss"}])
def test_prefixes_come_from_the_disk_with_the_parts_of_windows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer after a hit is that of the worker that computed the prompt, to the last bit."""
    config = worker_config(
        exported(NAMES)[name],
        kv_cache_bytes=1 << 23,
        threads=2,
        max_num_seqs=4,
        trims_windows=True,
        kv_disk=tmp_path,
        kv_disk_gb=0.1,
    )
    monkeypatch.setattr(fetching_module, "_LEAST_PATIENCE_S", 60.0)
    # The model is so small that computing is faster; that is not the question here.
    monkeypatch.setattr(DiskTier, "expected_s", lambda *_: 0.0)
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 500, 700)]
    answers = []
    for is_second in (False, True):
        model = load_model(config)
        disk, scheduler = model.tiers.disk, model.engine.scheduler
        assert disk is not None
        disk.start()
        fetching = Fetching(scheduler, disk)
        request = Request("r", prompt, SamplingParams(40, seed=0, num_logprobs=1), 1)
        if not fetching.begin(request):
            assert not is_second
            scheduler.add(request)
        outputs = run_with(model.engine, fetching)
        answers.append([entry for output in outputs for entry in zip(output.token_ids, output.logprobs, strict=True)])
        if is_second:
            assert request.num_disk_tokens > 600
            assert request.num_cached_tokens >= request.num_disk_tokens
        else:
            pool = scheduler.kv_cache.pool
            pool.release(reversed(pool.take(pool.num_blocks)))
            until(partial(is_written, disk), "the blocks are on the disk", 60)
        disk.stop()
        disk.join(60)
        model.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", [name for name in WINDOWED if name in {"gemma3_text", "gpt_oss"}])
def test_prefixes_and_parts_of_windows_outlive_the_process(name: str) -> None:
    """The answer after a hit is that of the process that computed the prompt, to the last bit."""
    config = worker_config(exported(NAMES)[name], kv_cache_bytes=1 << 23, threads=2, trims_windows=True)
    memory = HostMemory(os.memfd_create("kept"))
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 500, 700)]
    answers, num_cached = [], []
    for _ in range(2):
        model = load_model(config, memory)
        request = Request("r", prompt, SamplingParams(40, seed=0, num_logprobs=1), 1)
        model.engine.scheduler.add(request)
        outputs = []
        while model.engine.scheduler.has_requests or model.engine.has_outputs:
            outputs += model.engine.step()
        model.engine.scheduler.kv_cache.seal()
        answers.append([entry for output in outputs for entry in zip(output.token_ids, output.logprobs, strict=True)])
        num_cached.append(request.num_cached_tokens)
        model.close()
        after = HostMemory(os.memfd_create("kept"))  # as the next process finds it
        os.ftruncate(after.descriptor, memory.size_bytes)
        after.map()[:] = memory.map()
        memory = after
    assert num_cached[0] == 0
    assert num_cached[1] > 600
    assert answers[0] == answers[1]


def run_with(engine: Engine, fetching: Fetching) -> list[RequestOutput]:
    """Run all requests to their ends."""
    outputs = []
    while engine.scheduler.has_requests or engine.has_outputs or fetching.num_held:
        for request in fetching.take_ready():
            engine.scheduler.add(request)
        outputs += engine.step()
    return outputs


def test_a_model_without_windows_has_no_parts() -> None:
    runner = OpenVINOModelRunner(
        exported(NAMES)["llama"], threads=2, kv_precision="f32", execution_mode="accuracy", has_parts=True
    )
    assert not runner.has_parts
    assert runner.part_bytes == 0
