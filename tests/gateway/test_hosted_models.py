"""Models that a host loads and unloads, as callers of the gateway see them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace.common.aliases import parse_aliases
from headrace.common.tasks import end_tasks
from headrace.gateway.upstream.model_host import ModelHost
from headrace.protos.host_pb2 import (
    HOSTED_MODEL_STATE_LOADED,
    HostedModel,
    ReloadConfigurationResponse,
    ServingRules,
)
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK
from headrace.protos.priorities import SHADOW_PRIORITY
from headrace.protos.router_pb2 import ServedAdapter
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import Adapter
from tests.gateway.encoder_model import encode
from tests.gateway.model_host import FakeHost, serving_host
from tests.patience import patience

BOUND_S = 20.0
KEY = "k" * 16


@dataclass
class System:
    """A gateway between a test, a fake router and a fake host."""

    gateway: Any
    router: Any
    host: FakeHost

    async def chat(self, model: str, headers: dict[str, str] | None = None) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
        return await self.gateway.http.post("/v1/chat/completions", json=body, headers=headers)

    async def operate(self, what: str, **body: str) -> Any:
        headers = {"authorization": f"Bearer {KEY}"}
        return await self.gateway.http.post(f"/v1/{what}", json=body, headers=headers)

    async def until_loading(self, number: int = 1) -> None:
        async with asyncio.timeout(patience(BOUND_S)):
            while len(self.host.loads) < number:
                await asyncio.sleep(0.01)

    async def listed(self) -> dict[str, dict[str, Any]]:
        answer = await self.gateway.http.get("/v1/models")
        return {model["id"]: model for model in answer.json()["data"]}

    async def until_ruled(self, name: str, rules: ServingRules) -> None:
        async with asyncio.timeout(patience(BOUND_S)):
            while (await self.gateway.models.find(name)).rules != rules:
                await asyncio.sleep(0.01)

    async def until_listed(self, name: str, state: str) -> None:
        async with asyncio.timeout(patience(BOUND_S)):
            while (await self.listed()).get(name, {}).get("state") != state:
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def system(kit: Any, tiny_bundle: bytes, tmp_path: Path) -> AsyncIterator[System]:
    """Model `a` is loaded, `b` is not."""
    router = kit.FakeRouter(tiny_bundle)
    router.cards = [router.card(name="a")]
    async with serving_host() as host, kit.serving_router(router):
        host.set("a", "LOADED")
        host.set("b", "UNLOADED", is_on_demand=True)
        host.aliases = ["other=b", "same=a"]
        (tmp_path / "key").write_text(KEY)
        flags = {"admin_key_file": tmp_path / "key"}
        async with kit.serving_gateway(router.address, model_host=host.address, flags=flags) as gateway:
            made = System(gateway, router, host)
            await made.until_listed("b", "unloaded")
            yield made


async def test_a_request_waits_until_its_model_is_loaded_and_many_share_one_load(system: System) -> None:
    asked = [asyncio.create_task(system.chat("b")) for _ in range(5)]
    async with asyncio.timeout(patience(BOUND_S)):
        while not system.host.loads:
            await asyncio.sleep(0.01)
    assert (await system.chat("a")).status_code == 200, "the others are not held up"
    assert not any(task.done() for task in asked)
    system.router.cards = [system.router.card(name="a"), system.router.card(name="b")]
    system.host.set("b", "LOADED")
    answers = await asyncio.wait_for(asyncio.gather(*asked), patience(BOUND_S))
    assert [answer.status_code for answer in answers] == [200] * 5
    assert {answer.json()["model"] for answer in answers} == {"b"}
    assert system.host.loads == ["b"]


async def test_a_model_whose_tokenizer_is_loaded_is_not_idle_at_the_host() -> None:
    async with serving_host() as host:
        host.set("a", "LOADED")
        host.set("b", "LOADED", is_on_demand=True)
        models = ModelHost(host.address)
        following = asyncio.create_task(models.run())
        async with asyncio.timeout(patience(BOUND_S)):
            while not models.models:
                await asyncio.sleep(0.01)
            async with models.using(["a", "b", "of another host"]):
                while host.kept != {"b"}:
                    await asyncio.sleep(0.01)
            while host.kept:
                await asyncio.sleep(0.01)
        assert not host.loads
        await end_tasks(following)
        await models.close()


@pytest.mark.parametrize("was_loaded", [False, True])
async def test_a_request_for_an_adapter_has_its_model_loaded(system: System, was_loaded: bool) -> None:
    router, host = system.router, system.host
    cards = router.cards, [*router.cards, router.card(name="b")]
    sql = ServedAdapter(model="b", adapter=Adapter(name="sql", sha256="a" * 64, created_s=7), num_workers=1)
    adapters: list[str] = []
    if was_loaded:
        router.cards, router.adapters = cards[1], [sql]
        host.set("b", "LOADED", is_on_demand=True)
        await system.until_listed("sql", "loaded")
        router.cards, router.adapters = cards[0], []
    else:
        adapters = ["sql"]
    host.set("b", "UNLOADED", is_on_demand=True, adapters=adapters)
    await system.until_listed("b", "unloaded")
    assert (await system.gateway.http.get("/v2/models/sql/ready")).status_code == (200 if was_loaded else 503)
    asked = asyncio.create_task(system.chat("sql"))
    await system.until_loading()
    router.cards, router.adapters = cards[1], [sql]
    host.set("b", "LOADED", is_on_demand=True)
    answer = await asyncio.wait_for(asked, patience(BOUND_S))
    assert (answer.status_code, answer.json()["model"], host.loads) == (200, "sql", ["b"])
    assert (router.streams[-1].request.model, router.streams[-1].request.adapter) == ("b", "sql")


async def test_a_model_that_cannot_be_loaded_says_why(system: System) -> None:
    system.host.set("b", "FAILED", problem="the weights are damaged")
    await system.until_listed("b", "failed")
    answer = await system.chat("b")
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "model_not_loaded"
    assert error["message"] == "model 'b' cannot be loaded: the weights are damaged"
    assert (await system.listed())["b"]["problem"] == "the weights are damaged"
    assert (await system.chat("a")).status_code == 200


async def test_lists_tell_the_state_of_every_model_and_alias(system: System) -> None:
    system.host.set("e", "LOADING", task=TASK_EMBED)
    await system.until_listed("e", "loading")
    listed = await system.listed()
    assert {name: model["state"] for name, model in listed.items()} == {
        "a": "loaded",
        "b": "unloaded",
        "e": "loading",
        "other": "unloaded",
        "same": "loaded",
    }
    assert listed["same"]["root"] == "a"
    assert (listed["e"]["task"], listed["b"]["task"]) == ("embed", "generate")
    assert listed["b"]["max_model_len"] is None
    config = (await system.gateway.http.get("/v1/config")).json()
    assert config["b"]["model_version_status"][0]["state"] == "END"
    assert config["a"]["model_version_status"][0]["state"] == "AVAILABLE"
    running = (await system.gateway.http.get("/api/ps")).json()["models"]
    assert [model["name"] for model in running] == ["a", "same"]
    system.host.set("a", "LOADED", idle_ms=1 << 60, num_bytes=7 << 20)
    system.host.set("f", "LOADING")
    await system.until_listed("f", "loading")
    running = (await system.gateway.http.get("/api/ps")).json()["models"]
    assert running[0]["expires_at"].startswith("9999"), "there is no such year"
    metrics = (await system.gateway.http.get("/metrics")).text
    assert 'headrace_model_state{model="b",state="unloaded"} 1.0' in metrics
    tags = (await system.gateway.http.get("/api/tags")).json()["models"]
    assert [model["name"] for model in tags] == ["a", "b", "e", "f", "other", "same"]
    assert tags[0]["size"] == running[0]["size"] == 7 << 20


async def test_a_reload_is_answered_as_openvino_model_server_answers_it(system: System) -> None:
    http = system.gateway.http
    unchanged = await http.post("/v1/config/reload")
    assert (unchanged.status_code, unchanged.json()) == (200, (await http.get("/v1/config")).json())
    system.host.reloaded = ReloadConfigurationResponse(has_changed=True)
    changed = await http.post("/v1/config/reload")
    assert (changed.status_code, changed.json().keys()) == (201, {"a", "b", "other", "same"})
    system.host.models["new"] = HostedModel(name="new", state=HOSTED_MODEL_STATE_LOADED)
    assert "new" in (await http.post("/v1/config/reload")).json(), "before the gateway's watch has told of it"
    system.host.reloaded = ReloadConfigurationResponse(has_changed=True, problems=["b: no graph", "c: no files"])
    partly = await http.post("/v1/config/reload")
    assert (partly.status_code, partly.json()) == (412, {"error": "b: no graph; c: no files"})
    system.host.reloaded = StatusError(Reason.INVALID_FIELD, "config.json is not JSON")
    refused = await http.post("/v1/config/reload")
    assert (refused.status_code, refused.json()) == (412, {"error": "config.json is not JSON"})


async def test_a_model_that_its_host_has_no_more_is_not_found(system: System) -> None:
    assert (await system.chat("a")).status_code == 200
    system.router.cards = []
    del system.host.models["a"]
    system.host.tell()
    async with asyncio.timeout(patience(BOUND_S)):
        while "a" in await system.listed():
            await asyncio.sleep(0.01)
        while (answer := await system.chat("a")).status_code != 404:
            await system.gateway.models.refresh()
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_requests_wait_for_a_host_with_rules(kit: Any, tiny_bundle: bytes) -> None:
    """Without it, they would be answered without the rules."""
    router = kit.FakeRouter(tiny_bundle)
    router.cards = [router.card(name="a")]
    async with serving_host() as host, kit.serving_router(router):
        host.is_silent = True
        async with kit.serving_gateway(router.address, model_host=host.address, await_model_host=True) as gateway:
            await gateway.models.refresh()
            assert not gateway.models.ready
            body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
            asked = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body))
            for _ in range(5):
                await gateway.models.refresh()
            assert not asked.done()
            host.set("a", "LOADED", rules=ServingRules(max_tokens_limit=8))
            host.is_silent = False
            host.tell()
            answer = await asyncio.wait_for(asked, patience(BOUND_S))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
            assert gateway.models.ready


async def test_limits_of_a_model_are_those_that_its_host_says(system: System) -> None:
    rules = ServingRules(max_tokens_limit=9, best_of_limit=2)
    system.host.set("a", "LOADED", rules=rules, adapters=[])
    await system.until_ruled("a", rules)
    body: dict[str, Any] = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}
    post = system.gateway.http.post
    assert (await post("/v1/chat/completions", json=body)).status_code == 200
    assert system.router.streams[-1].request.sampling.max_tokens == 9, "the default is the limit"
    assert (await post("/v1/chat/completions", json={**body, "max_tokens": 9})).status_code == 200
    for path, field, value in (
        ("/v1/chat/completions", "max_tokens", 10),
        ("/v1/chat/completions", "max_completion_tokens", 10),
        ("/v1/responses", "max_output_tokens", 16),
    ):
        named = {"model": "a", "input": "hi"} if path == "/v1/responses" else body
        answer = await post(path, json={**named, field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert answer.json()["error"]["message"].startswith(f"{field} must be at most 9, the limit")
    completion = {"model": "a", "prompt": "hi", "best_of": 3, "max_tokens": 1}
    answer = await post("/v1/completions", json=completion)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
    assert (await post("/v1/completions", json={**completion, "best_of": 2})).status_code == 200
    assert (await post("/api/generate", json={"model": "a", "prompt": "hi", "stream": False})).status_code == 200
    assert system.router.streams[-1].request.sampling.max_tokens == 9, "without a default of its own too"


async def test_texts_are_truncated_and_documents_bounded_as_the_host_says(system: System) -> None:
    router, host = system.router, system.host
    router.script = encode
    tasks = {"e": TASK_EMBED, "r": TASK_RANK}
    router.cards = [
        router.card(name=name, task=task, dimensions=4, eos_token_ids=[], max_context_tokens=8)
        for name, task in tasks.items()
    ]
    await system.gateway.models.refresh()
    long = {"model": "e", "input": "z" * 50}
    assert (await system.gateway.http.post("/v1/embeddings", json=long)).status_code == 400
    host.set("e", "LOADED", task=TASK_EMBED, rules=ServingRules(truncates_texts=True))
    host.set("r", "LOADED", task=TASK_RANK, rules=ServingRules(max_documents=2))
    await system.until_ruled("r", ServingRules(max_documents=2))
    answer = await system.gateway.http.post("/v1/embeddings", json=long)
    assert (answer.status_code, answer.json()["usage"]["prompt_tokens"]) == (200, 8)
    ranking = {"model": "r", "query": "a", "documents": ["b", "c", "d"]}
    answer = await system.gateway.http.post("/v1/rerank", json=ranking)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")
    assert "at most 2 texts" in answer.json()["error"]["message"]
    assert (await system.gateway.http.post("/v1/rerank", json={**ranking, "documents": ["b"]})).status_code == 200


async def test_looking_at_a_model_does_not_load_it(system: System) -> None:
    http = system.gateway.http
    assert (await http.get("/v1/models/b")).json()["state"] == "unloaded"
    for path in ("/v2/models/b/ready", "/v2/models/b", "/info?model=b"):
        answer = await http.get(path)
        assert answer.status_code == 503, path
        assert "is not loaded" in answer.text
    assert (await http.post("/api/show", json={"model": "b"})).status_code == 503
    assert system.host.loads == []


async def test_an_alias_answers_as_its_model(system: System) -> None:
    answer = await system.chat("same")
    assert answer.status_code == 200
    assert answer.json()["model"] == "a"
    assert system.router.streams[-1].request.model == "a"


async def test_the_host_changes_aliases_while_the_gateway_serves(system: System) -> None:
    system.router.cards = [system.router.card(name=name) for name in "ab"]
    system.host.aliases, system.host.shadows = ["same=b", "gpt=a:1,b:1"], ["gpt=b:100"]
    system.host.set("b", "LOADED")
    await system.until_listed("gpt", "loaded")
    assert (await system.chat("same")).json()["model"] == "b"
    assert (await system.chat("other")).status_code == 404
    models = {(await system.chat("gpt", {"x-request-id": f"r{i}"})).json()["model"] for i in range(20)}
    assert models == {"a", "b"}


async def test_an_unknown_name_is_refused_with_all_names(system: System) -> None:
    answer = await system.chat("nosuch")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "The model 'nosuch' does not exist; there are 'a', 'b', 'other', 'same'"
    )


async def test_no_name_is_refused_if_there_are_several_models(system: System) -> None:
    answer = await system.chat("")
    assert answer.status_code == 400
    assert "model is required" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_does_not_end_the_load_for_the_others(system: System) -> None:
    leaving, staying = (asyncio.create_task(system.chat("b")) for _ in range(2))
    async with asyncio.timeout(patience(BOUND_S)):
        while not system.host.loads:
            await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.sleep(0.1)
    system.router.cards = [system.router.card(name="b")]
    system.host.set("b", "LOADED")
    assert (await asyncio.wait_for(staying, patience(BOUND_S))).status_code == 200


async def test_a_request_that_was_placed_when_its_model_left_has_it_loaded_again(kit: Any, system: System) -> None:
    is_there = False

    async def maybe(router: Any, stream: Any, send: Any) -> None:
        if not is_there:
            raise kit.StatusError(kit.Reason.NO_CAPACITY, "no worker", retry_after_s=0.1)
        await kit.speak(router, stream, send)

    system.router.script = maybe
    asked = asyncio.create_task(system.chat("a"))
    async with asyncio.timeout(patience(BOUND_S)):
        while not system.router.streams:
            await asyncio.sleep(0.01)
    system.host.set("a", "UNLOADED", is_on_demand=True)
    await system.until_loading()
    is_there = True
    system.host.set("a", "LOADED")
    assert (await asyncio.wait_for(asked, patience(BOUND_S))).status_code == 200
    assert system.host.loads == ["a"]


@pytest.mark.parametrize(
    ("state", "problem"), [("FAILED", "the disk is gone"), ("UNLOADED", "its operator has unloaded it")]
)
async def test_a_request_in_progress_whose_model_cannot_be_loaded_any_more_ends(
    kit: Any, system: System, state: str, problem: str
) -> None:
    async def no_worker(router: Any, stream: Any, send: Any) -> None:
        raise kit.StatusError(kit.Reason.NO_CAPACITY, "no worker", retry_after_s=0.1)

    system.router.script = no_worker
    asked = asyncio.create_task(system.chat("a"))
    async with asyncio.timeout(patience(BOUND_S)):
        while not system.router.streams:
            await asyncio.sleep(0.01)
    system.host.set("a", state, problem="the disk is gone")
    answer = await asyncio.wait_for(asked, patience(BOUND_S))
    assert answer.status_code == 503
    assert problem in answer.json()["error"]["message"]


async def test_a_request_waits_no_longer_than_its_time_limit(system: System) -> None:
    answer = await asyncio.wait_for(system.chat("b", {"x-request-timeout": "0.3"}), patience(BOUND_S))
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


async def test_an_operator_loads_and_unloads_models(system: System) -> None:
    assert (await system.gateway.http.post("/v1/load_model", json={"model": "b"})).status_code == 401
    loading = asyncio.create_task(system.operate("load_model", model="b", path="/m"))
    await system.until_loading()
    system.host.set("b", "LOADED")
    assert (await asyncio.wait_for(loading, patience(BOUND_S))).json() == {"id": "b", "state": "loaded"}
    assert system.host.operators == [("b", "/m")]
    assert (await system.operate("unload_model", model="b")).json() == {"id": "b", "state": "unloaded"}
    refused = await system.operate("load_model", model="nosuch")
    assert refused.status_code == 404


async def test_a_gateway_without_a_host_says_so(kit: Any, tiny_bundle: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    router = kit.FakeRouter(tiny_bundle)
    flags = {"admin_key_file": tmp_path / "key"}
    async with kit.serving_router(router), kit.serving_gateway(router.address, flags=flags) as gateway:
        answer = await gateway.http.post(
            "/v1/unload_model", json={"model": "a"}, headers={"authorization": f"Bearer {KEY}"}
        )
        assert answer.status_code == 400
        assert "no host that loads models" in answer.json()["error"]["message"]


@pytest_asyncio.fixture
async def split(kit: Any, tiny_bundle: bytes) -> AsyncIterator[System]:
    """`gpt` is `a` for 90 % of the requests and `b` for 10 %. `c` gets copies of half of them."""
    router = kit.FakeRouter(tiny_bundle)
    router.cards = [router.card(name=name, fingerprint=name * 64) for name in "abc"]
    aliases = parse_aliases(["gpt=a:90,b:10"], ["gpt=c:50"])
    async with kit.serving_router(router), kit.serving_gateway(router.address, aliases=aliases) as gateway:
        yield System(gateway, router, FakeHost())


async def test_requests_are_split_by_weight_and_copies_go_to_the_shadow(split: System) -> None:
    number = 300
    answers = await asyncio.gather(*(split.chat("gpt", {"x-request-id": f"r{i}"}) for i in range(number)))
    assert {answer.status_code for answer in answers} == {200}
    models = Counter(answer.json()["model"] for answer in answers)
    assert models.keys() == {"a", "b"}
    assert 0.05 * number < models["b"] < 0.15 * number
    asked = Counter(stream.request.model for stream in split.router.streams)
    assert (asked["a"], asked["b"]) == (models["a"], models["b"])
    copies = [stream.request for stream in split.router.streams if stream.request.model == "c"]
    assert {copy.priority for copy in copies} == {SHADOW_PRIORITY}
    found = await shadowed(split)
    assert found["ok"] == len(copies)
    assert 0.4 * number < sum(found.values()) < 0.6 * number


async def test_a_truncated_response_has_one_copy(kit: Any, tiny_bundle: bytes) -> None:
    router = kit.FakeRouter(tiny_bundle)
    router.cards = [router.card(name=name, fingerprint=name * 64) for name in "ac"]
    aliases = parse_aliases(["gpt=a"], ["gpt=c:100"])
    async with kit.serving_router(router), kit.serving_gateway(router.address, aliases=aliases) as gateway:
        items = [{"role": "user", "content": "word " * 10} for _ in range(20)]
        body = {"model": "gpt", "input": items, "truncation": "auto", "max_output_tokens": 5}
        answer = await gateway.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        system = System(gateway, router, FakeHost())
        async with asyncio.timeout(patience(BOUND_S)):
            while not await shadowed(system):
                await asyncio.sleep(0.01)
        (original,) = [stream.request for stream in router.streams if stream.request.model == "a"]
        copies = [stream.request for stream in router.streams if stream.request.model == "c"]
        assert [list(copy.token_ids) for copy in copies] == [list(original.token_ids)]


async def test_a_conversation_stays_with_one_model(split: System) -> None:
    for key in ("x", "y", "z"):
        body = {"model": "gpt", "prompt": "hi", "max_tokens": 4, "prompt_cache_key": key}
        answers = [await split.gateway.http.post("/v1/completions", json=body) for _ in range(5)]
        assert len({answer.json()["model"] for answer in answers}) == 1


async def test_a_copy_that_fails_harms_nobody(kit: Any, split: System) -> None:
    async def fail_copies(router: Any, stream: Any, send: Any) -> None:
        if stream.request.model == "c":
            raise kit.StatusError(kit.Reason.INTERNAL, "no")
        await kit.speak(router, stream, send)

    split.router.script = fail_copies
    answers = await asyncio.gather(*(split.chat("gpt", {"x-request-id": f"s{i}"}) for i in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert 'outcome="internal"' in (await split.gateway.http.get("/metrics")).text


async def shadowed(system: System) -> dict[str, int]:
    """Outcomes of the copies, once none is running."""
    metrics = (await system.gateway.http.get("/metrics")).text
    pattern = r'headrace_shadow_requests_total\{model="c",outcome="(\w+)"\} (\S+)'
    return {outcome: int(float(count)) for outcome, count in re.findall(pattern, metrics)}


@pytest.mark.parametrize(
    ("path", "task", "body", "num_texts"),
    [
        ("/v1/embeddings", TASK_EMBED, {"input": ["one", "two"]}, 2),
        ("/api/embed", TASK_EMBED, {"input": "one"}, 1),
        ("/v1/rerank", TASK_RANK, {"query": "one", "documents": ["two", "three", "four"]}, 3),
        ("/v1/score", TASK_RANK, {"text_1": "one", "text_2": "two"}, 1),
    ],
)
async def test_encoders_have_shadows_too(
    split: System, path: str, task: Any, body: dict[str, Any], num_texts: int
) -> None:
    split.router.script = encode
    split.router.cards = [split.router.card(name=name, task=task, dimensions=4, eos_token_ids=[]) for name in "abc"]
    await split.gateway.models.refresh()
    number = 40
    asked = (
        split.gateway.http.post(path, json={"model": "gpt", **body}, headers={"x-request-id": f"u{i}"})
        for i in range(number)
    )
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    sent, found = Counter[str](), dict[str, int]()
    async with asyncio.timeout(patience(BOUND_S)):  # until no copy runs
        while sum(found.values()) < 0.2 * number or sent["c"] != num_texts * found.get("ok", 0):
            await asyncio.sleep(0.01)
            found = await shadowed(split)
            sent = Counter(stream.request.model for stream in split.router.streams)
    assert sent["a"] + sent["b"] == number * num_texts
    assert found.keys() <= {"ok", "left_out"}
    assert sum(found.values()) < 0.8 * number
    assert {stream.request.priority for stream in split.router.streams if stream.request.model == "c"} == {
        SHADOW_PRIORITY
    }


async def test_ollamas_names_are_aliases_too(split: System) -> None:
    number = 40
    body = {"model": "gpt:latest", "prompt": "hi", "stream": False, "options": {"num_predict": 4}}
    asked = (
        split.gateway.http.post("/api/generate", json=body, headers={"x-request-id": f"v{i}"}) for i in range(number)
    )
    answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    assert {answer.json()["model"] for answer in answers} == {"a", "b"}
    async with asyncio.timeout(patience(BOUND_S)):
        while not 0.2 * number < sum((await shadowed(split)).values()) < 0.8 * number:
            await asyncio.sleep(0.01)


async def test_a_resumption_stays_with_the_weights_that_began_the_answer(kit: Any, split: System) -> None:
    async def break_off(router: Any, stream: Any, send: Any) -> None:
        if stream.request.model == "c" or stream.request.attempt:
            await kit.speak(router, stream, send)
            return
        await send([70], 0, None)
        await router.context_of(stream).abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    split.router.script = break_off
    answers = await asyncio.gather(*(split.chat("gpt", {"x-request-id": f"t{i}"}) for i in range(30)))
    assert {answer.status_code for answer in answers} == {200}
    by_request: dict[str, set[str]] = {}
    for stream in split.router.streams:
        if not stream.request.request_id.startswith("shadow") and stream.request.model != "c":
            by_request.setdefault(stream.metadata["x-request-id"], set()).add(stream.request.model)
    resumed = [stream.request for stream in split.router.streams if stream.request.resume_token_ids]
    assert len(resumed) == 30
    assert all(request.model_identity for request in resumed)
    assert all(len(models) == 1 for models in by_request.values())


async def test_pages_of_models_follow_anthropics_parameters(system: System) -> None:
    ids = list(await system.listed())
    assert len(ids) >= 3

    async def page(**query: Any) -> tuple[list[str], bool]:
        answer = (await system.gateway.http.get("/v1/models", params=query)).json()
        found = [model["id"] for model in answer["data"]]
        assert (answer["first_id"], answer["last_id"]) == ((found[0], found[-1]) if found else (None, None))
        return found, answer["has_more"]

    assert await page() == (ids, False)
    assert await page(limit=2) == (ids[:2], True)
    assert await page(limit=1000, after_id=ids[0]) == (ids[1:], False)
    assert await page(limit=1, after_id=ids[0]) == (ids[1:2], True)
    assert await page(after_id=ids[-1]) == ([], False)
    assert await page(limit=1, before_id=ids[2]) == (ids[1:2], True)
    assert await page(before_id=ids[0]) == ([], False)
    both = await system.gateway.http.get("/v1/models", params={"after_id": ids[0], "before_id": ids[2]})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "before_id")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"after_id": "nobody"}, "after_id"),
        ({"before_id": "nobody"}, "before_id"),
    ],
)
async def test_wrong_pages_of_models_are_refused_by_field(system: System, query: dict[str, str], field: str) -> None:
    answer = await system.gateway.http.get("/v1/models", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
