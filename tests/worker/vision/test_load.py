"""Which models serve images, and the real process with the tower of a small one."""

from __future__ import annotations

import io
import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.protos.status import Reason
from headrace.worker.config import ConfigurationError
from headrace.worker.multimodal.image_inputs import ImageInputs
from headrace.worker.vision.job import EncodeJob
from headrace.worker.vision.load import vision_for
from tests.e2e.shapes import MODEL, TOKENS_PER_PICTURE, questions
from tests.patience import until
from tests.worker.configs import worker_config

HIDDEN_SIZE = json.loads((MODEL / "config.json").read_bytes())["text_config"]["hidden_size"]
INPUTS = ImageInputs(HIDDEN_SIZE, has_positions=False, num_layers=0, keeps_whole=False)
CONFIG = worker_config(MODEL, max_images=3, image_threads=1, image_cache_gb=0.5)


def nothing() -> None:
    """Nobody waits."""


def test_the_process_decodes_and_encodes() -> None:
    bell = threading.Event()
    vision = vision_for(CONFIG, INPUTS, 2, bell.set)
    assert vision is not None
    try:
        assert (vision.limits.max_images, vision.limits.max_view_pixels) == (3, 1_003_520)
        assert vision.max_tokens == (4 << 30) // (4 * HIDDEN_SIZE)
        first, second = questions()[0].pictures[0], questions()[2].pictures[0]
        out = io.BytesIO()
        Image.open(io.BytesIO(first)).save(out, "WEBP", lossless=True)
        files = [first, second, first, out.getvalue(), first[: len(first) // 2], b"no image"]
        jobs = [EncodeJob(str(number).encode(), data, "auto", TOKENS_PER_PICTURE) for number, data in enumerate(files)]
        for job in jobs:
            vision.encoder.encode(job)
        ended: list[EncodeJob] = []

        def have_ended() -> bool:
            ended.extend(vision.encoder.take_ended())
            return len(ended) == len(jobs)

        until(have_ended, "the end of all images", 60)
    finally:
        vision.encoder.close()
    found = [job.states.states for job in jobs[:4] if job.states is not None]
    assert [states.shape for states in found] == [(TOKENS_PER_PICTURE, HIDDEN_SIZE)] * 4
    assert np.allclose(found[0], found[2], atol=1e-4)
    assert np.allclose(found[0], found[3], atol=1e-4), "the same pixels in another format"
    assert not np.allclose(found[0], found[1], atol=1e-2)
    assert [job.reason for job in jobs[4:]] == [Reason.INVALID_FIELD] * 2
    assert "truncated or broken PNG" in jobs[4].problem
    assert "neither PNG, JPEG, WebP nor GIF" in jobs[5].problem


def test_a_model_serves_text_only_when_it_is_told_to() -> None:
    assert vision_for(replace(CONFIG, max_images=0), INPUTS, 1, nothing) is None


def test_a_store_of_states_that_does_not_fit_into_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--image-cache-gb asks for 1000000\.0 GiB, but only"):
        vision_for(replace(CONFIG, image_cache_gb=1e6), INPUTS, 1, nothing)


def test_a_model_without_networks_for_images_says_why_it_serves_text_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert vision_for(CONFIG, None, 1, nothing) is None
    assert "lacks networks for images; pull the model again" in caplog.text


def test_a_family_that_is_not_supported_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "strange_vl", "vision_config": {}}')
    with caplog.at_level(logging.WARNING):
        assert vision_for(replace(CONFIG, model_dir=tmp_path), INPUTS, 1, nothing) is None
    assert "served for its text only" in caplog.text
    assert "strange_vl" in caplog.text
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert vision_for(replace(CONFIG, model_dir=tmp_path), None, 1, nothing) is None
