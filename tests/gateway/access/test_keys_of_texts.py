"""Texts to encode are charged to the tenant of an API key, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace.common.stores.api_keys import write_keys
from headrace.protos import text_pb2, text_pb2_grpc
from headrace.protos.status import Reason, StatusError, error_of
from tests.gateway.access.test_keys import SECRET, bearer, guarded_gateway, key_of
from tests.gateway.encoder_model import SCORES, VECTORS, cards, encode

pytestmark = pytest.mark.asyncio(loop_scope="module")
# Ten tokens: a special one and nine bytes.
TEXT = "123456789"
NUM_TOKENS = 10
LIMIT = 100


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(kit: Any, router: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """A gateway with a key of LIMIT tokens a minute."""
    router.reset()
    router.script, router.cards = encode, cards(router)
    async with guarded_gateway(kit, router, tmp_path / "keys") as (guarded, ring):
        write_keys(tmp_path / "keys", [key_of(tokens_per_minute=LIMIT)])
        await ring.refresh()
        yield guarded


async def embed(gateway: Any, num_texts: int) -> Any:
    body = {"model": VECTORS, "input": [TEXT] * num_texts, "user": "other"}
    return await gateway.http.post("/v1/embeddings", json=body, headers={**bearer(), "x-tenant": "other"})


async def test_the_tokens_of_all_texts_are_charged_to_the_keys_tenant(gateway: Any, router: Any) -> None:
    answer = await embed(gateway, 4)
    assert answer.json()["usage"]["prompt_tokens"] == 4 * NUM_TOKENS
    assert {stream.request.tenant for stream in router.streams} == {"mill"}
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(LIMIT - 4 * NUM_TOKENS)
    pairs = {"model": SCORES, "query": "12", "documents": ["34", "5"]}
    ranked = await gateway.http.post("/v1/rerank", json=pairs, headers=bearer())
    num_of_pairs = ranked.json()["usage"]["prompt_tokens"]
    assert {stream.request.tenant for stream in router.streams} == {"mill"}
    # A second gives back one or two.
    left = LIMIT - 4 * NUM_TOKENS - num_of_pairs
    assert left <= int(ranked.headers["x-ratelimit-remaining-tokens"]) <= left + 20
    refused = await embed(gateway, 9)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(router.streams) == 6, "a refused text goes nowhere"


async def test_texts_that_failed_cost_nothing(gateway: Any, router: Any) -> None:
    async def refuse(*_: Any) -> None:
        raise StatusError(Reason.INTERNAL, "it broke")

    router.script = refuse
    for _ in range(5):
        assert (await embed(gateway, 6)).status_code == 500
    router.script = encode
    answer = await embed(gateway, 6)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(LIMIT - 6 * NUM_TOKENS)


async def test_grpc_charges_the_same(gateway: Any, router: Any) -> None:
    known = (("authorization", f"Bearer {SECRET}"),)
    texts = [text_pb2.EmbedText(text=TEXT)] * 6
    request = text_pb2.EmbedRequest(model=VECTORS, texts=texts)
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        stub = text_pb2_grpc.TextStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as stranger:
            await stub.Embed(request)
        assert error_of(stranger.value).reason is Reason.UNAUTHENTICATED
        assert (await stub.Embed(request, metadata=known)).usage.prompt_tokens == 6 * NUM_TOKENS
        assert {stream.request.tenant for stream in router.streams} == {"mill"}
        with pytest.raises(grpc.aio.AioRpcError) as over:
            await stub.Embed(request, metadata=known)
        assert error_of(over.value).reason is Reason.QUOTA
        pairs = text_pb2.RerankRequest(model=SCORES, query="1", documents=["2"] * 20)
        with pytest.raises(grpc.aio.AioRpcError) as over:
            await stub.Rerank(pairs, metadata=known)
        assert error_of(over.value).reason is Reason.QUOTA
    assert len(router.streams) == 6
