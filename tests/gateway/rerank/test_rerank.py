"""Rerank and score over a fake router whose model counts the tokens that two texts share."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.protos import inference_pb2
from tests.gateway.encoder_model import SCORES, SEPARATOR, VECTORS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("encoders")]
BOS = 0
DOCUMENTS = ["xyz", "abx", "abc", "qrs", "ab"]
# The share of each document's characters that are in "abc".
EXPECTED = [0, 2 / 3, 1, 0, 1]


@pytest.fixture
def ask(gateway: Any) -> Any:
    async def post(path: str = "/v1/rerank", **body: Any) -> Any:
        defaults = {"model": SCORES, "query": "abc", "documents": DOCUMENTS} if path.endswith("rerank") else {}
        return await gateway.http.post(path, json={"model": SCORES, **defaults, **body})

    return post


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/v3/rerank", "/rerank"])
async def test_documents_come_best_first_and_equal_ones_in_order(ask: Any, path: str) -> None:
    answer = (await ask(path)).json()
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [
        (number, pytest.approx(EXPECTED[number])) for number in (2, 4, 1, 0, 3)
    ]
    assert answer["model"] == SCORES
    assert answer["id"].startswith("rerank-req_")
    assert not any("document" in one for one in answer["results"])


async def test_the_best_are_returned_with_their_texts_if_wanted(ask: Any) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    answer = (await ask(documents=documents, top_n=2, return_documents=True)).json()
    assert [one["document"] for one in answer["results"]] == [{"text": "abc"}, {"text": "ab"}]
    assert len((await ask(top_n=99)).json()["results"]) == len(DOCUMENTS)


async def test_a_pair_is_query_separator_and_document_with_special_tokens(ask: Any, router: Any, kit: Any) -> None:
    answer = (await ask(documents=["xé"], priority=2)).json()
    (stream,) = router.streams
    request = stream.request
    query = [BOS, *kit.tokens_of("abc"), SEPARATOR]
    assert list(request.token_ids) == [*query, *kit.tokens_of("xé")]
    assert request.num_first_text_tokens == len(query)
    assert (request.task, request.priority, request.model) == (inference_pb2.TASK_RANK, 2, SCORES)
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}


async def test_the_tokens_around_a_pair_are_those_of_the_card(ask: Any, router: Any, gateway: Any, kit: Any) -> None:
    """A tokenizer may have been converted without them."""
    card = router.card(
        name=SCORES,
        task=inference_pb2.TASK_RANK,
        dimensions=1,
        pair_prefix_token_ids=[1],
        pair_separator_token_ids=[SEPARATOR],
        pair_suffix_token_ids=[2],
    )
    router.cards = [*(one for one in router.cards if one.name != SCORES), card]
    await gateway.models.refresh()
    assert (await ask(documents=["x"])).status_code == 200
    pair = [1, *kit.tokens_of("abc"), SEPARATOR, *kit.tokens_of("x"), 2]
    assert list(router.streams[-1].request.token_ids) == pair


@pytest.mark.parametrize(
    ("separator", "texts"),
    [([], ["Q:abc\nD:xyz"]), ([SEPARATOR], ["Q:abc\nD:", "#xyz"])],
    ids=["as one text", "with tokens between"],
)
async def test_the_texts_of_a_prompt_are_those_of_the_card(
    ask: Any, router: Any, gateway: Any, kit: Any, separator: list[int], texts: list[str]
) -> None:
    card = router.card(
        name=SCORES,
        task=inference_pb2.TASK_RANK,
        dimensions=1,
        pair_prefix_token_ids=[1],
        pair_separator_token_ids=separator,
        pair_suffix_token_ids=[2, 1],
        pair_query_before="Q:",
        pair_query_after="\nD:",
        pair_document_before="#" if separator else "",
    )
    router.cards = [*(one for one in router.cards if one.name != SCORES), card]
    await gateway.models.refresh()
    assert (await ask(documents=["xyz"])).status_code == 200
    whole = [1, *kit.tokens_of(texts[0]), *separator, *kit.tokens_of("".join(texts[1:])), 2, 1]
    assert list(router.streams[-1].request.token_ids) == whole
    assert (await ask(documents=["xyz"], max_tokens_per_doc=2)).status_code == 200
    num_cut = 2 if separator else 1
    assert list(router.streams[-1].request.token_ids) == [*whole[: -2 - num_cut], 2, 1]
    num_first = 1 + len(kit.tokens_of("Q:abc\nD:")) + len(separator)
    assert router.streams[-1].request.num_first_text_tokens == num_first
    assert (await ask(documents=["x" * 300], truncate_prompt_tokens=-1)).status_code == 200
    assert len(router.streams[-1].request.token_ids) == 256
    assert list(router.streams[-1].request.token_ids)[-2:] == [2, 1]


async def test_long_documents_are_cut_if_that_is_wanted(ask: Any, router: Any) -> None:
    assert (await ask(documents=["x" * 300], truncate_prompt_tokens=-1)).status_code == 200
    assert len(router.streams[-1].request.token_ids) == 256
    assert (await ask(documents=["x" * 300], max_tokens_per_doc=7)).status_code == 200
    assert len(router.streams[-1].request.token_ids) == 5 + 7
    assert (await ask(documents=["x" * 300], truncate_prompt_tokens=20)).status_code == 200
    assert len(router.streams[-1].request.token_ids) == 20


@pytest.mark.parametrize("path", ["/v1/score", "/v3/score", "/score"])
async def test_scores_come_in_the_order_of_the_pairs(ask: Any, path: str) -> None:
    answer = (await ask(path, text_1="abc", text_2=DOCUMENTS)).json()
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3, 4]
    assert [one["score"] for one in answer["data"]] == pytest.approx(EXPECTED)
    assert answer["object"] == "list"
    assert {one["object"] for one in answer["data"]} == {"score"}


async def test_texts_are_paired_one_by_one_or_one_with_many(ask: Any) -> None:
    async def scores(first: Any, second: Any) -> list[float]:
        answer = await ask("/v1/score", text_1=first, text_2=second)
        return [one["score"] for one in answer.json()["data"]]

    assert await scores("abc", "abx") == pytest.approx([2 / 3])
    assert await scores(["abc"], ["abx", "ab"]) == pytest.approx([2 / 3, 1])
    assert await scores(["abc", "x"], ["abx", "ab"]) == pytest.approx([2 / 3, 0])


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        ("/v1/rerank", {"documents": []}, "documents", "must have at least one text"),
        ("/v1/rerank", {"documents": ["a"] * 2049}, "documents", "at most 2048 texts"),
        ("/v1/rerank", {"documents": ["a", "x" * 300]}, "documents[1]", "has 305 tokens, and the model 'scores' takes"),
        ("/v1/rerank", {"query": "x" * 300}, "query", "query has 300 tokens"),
        ("/v1/rerank", {"query": "x" * 254}, "query", "254 tokens, which leave no room for a document"),
        ("/v1/rerank", {"documents": ["a", 5]}, "documents[1]", "got 'int'"),
        ("/v1/rerank", {"documents": [{"title": "a"}]}, "documents[0].text", "is required"),
        ("/v1/rerank", {"top_n": 0}, "top_n", ">= 1"),
        ("/v1/rerank", {"max_tokens_per_doc": 0}, "max_tokens_per_doc", ">= 1"),
        ("/v1/rerank", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least 1"),
        ("/v1/rerank", {"model": "tiny"}, "model", "offers chat/completions and completions, not scores of documents"),
        ("/v1/rerank", {"model": VECTORS}, "model", "offers embeddings"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "text_1 has 2 texts, and text_2 has 1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "must have at least one text"),
        ("/v1/score", {"text_1": "a"}, "text_2", "is required"),
    ],
)
async def test_what_cannot_be_ranked_is_refused_with_its_field(
    ask: Any, router: Any, path: str, body: Any, field: str, message: str
) -> None:
    response = await ask(path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert message in error["message"]
    assert not router.streams


async def test_embeddings_of_a_reranker_are_refused(ask: Any, router: Any) -> None:
    response = await ask("/v1/embeddings", model=SCORES, input="a")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
    assert "offers rerank and score" in response.json()["error"]["message"]
    assert not router.streams
