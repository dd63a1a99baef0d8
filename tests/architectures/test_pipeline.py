"""Small models of many architectures, cut into stages in one process, have the log-probabilities of the whole."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.host.precision import computes_in_bfloat16, core_for
from headrace.worker.model.paging import read_paged
from headrace.worker.pipeline.cutting import find_cuts
from headrace.worker.pipeline.parts import LEAST_TOKENS
from tests.architectures.exports import PYTHON, exported
from tests.architectures.families import FAMILIES, VOCABULARY
from tests.architectures.test_ranks import ALL, EVERY, SHORT, undivided
from tests.architectures.test_ranks import REFUSED as OF_RANKS
from tests.worker.pipeline.local import staged
from tests.worker.ranks.exactness import FAST, assert_exact, whole

# Every run has windows, and learned positions.
NAMES = EVERY if ALL else ["gemma3_text", "gpt2"]
STAGES = (2, 3) if ALL else (2,)
# What a refusal says.
REFUSED = {
    **{
        name: "recurrent layers, whose states would have to be divided too"
        for name in NAMES
        if FAMILIES[name].is_recurrent
    },
    # Its later layers read keys of earlier ones.
    **({"gemma3n_text": "reads more than the hidden states of the layer before it"} if ALL else {}),
}
# Those that can be divided both ways; test_staged.py has one for every run.
DIVIDED = [name for name in NAMES if ALL and name not in REFUSED and OF_RANKS.get(name, (2, ""))[0] > 1]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


def directory_of(name: str) -> Path:
    return exported(EVERY if ALL else list(SHORT))[name]


def num_layers(name: str) -> int:
    """The layers of a family: 2, unless its configuration says another number, under one of these names."""
    config = FAMILIES[name].config
    named = (config.get(key) for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    return next((number for number in named if number is not None), 2)


CASES = [(name, number) for name in NAMES if name not in REFUSED for number in STAGES if number <= num_layers(name)]


@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_a_pipeline_has_the_log_probabilities_of_the_whole(name: str, num_stages: int) -> None:
    of_stages, runner = staged(directory_of(name), num_stages)
    assert len(runner.first_layers) == num_stages - 1
    tokens = np.random.default_rng(7).integers(4, VOCABULARY, 2000).tolist()
    assert_exact(undivided(directory_of(name)), of_stages, [tokens[:20], tokens[:300], *([tokens] if ALL else [])])


@pytest.mark.parametrize("name", [name for name, number in CASES if ALL and number == 2])
def test_a_pipeline_in_performance_mode_has_the_bits_of_the_whole(name: str) -> None:
    """Also with bfloat16 between its stages. test_pipeline.py of the worker has one for every run. Steps are of one
    part: in this mode, some models with experts have other bits in steps of other sizes."""
    of_stages, runner = staged(directory_of(name), 2, precisions=FAST)
    assert runner.bfloat16_states == computes_in_bfloat16(core_for("performance"))
    of_whole = whole(directory_of(name), FAST)
    tokens = np.random.default_rng(7).integers(4, VOCABULARY, 300).tolist()
    for prompt in (tokens[:20], tokens):
        found, expected = (each.log_probabilities(prompt, budget=LEAST_TOKENS) for each in (of_stages, of_whole))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", DIVIDED)
def test_stages_of_ranks_have_the_log_probabilities_of_the_whole(name: str) -> None:
    of_stages, runner = staged(directory_of(name), 2, 2)
    with closing(runner):
        tokens = np.random.default_rng(7).integers(4, VOCABULARY, 300).tolist()
        assert_exact(undivided(directory_of(name)), of_stages, [tokens[:20], tokens])


@pytest.mark.skipif(not REFUSED, reason="HEADRACE_ARCHITECTURES=1 exports models that are refused")
def test_what_cannot_be_cut_is_refused_in_a_sentence() -> None:
    for name, why in REFUSED.items():
        with pytest.raises(ConfigurationError, match=why):
            find_cuts(read_paged(ov.Core(), directory_of(name)).graph)
