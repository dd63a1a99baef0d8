"""GGUF files of many architectures, converted and served, give transformers' log-probabilities."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.models.convert import convert
from tests.architectures.exports import PYTHON, weights_for_gguf
from tests.architectures.families import CONTEXT
from tests.architectures.gguf_families import GGUF_FAMILIES
from tests.architectures.gguf_writer import write_gguf_of
from tests.architectures.test_architectures import Served, assert_close, assert_greedy, continued, scored

ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
# Without the others, each part of a graph is still in one of them.
SHORT = ("gemma2", "gemma3-scaled", "phi3-longrope", "phi4-mini", "granitemoe", "smollm3", "glm4", "gpt-oss")
NAMES = list(GGUF_FAMILIES) if ALL else list(SHORT)
LONGROPE = [name for name in NAMES if "rope.scaling.attn_factor" in GGUF_FAMILIES[name].metadata]
WINDOWED = [name for name in NAMES if GGUF_FAMILIES[name].window_layers]
NUM_SLOTS = 20
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what computes references"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("gguf"))


class Models:
    """The converted models, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, name: str) -> Path:
        directory = self._root / name
        if not directory.is_dir():
            source = weights_for_gguf(NAMES) / name
            directory.mkdir()
            shutil.copy(source / "reference.npz", directory)
            config = json.loads((source / "transformers.json").read_text())
            with np.load(source / "weights.npz") as weights:
                file = write_gguf_of(GGUF_FAMILIES[name], config, weights, directory / "model.gguf")
            convert(file, directory)
        return directory


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_and_answers_are_those_of_transformers(name: str, models: Models) -> None:
    """Two prompts at once, in chunks; then an answer, from an empty cache and from a hit."""
    model = Served(models[name])
    engine = model.engine(64)
    requests = [scored(model.tokens[:300]), scored(model.tokens[:20])]
    model.run(engine, requests)
    for request in requests:
        assert_close(request, model.short)
    for num_cached in (0, 200):
        request = continued(model)
        assert_greedy(request, model.run(engine, [request]), model)
        assert request.num_cached_tokens >= num_cached


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LONGROPE])
def test_long_prompts_are_those_of_transformers(name: str, models: Models) -> None:
    model = Served(models[name])
    request = scored(model.tokens)
    model.run(model.engine(512), [request])
    assert_close(request, model.long)


@pytest.mark.parametrize("name", LONGROPE)
def test_longer_contexts_get_the_second_set_of_factors(name: str, models: Models) -> None:
    model = Served(models[name], max_context_tokens=CONTEXT)
    assert model.runner.depends_on_context
    requests = [scored(model.tokens), scored(model.tokens[:300])]
    model.run(model.engine(512), requests)
    for request in requests:
        assert_close(request, model.long)


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_with_a_window_keep_no_more_than_it(name: str, models: Models) -> None:
    """The prompt of 2,000 tokens, in slots for an eighth of it."""
    model = Served(models[name], num_slots=NUM_SLOTS)
    windows = model.runner.windows
    assert windows.num_tokens == 64
    assert windows.layers == frozenset(GGUF_FAMILIES[name].window_layers)
    requests = [scored(model.tokens), scored(model.tokens[:300])]
    model.run(model.engine(64), requests)
    for request in requests:
        assert_close(request, model.long)
