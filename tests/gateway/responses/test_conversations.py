"""The Conversations API over real HTTP, and responses that continue conversations."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from headrace.common.stores.api_keys import ApiKey, sha256_of, write_keys
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.responses import conversations as conversations_module
from headrace.gateway.responses import store as store_module
from headrace.gateway.responses.conversations import Conversations, StoredConversation
from headrace.gateway.responses.redis_store import RedisStore
from headrace.gateway.responses.store import MemoryStore, Store, StoreError, TooLargeError, packed, unpacked
from headrace.protos.status import Reason, StatusError
from tests.gateway.tool_model import events_of
from tests.patience import patience
from tests.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONVERSATIONS = "/v1/conversations"
RESPONSES = "/v1/responses"


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


def user(text: str, **more: Any) -> dict[str, Any]:
    """A turn of the user."""
    return {"role": "user", "content": text, **more}


@pytest.fixture
def begin(front: Any) -> Any:
    """Begin a conversation with these turns of the user; give its path."""

    async def post(*texts: str, **fields: Any) -> str:
        body = {"items": [user(text) for text in texts], **fields}
        made = await front.http.post(CONVERSATIONS, json=body)
        assert made.status_code == 200, made.text
        return f"{CONVERSATIONS}/{made.json()['id']}"

    return post


@pytest.fixture
def ask(front: Any, model: Any) -> Any:
    """Continue a conversation with a response of a model that writes this text."""

    async def post(path: str, written: str, /, **fields: Any) -> Any:
        model.answer = written
        asked = {"model": "tiny", "conversation": path.rpartition("/")[2], **fields}
        response = await front.http.post(RESPONSES, json=asked)
        assert response.status_code == 200, response.text
        return events_of(response.text) if fields.get("stream") else response.json()

    return post


@pytest.fixture
def texts_in(front: Any) -> Any:
    """The texts of a conversation's messages, in order."""

    async def get(path: str) -> list[str]:
        items = (await front.http.get(f"{path}/items", params={"order": "asc", "limit": "100"})).json()["data"]
        return [part["text"] for item in items if item["type"] == "message" for part in item["content"]]

    return get


# --- conversations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/v1", "/v3"])
async def test_a_conversation_is_begun_changed_and_deleted(front: Any, prefix: str) -> None:
    path = f"{prefix}/conversations"
    made = (await front.http.post(path, json={"metadata": {"topic": "x"}})).json()
    assert made["id"].startswith("conv_")
    assert made["created_at"] > 1.7e9
    assert (made["object"], made["metadata"]) == ("conversation", {"topic": "x"})
    one = f"{path}/{made['id']}"
    assert (await front.http.get(one)).json() == made
    changed = {**made, "metadata": {"a": "b"}}
    assert (await front.http.post(one, json={"metadata": {"a": "b"}})).json() == changed
    assert (await front.http.get(one)).json() == changed
    assert (await front.http.post(one, json={"metadata": None})).json()["metadata"] == {}
    gone = {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    assert (await front.http.delete(one)).json() == gone
    for missing in (
        await front.http.get(one),
        await front.http.post(one, json={"metadata": {}}),
        await front.http.delete(one),
        await front.http.get(f"{one}/items"),
        await front.http.post(f"{one}/items", json={"items": [user("x")]}),
        await front.http.get(f"{one}/items/msg_1"),
        await front.http.delete(f"{one}/items/msg_1"),
    ):
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "conversation_id")


