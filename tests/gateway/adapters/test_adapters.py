"""Adapters as models for clients, and loading and unloading them over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway.upstream.served_adapters import AdapterCards
from headrace.protos.router_pb2 import ServedAdapter
from headrace.protos.worker_pb2 import Adapter, ModelCard

KEY = "an admin key of some length"
OPERATOR = {"authorization": f"Bearer {KEY}"}
LOAD = {"lora_name": "sql", "lora_path": "/adapters/sql"}


@pytest_asyncio.fixture
async def running(kit: Any, tiny_bundle: bytes, tmp_path: Path) -> AsyncIterator[tuple[Any, Any]]:
    """A gateway with an admin key, and its fake router."""
    path = tmp_path / "admin.key"
    path.write_text(KEY + "\n")
    router = kit.FakeRouter(tiny_bundle)
    async with kit.serving_router(router), kit.serving_gateway(router.address, flags={"admin_key_file": path}) as front:
        yield front, router


async def test_an_adapter_is_a_model_with_a_parent(running: tuple[Any, Any]) -> None:
    front, router = running
    answer = await front.http.post("/v1/load_lora_adapter", json=LOAD, headers=OPERATOR)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    listed = {card["id"]: card for card in (await front.http.get("/v1/models")).json()["data"]}
    assert (listed["sql"]["parent"], listed["tiny"]["parent"]) == ("tiny", None)
    for model, expected in (("sql", ("tiny", "sql")), ("tiny", ("tiny", "")), (None, ("tiny", ""))):
        body = {"prompt": "hi", "max_tokens": 3} | ({} if model is None else {"model": model})
        answer = await front.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, "without a name the model itself is meant"
        request = router.streams[-1].request
        assert (request.model, request.adapter) == expected
        assert answer.json()["model"] == (model or "tiny")


async def test_an_unloaded_adapter_is_an_unknown_model_at_once(running: tuple[Any, Any]) -> None:
    front, _ = running
    await front.http.post("/v1/load_lora_adapter", json=LOAD, headers=OPERATOR)
    shown = (await front.http.get("/v1/lora_adapters", headers=OPERATOR)).json()["data"]
    assert [(each["id"], each["parent"], each["workers"], each["in_memory"]) for each in shown] == [
        ("sql", "tiny", 2, 1)
    ]
    answer = await front.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=OPERATOR)
    assert answer.status_code == 200
    answer = await front.http.post("/v1/completions", json={"model": "sql", "prompt": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = await front.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=OPERATOR)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_name")


@pytest.mark.parametrize("key", ["", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"])
async def test_only_operators_may_change_adapters(running: tuple[Any, Any], key: str) -> None:
    front, router = running
    for method, path in (("POST", "load_lora_adapter"), ("POST", "unload_lora_adapter"), ("GET", "lora_adapters")):
        answer = await front.http.request(method, f"/v1/{path}", json=LOAD, headers={"authorization": key})
        assert answer.status_code == 401
    assert not router.adapters


async def test_a_key_may_have_any_characters(kit: Any, tiny_bundle: bytes, tmp_path: Path) -> None:
    path, router = tmp_path / "admin.key", kit.FakeRouter(tiny_bundle)
    path.write_text("schlüssel-für-déjà\n", encoding="utf-8")
    async with kit.serving_router(router), kit.serving_gateway(router.address, flags={"admin_key_file": path}) as front:
        headers = {"authorization": "Bearer schlüssel-für-déjà".encode()}
        assert (await front.http.get("/v1/lora_adapters", headers=headers)).status_code == 200


async def test_without_an_admin_key_nobody_may(kit: Any, tiny_bundle: bytes) -> None:
    router = kit.FakeRouter(tiny_bundle)
    async with kit.serving_router(router), kit.serving_gateway(router.address) as front:
        answer = await front.http.post("/v1/load_lora_adapter", json=LOAD, headers=OPERATOR)
        assert answer.status_code == 403
        assert "--admin-key-file" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_name": "sql"}, "lora_path"),
        ({**LOAD, "lora_path": "here"}, "lora_path"),
        ({**LOAD, "lora_name": 3}, "lora_name"),
    ],
)
async def test_what_is_wrong_is_named(running: tuple[Any, Any], body: dict[str, Any], field: str) -> None:
    front, _ = running
    answer = await front.http.post("/v1/load_lora_adapter", json=body, headers=OPERATOR)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", ["", "short"])
async def test_a_key_that_is_none_is_refused_at_the_start(
    kit: Any, tiny_bundle: bytes, tmp_path: Path, content: str
) -> None:
    (tmp_path / "key").write_text(content)
    router = kit.FakeRouter(tiny_bundle)
    async with kit.serving_router(router):
        with pytest.raises(Exception, match="at least 16 characters"):
            async with kit.serving_gateway(router.address, flags={"admin_key_file": tmp_path / "key"}):
                pass


def served(name: str, sha256: str) -> ServedAdapter:
    return ServedAdapter(model="tiny", adapter=Adapter(name=name, sha256=sha256, created_s=7))


def test_cards_are_only_made_for_adapters_that_are_new_or_changed() -> None:
    cards, model = AdapterCards(), ModelCard(name="tiny", fingerprint="f", max_context_tokens=64)
    first = cards.of([model], [served("law", "a"), served("sql", "b")])
    assert [(card.name, card.parent, card.max_context_tokens) for card in first] == [
        ("law", "tiny", 64),
        ("sql", "tiny", 64),
    ]
    second = cards.of([model], [served("law", "a"), served("sql", "c"), served("tiny", "d")])
    assert [card.name for card in second] == ["law", "sql"], "a model's name is no adapter's"
    assert second[0] is first[0]
    assert second[1].fingerprint != first[1].fingerprint
    longer = ModelCard(name="tiny", fingerprint="f", max_context_tokens=128)
    assert [card.max_context_tokens for card in cards.of([longer], [served("law", "a")])] == [128]
    assert cards.of([], [served("law", "a")]) == []
