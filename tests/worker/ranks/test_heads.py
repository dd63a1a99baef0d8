"""Heads that draft for divided models, whose ranks are processes. Rank 0 reads hidden states for them, and these are
those of the whole model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind

from headrace.worker.draft_heads.eagle_runner import EagleHeads
from headrace.worker.draft_heads.medusa_runner import MedusaHeads
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.loading import load_model
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.ranks.group import GroupRunner
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.eagle import EagleModel, MtpModel
from headrace.worker.speculation.eagle_trees import EagleTrees, num_spare_blocks
from headrace.worker.speculation.medusa import MedusaModel
from tests.e2e.test_speculation_exact import (
    FREE_STEPS,
    NUM_BLOCKS,
    PROMPT_TOKENS,
    TREE,
    BothStates,
    SeenHeads,
    SeenMedusa,
    answers,
)
from tests.gguf_models import TinyModel
from tests.worker.configs import worker_config
from tests.worker.draft_heads.files import (
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    mtp_config,
    mtp_tensors,
    write_heads,
)
from tests.worker.ranks.exactness import ASKED

# EAGLE-3 heads read three layers; the vocabulary has 288 tokens.
MODEL = TinyModel("qwen2", Kind.Q4_1, layers=3, heads=6, kv_heads=3, spare_tokens=25)
SIZE, VOCAB_SIZE = 256, 288
SHAPE = {"hidden_size": SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE}
FloatArray = npt.NDArray[np.float32]


class Heads(NamedTuple):
    """Random heads of all kinds, in files."""

    eagle: Path
    mtp: Path
    medusa: Path


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    made = tmp_path_factory.mktemp("heads")
    eagle, mtp = eagle_config(**SHAPE, draft_vocab_size=100), mtp_config(**SHAPE)
    medusa = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    return Heads(
        write_heads(made / "eagle", eagle, eagle_tensors(eagle)),
        write_heads(made / "mtp", mtp, mtp_tensors(mtp)),
        write_heads(made / "medusa", medusa, medusa_tensors(SIZE, VOCAB_SIZE, 3, 1)),
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Each ends as it begins."""
    begun = [np.random.default_rng(seed).integers(0, 256, PROMPT_TOKENS - 6).tolist() for seed in range(4)]
    return [[*prompt, *prompt[:6]] for prompt in begun]


def group_of(directory: Path, states: EagleHeads | BothStates) -> GroupRunner:
    """Two processes on the first CPU. The first reads what heads need."""
    runner = GroupRunner(
        directory,
        [[min(os.sched_getaffinity(0))]] * 2,
        threads=1,
        max_context_tokens=4096,
        speculates=True,
        states=states.reader if isinstance(states, EagleHeads) else states,
        most_tokens=1024,
        hangs_after_s=60,
        on_lost=lambda why: None,
        **ASKED,
    )
    runner.allocate(NUM_BLOCKS)
    return runner


class Compiled(NamedTuple):
    """A divided model with heads of two formats."""

    runner: GroupRunner
    eagle: EagleHeads
    seen: SeenHeads
    seen_medusa: SeenMedusa


@pytest.fixture(scope="module")
def compiled(directory: Path, heads: Heads) -> Iterator[Compiled]:
    eagle, medusa = EagleHeads.read(heads.eagle, partial(num_spare_blocks, TREE)), MedusaHeads.read(heads.medusa)
    with closing(group_of(directory, BothStates(eagle.reader, medusa.reader))) as runner:
        of_eagle = eagle.compile(directory, 1, runner)
        of_eagle.allocate(NUM_BLOCKS)
        yield Compiled(runner, eagle, SeenHeads(of_eagle), SeenMedusa(medusa.compile(directory, 1, runner)))


