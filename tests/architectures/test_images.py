"""Vision-language models give transformers' log-probabilities for prompts with images, whole and in chunks, beside
text, after prefix hits and preemptions; and their text keeps its bits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.kv.cache import GroupBudget
from headrace.worker.kv.groups.recurrent import StateBudget
from headrace.worker.kv.groups.window import WindowBudget
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import step_limits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput
from headrace.worker.sampling.sampler import BatchSampler
from tests.architectures.exports import PYTHON, exported
from tests.architectures.families import FAMILIES
from tests.architectures.image_processing import PROCESSING
from tests.architectures.image_references import ImagePrompt, prompts_in
from tests.infra.seeing import Seeing
from tests.worker.conftest import CHEAP_STEPS

ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
NAMES = [name for name in PROCESSING if ALL or FAMILIES[name].is_short]
TOLERANCE = 1e-3
NUM_BLOCKS = 300
STATES = StateBudget(num_slots=24, interval=64)
WHOLE = 2048
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


class Model:
    """A compiled model, blind if `directory` lacks its networks for images. With `num_slots`, layers with a sliding
    window keep no more than their windows."""

    def __init__(self, directory: Path, num_slots: int = 0) -> None:
        self.runner = OpenVINOModelRunner(
            directory, threads=2, kv_precision="f32", execution_mode="accuracy", has_parts=num_slots > 0
        )
        self.runner.allocate(NUM_BLOCKS, num_slots)
        self.num_slots = num_slots
        self.states = None if self.runner.state_tables is None else STATES
        if self.states is not None:
            self.runner.allocate_states(self.states.num_slots)

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


class Seen(Model):
    """The same with its tower, and the prompts of its reference."""

    def __init__(self, directory: Path, num_slots: int = 0) -> None:
        super().__init__(directory, num_slots)
        self.seeing, self.prompts = Seeing(directory), prompts_in(directory)

    def scored(self, prompt: ImagePrompt) -> Request:
        """A request for the log-probabilities of a prompt."""
        sampling = SamplingParams(1, seed=0, temperature=0.0, num_prompt_logprobs=0)
        return self.seeing.request("scored", prompt.token_ids, prompt.images, sampling)

    def continued(self, prompt: ImagePrompt, given: Sequence[int] = ()) -> Request:
        """A request for the answer of the reference. A failure may have cut it off after `given`."""
        sampling = SamplingParams(len(prompt.greedy), seed=0, temperature=0.0, num_logprobs=0)
        return self.seeing.request("continued", prompt.token_ids, prompt.images, sampling, resume_token_ids=given)


@lru_cache(maxsize=1)
def seen(name: str) -> Seen:
    return Seen(exported(NAMES)[name])


def run(engine: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
    outputs = []
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_requests:
        outputs += engine.step()
        engine.scheduler.check()
    assert not [output.error for output in outputs if output.error is not None]
    return outputs


def text(name: str = "text") -> Request:
    sampling = SamplingParams(6, seed=0, temperature=0.0, num_logprobs=0, num_prompt_logprobs=0)
    return Request(name, list(range(5, 95)), sampling, 1)


def values(outputs: Sequence[RequestOutput], request: Request) -> list[float]:
    """The log-probabilities of its prompt and of its answer."""
    answer = [entry.logprob for output in outputs if output.request is request for entry in output.logprobs]
    return [*(entry.logprob for entry in request.prompt_logprobs), *answer]


def assert_scored(request: Request, prompt: ImagePrompt) -> None:
    """Its log-probabilities are those of the reference."""
    tokens = np.array(prompt.token_ids)
    is_text = tokens[1:] != prompt.image_token_id
    expected = np.take_along_axis(prompt.logprobs[:-1], tokens[1:, None], 1)[:, 0]
    found = np.array([entry.logprob for entry in request.prompt_logprobs])
    np.testing.assert_allclose(found[is_text], expected[is_text], rtol=0, atol=TOLERANCE)


def assert_continued(request: Request, outputs: Sequence[RequestOutput], prompt: ImagePrompt) -> None:
    """Its tokens and their log-probabilities are those of the reference."""
    assert list(request.token_ids[request.num_prompt_tokens :]) == prompt.greedy
    expected = prompt.greedy_logprobs[len(request.resume_token_ids) :]
    np.testing.assert_allclose(values(outputs, request), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("budget", [24, 100, WHOLE])
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_transformers(name: str, budget: int) -> None:
    """Prompts of one, two and five images run at once, beside a text, so steps have parts of several images."""
    model = seen(name)
    requests = [model.scored(prompt) for prompt in model.prompts]
    run(model.engine(budget), [*requests, text()])
    for request, prompt in zip(requests, model.prompts, strict=True):
        assert_scored(request, prompt)


@pytest.mark.parametrize("name", NAMES)
def test_answers_after_hits_are_those_of_transformers(name: str) -> None:
    model = seen(name)
    engine = model.engine(WHOLE)
    for _ in range(2):
        requests = [model.continued(prompt) for prompt in model.prompts]
        outputs = run(engine, requests)
        for request, prompt in zip(requests, model.prompts, strict=True):
            assert_continued(request, outputs, prompt)
    assert all(request.num_cached_tokens for request in requests if request.num_prompt_tokens > 64)


@pytest.mark.parametrize("name", NAMES)
def test_answers_after_preemptions_and_failures_are_those_of_transformers(name: str) -> None:
    model = seen(name)
    prompt = max(model.prompts, key=lambda prompt: len(prompt.token_ids))
    block_size = model.runner.block_size
    num_blocks = 1 + -(-(len(prompt.token_ids) + len(prompt.greedy)) // block_size)
    # It needs another block before the second request has ended.
    other = Request("other", [7] * (block_size - 1), SamplingParams(24, seed=0, temperature=0.0), 1)
    preempted = model.continued(prompt)
    outputs = run(model.engine(WHOLE, num_blocks), [other, preempted])
    assert preempted.num_preemptions > 0 or len(prompt.greedy) < 4
    assert_continued(preempted, outputs, prompt)
    lost = model.continued(prompt)
    engine = model.engine(WHOLE)
    engine.scheduler.add(lost)
    outputs = []
    while lost.num_generated_tokens < 1:
        outputs += engine.step()
    engine.scheduler._preempt(lost)
    engine.scheduler.kv_cache.forget_all()  # others were given its blocks
    outputs += run(engine, [])
    assert lost.num_preemptions == 1
    assert_continued(lost, outputs, prompt)
    resumed = model.continued(prompt, prompt.greedy[: len(prompt.greedy) // 2])
    assert_continued(resumed, run(model.engine(WHOLE), [resumed, text()]), prompt)


@pytest.mark.parametrize("name", NAMES)
def test_answers_after_hits_that_end_at_borders_of_images_are_those_of_transformers(name: str) -> None:
    """An earlier prompt was the same up to a border of an image, and has other text behind it."""
    model = seen(name)
    block_size = model.runner.block_size
    prompt = max(model.prompts, key=lambda prompt: len(prompt.token_ids))
    places = model.continued(prompt).images
    borders = [(number, image.first) for number, image in enumerate(places)]
    borders += [(number + 1, image.end) for number, image in enumerate(places)]
    sampling = SamplingParams(1, seed=0, temperature=0.0)
    hits = []
    for num_images, border in borders:
        engine = model.engine(WHOLE)
        tokens = [*prompt.token_ids[:border], *[9] * (2 * block_size)]
        run(engine, [model.seeing.request("earlier", tokens, prompt.images[:num_images], sampling)])
        request = model.continued(prompt)
        outputs = run(engine, [request])
        assert_continued(request, outputs, prompt)
        assert request.num_cached_tokens <= border
        assert request.whole_until(request.num_cached_tokens) == request.num_cached_tokens
        hits.append(request.num_cached_tokens)
    # States of recurrent layers are kept in few places.
    assert max(hits) > block_size or model.states is not None


@pytest.mark.parametrize("name", NAMES)
def test_text_beside_images_keeps_its_bits(name: str) -> None:
    """The same steps once with images, once with a text of the same length in their place."""
    model = seen(name)
    prompt = model.prompts[1]
    found = []
    for other in (
        model.scored(prompt),
        Request("words", [9] * len(prompt.token_ids), model.scored(prompt).sampling, 1),
    ):
        beside = text()
        found.append((values(run(model.engine(100), [other, beside]), beside), list(beside.token_ids)))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
def test_text_has_the_bits_of_a_graph_without_inputs_for_images(name: str, tmp_path: Path) -> None:
    directory = exported(NAMES)[name]
    for path in directory.iterdir():
        if not path.name.startswith("openvino_vision"):
            (tmp_path / path.name).symlink_to(path)
    blind = Model(tmp_path)
    assert blind.runner.image_inputs is None
    found = []
    for model in (blind, seen(name)):
        request = text()
        found.append((values(run(model.engine(24), [request]), request), list(request.token_ids)))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_bit_of_answers_about_images(name: str) -> None:
    """Every fourth token of the drafts is wrong."""
    model = seen(name)
    found = []
    prediction: list[int] = []
    for speculation in ("off", "ngram"):
        prompt = model.prompts[1]
        sampling = SamplingParams(24, seed=0, temperature=0.0, num_logprobs=0)
        request = model.seeing.request("r", prompt.token_ids, prompt.images, sampling, prediction=prediction)
        outputs = run(model.engine(WHOLE, speculation=speculation), [request])
        found.append((values(outputs, request), list(request.token_ids)))
        prediction = list(request.token_ids[request.num_prompt_tokens :])
        prediction[::4] = [(token + 1) % 500 for token in prediction[::4]]
    assert request.num_accepted > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [name for name in NAMES if name == "gemma3"])
def test_layers_that_keep_no_more_than_their_windows_give_the_same(name: str) -> None:
    model = Seen(exported(NAMES)[name], num_slots=80)
    requests = [model.scored(prompt) for prompt in model.prompts]
    run(model.engine(64), requests)
    for request, prompt in zip(requests, model.prompts, strict=True):
        assert_scored(request, prompt)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_at_the_end_of_a_prompt_does_not_see_one_that_begins_the_next(name: str) -> None:
    """They follow each other in the step's tokens."""
    model = seen(name)
    prompt = model.prompts[0]
    is_image = np.array(prompt.token_ids) == prompt.image_token_id
    first, end = int(np.flatnonzero(is_image)[0]), int(np.flatnonzero(is_image)[-1]) + 1
    sampling = SamplingParams(4, seed=0, temperature=0.0, num_logprobs=0)
    parts = (prompt.token_ids[:end], prompt.token_ids[first:])
    alone, together = (
        [model.seeing.request("part", part, prompt.images, sampling) for part in parts] for _ in range(2)
    )
    expected = [values(run(model.engine(WHOLE), [request]), request) for request in alone]
    outputs = run(model.engine(WHOLE), together)
    for request, of_one in zip(together, expected, strict=True):
        np.testing.assert_allclose(values(outputs, request), of_one, rtol=0, atol=1e-4)
