"""Beam search over HTTP with the openai client, held to a plain search over the unpaged model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import openvino as ov
import pytest

from headrace.worker.grammar.compiler import read_vocabulary
from tests.e2e.serving import BOUND_S, MODEL, Serve, serving
from tests.e2e.small_model import small_model
from tests.patience import patience
from tests.worker.beam_reference import Answer, log_softmax, search

pytestmark = pytest.mark.e2e

PROMPT = "The three largest cities of France are"
EOS = 2
# Both sides compute in f32, in different kernels.
TOLERANCE = 2e-3


class Unpaged:
    """The model as it was exported. The contexts of a step are computed from their beginnings, in one batch."""

    def __init__(self) -> None:
        options = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        path = small_model() / "openvino_model.xml"
        self._request = ov.Core().compile_model(path, "CPU", options).create_infer_request()
        self.after = lru_cache(maxsize=None)(self._after)

    def _after(self, contexts: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.float64]:
        self._request.reset_state()
        tokens = np.array(contexts)
        inputs = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "position_ids": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
            "beam_idx": np.arange(len(contexts), dtype=np.int32),
        }
        return log_softmax(next(iter(self._request.infer(inputs).values()))[:, -1])

    def search(self, prompt: Sequence[int], **options: Any) -> list[Answer]:
        return search(lambda contexts: self.after(tuple(map(tuple, contexts))), prompt, **options)


@pytest.fixture(scope="module")
def unpaged() -> Unpaged:
    return Unpaged()


@pytest.fixture(scope="module")
def accurate() -> Iterator[Serve]:
    """A few layers of the demo model, computed in its own precision."""
    with serving("--execution-mode", "accuracy", model=small_model()) as serve:
        yield serve


@pytest.fixture(scope="module")
def client(accurate: Serve) -> Iterator[openai.OpenAI]:
    url = f"{accurate.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=patience(BOUND_S)) as made:
        yield made


@pytest.fixture(scope="module")
def prompt(accurate: Serve) -> list[int]:
    body = {"prompt": PROMPT, "add_special_tokens": False}
    tokens: list[int] = httpx.post(f"{accurate.base_url}/tokenize", json=body, timeout=patience(BOUND_S)).json()[
        "tokens"
    ]
    return tokens


def check(choices: Sequence[Any], answers: Sequence[Answer], penalty: float = 1.0) -> None:
    """Assert that the choices are these answers with these scores."""
    assert [choice.index for choice in choices] == list(range(len(answers)))
    for choice, answer in zip(choices, answers, strict=True):
        logprobs = choice.logprobs.token_logprobs
        score = sum(logprobs) / len(logprobs) ** penalty
        assert score == pytest.approx(answer.score, abs=TOLERANCE)
        assert choice.token_ids == answer.token_ids
        assert choice.finish_reason == ("stop" if answer.token_ids[-1] == EOS else "length")


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_answers_and_scores_are_those_of_the_unpaged_model(
    client: openai.OpenAI, unpaged: Unpaged, prompt: list[int], width: int
) -> None:
    """The second time, the prompt is cached."""
    answers = unpaged.search(prompt, width=width, max_tokens=8, stops=[EOS])
    for _ in range(2):
        made = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=8,
            n=width,
            logprobs=1,
            extra_body={"use_beam_search": True, "return_token_ids": True},
        )
        check(made.choices, answers)
        assert made.usage is not None
        assert made.usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 2.0])
def test_fields_have_their_effect(
    client: openai.OpenAI, unpaged: Unpaged, prompt: list[int], early_stopping: bool | str, length_penalty: float
) -> None:
    """Answers end at a token that is likely after few others. The two best of four beams are returned."""
    stop = unpaged.search(prompt, width=1, max_tokens=6)[0].token_ids[3]
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    answers = unpaged.search(prompt, width=4, max_tokens=8, stops=[EOS, stop], **options)
    fields = {"use_beam_search": True, "stop_token_ids": [stop], "return_token_ids": True, **options}
    made = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, n=2, best_of=4, temperature=0, extra_body=fields
    )
    found = [(choice.token_ids, choice.finish_reason) for choice in made.choices]  # type: ignore[attr-defined]
    ends = ["stop" if answer.token_ids[-1] in (EOS, stop) else "length" for answer in answers]
    assert found == [(answer.token_ids, end) for answer, end in zip(answers[:2], ends, strict=False)]
    assert made.usage is not None
    assert made.usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)


def test_answers_end_at_texts(client: openai.OpenAI, accurate: Serve, unpaged: Unpaged, prompt: list[int]) -> None:
    """The text is of the best answer without it, and the penalty favours short answers."""
    vocabulary = read_vocabulary(small_model())

    def text_of(token_ids: Sequence[int]) -> str:
        return b"".join(vocabulary.token_bytes[i] for i in token_ids if i not in vocabulary.special_ids).decode(
            errors="replace"
        )

    best = unpaged.search(prompt, width=4, max_tokens=8, stops=[EOS])[0].token_ids
    stop = text_of(best[2:4])[1:-1]
    penalty = {"length_penalty": -1.5}
    answers = unpaged.search(
        prompt,
        width=4,
        max_tokens=8,
        stops=[EOS],
        is_text_complete=lambda token_ids: stop in text_of(token_ids),
        **penalty,
    )
    made = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=8,
        n=4,
        stop=["never", stop],
        extra_body={"use_beam_search": True, "return_token_ids": True, **penalty},
    )
    for choice, answer in zip(made.choices, answers, strict=True):
        text, found, _ = text_of(answer.token_ids).partition(stop)
        assert (choice.token_ids, choice.text) == (answer.token_ids, text)  # type: ignore[attr-defined]
        assert choice.finish_reason == ("stop" if found or answer.token_ids[-1] == EOS else "length")
        assert choice.stop_reason == (stop if found else None)  # type: ignore[attr-defined]
    assert any(stop in text_of(answer.token_ids) for answer in answers), "the case needs an answer that it ends"


def test_a_chat_gives_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 12,
        "n": 3,
        "extra_body": {"use_beam_search": True},
    }
    whole = client.chat.completions.create(**ask)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    ends = ["", "", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert streamed == texts
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_a_best_of_with_a_length_penalty_is_a_beam_search_as_in_openvino_model_server(
    client: openai.OpenAI, unpaged: Unpaged, prompt: list[int]
) -> None:
    answers = unpaged.search(prompt, width=3, max_tokens=6, stops=[EOS], length_penalty=0.5)
    fields = {"length_penalty": 0.5, "return_token_ids": True}
    made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, best_of=3, extra_body=fields)
    assert [choice.token_ids for choice in made.choices] == [answers[0].token_ids]  # type: ignore[attr-defined]


def test_several_prompts_have_a_search_each(client: openai.OpenAI, unpaged: Unpaged, prompt: list[int]) -> None:
    prompts = [prompt, prompt[:-2]]
    answers = [answer for one in prompts for answer in unpaged.search(one, width=2, max_tokens=5, stops=[EOS])]
    fields = {"use_beam_search": True, "return_token_ids": True}
    made = client.completions.create(model=MODEL, prompt=prompts, max_tokens=5, n=2, logprobs=0, extra_body=fields)
    check(made.choices, answers)


def test_contradictions_are_refused_by_name(accurate: Serve, client: openai.OpenAI, prompt: list[int]) -> None:
    for fields, name in (
        ({"temperature": 0.7}, "temperature"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_regex"),
        ({"max_tokens": 8000, "n": 64}, "max_tokens"),
        ({"n": 129}, "n"),
    ):
        extra = {"use_beam_search": True, **fields.pop("extra_body", {})}  # type: ignore[arg-type, dict-item]
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt[:2], "max_tokens": 4, **fields}
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**body, extra_body=extra)
        assert refused.value.param == name, json.dumps(refused.value.body)
    assert httpx.get(f"{accurate.base_url}/health").status_code == 200
