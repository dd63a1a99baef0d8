"""Requests made up from the OpenAPI document: no server error, every failure in the one shape, answers as described.

A few hundred requests here; HEADRACE_SOAK=1 makes about 20,000 (`python -m tests.soak gateway`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.gateway.encoder_model import SCORES, VECTORS, cards, encode
from tests.gateway.served import described
from tests.patience import patience

SOAK = bool(os.environ.get("HEADRACE_SOAK"))
# For each operation, of requests that are as the document says and of requests that are not.
NUM_EXAMPLES = int(os.environ.get("HEADRACE_EXAMPLES", 800 if SOAK else 5))
# Knows tools, calls and reasoning.
TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}<tool_call>{%- endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor %}<|im_end|>
{%- endfor %}{% if enable_thinking %}<think>{% endif %}"""
MAX_ERROR_BYTES = 4096
# Requests that are not for the ordinary model.
ENCODERS = {"EmbeddingRequest": VECTORS, "OllamaEmbed": VECTORS, "OllamaEmbeddings": VECTORS}
ENCODERS |= {"RerankRequest": SCORES, "ScoreRequest": SCORES}
CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]


def distinct() -> dict[str, Any]:
    """The document without duplicate paths."""
    whole = json.loads(json.dumps(described()))
    for schema in whole["components"]["schemas"].values():
        for branch in schema.get("properties", {}).get("model", {}).get("anyOf", ()):
            if branch["type"] == "string":
                branch["enum"] = [ENCODERS.get(schema["title"], "tiny")]
        if schema["title"] == "ChatMessage":  # most messages need it
            schema["required"].append("content")
            schema["properties"]["content"]["anyOf"] = schema["properties"]["content"]["anyOf"][:2]
        if schema["title"] == "DetokenizeRequest":
            schema["properties"]["tokens"]["items"] |= {"minimum": 0, "maximum": 269}
    for methods in whole["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "x-request-timeout":  # a short one ends in a 504
                    parameter["schema"]["minimum"] = 60
    for path, methods in whole["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()) if path.startswith("/v2/models") else ():
                if parameter["in"] == "path":
                    parameter["schema"]["enum"] = ["tiny" if parameter["name"] == "name" else "1"]
    twice = [path for path in whole["paths"] if path.startswith(("/v3/", "/v2/health/"))]
    for path in twice:
        del whole["paths"][path]
    return whole


SCHEMA = schemathesis.openapi.from_dict(distinct())
OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def address(kit_of_module: Any, tiny_files: dict[str, bytes]) -> Iterator[str]:
    """A gateway in its own thread, in front of a router that answers at once."""
    kit = kit_of_module
    started, url = threading.Event(), []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def answer(router: Any, stream: Any, send: Any) -> None:
        if stream.request.task:
            await encode(router, stream, send)
            return
        most = min(stream.request.sampling.max_tokens, 4)
        await send(kit.tokens_of("aé!")[:most], 0, kit.inference_pb2.FINISH_REASON_LENGTH)

    async def serve() -> None:
        fake = kit.FakeRouter(kit.tar_of({**tiny_files, "chat_template.jinja": TEMPLATE.encode()}))
        fake.script = answer
        fake.max_context_tokens = 2**20
        fake.cards = cards(fake)
        async with kit.serving_router(fake) as (router, _), kit.serving_gateway(router) as gateway:
            polling = asyncio.create_task(gateway.models.run())
            url.append(gateway.url)
            started.set()
            await stop.wait()
            polling.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(patience(30))
    yield url[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(patience(30))
    loop.close()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


def check_error(raw: bytes, label: str) -> None:
    """The error has the protocol's format and is short."""
    assert len(raw) < MAX_ERROR_BYTES
    whole = json.loads(raw)
    if "/messages" in label:
        assert list(whole) == ["type", "error", "request_id"]
        assert list(whole["error"]) == ["type", "message"]
        return
    if label.split()[1] in ("/", "/generate", "/generate_stream", "/info"):
        assert list(whole) == ["error", "error_type"]
        assert whole["error"]
        return
    if " /api/" in label or " /v2" in label:
        assert list(whole) == ["error"]
        assert whole["error"]
        return
    assert list(whole) == ["error"]
    if label.split()[1] in ("/apply-template", "/completion", "/infill", "/props", "/slots"):
        assert list(whole["error"]) == ["code", "message", "type"]
        assert whole["error"]["message"]
        return
    assert list(whole["error"]) == ["message", "type", "param", "code"]
    assert whole["error"]["message"]


def leave_few(body: dict[str, Any], draw: random.Random) -> None:
    """Usually omit most optional fields, because two of fifty fields almost always contradict each other."""
    if draw.random() < 0.8:
        needed = {"messages", "prompt", "input", "tokens", "max_tokens"}
        if {"messages", "prompt"} <= body.keys():
            needed.remove(draw.choice(["messages", "prompt"]))
        optional = sorted(body.keys() - needed)
        for name in draw.sample(optional, max(len(optional) - draw.randrange(5), 0)):
            del body[name]


def asked() -> list[tuple[str, GenerationMode]]:
    """Every operation with requests as described, and with others where anything could be wrong."""
    found = []
    for label, operation in sorted(OPERATIONS.items()):
        found.append((label, GenerationMode.POSITIVE))
        if operation.body or operation.query:
            found.append((label, GenerationMode.NEGATIVE))
    return found


@pytest.mark.parametrize(("label", "mode"), asked())
def test_whatever_is_asked_is_answered_or_refused_as_described(
    address: str, session: requests.Session, label: str, mode: GenerationMode
) -> None:
    operation, statuses = OPERATIONS[label], Counter[int]()

    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=not SOAK,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), few=st.randoms(use_true_random=False))
    def ask(case: Any, few: random.Random) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            leave_few(case.body, few)
        response = case.call(base_url=address, session=session)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            check_error(response.content, label)
        elif response.headers["content-type"][0].startswith("text/event-stream"):
            last = response.content.rstrip(b"\n").split(b"\n\n")[-1].partition(b"data:")[2].strip()
            assert last
            if label.endswith("completions") and last != b"[DONE]":
                check_error(last, label)
        elif response.headers["content-type"][0] == "application/x-ndjson":
            last = json.loads(response.content.splitlines()[-1])
            assert last.get("done") or last.get("status") == "success" or list(last) == ["error"]

    ask()
    print(f"{label} {mode.value}: {dict(statuses)}")
    assert statuses
    assert not any(status >= 500 for status in statuses), statuses
