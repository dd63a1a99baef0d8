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
    "typical_p": 0.75,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.25,
    "dynatemp_range": 0.25,
    "dynatemp_exponent": 2.0,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.25,
    "dry_multiplier": 0.5,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
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
    below = number.least - abs(number.least) - 1
    for value in (number.greatest * 2 + 1, below, *([number.least] if number.open_below else [])):
        value = int(value) if isinstance(VALUES[name], int) else value
        response = await gateway.http.post(path, json={**BODIES[path], name: value})
        assert response.status_code == 400, (name, value)
        assert name in response.json()["error"]["message"]


async def test_values_that_mean_another_on_the_wire(gateway: Any, router: Any) -> None:
    router.reset()
    fields = {"top_k": -1, "top_p": 0, "seed": -1}
    await gateway.http.post("/v1/completions", json={"prompt": "hi", **fields})
    sampling = router.streams[-1].request.sampling
    assert (sampling.top_k, sampling.top_p, sampling.seed) == (0, LEAST_TOP_P, 2**64 - 1)


async def test_the_order_of_samplers_reaches_the_worker(gateway: Any, router: Any) -> None:
    """Samplers that are not named have no effect, and the usual order is not sent."""
    router.reset()
    given = {"temperature": 0.5, "top_k": 7, "typical_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.25}
    for samplers, order in (
        (["top_k", "typ_p", "temperature"], [3, 4, 1]),
        ("kyt", [3, 4, 1]),
        (["temperature", "top_k", "typical_p"], []),
    ):
        response = await gateway.http.post("/v1/completions", json={"prompt": "hi", **given, "samplers": samplers})
        assert response.status_code == 200, response.text
        sampling = router.streams[-1].request.sampling
        assert list(sampling.samplers) == order
        assert (sampling.temperature, sampling.top_k, sampling.typical_p) == (0.5, 7, 0.75)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.0)


@pytest.mark.parametrize(
    "samplers", [["top_k", "penalties"], ["dry", "penalties"], ["top_k", "top_k"], ["infill"], "kq"]
)
async def test_an_order_that_cannot_be_kept_is_refused_by_name(gateway: Any, samplers: Any) -> None:
    response = await gateway.http.post("/v1/completions", json={"prompt": "hi", "samplers": samplers})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "samplers"


async def test_breakers_reach_the_worker_as_tokens(gateway: Any, router: Any) -> None:
    """Those of a request, or the usual ones. Without DRY, none is looked for."""
    router.reset()
    for breakers, texts in ((None, ["\n", ":", '"', "*"]), (["q"], ["q"]), ([], [])):
        body = {"prompt": "hi", "dry_multiplier": 1.0}
        body |= {} if breakers is None else {"dry_sequence_breakers": breakers}
        response = await gateway.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        sampling = router.streams[-1].request.sampling
        shown = await gateway.http.post("/detokenize", json={"tokens": list(sampling.dry_breaker_token_ids)})
        assert all(text in shown.json()["prompt"] for text in texts)
        assert bool(sampling.dry_breaker_token_ids) == bool(texts)
    await gateway.http.post("/v1/completions", json={"prompt": "hi"})
    assert not router.streams[-1].request.sampling.dry_breaker_token_ids


async def test_too_many_breakers_are_refused_by_name(gateway: Any) -> None:
    for breakers in (["x"] * 65, ["x" * 41]):
        body = {"prompt": "hi", "dry_multiplier": 1.0, "dry_sequence_breakers": breakers}
        response = await gateway.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "dry_sequence_breakers"
