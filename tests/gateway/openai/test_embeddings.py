"""POST /v1/embeddings over a fake router that answers with vectors."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from headrace.gateway.encoding.running import MAX_CALLS
from headrace.protos import inference_pb2
from headrace.protos.status import Reason, StatusError
from tests.gateway.encoder_model import VECTORS, encode, vector_of
from tests.patience import patience

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("encoders")]
PATH = "/v1/embeddings"
BOS = 0


async def ask(gateway: Any, **body: Any) -> httpx.Response:
    return await gateway.http.post(PATH, json={"model": VECTORS, **body})


async def refusal(gateway: Any, **body: Any) -> tuple[int, str, str]:
    """Status, field and message of a request that is refused."""
    response = await ask(gateway, **body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


async def test_a_text_becomes_a_vector_with_its_special_tokens(gateway: Any, router: Any, kit: Any) -> None:
    response = await ask(gateway, input="hé", user="somebody", priority=3)
    assert response.status_code == 200, response.text
    token_ids = [BOS, *kit.tokens_of("hé")]
    assert response.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector_of(token_ids)}],
        "model": VECTORS,
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    (stream,) = router.streams
    request = stream.request
    assert list(request.token_ids) == token_ids
    assert (request.model, request.task, request.priority) == (VECTORS, inference_pb2.TASK_EMBED, 3)
    assert request.sampling.HasField("max_tokens")
    assert request.sampling.max_tokens == 0


@pytest.mark.parametrize("given", [["a", "", "b" * 90], [[5], [6, 7]], [8, 9]])
async def test_each_input_has_its_vector_in_order(gateway: Any, router: Any, kit: Any, given: list[Any]) -> None:
    data = (await ask(gateway, input=given)).json()["data"]
    texts = [given] if isinstance(given[0], int) else given
    tokens = [[BOS, *kit.tokens_of(text)] if isinstance(text, str) else text for text in texts]
    assert [entry["embedding"] for entry in data] == [vector_of(token_ids) for token_ids in tokens]
    assert [entry["index"] for entry in data] == list(range(len(texts)))


async def test_many_texts_are_sent_longest_first_and_a_bounded_number_at_a_time(gateway: Any, router: Any) -> None:
    num_running = most_running = 0
    are_most = asyncio.Event()

    async def slow(fake: Any, stream: Any, send: Any) -> None:
        nonlocal num_running, most_running
        num_running += 1
        most_running = max(most_running, num_running)
        if num_running == MAX_CALLS:
            are_most.set()
        await are_most.wait()
        num_running -= 1
        await encode(fake, stream, send)

    router.script = slow
    texts = ["x" * (1 + i % 150) for i in range(300)]
    response = await ask(gateway, input=texts)
    assert [entry["embedding"][0] for entry in response.json()["data"]] == [len(text) + 1 for text in texts]
    assert most_running == MAX_CALLS
    lengths = [len(stream.request.token_ids) for stream in router.streams]
    assert lengths[:MAX_CALLS] == sorted(lengths, reverse=True)[:MAX_CALLS]


async def test_base64_holds_the_same_numbers(gateway: Any) -> None:
    plain = (await ask(gateway, input="a", encoding_format="float")).json()["data"][0]["embedding"]
    packed = (await ask(gateway, input="a", encoding_format="base64")).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == plain


async def test_fewer_dimensions_are_the_first_ones_at_length_one(gateway: Any) -> None:
    whole = (await ask(gateway, input=[5, 6])).json()["data"][0]["embedding"]
    short = (await ask(gateway, input=[5, 6], dimensions=2)).json()["data"][0]["embedding"]
    assert short == pytest.approx(np.array(whole[:2]) / np.linalg.norm(whole[:2]))
    assert (await ask(gateway, input=[5, 6], dimensions=4)).json()["data"][0]["embedding"] == whole


async def test_a_long_text_is_cut_if_that_is_wanted_and_keeps_its_special_tokens(gateway: Any, router: Any) -> None:
    assert (await ask(gateway, input="x" * 300, truncate_prompt_tokens=-1)).status_code == 200
    assert len(router.streams[-1].request.token_ids) == 256
    assert (await ask(gateway, input="xyz" * 9, truncate_prompt_tokens=3)).status_code == 200
    assert router.streams[-1].request.token_ids[0] == BOS
    assert len(router.streams[-1].request.token_ids) == 3
    assert (await ask(gateway, input="xyz", truncate_prompt_tokens=30)).status_code == 200
    assert len(router.streams[-1].request.token_ids) == 4


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"input": []}, "input", "input must have at least one text"),
        ({"input": ["a"] * 2049}, "input", "takes at most 2048 texts, these are 2049; send several requests"),
        (
            {"input": "x" * 300},
            "input",
            "input has 301 tokens, and the model 'vectors' takes at most 256; split",
        ),
        ({"input": ["a", "x" * 300]}, "input[1]", "set truncate_prompt_tokens to -1"),
        ({"input": [[5], []]}, "input[1]", "must have at least one token"),
        ({"input": [[5], [270]]}, "input[1]", "tokens must be from 0 to 269"),
        ({"input": [[5], [-1]]}, "input[1]", "tokens must be from 0 to 269"),
        ({"input": [5, "a"]}, "input", "a text, a list of texts, a list of tokens or a list of lists of tokens"),
        ({"input": {"text": "a"}}, "input", "got 'object'"),
        ({}, "input", "is required"),
        ({"input": "a", "dimensions": 5}, "dimensions", "must be 1 to 4"),
        ({"input": "a", "dimensions": 0}, "dimensions", "must be 1 to 4"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "model": "tiny"}, "model", "offers chat/completions and completions, not embeddings"),
    ],
)
async def test_what_is_wrong_is_named(gateway: Any, router: Any, body: Any, field: str, message: str) -> None:
    status, param, text = await refusal(gateway, **body)
    assert (status, param) == (400, field)
    assert message in text
    assert not router.streams


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_a_model_that_encodes_generates_no_text(gateway: Any, path: str, body: Any) -> None:
    response = await gateway.http.post(path, json={"model": VECTORS, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "model", "unsupported")
    assert error["message"] == "the model 'vectors' offers embeddings (POST /v1/embeddings), not text generation"


async def test_the_list_of_models_tells_their_task(gateway: Any) -> None:
    listed = (await gateway.http.get("/v1/models")).json()["data"]
    assert {model["id"]: (model["task"], model["dimensions"]) for model in listed} == {
        "tiny": ("generate", None),
        "vectors": ("embed", 4),
        "scores": ("rank", 1),
    }


async def test_the_first_text_that_fails_ends_the_request_and_cancels_the_others(gateway: Any, router: Any) -> None:
    async def fail(fake: Any, stream: Any, send: Any) -> None:
        if len(stream.request.token_ids) == 2:
            raise StatusError(Reason.INTERNAL, "kernels failed")
        await asyncio.sleep(60)

    router.script = fail
    response = await ask(gateway, input=["a", *["bc"] * 9])
    assert (response.status_code, response.json()["error"]["message"]) == (500, "kernels failed")
    others = [stream for stream in router.streams if len(stream.request.token_ids) > 2]
    async with asyncio.timeout(patience(5)):
        for stream in others:
            await stream.cancelled.wait()
    assert len(others) == 9


async def test_a_client_that_goes_away_cancels_all_its_texts(gateway: Any, router: Any) -> None:
    async def hang(fake: Any, stream: Any, send: Any) -> None:
        await asyncio.sleep(60)

    router.script = hang
    asking = asyncio.create_task(ask(gateway, input=["a"] * 100))
    async with asyncio.timeout(patience(5)):
        while len(router.streams) < MAX_CALLS:
            await asyncio.sleep(0.01)
        asking.cancel()
        for stream in list(router.streams):
            await stream.cancelled.wait()
    assert len(router.streams) == MAX_CALLS


async def test_a_text_whose_router_is_lost_is_asked_again(gateway: Any, router: Any) -> None:
    num_lost = 0

    async def lose(fake: Any, stream: Any, send: Any) -> None:
        nonlocal num_lost
        if not num_lost:
            num_lost += 1
            await fake.context_of(stream).abort(grpc.StatusCode.UNAVAILABLE, "gone")
        await encode(fake, stream, send)

    router.script = lose
    response = await ask(gateway, input=[5, 6])
    assert response.json()["data"][0]["embedding"] == vector_of([5, 6])
    assert len(router.streams) == 2