def features(runner: OpenVINOModelRunner, heads: EagleHeads, prompt: list[int]) -> FloatArray:
    """The features `[tokens, size]` of a prompt."""
    engine = build_engine(runner, BatchSampler(), NUM_BLOCKS, StepLimits(1, 1024, 1024, is_exact=True))
    request = Request("0", prompt, SamplingParams(2, 0, temperature=0.0), 1)
    engine.scheduler.add(request)
    engine.step()
    store = heads.reader.store
    table, slots = np.array(request.block_table, np.int32), np.arange(len(prompt))
    return store.read(table[slots // store.block_size], slots % store.block_size)


def features_of_whole(directory: Path, heads: EagleHeads, prompt: list[int]) -> FloatArray:
    """The same of the undivided model."""
    runner = OpenVINOModelRunner(directory, threads=1, states=heads.reader, speculates=True, **ASKED)
    runner.allocate(NUM_BLOCKS)
    heads.compile(directory, 1).allocate(NUM_BLOCKS)
    return features(runner, heads, prompt)


@pytest.mark.parametrize("proposer", ["ngram", "eagle3", "trees", "medusa"])
def test_drafts_change_no_token_of_a_divided_model(compiled: Compiled, prompts: list[list[int]], proposer: str) -> None:
    """Most drafts of heads are right, so answers go on behind accepted ones and behind rejected ones."""
    sampling = {"temperature": 0.8, "num_logprobs": 1}
    without, _ = answers(compiled.runner, prompts, 4, "off", **sampling)
    compiled.seen.right = compiled.seen_medusa.right = {
        str(number): token_ids for number, (token_ids, *_) in enumerate(without)
    }
    compiled.seen.is_second = proposer == "trees"
    draft = {
        "ngram": None,
        "eagle3": Draft(compiled.seen, BatchSampler(), FREE_STEPS, EagleModel),
        "trees": Draft(compiled.seen, BatchSampler(), FREE_STEPS, partial(EagleTrees, shape=TREE)),
        "medusa": Draft(compiled.seen_medusa, BatchSampler(), FREE_STEPS, MedusaModel),
    }[proposer]
    speculation = "eagle3" if proposer == "trees" else proposer
    found, requests = answers(compiled.runner, prompts, 4, speculation, draft, **sampling)
    assert found == without
    assert all(request.num_drafted > 0 for request in requests)
    assert draft is None or all(request.num_drafted > request.num_accepted > 0 for request in requests)


def test_features_are_those_of_the_whole_model(
    directory: Path, compiled: Compiled, heads: Heads, prompts: list[list[int]]
) -> None:
    mine = features(compiled.runner, compiled.eagle, prompts[0])
    assert_alike(mine, features_of_whole(directory, EagleHeads.read(heads.eagle), prompts[0]))


def test_a_layer_that_predicts_more_tokens_reads_the_last_states_of_all_tokens(
    directory: Path, heads: Heads, prompts: list[list[int]]
) -> None:
    """So all ranks compute them, not only for the sampled rows."""
    mtp = EagleHeads.read_mtp(heads.mtp)
    with closing(group_of(directory, mtp)) as runner:
        of_mtp = mtp.compile(directory, 1, runner)
        of_mtp.allocate(NUM_BLOCKS)
        mine = features(runner, mtp, prompts[0])
        without, _ = answers(runner, prompts, 4, "off", num_logprobs=1)
        seen = SeenHeads(of_mtp)
        seen.right = {str(number): token_ids for number, (token_ids, *_) in enumerate(without)}
        draft = Draft(seen, BatchSampler(), FREE_STEPS, MtpModel)
        found, requests = answers(runner, prompts, 4, "mtp", draft, num_logprobs=1)
    assert found == without
    assert all(request.num_drafted > request.num_accepted > 0 for request in requests)
    assert_alike(mine, features_of_whole(directory, EagleHeads.read_mtp(heads.mtp), prompts[0]))


def assert_alike(found: FloatArray, wanted: FloatArray) -> None:
    """Features are the same, as far as sums over ranks and bfloat16 allow."""
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=2**-8 * np.abs(wanted).max())


def test_a_worker_loads_a_divided_model_with_heads(directory: Path, heads: Heads, prompts: list[list[int]]) -> None:
    config = worker_config(
        directory,
        kv_cache_bytes=1 << 23,
        threads=1,
        max_num_seqs=4,
        tensor_parallel=2,
        rank_cpus=((min(os.sched_getaffinity(0)),),) * 2,
        draft_model=heads.eagle,
    )
    model = load_model(config)
    assert isinstance(model.engine.runner, GroupRunner)
    with closing(model.engine.runner):
        request = Request("0", prompts[0], SamplingParams(8, seed=0, temperature=0.0), 1)
        model.engine.scheduler.add(request)
        while model.engine.scheduler.has_requests:
            model.engine.step()
        assert request.num_output_tokens == 8
        assert len(model.ranks()) == 2