async def test_items_are_added_listed_in_pages_and_removed(front: Any, begin: Any, texts_in: Any) -> None:
    path = await begin("a")
    new = [user("b", id="msg_b"), {"type": "message", "role": "assistant", "content": "c"}, user("d")]
    added = (await front.http.post(f"{path}/items", json={"items": new})).json()
    assert [item["role"] for item in added["data"]] == ["user", "assistant", "user"]
    assert (added["object"], added["has_more"]) == ("list", False)
    assert (added["first_id"], added["last_id"]) == ("msg_b", added["data"][-1]["id"])
    assert await texts_in(path) == ["a", "b", "c", "d"]
    newest = (await front.http.get(f"{path}/items", params={"limit": "2"})).json()
    assert newest["data"] == added["data"][:0:-1]
    assert newest["has_more"] is True
    rest = (await front.http.get(f"{path}/items", params={"after": newest["last_id"]})).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["b", "a"]
    assert (await front.http.get(f"{path}/items/msg_b")).json() == added["data"][0]
    left = await front.http.delete(f"{path}/items/msg_b")
    assert left.json() == (await front.http.get(path)).json()
    assert await texts_in(path) == ["a", "c", "d"]
    for missing in (await front.http.get(f"{path}/items/msg_b"), await front.http.delete(f"{path}/items/msg_b")):
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "item_id")
    for params in ({"limit": "0"}, {"order": "up"}, {"after": "msg_b"}):
        assert (await front.http.get(f"{path}/items", params=params)).json()["error"]["param"] == next(iter(params))


async def test_an_empty_conversation_has_an_empty_page(front: Any, begin: Any) -> None:
    page = (await front.http.get(f"{await begin()}/items")).json()
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_reasoning_is_included_in_its_opaque_form(front: Any, begin: Any, ask: Any) -> None:
    path = await begin("a")
    answer = await ask(path, "<think>Hm</think>b", include=["reasoning.encrypted_content"])
    sealed = answer["output"][0]["encrypted_content"]
    other = await begin()
    new = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}]
    added = (await front.http.post(f"{other}/items", json={"items": new})).json()["data"][0]
    assert "encrypted_content" not in added
    query = {"include[]": ["reasoning.encrypted_content", "message.input_image.image_url"]}
    for shown in (
        (await front.http.get(f"{other}/items", params=query)).json()["data"][0],
        (await front.http.get(f"{other}/items/{added['id']}", params=query)).json(),
        (await front.http.post(f"{await begin()}/items", json={"items": new}, params=query)).json()["data"][0],
    ):
        assert shown["encrypted_content"] == sealed


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": "x"}, "items"),
        ({"items": [user("x"), {"type": "nonsense"}]}, "items[1].type"),
        ({"items": [{"role": "nobody", "content": "x"}]}, "items[0].role"),
        ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].id"),
        ({"items": [user("x", id="msg_1"), user("y", id="msg_1")]}, "items[1].id"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": "x"}, "metadata"),
    ],
)
async def test_what_is_wrong_in_a_conversation_is_named(front: Any, begin: Any, body: Any, param: str) -> None:
    refused = [await front.http.post(CONVERSATIONS, json=body)]
    if "items" in body:
        refused.append(await front.http.post(f"{await begin('a')}/items", json=body))
    else:
        refused.append(await front.http.post(await begin("a"), json=body))
    for response in refused:
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_what_is_missing_is_named(front: Any, begin: Any) -> None:
    path = await begin("a")
    assert (await front.http.post(path, json={})).json()["error"]["param"] == "metadata"
    assert (await front.http.post(f"{path}/items", json={})).json()["error"]["param"] == "items"
    assert (await front.http.post(f"{path}/items", json={"items": []})).json()["error"]["param"] == "items"


# --- responses that continue them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"background": True, "stream": True}, {"store": False}])
async def test_a_response_goes_on_from_a_conversation_and_adds_to_it(
    front: Any, model: Any, begin: Any, ask: Any, texts_in: Any, mode: Any
) -> None:
    path = await begin("a", "b")
    answer = await ask(path, "<think>Hm</think>c", input="d", **mode)
    answer = answer[-1]["response"] if mode.get("stream") else answer
    assert answer["conversation"] == {"id": path.rpartition("/")[2]}
    assert answer["previous_response_id"] is None
    assert "user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>user\nd<|im_end|>" in model.prompt
    assert await texts_in(path) == ["a", "b", "d", "c"]
    items = (await front.http.get(f"{path}/items", params={"order": "asc"})).json()["data"]
    assert items[-2:] == answer["output"]
    await ask(path, "f", input=[user("e")])
    assert "assistant\n<think>Hm</think>c<|im_end|>\n<|im_start|>user\ne<|im_end|>" in model.prompt
    assert await texts_in(path) == ["a", "b", "d", "c", "e", "f"]


