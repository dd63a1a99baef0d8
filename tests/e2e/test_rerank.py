"""A reranker, served by real processes, against what transformers computes with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.architectures.exports import PYTHON, exported_encoders
from tests.architectures.texts import made_up_texts
from tests.e2e.serving import Serve
from tests.patience import patience

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # the model is exported once

NAME = "ranker"


@pytest.fixture(scope="module")
def model_dir() -> Path:
    if not PYTHON.exists():
        pytest.skip("what exports models is not installed: make test")
    return exported_encoders([NAME]) / NAME


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> np.ndarray:
    """Scores [queries, documents]."""
    with np.load(model_dir / "reference.npz") as file:
        return np.array(file["scores"])


@pytest.fixture(scope="module")
def system(model_dir: Path) -> Iterator[Serve]:
    """In float32, as the reference."""
    serve = Serve(str(model_dir), "--name", NAME, "--port", "0", "--execution-mode", "accuracy")
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.end()


def ask(system: Serve, path: str, **body: Any) -> Any:
    response = httpx.post(f"{system.base_url}{path}", json={"truncate_prompt_tokens": -1, **body}, timeout=patience(60))
    assert response.status_code == 200, response.text
    return response.json()


def test_documents_are_in_the_order_of_transformers(system: Serve, reference: np.ndarray) -> None:
    num_queries, num_documents = reference.shape
    texts = made_up_texts(num_queries + num_documents)
    for query, expected in zip(texts, reference, strict=False):
        results = ask(system, "/v1/rerank", query=query, documents=texts[num_queries:])["results"]
        scores = {result["index"]: result["relevance_score"] for result in results}
        assert [scores[i] for i in range(num_documents)] == pytest.approx(expected.tolist(), abs=1e-4)
        assert [result["index"] for result in results] == np.argsort(-expected, kind="stable").tolist()


def test_pairs_have_the_scores_of_transformers(system: Serve, reference: np.ndarray) -> None:
    num_queries, num_documents = reference.shape
    texts = made_up_texts(num_queries + num_documents)
    queries, documents = texts[:num_queries], texts[num_queries : 2 * num_queries]
    data = ask(system, "/v1/score", text_1=queries, text_2=documents)["data"]
    expected = [reference[i, i] for i in range(num_queries)]
    assert [one["score"] for one in data] == pytest.approx(expected, abs=1e-4)


def test_the_reranker_says_what_it_offers(system: Serve) -> None:
    response = httpx.post(f"{system.base_url}/v1/embeddings", json={"input": "a"}, timeout=patience(5))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported")
    assert "offers rerank and score (POST /v1/rerank, /v1/score), not embeddings" in response.text
    assert any("/v1/rerank" in line for line in system.logs), "the serving command proposes it"
