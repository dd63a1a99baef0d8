"""A small model that sees, in an engine: its answers are transformers', however its pictures get into the cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import step_limits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput
from headrace.worker.sampling.sampler import BatchSampler
from tests.e2e.shapes import MODEL, TOKENS_PER_PICTURE, Question, questions, swapped
from tests.infra.seeing import Seeing
from tests.worker.conftest import CHEAP_STEPS

SENTENCE = "what is in the picture first second ? a and colour shape"
THINGS = "red green blue yellow black purple circle square triangle"
WORDS = ("<pad>", "<s>", "</s>", "<image>", *SENTENCE.split(" "), *THINGS.split(" "))
END = WORDS.index("</s>")
NUM_BLOCKS = 200
TWO = [number for number in range(1, 40, 2) if questions()[number].reference != swapped()[number // 2].reference]


@functools.cache
def model() -> tuple[OpenVINOModelRunner, Seeing]:
    runner = OpenVINOModelRunner(MODEL, threads=1, kv_precision="f32", execution_mode="accuracy")
    runner.allocate(NUM_BLOCKS)
    return runner, Seeing(MODEL)


def engine(budget: int = 256, num_blocks: int = NUM_BLOCKS) -> Engine:
    runner, _ = model()
    limits = step_limits(16 if budget > 20 else 4, budget, budget, exact_rows=runner.exact_rows)
    return build_engine(runner, BatchSampler(), num_blocks, limits, step_costs=CHEAP_STEPS)


def asked(question: Question, name: str = "asked", num_tokens: int = 0) -> Request:
    """A request for the answer, or for so many tokens."""
    _, seeing = model()
    tokens = [WORDS.index("<s>"), *[WORDS.index("<image>")] * TOKENS_PER_PICTURE * len(question.pictures)]
    tokens += [WORDS.index(word) for word in question.text.split(" ")]
    stops = frozenset() if num_tokens else frozenset({END})
    sampling = SamplingParams(num_tokens or 8, seed=0, temperature=0.0, stop_token_ids=stops, num_logprobs=0)
    return seeing.request(name, tokens, question.pictures, sampling)


def text(name: str = "text") -> Request:
    tokens = [WORDS.index(word) for word in ("what", "is", "a", "red", "circle", "and", "a", "blue", "square", "?")]
    return Request(name, tokens * 5, SamplingParams(12, seed=0, temperature=0.0, num_logprobs=0), 1)


def run(engine: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
    outputs = []
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_requests:
        outputs += engine.step()
        engine.scheduler.check()
    return outputs


def answer(request: Request) -> str:
    return " ".join(WORDS[token] for token in request.token_ids[request.num_prompt_tokens :] if token != END)


def values(outputs: Sequence[RequestOutput], request: Request) -> list[float]:
    return [entry.logprob for output in outputs if output.request is request for entry in output.logprobs]


@pytest.mark.parametrize("budget", [10, 19, 256])
def test_answers_are_those_of_the_reference_in_chunks_of_every_size(budget: int) -> None:
    """Many at once, so that steps have parts of several pictures."""
    found = questions()[:24]
    requests = [asked(question, f"r{number}") for number, question in enumerate(found)]
    run(engine(budget), requests)
    assert [answer(request) for request in requests] == [question.reference for question in found]


def test_swapped_pictures_swap_the_answers() -> None:
    """In one step, with the same words and the same pictures."""
    ways = [way for number in TWO for way in (questions()[number], swapped()[number // 2])]
    requests = [asked(question, f"r{number}") for number, question in enumerate(ways)]
    run(engine(), requests)
    assert [answer(request) for request in requests] == [question.reference for question in ways]


def test_a_second_question_hits_the_pictures_and_needs_no_states() -> None:
    one = questions()[1]
    words = one.text.replace("first", "SECOND").replace("second", "first").replace("SECOND", "second")
    used, question = engine(), Question(one.pictures, words, "")
    run(used, [asked(one, "first")])
    again, fresh = asked(question, "again"), asked(question, "fresh")
    for image in again.images:
        image.states = None
    outputs = run(used, [again])
    expected = run(engine(), [fresh])
    assert again.num_cached_tokens >= again.images_end
    assert answer(again) == answer(fresh) != one.reference
    assert values(outputs, again) == pytest.approx(values(expected, fresh), abs=1e-5)


def test_the_same_words_about_another_picture_hit_nothing() -> None:
    one, other = questions()[0], questions()[2]
    used = engine()
    run(used, [asked(one, "one")])
    request = asked(Question(other.pictures, one.text, other.right, ""))
    run(used, [request])
    assert request.num_cached_tokens == 0


def test_what_comes_behind_preemptions_is_the_same() -> None:
    """Requests whose answers do not fit the cache together."""
    found = questions()[1:24:2]
    alone, crowded = [[asked(question, f"r{n}", 40) for n, question in enumerate(found)] for _ in range(2)]
    expected = run(engine(), alone)
    used = engine(num_blocks=20)
    outputs = run(used, crowded)
    assert used.scheduler.stats.preemptions > 0
    assert [request.token_ids for request in crowded] == [request.token_ids for request in alone]
    for one, other in zip(crowded, alone, strict=True):
        assert values(outputs, one) == pytest.approx(values(expected, other), abs=1e-4)


def test_text_beside_pictures_keeps_its_bits() -> None:
    """The same steps once with pictures, once with words in their places."""
    question = questions()[1]
    beside_pictures, beside_words, seeing = text(), text(), asked(question)
    plain = Request("plain", [min(token, END) for token in seeing.token_ids], seeing.sampling, 1)
    one, other = run(engine(40), [seeing, beside_pictures]), run(engine(40), [plain, beside_words])
    assert beside_pictures.token_ids == beside_words.token_ids
    assert values(one, beside_pictures) == values(other, beside_words)


@pytest.mark.parametrize(("option", "slot"), [({"decode_graph": True}, -1), ({"max_adapters": 1}, 0)])
def test_every_graph_of_a_model_takes_images(option: dict[str, Any], slot: int) -> None:
    """That of small decode steps, and that with adapters, of which the slot is empty."""
    runner = OpenVINOModelRunner(MODEL, threads=1, kv_precision="f32", execution_mode="accuracy", **option)
    runner.allocate(NUM_BLOCKS)
    limits = step_limits(4, 24, 24, exact_rows=runner.exact_rows)
    found = questions()[:8]
    requests = [asked(question, f"r{number}") for number, question in enumerate(found)]
    for request in requests:
        request.adapter_slot = slot
    run(build_engine(runner, BatchSampler(), NUM_BLOCKS, limits, step_costs=CHEAP_STEPS), requests)
    assert [answer(request) for request in requests] == [question.reference for question in found]


def test_text_has_the_bits_of_a_graph_without_inputs_for_images(tmp_path: Path) -> None:
    """The same model without its network for images."""
    for path in MODEL.iterdir():
        if not path.name.startswith("openvino_vision"):
            (tmp_path / path.name).symlink_to(path)
    blind = OpenVINOModelRunner(tmp_path, threads=1, kv_precision="f32", execution_mode="accuracy")
    blind.allocate(NUM_BLOCKS)
    assert blind.image_inputs is None
    found = []
    for runner in (blind, model()[0]):
        limits = step_limits(4, 24, 24, exact_rows=runner.exact_rows)
        used = build_engine(runner, BatchSampler(), NUM_BLOCKS, limits, step_costs=CHEAP_STEPS)
        requests = [text("one"), text("other")]
        outputs = run(used, requests)
        found.append([(request.token_ids, values(outputs, request)) for request in requests])
    assert found[0] == found[1]


@pytest.mark.e2e
def test_all_answers_are_those_of_the_reference() -> None:
    found = [*questions(), *swapped()]
    requests = [asked(question, f"r{number}") for number, question in enumerate(found)]
    run(engine(), requests)
    assert [answer(request) for request in requests] == [question.reference for question in found]
