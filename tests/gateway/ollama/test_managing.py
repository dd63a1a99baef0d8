"""What Ollama's clients may change of a host's models, with the operator's leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from headrace.common.stores.api_keys import ApiKey, sha256_of, write_keys
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.hints import HEADER
from headrace.gateway.ollama.managing import Managing
from headrace.protos.host_pb2 import HOSTED_MODEL_STATE_LOADED, HostedModel
from headrace.protos.status import Reason, StatusError
from tests.gateway.model_host import FakeHost, serving_host
from tests.patience import patience

BOUND_S = 20.0
HI = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def host() -> AsyncIterator[FakeHost]:
    """Model `a` was loaded at the start, `b` for a request, `c` is not loaded."""
    async with serving_host() as served:
        served.set("a", "LOADED")
        served.set("b", "LOADED", is_on_demand=True)
        served.set("c", "UNLOADED", is_on_demand=True)
        served.aliases = ["several=a:90,b:10"]
        served.operators_aliases = {"several"}
        yield served


@pytest_asyncio.fixture
async def managed(kit: Any, tiny_bundle: bytes, host: FakeHost) -> AsyncIterator[Any]:
    """A gateway of such a host, whose operator allows changes."""
    router = kit.FakeRouter(tiny_bundle)
    router.cards = [router.card(name="a"), router.card(name="b")]
    flags = {"ollama_manage": True}
    async with (
        kit.serving_router(router),
        kit.serving_gateway(router.address, model_host=host.address, flags=flags) as gateway,
    ):
        async with asyncio.timeout(patience(BOUND_S)):
            while "c" not in await names(gateway):
                await asyncio.sleep(0.01)
        yield gateway


async def names(gateway: Any) -> set[str]:
    return {one["name"] for one in (await gateway.http.get("/api/tags")).json()["models"]}


async def send(gateway: Any, method: str, verb: str, status: int = 200, **body: Any) -> Any:
    response = await gateway.http.request(method, f"/api/{verb}", json=body)
    assert response.status_code == status, response.text
    return response


async def test_a_copy_is_another_name_until_it_is_deleted(managed: Any, host: FakeHost) -> None:
    assert (await send(managed, "POST", "copy", source="a:latest", destination="mine:latest")).text == ""
    assert host.aliases == ["several=a:90,b:10", "mine=a"]
    assert "mine" in await names(managed)
    answer = await send(managed, "POST", "chat", model="mine:latest", messages=HI, stream=False)
    assert answer.json()["message"]["content"]
    await send(managed, "POST", "copy", source="mine", destination="its/copy:v2")
    assert host.aliases[-1] == "its/copy:v2=a"
    await send(managed, "POST", "copy", source="a", destination="mine")
    await send(managed, "DELETE", "delete", model="mine")
    await send(managed, "DELETE", "delete", name="its/copy:v2")
    assert host.aliases == ["several=a:90,b:10"]
    assert not {"mine", "its/copy:v2"} & await names(managed)


async def test_a_copy_takes_the_place_of_another_copy(managed: Any, host: FakeHost) -> None:
    await send(managed, "POST", "copy", source="a", destination="mine")
    await send(managed, "POST", "copy", source="b", destination="mine")
    assert host.aliases[-1] == "mine=b"
    answer = await send(managed, "POST", "chat", model="mine", messages=HI, stream=False)
    assert answer.json()["message"]["content"]


async def test_a_created_model_goes_with_its_last_name(managed: Any, host: FakeHost) -> None:
    """Its names are all alike: a copy stays when the first one is deleted."""
    host.set("made@1", "UNLOADED", is_on_demand=True, is_created=True)
    host.alias("made", "made@1")
    async with asyncio.timeout(patience(BOUND_S)):
        while "made" not in await names(managed):
            await asyncio.sleep(0.01)
    assert "made@1" not in await names(managed)
    await send(managed, "POST", "copy", source="made", destination="copied")
    await send(managed, "DELETE", "delete", model="made")
    assert host.removed == []
    assert "copied" in await names(managed)
    for gone in ("made", "made@1"):
        refused = await send(managed, "DELETE", "delete", 404, model=gone)
        assert refused.json()["error"] == f"model: there is no model '{gone}' here"
    await send(managed, "POST", "copy", source="a", destination="copied")
    assert (host.removed, host.aliases[-1]) == (["made@1"], "copied=a")


async def test_a_model_is_created_from_another(managed: Any, host: FakeHost) -> None:
    response = await send(managed, "POST", "create", **{"model": "helper", "from": "c"})
    assert [json.loads(line)["status"] for line in response.text.splitlines()] == ["success"]
    assert host.aliases[-1] == "helper=c"
    whole = await send(managed, "POST", "create", **{"name": "helper2", "from": "helper", "stream": False})
    assert whole.json() == {"status": "success"}
    assert host.aliases[-1] == "helper2=c"


@pytest.mark.parametrize(
    ("verb", "body", "status", "problem"),
    [
        ("copy", {"source": "gone", "destination": "x"}, 404, "source: there is no model 'gone'"),
        ("copy", {"source": "a", "destination": "b"}, 400, "'b' is the name of another model"),
        ("copy", {"source": "b", "destination": "several"}, 403, "destination: the name 'several' was given by an"),
        ("copy", {"source": "a", "destination": "a=b"}, 400, "destination must have 1 to 128"),
        ("copy", {"source": "a"}, 400, "destination is required"),
        ("create", {"model": "x", "from": "gone"}, 404, "from: there is no model 'gone'"),
        ("create", {"model": "x"}, 400, "from or files is required"),
        ("create", {"from": "a"}, 400, "model is required"),
        ("create", {"model": "x", "from": "a", "system": "Be brief."}, 400, "send it in each request"),
        ("create", {"model": "x", "from": "a", "parameters": {"top_k": 1}}, 400, "options of each request"),
        ("create", {"model": "x", "files": {"a": "sha256:b"}}, 400, "headrace models load"),
        ("create", {"model": "x", "from": "a", "files": {"a": "b"}}, 400, "files and from exclude each other"),
        ("create", {"model": "x", "from": "a", "quantize": "q4_0"}, 400, "send a file of the quantisation"),
        ("delete", {"model": "gone"}, 404, "there is no model 'gone'"),
        ("delete", {"model": "a"}, 403, "model: 'a' is its operator's; delete takes away only what copy or create"),
        ("delete", {"model": "several"}, 403, "model: the name 'several' was given by an operator"),
        ("delete", {}, 400, "model is required"),
    ],
)
async def test_what_cannot_be_done_is_named(
    managed: Any, host: FakeHost, verb: str, body: Any, status: int, problem: str
) -> None:
    before = list(host.aliases)
    response = await send(managed, "DELETE" if verb == "delete" else "POST", verb, status, **body)
    assert problem in response.json()["error"]
    assert host.aliases == before


async def test_a_key_for_some_models_manages_these_only(
    kit: Any, tiny_bundle: bytes, host: FakeHost, tmp_path: Path
) -> None:
    host.set("made@1", "UNLOADED", is_on_demand=True, is_created=True)
    host.aliases += ["made=made@1", "named=a"]
    secret = "hr-secret-of-alice"
    key = ApiKey(id="key_1", name="alice", tenant="mill", created_s=1, sha256=sha256_of(secret), models=("a", "mine"))
    write_keys(tmp_path / "keys", [key])
    controls = EdgeControls(EdgeSettings(api_keys=tmp_path / "keys"))
    await controls.start()
    router = kit.FakeRouter(tiny_bundle)
    async with (
        kit.serving_router(router),
        kit.serving_gateway(
            router.address, controls=controls, model_host=host.address, flags={"ollama_manage": True}
        ) as gateway,
    ):
        gateway.http.headers["authorization"] = f"Bearer {secret}"
        async with asyncio.timeout(patience(BOUND_S)):
            while "made" not in await names(gateway):
                await asyncio.sleep(0.01)
        for method, verb, body, field in (
            ("POST", "copy", {"source": "b", "destination": "mine"}, "source"),
            ("POST", "copy", {"source": "a", "destination": "other"}, "destination"),
            ("POST", "create", {"model": "other", "from": "a"}, "model"),
            ("DELETE", "delete", {"model": "made"}, "model"),
            ("DELETE", "delete", {"model": "named:latest"}, "model"),
        ):
            refused = await send(gateway, method, verb, 403, **body)
            assert refused.json()["error"].startswith(f"{field}: this key is not for model '")
        await send(gateway, "POST", "copy", source="a", destination="mine")
        await send(gateway, "DELETE", "delete", model="mine")
    await controls.close()
    assert (host.removed, host.aliases) == ([], ["several=a:90,b:10", "made=made@1", "named=a"])


@pytest.mark.parametrize(("verb", "prompt"), [("chat", {"messages": []}), ("generate", {})])
async def test_a_keep_alive_of_0_unloads_what_requests_load(
    managed: Any, host: FakeHost, verb: str, prompt: Any
) -> None:
    response = await send(managed, "POST", verb, model="b:latest", keep_alive="0s", stream=False, **prompt)
    assert (response.json()["done_reason"], response.headers.get(HEADER)) == ("unload", None)
    assert host.models["b"].state == 1
    # It would stay unloaded.
    response = await send(managed, "POST", verb, model="a", keep_alive=0, stream=False, **prompt)
    assert (response.json()["done_reason"], response.headers[HEADER]) == ("unload", "keep_alive")
    assert host.models["a"].state == 3


async def test_a_keep_alive_of_0_unloads_after_the_answer(managed: Any, host: FakeHost) -> None:
    response = await send(managed, "POST", "chat", model="b", messages=HI, keep_alive=0)
    assert json.loads(response.text.splitlines()[-1])["done_reason"] == "stop"
    async with asyncio.timeout(patience(BOUND_S)):
        while host.models["b"].state != 1:
            await asyncio.sleep(0.01)
    response = await send(managed, "POST", "chat", model="a", messages=HI, keep_alive="5m", stream=False)
    assert response.headers[HEADER] == "keep_alive"


@pytest.mark.parametrize(("verb", "body"), [("chat", {"messages": HI}), ("generate", {})])
async def test_a_keep_alive_unloads_what_was_not_used_for_so_long(
    managed: Any, host: FakeHost, verb: str, body: Any
) -> None:
    response = await send(managed, "POST", verb, model="b", keep_alive="1h30m", stream=False, **body)
    assert HEADER not in response.headers
    assert host.models["b"].state == 3
    await send(managed, "POST", verb, model="b:latest", keep_alive="1ms", stream=False, **body)
    async with asyncio.timeout(patience(BOUND_S)):
        while host.models["b"].state != 1:
            await asyncio.sleep(0.01)
    response = await send(managed, "POST", verb, model="a", keep_alive=-1, stream=False, **body)
    assert response.headers[HEADER] == "keep_alive"


class UsedHost:
    """A host with a model that requests load; `used_ms` are the times of its last use that it tells, one by one."""

    def __init__(self, *used_ms: int) -> None:
        self.models = {"b": HostedModel(name="b", is_on_demand=True)}
        self.aliases = None
        self.used_ms = list(used_ms)
        self.unloaded = asyncio.Event()

    async def latest(self, name: str) -> HostedModel | None:
        if not self.used_ms:
            raise StatusError(Reason.UNSUPPORTED, "gone")
        return HostedModel(name=name, state=HOSTED_MODEL_STATE_LOADED, last_used_ms=self.used_ms.pop(0))

    async def unload(self, name: str) -> None:
        assert not self.used_ms, "it was used"
        self.unloaded.set()


async def test_requests_that_others_see_keep_a_model_loaded() -> None:
    host = UsedHost(7_010, 7_000, 6_000)
    managing = Managing(cast("Any", None), cast("Any", host), is_allowed=True, clock=lambda: 7.0)
    managing.leave_after("b", 0.01)
    async with asyncio.timeout(patience(BOUND_S)):
        await host.unloaded.wait()
    await managing.close()


async def test_the_latest_request_decides_how_long_a_model_stays() -> None:
    host = UsedHost()
    managing = Managing(cast("Any", None), cast("Any", host), is_allowed=True)
    managing.leave_after("b", 3600.0)
    (first,) = managing._leaving.values()
    managing.leave_after("b", 7200.0)
    (second,) = managing._leaving.values()
    managing.stay("b", None)
    assert not managing._leaving
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.cancelled()
    assert not host.unloaded.is_set()


async def test_without_a_host_there_is_nothing_to_manage(kit: Any, tiny_bundle: bytes) -> None:
    router = kit.FakeRouter(tiny_bundle)
    async with (
        kit.serving_router(router),
        kit.serving_gateway(router.address, flags={"ollama_manage": True}) as gateway,
    ):
        response = await gateway.http.post("/api/generate", json={"model": "tiny", "keep_alive": 0, "stream": False})
        assert (response.json()["done_reason"], response.headers[HEADER]) == ("unload", "keep_alive")
        copy = await gateway.http.post("/api/copy", json={"source": "tiny", "destination": "x"})
        assert (copy.status_code, "no host that loads models" in copy.json()["error"]) == (400, True)
