"""Every number of sampling reaches the worker from each API that has it, within its range."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.protos import text_pb2
from headrace.protos.inference_pb2 import SamplingParams
from headrace.protos.sampling_fields import LEAST_TOP_P, NUMBERS

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
}
VALUES = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "top_n_sigma": 1.5,
    "seed": 11,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
}


async def test_the_table_names_fields_of_both_messages() -> None:
    assert NUMBERS.keys() == VALUES.keys()
    assert NUMBERS.keys() <= set(SamplingParams.DESCRIPTOR.fields_by_name)
    assert NUMBERS.keys() <= set(text_pb2.TextParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("path", BODIES)
async def test_each_number_reaches_the_worker(gateway: Any, router: Any, path: str) -> None:
    router.reset()
    response = await gateway.http.post(path, json={**BODIES[path], **VALUES})
    assert response.status_code == 200, response.text
    sampling = router.streams[-1].request.sampling
    assert {name: getattr(sampling, name) for name in VALUES} == VALUES
    response = await gateway.http.post(path, json={"model": "tiny", **BODIES[path]})
    sampling = router.streams[-1].request.sampling
    absent = [name for name in VALUES if not sampling.HasField(name)]
    assert "top_n_sigma" in absent


async def test_each_number_reaches_the_worker_over_kserve(gateway: Any, router: Any) -> None:
    router.reset()
    body = {"text_input": "hi", "parameters": VALUES}
    response = await gateway.http.post("/v2/models/tiny/generate", json=body)
    assert response.status_code == 200, response.text
    sampling = router.streams[-1].request.sampling
    assert {name: getattr(sampling, name) for name in VALUES} == VALUES


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", NUMBERS)
async def test_a_value_out_of_range_is_refused_by_name(gateway: Any, path: str, name: str) -> None:
    number = NUMBERS[name]
    for value in (number.greatest * 2 + 1, number.least * 2 - 1, *([number.least] if number.open_below else [])):
        value = int(value) if name in ("seed", "top_k") else value
        response = await gateway.http.post(path, json={**BODIES[path], name: value})
        assert response.status_code == 400, (name, value)
        assert name in response.json()["error"]["message"]


async def test_values_that_mean_another_on_the_wire(gateway: Any, router: Any) -> None:
    router.reset()
    fields = {"top_k": -1, "top_p": 0, "seed": -1}
    await gateway.http.post("/v1/completions", json={"prompt": "hi", **fields})
    sampling = router.streams[-1].request.sampling
    assert (sampling.top_k, sampling.top_p, sampling.seed) == (0, LEAST_TOP_P, 2**64 - 1)
