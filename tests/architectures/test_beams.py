"""Beam searches find what those of transformers find, with the same scores."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headrace.worker.request.params import BeamParams, EarlyStopping, SamplingParams
from headrace.worker.request.request import Request
from tests.architectures.exports import PYTHON, beam_searches, exported
from tests.architectures.test_architectures import Served

NAMES = ["llama"]
TOLERANCE = 1e-3
STOPPING = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.ALWAYS, "never": EarlyStopping.NEVER}
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


def asked(case: dict[str, Any], number: int) -> Request:
    beams = BeamParams(case["width"], case["length_penalty"], STOPPING[case["early_stopping"]])
    sampling = SamplingParams(
        case["max_tokens"],
        seed=0,
        temperature=0.0,
        min_tokens=case["min_tokens"],
        stop_token_ids=frozenset(case["stops"]),
        beam_search=beams,
    )
    return Request(f"r{number}", case["prompt"], sampling, 1, arrival_s=float(number))


def is_clear(case: dict[str, Any]) -> bool:
    """Whether rounding can change nothing: no two answers have nearly the same score."""
    return bool(np.all(-np.diff(case["scores"]) > TOLERANCE))


@pytest.mark.parametrize("name", NAMES)
def test_answers_and_scores_are_those_of_transformers(name: str) -> None:
    """All searches run in one batch, as far as there is room."""
    model = Served(exported(NAMES)[name])
    cases = json.loads((beam_searches(NAMES)[name] / "beams.json").read_text())
    requests = [asked(case, number) for number, case in enumerate(cases)]
    outputs = {output.request: output for output in model.run(model.engine(512), requests)}
    num_clear = 0
    for case, request in zip(cases, requests, strict=True):
        hypotheses = outputs[request].hypotheses
        np.testing.assert_allclose([one.score for one in hypotheses], case["scores"], rtol=0, atol=TOLERANCE)
        if is_clear(case):
            num_clear += 1
            assert [list(one.token_ids) for one in hypotheses] == case["answers"], case
    assert num_clear > len(cases) // 2
    assert {len(answer) for case in cases for answer in case["answers"]} > {3, 16}, "answers of several lengths"
