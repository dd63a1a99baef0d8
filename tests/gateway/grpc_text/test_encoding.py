"""Embed, Rerank and Score over gRPC, and the same with the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from headrace.client import TextClient
from headrace.gateway.encoding.planning import MAX_TEXTS
from headrace.protos import inference_pb2, text_pb2, text_pb2_grpc
from headrace.protos.status import Reason, StatusError, error_of
from tests.gateway.encoder_model import DIMENSIONS, SCORES, VECTORS, vector_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("encoders")]
BOS = 0
DOCUMENTS = ["xyz", "abx", "abc", "qrs", "ab"]


@pytest_asyncio.fixture(loop_scope="module")
async def text(gateway: Any) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        yield text_pb2_grpc.TextStub(channel)


def texts(*values: str | list[int]) -> list[text_pb2.EmbedText]:
    return [
        text_pb2.EmbedText(text=value)
        if isinstance(value, str)
        else text_pb2.EmbedText(token_ids=text_pb2.TokenIds(ids=value))
        for value in values
    ]


async def refusal(call: Any) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of(caught.value)


async def test_texts_and_tokens_become_vectors(text: Any, router: Any, kit: Any) -> None:
    request = text_pb2.EmbedRequest(model=VECTORS, texts=texts("hé", [5, 6]), priority=3)
    answer = await text.Embed(request, metadata=[("x-request-id", "mine")])
    written = [BOS, *kit.tokens_of("hé")]
    assert [list(one.values) for one in answer.embeddings] == [vector_of(written), vector_of([5, 6])]
    assert answer.usage.prompt_tokens == len(written) + 2
    assert answer.request_id == "mine"
    assert {stream.request.priority for stream in router.streams} == {3}
    assert {stream.request.task for stream in router.streams} == {inference_pb2.TASK_EMBED}


async def test_vectors_are_shortened_and_texts_cut_if_wanted(text: Any, router: Any) -> None:
    request = text_pb2.EmbedRequest(model=VECTORS, texts=texts("a" * 300), dimensions=2, truncate_prompt_tokens=7)
    (vector,) = (await text.Embed(request)).embeddings
    assert len(router.streams[-1].request.token_ids) == 7
    assert len(vector.values) == 2
    assert np.linalg.norm(vector.values) == pytest.approx(1)


async def test_documents_come_best_first(text: Any) -> None:
    fields = {"model": SCORES, "query": "abc", "documents": DOCUMENTS}
    answer = await text.Rerank(text_pb2.RerankRequest(**fields))
    assert [one.index for one in answer.results] == [2, 4, 1, 0, 3]
    assert [one.relevance_score for one in answer.results] == pytest.approx([1, 1, 2 / 3, 0, 0])
    assert not any(one.document for one in answer.results)
    assert answer.usage.prompt_tokens > 0
    best = await text.Rerank(text_pb2.RerankRequest(**fields, top_n=2, return_documents=True))
    assert [one.document for one in best.results] == ["abc", "ab"]


async def test_pairs_are_scored_in_their_order(text: Any, router: Any) -> None:
    request = text_pb2.ScoreRequest(model=SCORES, first_texts=["abc"], second_texts=DOCUMENTS, priority=2)
    answer = await text.Score(request, metadata=[("x-request-id", "mine")])
    assert list(answer.scores) == pytest.approx([0, 2 / 3, 1, 0, 1])
    assert answer.usage.prompt_tokens == sum(len(stream.request.token_ids) for stream in router.streams)
    assert answer.request_id == "mine"
    assert {stream.request.priority for stream in router.streams} == {2}
    paired = await text.Score(text_pb2.ScoreRequest(model=SCORES, first_texts=["ab", "c"], second_texts=["ac", "c"]))
    assert list(paired.scores) == pytest.approx([0.5, 1])


async def test_the_second_text_of_a_pair_is_cut_if_wanted(text: Any, router: Any) -> None:
    request = text_pb2.ScoreRequest(
        model=SCORES, first_texts=["abc"], second_texts=["a" * 300], truncate_prompt_tokens=9
    )
    assert list((await text.Score(request)).scores) == [1]
    assert len(router.streams[-1].request.token_ids) == 9


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (text_pb2.EmbedRequest(model=VECTORS), "texts", "must have at least one text"),
        (text_pb2.EmbedRequest(model=VECTORS, texts=texts("a", [])), "texts[1]", "at least one token"),
        (text_pb2.EmbedRequest(model=VECTORS, texts=[text_pb2.EmbedText()]), "texts[0]", "either text or token_ids"),
        (text_pb2.EmbedRequest(model=VECTORS, texts=texts("a", "x" * 300)), "texts[1]", "takes at most 256"),
        (text_pb2.EmbedRequest(model=VECTORS, texts=texts("a"), dimensions=5), "dimensions", "1 to 4"),
        (text_pb2.EmbedRequest(model=VECTORS, texts=texts("a"), dimensions=0), "dimensions", "1 to 4"),
        (text_pb2.EmbedRequest(model=SCORES, texts=texts("a")), "model", "offers rerank and score"),
        (text_pb2.RerankRequest(model=SCORES, query="a"), "documents", "must have at least one text"),
        (text_pb2.RerankRequest(model=SCORES, query="a", documents=["b"], top_n=0), "top_n", "at least 1"),
        (text_pb2.RerankRequest(model=VECTORS, query="a", documents=["b"]), "model", "offers embeddings"),
        (text_pb2.ScoreRequest(model=SCORES, first_texts=["a"]), "second_texts", "must have at least one text"),
        (
            text_pb2.ScoreRequest(model=SCORES, second_texts=["a"]),
            "first_texts",
            "first_texts takes one text, or as many as second_texts",
        ),
        (
            text_pb2.ScoreRequest(model=SCORES, first_texts=["a", "b"], second_texts=["a"] * 3),
            "first_texts",
            "first_texts has 2 texts, and second_texts has 3",
        ),
        (
            text_pb2.ScoreRequest(model=SCORES, first_texts=["a"], second_texts=["a", "x" * 300]),
            "second_texts[1]",
            "truncate_prompt_tokens",
        ),
        (
            text_pb2.ScoreRequest(model=SCORES, first_texts=["x" * 300], second_texts=["a"]),
            "first_texts[0]",
            "shorten it",
        ),
    ],
)
async def test_what_cannot_be_encoded_is_refused_with_its_field(
    text: Any, router: Any, request_: Any, field: str, message: str
) -> None:
    methods = {
        text_pb2.EmbedRequest: text.Embed,
        text_pb2.RerankRequest: text.Rerank,
        text_pb2.ScoreRequest: text.Score,
    }
    error = await refusal(methods[type(request_)](request_))
    assert (error.field, message in error.message) == (field, True), error.message
    assert not router.streams


async def test_vectors_that_fit_into_no_message_are_refused_before_work(text: Any, router: Any, gateway: Any) -> None:
    router.cards = [router.card(name=VECTORS, task=inference_pb2.TASK_EMBED, dimensions=4096, eos_token_ids=[])]
    await gateway.models.refresh()
    request = text_pb2.EmbedRequest(model=VECTORS, texts=texts(*["a"] * MAX_TEXTS))
    error = await refusal(text.Embed(request))
    assert error.field == "texts"
    assert "send several requests, or fewer dimensions" in error.message
    assert not router.streams


async def test_a_failure_upstream_is_its_status(text: Any, router: Any) -> None:
    async def refuse(_: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.QUEUE_FULL, "no room", retry_after_s=2.0)

    router.script = refuse
    error = await refusal(text.Embed(text_pb2.EmbedRequest(model=VECTORS, texts=texts("a"))))
    assert error.reason is Reason.QUEUE_FULL


async def test_the_client_has_all(gateway: Any) -> None:
    def ask() -> tuple[list[list[float]], list[tuple[int, float]], list[float], list[float]]:
        with TextClient(gateway.grpc_address) as client:
            vectors = client.embed(["a", [5, 6]], model=VECTORS)
            best = client.rerank("abc", DOCUMENTS, model=SCORES, top_n=1)
            one_with_many = client.score("abc", DOCUMENTS[:2], model=SCORES)
            return vectors, best, one_with_many, client.score(["ab", "c"], ["ac", "c"], model=SCORES)

    vectors, best, one_with_many, many = await asyncio.to_thread(ask)
    assert [len(vector) for vector in vectors] == [DIMENSIONS] * 2
    assert best == [(2, pytest.approx(1))]
    assert one_with_many == pytest.approx([0, 2 / 3])
    assert many == pytest.approx([0.5, 1])
