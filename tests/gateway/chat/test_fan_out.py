"""n choices are n requests that have prompt and grammar in common: both are written and sent once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.common.transport.wire_request import WireRequest
from headrace.gateway.chat.generation import Common, Job, Plan, plan_job
from headrace.gateway.chat.sampling import Sampling
from headrace.gateway.structure.fields import Structure
from headrace.protos.host_pb2 import ServingRules
from headrace.protos.inference_pb2 import Constraint, GenerateRequest
from headrace.protos.sampling_fields import SamplingNumbers
from headrace.protos.worker_pb2 import ModelCard
from tests.patience import patience

CARD = ModelCard(name="m", vocab_size=50_000, max_context_tokens=40_000, block_size=32)
SCHEMA = Structure(Constraint(json_schema='{"description": "' + "x" * 200_000 + '"}'), "response_format")


def planned(num_choices: int, **fields: Any) -> Plan:
    model: Any = SimpleNamespace(card=CARD, rules=ServingRules())
    values = {
        "token_ids": range(32_000),
        "sampling": Sampling(numbers=SamplingNumbers(seed=7), structure=SCHEMA, logit_bias={5: 1.0}),
    } | fields
    return plan_job(Job(model=model, num_choices=num_choices, **values))


def wires(plan: Plan) -> list[WireRequest]:
    return [WireRequest(request.SerializeToString(), plan.shared) for request in plan.requests]


def test_128_choices_write_prompt_and_grammar_once() -> None:
    plan = planned(128)
    (alone,) = wires(planned(1))
    sent = wires(plan)
    num_shared_bytes = sum(len(part.raw) for part in plan.shared)
    assert num_shared_bytes + sum(len(wire.own) for wire in sent) < alone.num_bytes + 128 * 100
    whole = GenerateRequest.FromString(alone.joined())
    for number, wire in enumerate(sent):
        request = GenerateRequest.FromString(wire.joined())
        assert request.sampling.seed == 7 + number
        request.sampling.seed, request.request_id = 7, whole.request_id
        assert request == whole
    assert len({request.request_id for request in plan.requests}) == 128
    # What is not repeated is known to be there all the same.
    assert plan.requests[0].sampling.HasField("constraint")


def test_one_choice_is_whole() -> None:
    plan = planned(1)
    assert plan.shared == ()
    assert len(plan.requests[0].token_ids) == 32_000


def test_several_prompts_of_one_request_have_its_grammar_in_common() -> None:
    common = Common()
    plans = [planned(2, token_ids=[number, 9], common=common) for number in range(3)]
    grammar = plans[0].shared[0]
    assert len(grammar.raw) > 200_000
    for number, plan in enumerate(plans):
        assert plan.shared[0] is grammar
        for wire in wires(plan):
            request = GenerateRequest.FromString(wire.joined())
            assert list(request.token_ids) == [number, 9]
            assert request.sampling.constraint == SCHEMA.constraint
            assert dict(request.sampling.logit_bias) == {5: 1.0}


@pytest.mark.asyncio(loop_scope="module")
async def test_each_choice_arrives_whole(gateway: Any, router: Any) -> None:
    router.reset()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "seed": 5}
    body["response_format"] = {"type": "json_object"}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 3
    requests = [stream.request for stream in router.streams]
    assert sorted(request.sampling.seed for request in requests) == [5, 6, 7]
    assert len({tuple(request.token_ids) for request in requests}) == 1
    assert all(request.token_ids for request in requests)
    assert all(request.sampling.constraint.HasField("json_object") for request in requests)


@pytest.mark.asyncio(loop_scope="module")
async def test_128_choices_with_a_large_schema_disturb_no_stream(gateway: Any, router: Any, kit: Any) -> None:
    router.reset()
    going = asyncio.Event()

    async def script(own: Any, stream: Any, send: Any) -> None:
        send = _behind_first(send)
        if not stream.request.sampling.HasField("constraint"):
            await send(kit.tokens_of(own.answer)[:1], 0, None)
            await going.wait()
        await kit.speak(own, stream, send)

    router.script = script
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    innocent = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=hi))
    async with asyncio.timeout(patience(10)):
        while not router.streams:
            await asyncio.sleep(0.005)
    schema = {"type": "object", "description": "x" * 200_000}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = await gateway.http.post("/v1/chat/completions", json={**hi, "n": 128, "response_format": form})
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 128
    going.set()
    assert (await innocent).json()["choices"][0]["message"]["content"] == router.answer
    assert [stream.request.attempt for stream in router.streams] == [0] * 129


def _behind_first(send: Any) -> Any:
    """As `send`, but without the tokens that were already sent."""
    num_sent = 0

    async def once(tokens: list[int], position: int, reason: Any, *rest: Any) -> None:
        nonlocal num_sent
        if position >= num_sent:
            num_sent = position + len(tokens)
            await send(tokens, position, reason, *rest)

    return once
