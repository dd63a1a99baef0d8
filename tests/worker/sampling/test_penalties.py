"""Tokens that are taken back leave no trace in the counts of penalties."""

from __future__ import annotations

import random

import pytest

from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.penalties import SeenTokens


def test_tokens_of_images_are_not_penalised() -> None:
    sampling = SamplingParams(5, 0, repetition_penalty=1.2)
    seen = SeenTokens(sampling, [7, FIRST_PSEUDO_TOKEN + 3, 2**32 - 1, 2])
    assert seen.token_ids.tolist() == [2, 7]


@pytest.mark.parametrize("seed", range(10))
def test_counts_after_tokens_were_taken_back_are_those_without_them(seed: int) -> None:
    rng = random.Random(seed)
    sampling = SamplingParams(500, 0, presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.2)
    prompt = [rng.randrange(30) for _ in range(20)]
    request = Request("r", prompt, sampling, 0)
    seen = SeenTokens(sampling, prompt)
    for _ in range(100):
        num_tokens = request.num_tokens
        for _ in range(rng.randrange(8)):
            request.token_ids.append(rng.randrange(60))
            if rng.random() < 0.8:  # the last token of a draft is not counted
                seen.count(request)
        num_kept = rng.randint(num_tokens, request.num_tokens)
        seen.take_back(request, num_kept)
        del request.token_ids[num_kept:]
        if rng.random() < 0.5:
            seen.count(request)
            fresh = SeenTokens(sampling, prompt)
            fresh.count(request)
            assert seen.token_ids.tolist() == fresh.token_ids.tolist()
            assert seen.penalties.tolist() == fresh.penalties.tolist()
