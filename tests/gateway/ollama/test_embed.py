"""Embeddings of Ollama's API over a fake router that answers with vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gateway.encoder_model import VECTORS, vector_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("encoders")]
BOS = 0


@pytest.mark.parametrize("given", ["ab", ["ab"], ["ab", "c"], []])
async def test_texts_become_vectors(gateway: Any, kit: Any, given: Any) -> None:
    body = {"model": f"{VECTORS}:latest", "input": given, "keep_alive": "5m", "options": {"num_thread": 4}}
    response = await gateway.http.post("/api/embed", json=body)
    if not given:
        assert (response.status_code, response.json()) == (400, {"error": "input must have at least one text"})
        return
    answer = response.json()
    texts = [given] if isinstance(given, str) else given
    tokens = [[BOS, *kit.tokens_of(text)] for text in texts]
    assert answer["embeddings"] == [vector_of(token_ids) for token_ids in tokens]
    assert (answer["model"], answer["prompt_eval_count"]) == (VECTORS, sum(map(len, tokens)))
    assert answer["total_duration"] >= answer["load_duration"] > 0


async def test_a_long_text_is_truncated_unless_that_is_unwanted(gateway: Any) -> None:
    body = {"model": VECTORS, "input": "x" * 300}
    assert (await gateway.http.post("/api/embed", json=body)).json()["embeddings"][0][0] == 256
    response = await gateway.http.post("/api/embed", json={**body, "truncate": False})
    assert response.status_code == 400
    assert "input has 301 tokens" in response.json()["error"]


async def test_fewer_dimensions_are_the_first_ones(gateway: Any) -> None:
    body = {"model": VECTORS, "input": "a"}
    whole = (await gateway.http.post("/api/embed", json=body)).json()["embeddings"][0]
    (short,) = (await gateway.http.post("/api/embed", json={**body, "dimensions": 2})).json()["embeddings"]
    assert short == pytest.approx(np.array(whole[:2]) / np.linalg.norm(whole[:2]))


async def test_the_older_path_takes_one_prompt(gateway: Any, kit: Any) -> None:
    response = await gateway.http.post("/api/embeddings", json={"model": VECTORS, "prompt": "ab"})
    assert response.json() == {"embedding": vector_of([BOS, *kit.tokens_of("ab")])}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/api/embed", {"input": "a", "dimensions": 9}, "dimensions must be 1 to 4"),
        ("/api/embed", {"input": "a", "keep_alive": "0" * 300_000}, "keep_alive must be"),
        ("/api/embed", {"input": "a", "keep_alive": "soon"}, "keep_alive must be"),
        ("/api/embed", {"input": "a", "model": "tiny"}, "the model 'tiny' offers chat/completions and completions"),
        ("/api/embeddings", {"prompt": "a", "model": "tiny"}, "not embeddings"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}, "not text generation"),
        ("/api/generate", {"prompt": "a", "raw": True}, "not text generation"),
    ],
)
async def test_what_cannot_be_done_is_named(gateway: Any, path: str, body: Any, message: str) -> None:
    response = await gateway.http.post(path, json={"model": VECTORS, **body})
    assert response.status_code == 400
    assert message in response.json()["error"]


async def test_the_ability_is_shown(gateway: Any) -> None:
    shown = (await gateway.http.post("/api/show", json={"model": VECTORS})).json()
    assert shown["capabilities"] == ["embedding"]
