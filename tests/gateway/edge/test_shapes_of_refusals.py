"""Refusals by the edge have the error format of the requested protocol."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headrace.common.stores.api_keys import ApiKey
from headrace.gateway.access.admission import AdmissionControl, OwnLimits
from headrace.gateway.access.limits import LocalLimits
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.protos.status import Reason, StatusError

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
# path -> what is asked there, and the names in its errors
ASKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/chat/completions": ({"messages": HI}, ["error"]),
    "/v1/messages": ({"messages": HI, "max_tokens": 1}, ["type", "error", "request_id"]),
    "/api/chat": ({"messages": HI, "options": {"num_predict": 1}}, ["error"]),
    "/api/generate": ({"prompt": "hi", "options": {"num_predict": 1}}, ["error"]),
    "/generate": ({"inputs": "hi", "parameters": {"max_new_tokens": 1}}, ["error", "error_type"]),
    "/generate_stream": ({"inputs": "hi", "parameters": {"max_new_tokens": 1}}, ["error", "error_type"]),
    "/v2/models/tiny/generate": ({"text_input": "hi", "max_tokens": 1}, ["error"]),
}
TEXTS = ("/api/chat", "/api/generate", "/generate", "/generate_stream", "/v2/models/tiny/generate")
KEY = {"authorization": "Bearer secret"}


class _Ring:
    """A key ring with one key, which allows as many requests per minute as there are paths."""

    def __init__(self) -> None:
        most = len(ASKED)
        self._key = ApiKey(id="k", name="k", sha256="0" * 64, tenant="t", created_s=0, requests_per_minute=most)

    def find(self, secret: str) -> ApiKey:
        if secret != "secret":
            raise StatusError(Reason.UNAUTHENTICATED, "no such key")
        return self._key


def shape_of(path: str, response: Any) -> None:
    """The body is an error in the shape of the path's protocol."""
    error = response.json()
    assert list(error) == ASKED[path][1]
    assert isinstance(error["error"], str) is (path in TEXTS)


async def test_keys_and_their_limits(router: Any, kit: Any) -> None:
    router.reset()
    ring: Any = _Ring()
    controls = EdgeControls(EdgeSettings())
    limits = OwnLimits(LocalLimits(lambda: time.monotonic_ns() // 1000))
    controls.admission = AdmissionControl(keys=ring, limits=limits)
    async with kit.serving_gateway(router.address, controls=controls) as gateway:
        for path, (body, _) in ASKED.items():
            for headers in ({}, {"authorization": "Bearer wrong"}):
                response = await gateway.http.post(path, json={"model": "tiny", **body}, headers=headers)
                assert response.status_code == 401
                shape_of(path, response)
        assert router.streams == []
        for path, (body, _) in ASKED.items():
            sent = body if path.startswith("/v2/") else {"model": "tiny", **body}
            response = await gateway.http.post(path, json=sent, headers=KEY)
            assert response.status_code == 200, (path, response.text)
            assert response.headers["x-ratelimit-limit-requests"] == str(len(ASKED))
        assert {one.request.tenant for one in router.streams} == {"t"}
        for path, (body, _) in ASKED.items():
            response = await gateway.http.post(path, json=body, headers=KEY)
            assert response.status_code == 429
            assert "retry-after" in response.headers
            shape_of(path, response)
        for path in ("/api/tags", "/api/ps", "/info", "/v2/models/tiny"):
            assert (await gateway.http.get(path)).status_code == 401
            assert (await gateway.http.get(path, headers=KEY)).status_code == 200
        for path in ("/api/version", "/v2", "/v2/health/live", "/v2/health/ready"):
            assert (await gateway.http.get(path)).status_code == 200


async def test_bodies_and_methods(gateway: Any) -> None:
    for path in ASKED:
        for content in (b"{", b"[]", b'{"model": 5}', b"\xff"):
            response = await gateway.http.post(path, content=content)
            assert response.status_code == 400
            shape_of(path, response)
        response = await gateway.http.delete(path)
        assert response.status_code in (404, 405)
        shape_of(path, response)
