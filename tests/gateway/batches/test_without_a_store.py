"""Without a store there are neither files nor batches, and each endpoint says so."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_each_endpoint_says_how_to_get_one(gateway: Any) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/batch_1")):
        answer: httpx.Response = await gateway.http.request(method, path)
        assert answer.status_code == 400
        assert "--batch-store DIR" in answer.json()["error"]["message"]
