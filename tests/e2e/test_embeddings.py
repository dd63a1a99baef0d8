"""A real encoder, all-MiniLM-L6-v2, served by real processes, against what transformers computes with it."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from tests.architectures.exports import PYTHON, exported_encoders
from tests.architectures.texts import made_up_texts
from tests.e2e.serving import Serve, headrace, until
from tests.patience import patience

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # the model is exported once

ROOT = Path(__file__).parents[2]
SOAK = bool(os.environ.get("HEADRACE_SOAK"))
NUM_TEXTS = 1000 if SOAK else 200
NAME = "minilm"
LEAST_COSINE = 0.9999
_WORKER = (sys.executable, "-m", "headrace.worker")


@pytest.fixture(scope="module")
def model_dir() -> Path:
    if not PYTHON.exists():
        pytest.skip("what exports models is not installed: make test")
    return exported_encoders([NAME]) / NAME


@pytest.fixture(scope="module")
def system(model_dir: Path) -> Iterator[Serve]:
    """The encoder with two workers."""
    serve = Serve(str(model_dir), "--name", NAME, "--port", "0", "--workers", "2", "--threads", "1")
    try:
        serve.until_ready()
        until(lambda: serve.metric("headrace_worker_up") == 2, "two workers")
        yield serve
    finally:
        serve.end()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return made_up_texts(1000)[:NUM_TEXTS]


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> np.ndarray:
    with np.load(model_dir / "reference.npz") as file:
        return np.array(file["vectors"][:NUM_TEXTS])


@pytest.fixture(scope="module")
def client(system: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def embed(client: openai.OpenAI, texts: list[str]) -> np.ndarray:
    """As the client decodes them from base64."""
    answer = client.embeddings.create(model=NAME, input=texts, extra_body={"truncate_prompt_tokens": -1})
    assert [entry.index for entry in answer.data] == list(range(len(texts)))
    return np.array([entry.embedding for entry in answer.data])


def check(vectors: np.ndarray, reference: np.ndarray) -> None:
    """Both have length 1."""
    cosines = (vectors * reference).sum(axis=1)
    assert cosines.min() >= LEAST_COSINE, f"{cosines.min()} at text {cosines.argmin()}"
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-4)


def test_vectors_of_one_request_are_those_of_transformers(
    client: openai.OpenAI, texts: list[str], reference: np.ndarray
) -> None:
    check(embed(client, texts), reference)


def test_vectors_of_64_callers_are_those_of_transformers(
    client: openai.OpenAI, texts: list[str], reference: np.ndarray
) -> None:
    with concurrent.futures.ThreadPoolExecutor(64) as callers:
        vectors = callers.map(lambda text: embed(client, [text])[0], texts)
    check(np.array(list(vectors)), reference)


def test_floats_are_what_base64_holds(client: openai.OpenAI, texts: list[str]) -> None:
    plain = client.embeddings.create(model=NAME, input=texts[:3], encoding_format="float").data
    packed = embed(client, texts[:3])
    for entry, other in zip(plain, packed, strict=True):
        assert entry.embedding == pytest.approx(other.tolist(), abs=2e-3)


def test_fewer_dimensions_keep_the_direction_of_the_first_ones(
    client: openai.OpenAI, texts: list[str], reference: np.ndarray
) -> None:
    short = np.array(client.embeddings.create(model=NAME, input=texts[0], dimensions=64).data[0].embedding)
    expected = reference[0][:64] / np.linalg.norm(reference[0][:64])
    assert float(short @ expected) >= LEAST_COSINE


def test_the_encoder_generates_no_text_and_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"offers embeddings \(POST /v1/embeddings\)"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}])


def test_a_text_that_is_too_long_is_refused_with_its_length(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has 402 tokens.* takes at most 256; split it"):
        client.embeddings.create(model=NAME, input=["a", "word " * 400])


@pytest.mark.parametrize("client_name", ["langchain", "llama_index", "ollama"])
def test_clients_of_other_makers_work_unmodified(system: Serve, client_name: str) -> None:
    python = ROOT / ".make" / "clients" / "bin" / "python"
    if not python.exists():
        pytest.skip("the clients are not installed: make test")
    script = ROOT / "tests" / "e2e" / "clients" / f"embeddings_{client_name}.py"
    environment = {
        **os.environ,
        "HEADRACE_TEST_BASE_URL": f"{system.base_url}/v1",
        "HEADRACE_TEST_MODEL": NAME,
        "PYTHONPATH": str(ROOT),
        "LANGSMITH_TRACING": "false",
        "DO_NOT_TRACK": "1",
    }
    done = subprocess.run(
        [python, script], env=environment, capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_when_a_worker_is_killed_the_vectors_come_from_the_other_one(
    system: Serve, client: openai.OpenAI, texts: list[str], reference: np.ndarray
) -> None:
    """All requests are under way when it dies, and none fails."""
    number = int(system.metric("headrace_worker_requests_finished_total"))
    with concurrent.futures.ThreadPoolExecutor(4) as callers:
        asked = [callers.submit(embed, client, texts) for _ in range(4)]
        until(lambda: system.metric("headrace_worker_requests_finished_total") > number + 20, "vectors")
        os.kill(system.process_of("worker-0")["pid"], signal.SIGKILL)
        for one in asked:
            check(one.result(), reference)
    until(lambda: system.metric("headrace_worker_up") == 2, "the worker's return", 60)


def test_the_serving_command_proposes_what_the_model_can_do(system: Serve) -> None:
    assert any("curl http" in line and "/v1/embeddings" in line for line in system.logs)
    assert not any("headrace chat" in line for line in system.logs)


def test_pull_takes_the_directory_and_serve_finds_it_by_name(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    pulled = headrace("pull", str(model_dir), timeout_s=120)
    assert pulled.returncode == 0, pulled.stderr
    assert "minilm" in headrace("models", "list").stdout


def test_a_flag_for_generation_is_refused_by_a_worker(model_dir: Path) -> None:
    command = [*_WORKER, "--model", str(model_dir), "--listen", "127.0.0.1:0", "--kv-cache-gb", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 2
    assert "has no KV cache: --kv-cache-gb cannot be used with it" in done.stderr
