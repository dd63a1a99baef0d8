"""From the name of an embedder or a reranker on a hub to vectors and scores, which are those of transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.architectures.exports import PYTHON, written_encoders
from tests.architectures.texts import made_up_texts
from tests.e2e.serving import Serve, headrace
from tests.hub import Hub, running_hub
from tests.patience import patience

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]
TEXTS = made_up_texts(12)
# Each is exported, which takes half a minute: one of each kind, an encoder and a decoder, unless all are asked for.
ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
EMBEDDERS = ("bert", "qwen3-embedding") if ALL else ("bert",)
RERANKERS = ("bert-reranker", "qwen3-reranker", "logit-score") if ALL else ("qwen3-reranker",)


@pytest.fixture(scope="module")
def written() -> Path:
    return written_encoders([*EMBEDDERS, *RERANKERS])


@pytest.fixture(scope="module")
def hub(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with the checkpoints, and a machine without any model."""
    folder = tmp_path_factory.mktemp("by-name")
    with running_hub() as hub, pytest.MonkeyPatch.context() as patch:
        for name in (*EMBEDDERS, *RERANKERS):
            root = written / name / "checkpoint"
            files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
            hub.add(f"owner/{name}", files)
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(folder / "huggingface"))
        patch.setenv("HEADRACE_CACHE", str(folder / "cache"))
        patch.setenv("HEADRACE_EXPORT_PYTHON", str(PYTHON))
        yield hub


def served(name: str) -> Serve:
    """The model, pulled and served in float32, as the reference computes."""
    pulled = headrace("pull", f"owner/{name}", timeout_s=240)
    assert pulled.returncode == 0, pulled.stderr
    assert "weights in bf16, because fewer bits would not make a model that encodes texts faster" in pulled.stderr
    serve = Serve(f"owner/{name}", "--name", name, "--port", "0", "--execution-mode", "accuracy")
    serve.until_ready()
    return serve


def ask(serve: Serve, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{serve.base_url}{path}", json=body, timeout=patience(60))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_of_an_embedder_by_name_are_those_of_transformers(hub: Hub, written: Path, name: str) -> None:
    serve = served(name)
    try:
        data = ask(serve, "/v1/embeddings", input=TEXTS)["data"]
        with np.load(written / name / "reference.npz") as reference:
            expected = reference["vectors"]
        found = np.array([one["embedding"] for one in data])
        assert found.shape == expected.shape
        assert (found * expected).sum(1).min() > 0.99999
        others = expected @ expected.T - np.eye(len(expected))
        assert others.max() < 0.999, "the reference tells texts apart"
    finally:
        serve.end()


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_of_a_reranker_by_name_are_those_of_transformers(hub: Hub, written: Path, name: str) -> None:
    serve = served(name)
    try:
        results = ask(serve, "/v1/rerank", query=TEXTS[0], documents=TEXTS[1:])["results"]
        with np.load(written / name / "reference.npz") as reference:
            expected = reference["scores"]
        scores = {result["index"]: result["relevance_score"] for result in results}
        assert [scores[i] for i in range(len(expected))] == pytest.approx(expected.tolist(), abs=1e-3)
        assert np.ptp(expected) > 0.01, "the reference tells documents apart"
    finally:
        serve.end()
