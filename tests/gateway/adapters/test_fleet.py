"""The fleet for operators over HTTP: who may see it, drain a worker, and have a placement explained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.common.stores.api_keys import ApiKey, sha256_of, write_keys
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.protos.cache_scope import cache_scope, scoped_salt
from headrace.protos.router_pb2 import WORKER_STATE_READY, WorkerInfo
from headrace.protos.worker_pb2 import Counters, Load

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADMIN = "an admin key of some length"
SECRET = "hr-secret-of-alice"
OPERATOR = {"authorization": f"Bearer {ADMIN}"}
CALLER = {"authorization": f"Bearer {SECRET}"}
STRANGER = {"authorization": "Bearer hr-nobody"}
WORKER = WorkerInfo(
    worker_id="w0",
    address="10.0.0.7:50061",
    state=WORKER_STATE_READY,
    model="tiny",
    load=Load(num_running=2, num_blocks=100, counters=Counters(tokens_generated=2**40)),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(
    kit_of_module: Any, router: Any, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Any, Any]]:
    """A gateway with one API key and an admin key, and its fake router."""
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "admin.key").write_text(ADMIN)
    key = ApiKey(id="key_1", name="alice", tenant="mill", created_s=1, sha256=sha256_of(SECRET), models=("tiny",))
    write_keys(folder / "keys", [key])
    controls = EdgeControls(EdgeSettings(api_keys=folder / "keys"))
    await controls.start()
    flags = {"admin_key_file": folder / "admin.key"}
    try:
        async with kit_of_module.serving_gateway(router.address, controls=controls, flags=flags) as gateway:
            yield gateway, router
    finally:
        await controls.close()


@pytest.fixture(autouse=True)
def as_before(router: Any) -> None:
    router.reset()
    router.workers = [WORKER]


async def explained(gateway: Any, headers: dict[str, str], **body: Any) -> Any:
    return await gateway.http.post("/v1/fleet/explain", json={"tokens": [1, 2, 3], **body}, headers=headers)


@pytest.mark.parametrize("headers", [OPERATOR, CALLER])
async def test_an_operator_or_a_caller_with_a_key_sees_every_worker(
    guarded: tuple[Any, Any], headers: dict[str, str]
) -> None:
    gateway, _ = guarded
    answer = await gateway.http.get("/v1/fleet", headers=headers)
    body = answer.json()
    assert (answer.status_code, body["problem"]) == (200, "")
    (worker,) = body["workers"]
    assert (worker["worker_id"], worker["state"], worker["load"]["num_running"]) == ("w0", "WORKER_STATE_READY", 2)
    assert worker["load"]["counters"]["tokens_generated"] == str(2**40), "as protobuf's JSON has 64 bits"
    assert [router["connected"] for router in body["routers"]] == [True]
    assert [(model["id"], model["state"], model["max_context_tokens"]) for model in body["models"]] == [
        ("tiny", "loaded", 256)
    ]


@pytest.mark.parametrize("headers", [{}, STRANGER])
async def test_nobody_else_sees_changes_or_learns_anything(guarded: tuple[Any, Any], headers: dict[str, str]) -> None:
    gateway, router = guarded
    assert (await gateway.http.get("/v1/fleet", headers=headers)).status_code == 401
    assert (await explained(gateway, headers)).status_code == 401
    assert (await gateway.http.post("/v1/fleet/drain", json={"worker": "w0"}, headers=headers)).status_code == 401
    assert (router.drains, router.explained) == ([], [])


async def test_only_an_operator_drains_a_worker(guarded: tuple[Any, Any]) -> None:
    gateway, router = guarded
    for body, headers, status in (
        ({"worker": "w0"}, CALLER, 401),
        ({"worker": "w0"}, OPERATOR, 200),
        ({"worker": "w0", "undo": True}, OPERATOR, 200),
    ):
        answer = await gateway.http.post("/v1/fleet/drain", json=body, headers=headers)
        assert answer.status_code == status
    assert answer.json() == {"worker": "w0", "num_running": 2}
    assert router.drains == [("w0", False), ("w0", True)]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "worker"),
        ({"worker": "nosuch"}, "worker"),
        ({"worker": "w0", "wait_s": 0}, "wait_s"),
        ({"worker": "w0", "wait_s": 1e9}, "wait_s"),
        ({"worker": "w0", "undo": "yes"}, "undo"),
    ],
)
async def test_what_is_wrong_with_a_drain_is_named(guarded: tuple[Any, Any], body: Any, field: str) -> None:
    gateway, _ = guarded
    answer = await gateway.http.post("/v1/fleet/drain", json=body, headers=OPERATOR)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_a_caller_is_told_of_its_own_tenants_cache_and_an_operator_of_any(guarded: tuple[Any, Any]) -> None:
    gateway, router = guarded
    own, other = cache_scope("mill", None), cache_scope("weir", None)
    for headers, body, salt, session in (
        (CALLER, {"cache_salt": "s", "session_key": "k"}, scoped_salt(own, "s"), scoped_salt(own, "k")),
        (OPERATOR, {"cache_salt": "s", "session_key": "k"}, "s", "k"),
        (OPERATOR, {"tenant": "weir"}, scoped_salt(other, ""), ""),
        (OPERATOR, {"cache_group": "all"}, scoped_salt(cache_scope("", "all"), ""), ""),
    ):
        answer = await explained(gateway, headers, model="tiny", max_tokens=9, **body)
        assert (answer.status_code, answer.json()["worker_id"]) == (200, "w0")
        asked = router.explained[-1]
        assert (asked.cache_salt, asked.session_key, asked.max_tokens) == (salt, session, 9)
        assert (asked.model, [*asked.token_ids]) == ("tiny", [1, 2, 3])


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"tenant": "weir"}, 403, "tenant"),
        ({"cache_group": "all"}, 403, "cache_group"),
        ({"model": "nosuch"}, 404, "model"),
        ({"tokens": [-1]}, 400, "tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
    ],
)
async def test_what_a_caller_may_not_ask_is_named(
    guarded: tuple[Any, Any], body: dict[str, Any], status: int, field: str
) -> None:
    gateway, router = guarded
    answer = await explained(gateway, CALLER, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)
    assert not router.explained


async def test_without_an_admin_key_nobody_drains(gateway: Any, router: Any) -> None:
    answer = await gateway.http.post("/v1/fleet/drain", json={"worker": "w0"}, headers=OPERATOR)
    assert (answer.status_code, router.drains) == (403, [])
    assert "--admin-key-file" in answer.json()["error"]["message"]
    assert (await gateway.http.get("/v1/fleet")).status_code == 200, "without keys everybody sees the fleet"


async def test_a_gateway_without_a_router_says_so(kit_of_module: Any, tiny_bundle: bytes) -> None:
    worker = kit_of_module.FakeRouter(tiny_bundle, is_worker=True)
    async with kit_of_module.serving_router(worker), kit_of_module.serving_gateway(worker.address) as front:
        body = (await front.http.get("/v1/fleet")).json()
        assert (body["workers"], "without a router" in body["problem"]) == ([], True)
        answer = await explained(front, {})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
