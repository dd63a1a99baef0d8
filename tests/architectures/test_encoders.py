"""Encoders of several architectures, exported or converted, give the vectors of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.common.model_files.task import task_of
from headrace.protos.inference_pb2 import TASK_EMBED
from headrace.worker.encoder.files import read_encoder_files
from headrace.worker.encoder.load import warm_up
from headrace.worker.encoder.runner import EncoderRunner
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from tests.architectures.exports import PYTHON, exported_small_encoders

NAMES = ["bert", "xlm-roberta", "qwen3", "modernbert"]
VOCABULARY = 512
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


def load(directory: Path, mode: str) -> EncoderRunner:
    """The encoder, after the checks of a worker that starts."""
    assert task_of(directory) == TASK_EMBED
    files = read_encoder_files(directory, TASK_EMBED, None)
    runner = EncoderRunner(directory, files, threads=2, execution_mode=mode)
    warm_up(runner, files, VOCABULARY)
    return runner


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("mode", "least_cosine"), [("accuracy", 0.999999), ("performance", 0.999)])
def test_vectors_are_those_of_transformers(name: str, mode: str, least_cosine: float) -> None:
    """Alone and in one batch of unequal lengths. Random weights spread bfloat16's rounding more than trained ones."""
    directory = exported_small_encoders(NAMES) / name
    runner = load(directory, mode)
    with np.load(directory / "reference.npz") as reference:
        texts = np.split(reference["tokens"], np.cumsum(reference["lengths"])[:-1])
        expected = reference["vectors"]
    sampling = SamplingParams(max_tokens=0, seed=0)
    requests = [Request(str(number), text.tolist(), sampling, 0) for number, text in enumerate(texts)]
    for found in (runner.encode(requests), np.concatenate([runner.encode([request]) for request in requests])):
        assert found.shape == expected.shape
        assert ((found * expected).sum(axis=1) >= least_cosine).all()


def test_the_reference_tells_texts_apart() -> None:
    for name in NAMES:
        with np.load(exported_small_encoders(NAMES) / name / "reference.npz") as reference:
            vectors = reference["vectors"]
        others = vectors @ vectors.T - np.eye(len(vectors))
        assert others.max() < 0.995