async def test_a_conversation_is_named_by_an_object_too(ask: Any, begin: Any, texts_in: Any) -> None:
    path = await begin("a")
    answer = await ask(path, "b", input="x", conversation={"id": path.rpartition("/")[2]})
    assert answer["conversation"] == {"id": path.rpartition("/")[2]}
    assert await texts_in(path) == ["a", "x", "b"]


async def test_what_a_conversation_has_is_answered_without_an_input(
    front: Any, model: Any, ask: Any, begin: Any, texts_in: Any
) -> None:
    path = await begin("a")
    await ask(path, "b")
    assert await texts_in(path) == ["a", "b"]
    assert model.prompt.endswith("user\na<|im_end|>\n<|im_start|>assistant\n")
    empty = (await begin()).rpartition("/")[2]
    refused = await front.http.post(RESPONSES, json={"model": "tiny", "conversation": empty})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


async def test_calls_and_their_outputs_are_in_the_conversation(front: Any, model: Any, ask: Any, begin: Any) -> None:
    path = await begin("a")
    tools = [{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}]
    answer = await ask(path, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', tools=tools)
    (call,) = answer["output"]
    told = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    await ask(path, "It is noon.", input=[told], tools=tools)
    assert "<tool_call>now{}</tool_call><|im_end|>\n<|im_start|>tool\nnoon<|im_end|>" in model.prompt
    items = (await front.http.get(f"{path}/items", params={"order": "asc"})).json()["data"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output", "message"]
    assert (await front.http.get(f"{path}/items/{call['id']}")).json() == call


async def test_a_response_of_a_conversation_lists_all_that_it_answers(front: Any, ask: Any, begin: Any) -> None:
    path = await begin("a")
    answer = await ask(path, "c", input="b")
    items = (await front.http.get(f"{RESPONSES}/{answer['id']}/input_items", params={"order": "asc"})).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["a", "b"]
    assert (await front.http.get(f"{RESPONSES}/{answer['id']}")).json() == answer
    await front.http.delete(path)
    other = await begin()
    refer = {"items": [{"type": "item_reference", "id": answer["output"][0]["id"]}]}
    added = await front.http.post(f"{other}/items", json=refer)
    assert added.json()["data"] == answer["output"]


async def test_a_response_that_fails_adds_nothing(
    front: Any, model: Any, kit: Any, ask: Any, begin: Any, texts_in: Any
) -> None:
    async def fail(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("He"), 0, None)
        raise kit.StatusError(kit.Reason.TOO_LARGE_FOR_CACHE, "no room")

    path = await begin("a")
    model.script = fail
    events = await ask(path, "", input="b", stream=True)
    assert events[-1]["type"] == "response.failed"
    assert await texts_in(path) == ["a"]


@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"background": True, "stream": True}])
async def test_a_response_fails_if_its_conversation_is_deleted_meanwhile(
    front: Any, model: Any, kit: Any, begin: Any, ask: Any, mode: Any
) -> None:
    path = await begin("a")

    async def delete(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("He"), 0, None)
        await front.http.delete(path)
        await send([*kit.tokens_of("llo"), kit.EOS], 2, kit.inference_pb2.FINISH_REASON_STOP)

    model.script = delete
    asked = {"model": "tiny", "conversation": path.rpartition("/")[2], "input": "b", **mode}
    response = await front.http.post(RESPONSES, json=asked)
    if not mode:
        assert (response.status_code, response.json()["error"]["param"]) == (404, "conversation")
        return
    events = events_of(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    assert "there is no conversation" in events[-1]["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"conversation": "conv_none"}, 404, "conversation"),
        ({"conversation": "conv_:alive"}, 404, "conversation"),
        ({"conversation": "resp_1"}, 404, "conversation"),
        ({"conversation": 3}, 400, "conversation"),
        ({"conversation": {}}, 400, "conversation.id"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, 400, "conversation"),
        ({}, 400, "input"),
    ],
)
async def test_a_conversation_that_cannot_be_continued_is_named(
    front: Any, model: Any, fields: Any, status: int, param: str
) -> None:
    asked = {"model": "tiny", "input": "x", **fields} if fields else {"model": "tiny"}
    refused = await front.http.post(RESPONSES, json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert model.streams == []


async def test_items_that_a_conversation_has_are_not_sent_again(front: Any, model: Any, ask: Any, begin: Any) -> None:
    path = await begin("a")
    answer = await ask(path, "c", input="b")
    model.streams.clear()
    asked = {"model": "tiny", "conversation": path.rpartition("/")[2], "input": [user("x"), *answer["output"]]}
    refused = (await front.http.post(RESPONSES, json=asked)).json()["error"]
    assert refused["param"] == "input[1].id"
    assert "already" in refused["message"]
    assert model.streams == []


async def test_what_is_too_long_names_the_conversation(front: Any, begin: Any) -> None:
    path = await begin("x" * 5000)
    asked = {"model": "tiny", "conversation": path.rpartition("/")[2], "input": "b"}
    error = (await front.http.post(RESPONSES, json=asked)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert (await front.http.post(RESPONSES, json={**asked, "truncation": "auto"})).status_code == 200


async def test_responses_at_the_same_time_all_add_theirs(front: Any, model: Any, begin: Any, texts_in: Any) -> None:
    path = await begin("a")
    asked = {"model": "tiny", "conversation": path.rpartition("/")[2]}
    model.answer = "y"
    answers = await asyncio.gather(
        *(front.http.post(RESPONSES, json={**asked, "input": f"x{i}"}) for i in range(8)),
        *(front.http.post(f"{path}/items", json={"items": [user(f"z{i}")]}) for i in range(8)),
        front.http.post(path, json={"metadata": {"k": "v"}}),
    )
    assert {answer.status_code for answer in answers} == {200}
    texts = await texts_in(path)
    assert sorted(texts) == sorted(["a", *(f"x{i}" for i in range(8)), *(f"z{i}" for i in range(8)), *(["y"] * 8)])
    # An input and its output stay together.
    assert all(texts[position + 1] == "y" for position, text in enumerate(texts) if text.startswith("x"))
    assert (await front.http.get(path)).json()["metadata"] == {"k": "v"}


async def test_a_conversation_is_only_for_the_tenant_of_its_key(kit: Any, tiny_bundle: bytes, tmp_path: Any) -> None:
    keys = [
        ApiKey(id=f"key_{name}", name=name, tenant=tenant, created_s=1, sha256=sha256_of(name))
        for name, tenant in (("one", "one"), ("second", "one"), ("other", "other"))
    ]
    write_keys(tmp_path / "keys", keys)
    controls = EdgeControls(EdgeSettings(api_keys=tmp_path / "keys"))
    await controls.start()
    one, second, other = ({"x-api-key": key.name} for key in keys)
    fake = kit.FakeRouter(tiny_bundle)
    async with kit.serving_router(fake) as (address, _), kit.serving_gateway(address, controls=controls) as gateway:
        http = gateway.http
        made = (await http.post(CONVERSATIONS, json={"items": [user("a", id="msg_a")]}, headers=one)).json()
        path = f"{CONVERSATIONS}/{made['id']}"
        asked = {"model": "tiny", "input": "b", "conversation": made["id"]}
        for refused in (
            await http.get(path, headers=other),
            await http.post(path, json={"metadata": {}}, headers=other),
            await http.get(f"{path}/items", headers=other),
            await http.post(f"{path}/items", json={"items": [user("b")]}, headers=other),
            await http.get(f"{path}/items/msg_a", headers=other),
            await http.delete(f"{path}/items/msg_a", headers=other),
            await http.delete(path, headers=other),
            await http.post(RESPONSES, json=asked, headers=other),
        ):
            assert refused.status_code == 404
        assert (await http.get(path)).status_code == 401
        assert (await http.post(RESPONSES, json=asked, headers=second)).status_code == 200
        assert (await http.get(path, headers=second)).json() == made
    await controls.close()


# --- how they are kept ----------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(params=["memory", "redis"], loop_scope="module")
async def store(request: Any, tmp_path: Any) -> Any:
    """A store of each kind, of which a tenant has at most 1000 bytes."""
    if request.param == "memory":
        yield MemoryStore(tenant_bytes=1000)
        return
    server = RedisServer(tmp_path).start()
    made = RedisStore(server.url, tenant_bytes=1000)
    yield made
    await made.close()
    server.kill()


async def test_a_value_is_swapped_only_for_the_one_that_was_read(store: Store) -> None:
    assert not await store.swap("a", b"1", b"2", "one")
    await store.put("a", b"1", owner="one")
    assert not await store.swap("a", b"0", b"2", "one")
    assert await store.swap("a", b"1", b"22", "one")
    assert not await store.swap("a", b"1", b"3", "one")
    assert await store.get("a") == b"22"
    with pytest.raises(TooLargeError):
        await store.swap("a", b"22", bytes(1001), "one")
    await store.put("b", bytes(600), owner="one")
    await store.put("c", bytes(300), owner="one")
    # A swap counts as the newest value, and what it adds counts against the tenant.
    assert await store.swap("a", b"22", bytes(200), "one")
    assert [await store.get(key) for key in "abc"] == [bytes(200), None, bytes(300)]


async def test_changes_at_the_same_time_are_all_there(store: Store) -> None:
    kept = Conversations(store)
    name, _ = await kept.create("one", [], {})

    async def add(number: int) -> None:
        await kept.change("one", name, lambda one: one.add("items", [{"id": f"i{number}"}]))

    async with asyncio.timeout(patience(30)):
        await asyncio.gather(*(add(number) for number in range(8)))
    found = await kept.find("one", name)
    assert sorted(item["id"] for item in found.items) == [f"i{number}" for number in range(8)]


async def test_a_conversation_that_others_change_all_the_time_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations_module, "MAX_TRIES", 3)
    monkeypatch.setattr(conversations_module, "_PAUSE_S", 0.0)
    store = MemoryStore()
    kept = Conversations(store)
    name, _ = await kept.create("one", [], {})

    async def refuse(*_: Any) -> bool:
        return False

    monkeypatch.setattr(store, "swap", refuse)
    with pytest.raises(StatusError) as caught:
        await kept.change("one", name, lambda one: None)
    assert (caught.value.reason, caught.value.field) == (Reason.NO_CAPACITY, "conversation_id")


async def test_integers_of_any_size_are_kept() -> None:
    made = StoredConversation("o", 1, {}, [{"id": "a", "const": -(10**30)}])
    assert await unpacked(await packed(made), StoredConversation) == made


@pytest.mark.parametrize("bound", ["items", "bytes"])
async def test_a_conversation_that_is_too_large_says_so(
    front: Any, model: Any, ask: Any, begin: Any, texts_in: Any, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    path = await begin("a")
    if bound == "items":
        monkeypatch.setattr(conversations_module, "MAX_CONVERSATION_ITEMS", 2)
    else:
        monkeypatch.setattr(store_module, "MAX_PLAIN_BYTES", 400)
    added = {"items": [user("b" * 100), user("c" * 100)]}
    refused = await front.http.post(f"{path}/items", json=added)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] in ("items", "conversation_id")
    assert "begin another" in refused.json()["error"]["message"]
    events = await ask(path, "y" * 100, input="x" * 100, stream=True)
    assert events[-1]["type"] == "response.failed"
    assert "begin another" in events[-1]["response"]["error"]["message"]
    assert await texts_in(path) == ["a"]


async def test_without_its_store_a_conversation_is_refused_for_now(
    front: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await begin("a")

    async def away(*_: Any, **__: Any) -> Any:
        raise StoreError("Redis does not answer")

    monkeypatch.setattr(MemoryStore, "get", away)
    monkeypatch.setattr(MemoryStore, "put", away)
    for refused in (
        await front.http.post(CONVERSATIONS, json={}),
        await front.http.get(path),
        await front.http.post(RESPONSES, json={"model": "tiny", "conversation": path.rpartition("/")[2]}),
    ):
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
