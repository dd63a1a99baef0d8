"""Structured output on real processes with the real model: what ends validates."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.serving import BOUND_S, MODEL, Serve
from tests.patience import patience
from tests.schemas import Schema, all_schemas, validate

pytestmark = pytest.mark.e2e

SOAK = os.environ.get("HEADRACE_SOAK") == "1"
NUM_SCHEMAS = 200 if SOAK else 64
MAX_TOKENS = 200
CONCURRENCY = 64


def schema_format(schema: Schema) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def post(system: Serve, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Invent some data."}], **fields}
    return httpx.post(f"{system.base_url}{path}", json=body, timeout=patience(BOUND_S))


async def test_schemas_at_temperature_1_give_answers_that_validate(system: Serve) -> None:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def ask(seed: int, schema: Schema) -> tuple[str, str]:
        question = f"Invent one example of this: {json.dumps(schema, ensure_ascii=False)[:300]}"
        async with gate:
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": question}],
                response_format=schema_format(schema),  # type: ignore[arg-type]
                temperature=1,
                seed=seed,
                max_tokens=MAX_TOKENS,
            )
        return answer.choices[0].finish_reason, answer.choices[0].message.content or ""

    schemas = all_schemas(NUM_SCHEMAS)
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="unused", max_retries=0) as client:
        answers = await asyncio.gather(*(ask(seed, schema) for seed, schema in enumerate(schemas)))
    finished = [number for number, (reason, _) in enumerate(answers) if reason == "stop"]
    for number in finished:
        validate(json.loads(answers[number][1]), schemas[number])
    print(f"{len(finished)} of {len(schemas)} answers finished within {MAX_TOKENS} tokens; all of them validate")
    assert len(finished) >= 0.8 * len(schemas)


def test_a_stream_of_json_is_the_whole_answer_in_pieces(system: Serve) -> None:
    fields = {"response_format": {"type": "json_object"}, "seed": 4, "max_tokens": MAX_TOKENS}
    whole = post(system, **fields).json()["choices"][0]
    lines = [line.removeprefix("data: ") for line in post(system, **fields, stream=True).text.splitlines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole["message"]["content"]
    if whole["finish_reason"] == "stop":
        assert isinstance(json.loads(whole["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"guided_regex": r"[A-Z][a-z]{2,8} [0-9]{4}"}, r"[A-Z][a-z]{2,8} [0-9]{4}"),
        ({"guided_choice": ["Paris", "London", "Münster"]}, "Paris|London|Münster"),
        ({"structured_outputs": {"grammar": 'start: n "," n ("," n)?\nn: /[0-9]{1,2}/'}}, r"\d\d?(,\d\d?)+"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_expressions_choices_and_grammars_are_kept(
    system: Serve, fields: dict[str, Any], wanted: str, temperature: float
) -> None:
    choice = post(system, **fields, temperature=temperature, seed=1, max_tokens=300).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(wanted, choice["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_kept_is_refused_before_it_is_queued(system: Serve, stream: bool) -> None:
    admitted = system.metric("headrace_worker_requests_admitted_total")
    schema = {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}
    response = post(system, response_format=schema_format(schema), stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert "contains" in error["message"]
    assert system.metric("headrace_worker_requests_admitted_total") == admitted
