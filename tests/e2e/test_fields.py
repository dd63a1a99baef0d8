"""Fields that need the engine, with the real model: log-probabilities of prompts, and selection among answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from headrace.client import TextClient
from tests.e2e.serving import Serve
from tests.patience import patience

PROMPT = "The capital of France is"


def complete(system: Serve, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
    response = httpx.post(f"{system.base_url}/v1/completions", json=body, timeout=patience(60))
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_that_is_given_back_as_a_prompt_is_as_probable_as_it_was(system: Serve) -> None:
    answer = complete(system, logprobs=2, return_token_ids=True, ignore_eos=True)
    choice = answer["choices"][0]
    tokens = [*choice["prompt_token_ids"], *choice["token_ids"]]
    scored = complete(system, prompt=tokens, echo=True, logprobs=2, max_tokens=0)
    logprobs = scored["choices"][0]["logprobs"]
    assert scored["choices"][0]["text"] == PROMPT + choice["text"]
    assert scored["usage"]["completion_tokens"] == 0
    assert logprobs["token_logprobs"][0] is None
    num_prompt = len(choice["prompt_token_ids"])
    assert logprobs["tokens"][num_prompt:] == choice["logprobs"]["tokens"]
    # One token after the other, attention reads 8-bit keys and values; in a prompt, those of its own step are exact.
    assert logprobs["token_logprobs"][num_prompt:] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=0.5)
    listed = complete(system, prompt=tokens, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert len(listed) == len(tokens)
    for token, found, logprob in zip(tokens[1:], listed[1:], logprobs["token_logprobs"][1:], strict=True):
        assert found[str(token)]["logprob"] == pytest.approx(logprob, abs=0.05)


def test_a_bad_word_is_not_written(system: Serve) -> None:
    plain = complete(system)["choices"][0]["text"]
    assert "Paris" in plain
    without = complete(system, bad_words=["Paris"])["choices"][0]["text"]
    assert "Paris" not in without


def test_the_best_of_some_answers_is_the_most_probable_of_them(system: Serve) -> None:
    fields = {"temperature": 1.0, "seed": 3, "logprobs": 0}

    def mean(choice: Any) -> float:
        found = choice["logprobs"]["token_logprobs"]
        return float(sum(found) / len(found))

    several = complete(system, n=4, **fields)["choices"]
    best = complete(system, best_of=4, **fields)["choices"]
    assert len(best) == 1
    assert best[0]["text"] == max(several, key=mean)["text"]


def test_each_choice_has_the_least_number_of_tokens(system: Serve) -> None:
    likely = [
        choice["token_ids"][2]
        for choice in complete(system, n=4, temperature=1.0, seed=3, return_token_ids=True)["choices"]
    ]
    fields = {
        "n": 4,
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 12,
        "stop_token_ids": likely,
        "return_token_ids": True,
    }
    free, held = (complete(system, **fields, min_tokens=least)["choices"] for least in (0, 9))
    assert all(len(choice["token_ids"]) <= 3 and choice["finish_reason"] == "stop" for choice in free)
    assert all(len(choice["token_ids"]) >= 9 for choice in held)
    assert all(set(choice["token_ids"][:9]).isdisjoint(likely) for choice in held)


def test_both_edges_give_the_same_answer(system: Serve) -> None:
    with TextClient(system.process_of("gateway")["grpc_address"]) as client:
        answers = client.complete(PROMPT, temperature=0, max_tokens=8, logprobs=1, return_token_ids=True)
        answer = answers.whole()
    over_http = complete(system, logprobs=1, return_token_ids=True)["choices"][0]
    assert (answer.text, answer.token_ids) == (over_http["text"], over_http["token_ids"])
    logprobs = [one.logprob for one in answer.logprobs]
    assert logprobs == pytest.approx(over_http["logprobs"]["token_logprobs"], abs=1e-4)
