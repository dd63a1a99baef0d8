"""Small models of many architectures, divided among ranks in one process, have the log-probabilities of the whole."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from headrace.worker.adapters.peft import read_peft
from headrace.worker.config import ConfigurationError
from headrace.worker.loading import load_model
from headrace.worker.model.paging import read_paged
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.ranks.division import divide
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from tests.architectures.exports import PYTHON, exported, exported_adapters
from tests.architectures.families import FAMILIES, VOCABULARY
from tests.worker.configs import worker_config
from tests.worker.ranks.exactness import ASKED, NUM_BLOCKS, TOLERANCE, Computed, Prompt, assert_exact, divided, whole
from tests.worker.ranks.group import Group

ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
# Text models. Every run has plain attention, packed and compressed weights, windows, learned positions, and short
# convolutions.
SHORT = ("llama", "llama-awq", "llama-int4", "gemma3_text", "gpt2", "lfm2")
EVERY = [name for name, family in FAMILIES.items() if family.vision is None and not family.refused]
NAMES = EVERY if ALL else list(SHORT)
# What a refusal says: of all numbers of ranks, or of those above another.
REFUSED = {
    # There are two groups of heads, whose weights are stored by group.
    "qwen3_next": (2, "of a form that cannot be divided"),
    "falcon": (1, "would mix"),
    "olmo2": (2, "k_norm"),
    "olmo3": (2, "k_norm"),
    "deepseek_v2": (1, "more than two dimensions"),
    "deepseek_v3": (1, "more than two dimensions"),
    "gemma3n_text": (1, "would work on a part of its values"),
}
RANKS = (2, 3, 4) if ALL else (2,)
CASES = [(name, num_ranks) for name in NAMES for num_ranks in RANKS]
SERVED = [(name, num_ranks) for name, num_ranks in CASES if num_ranks <= REFUSED.get(name, (4, ""))[0]]
REFUSALS = [case for case in CASES if case not in SERVED]
# Every run has products that are fused in the export, so a rank's outputs are not in one run.
ADAPTED = ("llama", "qwen2", "gpt2", "phi3-longrope", "gemma3_text") if ALL else ("phi3-longrope",)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


@lru_cache(maxsize=1)
def undivided(directory: Path) -> Computed:
    return whole(directory)


@pytest.mark.parametrize(("name", "num_ranks"), SERVED)
def test_a_divided_model_has_the_log_probabilities_of_the_whole(name: str, num_ranks: int) -> None:
    directory = exported(NAMES)[name]
    of_group, group = divided(directory, num_ranks)
    assert group.division.whole_share < 0.05
    tokens = np.random.default_rng(7).integers(4, VOCABULARY, 2000).tolist()
    assert_exact(undivided(directory), of_group, [tokens[:20], tokens[:300], *([tokens] if ALL else [])])


def test_a_worker_divides_recurrent_layers_among_processes() -> None:
    """Prompts of several lengths at once, and again behind what is cached of them, with drafts from earlier text."""
    cpu = min(os.sched_getaffinity(0))
    whole_config = worker_config(
        exported(NAMES)["lfm2"], kv_cache_bytes=1 << 23, threads=1, max_num_seqs=4, execution_mode="accuracy"
    )
    rng = np.random.default_rng(3)
    prompts = [[*piece, *piece] for piece in (rng.integers(4, VOCABULARY, size).tolist() for size in (30, 100, 300))]
    answers, cached = [], []
    for config in (whole_config, replace(whole_config, tensor_parallel=2, rank_cpus=((cpu,),) * 2)):
        model = load_model(config)
        assert isinstance(model.engine.runner, OpenVINOModelRunner)
        with closing(model.engine.runner):
            assert len(model.ranks()) == (2 if config.rank_cpus else 0)
            for _ in range(2):
                requests = [
                    Request(str(number), prompt, SamplingParams(24, seed=0, temperature=0.0), 1)
                    for number, prompt in enumerate(prompts)
                ]
                for request in requests:
                    model.engine.scheduler.add(request)
                while model.engine.scheduler.has_requests:
                    model.engine.step()
                    model.engine.scheduler.check()
                answers.append([list(request.token_ids) for request in requests])
                cached.append([request.num_cached_tokens for request in requests])
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert cached[2:] == cached[:2]
    assert min(cached[1]) > max(cached[0]) == 0


@pytest.mark.parametrize(("name", "num_ranks"), REFUSALS)
def test_what_cannot_be_divided_is_refused_in_a_sentence(name: str, num_ranks: int) -> None:
    model = read_paged(ov.Core(), exported(NAMES)[name]).graph
    with pytest.raises(ConfigurationError, match=REFUSED[name][1]):
        divide(model, num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_a_divided_model_are_those_of_transformers(name: str, num_ranks: int) -> None:
    """Requests with each adapter and without one, in one batch."""
    adapters = exported_adapters(ADAPTED)[name]
    with np.load(adapters / "reference.npz") as file:
        reference = dict(file)
    tokens = reference.pop("tokens")
    names = [adapter for adapter in reference if adapter != "base"][:7]
    group = Group(exported(ADAPTED)[name], num_ranks, max_adapters=len(names), **ASKED)
    group.allocate(NUM_BLOCKS)
    for runner in group.ranks:
        assert runner.adapters is not None
        runner.adapters = runner.adapters.with_rank(64, [])
        for slot, adapter in enumerate(names):
            runner.adapters.write(slot, read_peft(adapters / adapter, runner.linears).weights)
    prompts = [Prompt(tokens.tolist(), slot) for slot in range(-1, len(names))]
    found = Computed(group, group.exact_rows).together(prompts)
    for adapter, mine in zip(["base", *names], found, strict=True):
        wanted = np.take_along_axis(reference[adapter][:-1], tokens[1:, None], 1)[:, 0]
        np.testing.assert_allclose(mine[: len(wanted)], wanted, rtol=0, atol=TOLERANCE)
