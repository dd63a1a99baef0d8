"""Small models of many architectures, divided among ranks in one process, have the log-probabilities of the whole."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from headrace.worker.adapters.peft import read_peft
from headrace.worker.config import ConfigurationError
from headrace.worker.model.paging import read_paged
from headrace.worker.ranks.division import divide
from tests.architectures.exports import PYTHON, exported, exported_adapters
from tests.architectures.families import FAMILIES, VOCABULARY
from tests.worker.ranks.exactness import ASKED, NUM_BLOCKS, TOLERANCE, Computed, Prompt, assert_exact, divided, whole
from tests.worker.ranks.group import Group

ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
# Text models. Every run has plain attention, packed and compressed weights, windows, and learned positions.
SHORT = ("llama", "llama-awq", "llama-int4", "gemma3_text", "gpt2")
EVERY = [name for name, family in FAMILIES.items() if family.vision is None and not family.refused]
NAMES = EVERY if ALL else list(SHORT)
# What a refusal says: of all numbers of ranks, or of those above another.
REFUSED = {
    **{name: (1, "recurrent layers") for name, family in FAMILIES.items() if family.is_recurrent},
    "falcon": (1, "would mix"),
    "olmo2": (2, "k_norm"),
    "olmo3": (2, "k_norm"),
    "deepseek_v2": (1, "more than two dimensions"),
    "deepseek_v3": (1, "more than two dimensions"),
    "llama4_text": (1, "of a form that cannot be divided"),
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
