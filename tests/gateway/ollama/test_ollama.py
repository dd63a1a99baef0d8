"""Ollama's API over real HTTP, with a fake router that plays the model."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.gateway.edge import exchange
from headrace.gateway.hints import HEADER
from headrace.protos.inference_pb2 import CacheEviction
from headrace.protos.status import Reason, StatusError
from tests.gateway.tool_model import ONE, TEXTS, TWO, in_pieces
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


@pytest.fixture
def ask(front: Any, model: Any) -> Any:
    """Ask a model that writes this text; the answer, or the lines of its stream."""

    async def post(text: str, path: str = CHAT, **fields: Any) -> Any:
        model.answer = text
        prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        response = await front.http.post(path, json={"model": "tiny", **prompt, **fields})
        assert response.status_code == 200, response.text
        if fields.get("stream") is False:
            assert response.headers["content-type"] == "application/json"
            return response.json()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.text.splitlines()]

    return post


@pytest.fixture
def refused(front: Any, model: Any) -> Any:
    """Send a request that is refused. Returns the error."""

    async def post(path: str = CHAT, status: int = 400, **fields: Any) -> str:
        prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        response = await front.http.post(path, json={"model": "tiny", **prompt, **fields})
        assert response.status_code == status, response.text
        assert model.streams == []
        error = response.json()
        assert list(error) == ["error"]
        return str(error["error"])

    return post


# --- answers --------------------------------------------------------------------------------------------------------


async def test_a_chat_has_the_text_and_the_account(ask: Any, model: Any) -> None:
    answer = await ask("Hello, wörld 😀!", stream=False)
    assert abs(datetime.fromisoformat(answer.pop("created_at")).timestamp() - datetime.now().timestamp()) < 60
    times = {name: answer.pop(name) for name in list(answer) if name.endswith("_duration")}
    assert answer == {
        "model": "tiny",
        "message": {"role": "assistant", "content": "Hello, wörld 😀!"},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": len(model.streams[0].request.token_ids),
        "eval_count": len("Hello, wörld 😀!".encode()) + 1,
    }
    parts = times["load_duration"] + times["prompt_eval_duration"] + times["eval_duration"]
    assert 0 < parts <= times["total_duration"] < 20e9


async def test_times_are_those_of_the_stages(ask: Any, model: Any, kit: Any) -> None:
    async def slowly(_: Any, stream: Any, send: Any) -> None:
        await asyncio.sleep(0.1)
        await send(kit.tokens_of("a"), 0, None)
        await asyncio.sleep(0.2)
        await send([kit.EOS], 1, kit.inference_pb2.FINISH_REASON_STOP)

    model.script = slowly
    last = (await ask(""))[-1]
    # Clocks of stages and of sleep are not the same.
    assert last["prompt_eval_duration"] > 0.09e9
    assert last["eval_duration"] > 0.19e9
    parts = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
    assert parts <= last["total_duration"], "no stage includes another one"


async def test_a_chat_is_streamed_unless_told_otherwise(ask: Any) -> None:
    lines = await ask("Hi")
    assert [one["message"] for one in lines] == [{"role": "assistant", "content": text} for text in ("H", "i", "")]
    assert [one["done"] for one in lines] == [False, False, True]
    assert lines[-1]["done_reason"] == "stop"
    assert lines[-1]["eval_count"] == 3


async def test_a_line_ends_where_any_client_sees_its_end(ask: Any) -> None:
    text = "a\u2028b\u2029c\x85d"
    lines = await ask(text)  # split as httpx does, and so Ollama's client in Python
    assert "".join(one["message"]["content"] for one in lines) == text


async def test_thinking_is_told_apart(ask: Any) -> None:
    answer = await ask("<think>\nHm.\n</think>\n\nParis.", stream=False)
    assert answer["message"] == {"role": "assistant", "content": "Paris.", "thinking": "Hm."}
    answer = await ask("<think>\nHm.\n</think>\n\nParis.", GENERATE, stream=False)
    assert (answer["response"], answer["thinking"]) == ("Paris.", "Hm.")


async def test_calls_have_their_arguments_as_objects(ask: Any) -> None:
    for stream in (False, True):
        answer = await ask(f"Look: {ONE}\n{TWO}", tools=[WEATHER, NOW], stream=stream)
        lines = answer if stream else [answer]
        calls = [call for one in lines for call in one["message"].get("tool_calls", ())]
        assert all(call.pop("id").startswith("call_") for call in calls)
        assert calls == [
            {"function": {"index": 0, "name": "weather", "arguments": {"city": "Köln"}}},
            {"function": {"index": 1, "name": "now", "arguments": {}}},
        ]
        assert "".join(one["message"]["content"] for one in lines) == "Look:"
        assert lines[-1]["done_reason"] == "stop"


async def test_a_call_that_is_cut_off_shows_its_arguments_as_text(ask: Any) -> None:
    answer = await ask(ONE, tools=[WEATHER], options={"num_predict": len(ONE.encode()) - 20}, stream=False)
    (call,) = answer["message"]["tool_calls"]
    assert answer["done_reason"] == "length"
    assert '{"city": "Köln"}'.startswith(call["function"]["arguments"]["INVALID_JSON"])


async def test_log_probabilities_go_with_their_text(ask: Any) -> None:
    for path in (CHAT, GENERATE):
        lines = await ask("Hé", path, logprobs=True, top_logprobs=2)
        found = [one for line in lines for one in line.get("logprobs", ())]
        assert bytes(byte for one in found for byte in one["bytes"]).startswith("Hé".encode())
        assert all(len(one["top_logprobs"]) == 2 and one["logprob"] < 0 for one in found)
        whole = await ask("Hé", path, logprobs=True, stream=False)
        assert [one["token"] for one in whole["logprobs"]] == [one["token"] for one in found]
        assert "logprobs" not in await ask("Hé", path, stream=False)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS, data=st.data())
async def test_a_stream_adds_up_to_the_whole_answer(ask: Any, model: Any, text: str, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([CHAT, GENERATE]))
    fields = {"tools": [WEATHER, NOW]} if path == CHAT else {}
    model.reset()
    model.script = in_pieces(text, data)
    whole, lines = await ask(text, path, stream=False, **fields), await ask(text, path, **fields)
    key = "content" if path == CHAT else "response"
    parts = [one["message"] if path == CHAT else one for one in (whole, *lines)]
    for name in (key, "thinking"):
        assert "".join(part.get(name, "") for part in parts[1:]) == parts[0].get(name, "")
    calls = [call["function"] for part in parts[1:] for call in part.get("tool_calls", ())]
    assert calls == [call["function"] for call in parts[0].get("tool_calls", ())]
    assert lines[-1]["done_reason"] == whole["done_reason"]
    assert lines[-1]["eval_count"] == whole["eval_count"]


# --- requests -------------------------------------------------------------------------------------------------------


async def test_options_reach_the_worker(ask: Any, model: Any) -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.25,
        "seed": 11,
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    for path, more in ((CHAT, {}), (GENERATE, {}), (GENERATE, {"raw": True})):
        await ask("", path, options=options, **more)
        sampling = model.streams[-1].request.sampling
        assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (7, 3, 11)
        assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.75, 0.25)
        assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.5)
        assert sampling.frequency_penalty == -0.5
    await ask("", options={**options, "repeat_last_n": 0, "seed": -1})
    sampling = model.streams[-1].request.sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)


async def test_an_answer_is_as_long_as_the_context_lets_it(ask: Any, model: Any) -> None:
    for more in ({}, {"raw": True}, {"options": {"num_predict": -1}}, {"options": {"num_predict": -2}}):
        await ask("", GENERATE, **more)
        request = model.streams[-1].request
        assert request.sampling.max_tokens == 4096 - len(request.token_ids)


async def test_num_ctx_bounds_prompt_and_answer(ask: Any, model: Any, refused: Any) -> None:
    for path, more in ((CHAT, {}), (GENERATE, {}), (GENERATE, {"raw": True})):
        last = (await ask("x" * 300, path, options={"num_ctx": 100}, **more))[-1]
        assert last["done_reason"] == "length"
        assert last["prompt_eval_count"] + last["eval_count"] == 100
        last = (await ask("x" * 300, path, options={"num_ctx": 100, "num_predict": 5}, **more))[-1]
        assert last["eval_count"] == 5
    model.reset()
    assert "num_ctx" in await refused(options={"num_ctx": 3})


async def test_num_ctx_over_the_context_is_the_context(front: Any, model: Any) -> None:
    for path, more in ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "hi"})):
        body = {"model": "tiny", **more, "options": {"num_ctx": 32768, "num_predict": 100_000}}
        response = await front.http.post(path, json=body)
        room = 4096 - len(model.streams[-1].request.token_ids)
        assert response.status_code == 200, response.text
        names = response.headers[HEADER].split(", ")
        assert sorted(name.partition(">")[2] for name in names) == sorted([str(room), "4096"])
        assert model.streams[-1].request.sampling.max_tokens == room
    assert (await front.http.get("/api/ps")).json()["models"][0]["context_length"] == 4096


async def test_num_ctx_may_be_as_long_as_contexts_that_give_up_blocks(
    ask: Any, model: Any, front: Any, refused: Any
) -> None:
    rule = CacheEviction(max_cache_size=64, start_size=1, recent_size=1)
    model.cards = [model.card(max_evicting_context_tokens=9000, cache_eviction=rule)]
    await front.models.refresh()
    try:
        last = (await ask("x", GENERATE, options={"num_ctx": 8000}))[-1]
        assert last["done_reason"] == "stop"
        model.streams.clear()
        response = await front.http.post(GENERATE, json={"prompt": "hi", "options": {"num_ctx": 9001}})
        assert response.headers[HEADER] == "options.num_ctx>9000"
    finally:
        model.reset()
        await front.models.refresh()


async def test_stop_texts_end_the_answer_and_are_no_part_of_it(ask: Any) -> None:
    for stop in (" th", ["zz", " th"]):
        answer = await ask("Hello there", options={"stop": stop}, stream=False)
        assert (answer["message"]["content"], answer["done_reason"]) == ("Hello", "stop")


async def test_a_format_holds_the_answer(ask: Any, model: Any) -> None:
    for path in (CHAT, GENERATE):
        await ask("{}", path, format="json")
        assert model.streams[-1].request.sampling.constraint.HasField("json_object")
        await ask("{}", path, format={"type": "object"})
        assert json.loads(model.streams[-1].request.sampling.constraint.json_schema) == {"type": "object"}
        await ask("{}", path, format="")
        assert not model.streams[-1].request.sampling.HasField("constraint")


@pytest.mark.parametrize(("think", "closed"), [(None, False), (True, False), ("high", False), (False, True)])
async def test_think_switches_reasoning(ask: Any, model: Any, think: Any, closed: bool) -> None:
    for path in (CHAT, GENERATE):
        await ask("", path, think=think)
        assert model.prompt.endswith("</think>\n\n") is closed


async def test_a_conversation_goes_through_the_template(ask: Any, model: Any) -> None:
    call = {"id": "c1", "function": {"name": "now", "arguments": {}}}
    messages = [
        {"role": "system", "content": "Be brief.", "images": []},
        *HI,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_name": "now", "tool_call_id": "c1"},
    ]
    await ask("", messages=messages, tools=[NOW])
    for part in ("tools\n", "Be brief.", "hi", "<think>Hm.</think>", "<tool_call>now{}</tool_call>", "noon"):
        assert part in model.prompt
    await ask("", messages=[*HI, {"role": "assistant", "content": "The answer"}])
    assert model.prompt.endswith("The answer")


async def test_a_prompt_goes_through_the_template_unless_raw(ask: Any, model: Any) -> None:
    await ask("", GENERATE, system="Be brief.")
    assert model.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = await ask("x", GENERATE, raw=True, stream=False)
    assert model.prompt == "<|bos|>hi"
    assert "context" not in answer


async def test_the_context_of_an_answer_is_continued(ask: Any, model: Any, refused: Any) -> None:
    first = await ask("Hello", GENERATE, stream=False)
    tokens = list(model.streams[-1].request.token_ids)
    assert first["context"][: len(tokens)] == tokens
    said = model.prompt + "Hello<|im_end|>"
    lines = await ask("Again", GENERATE, context=first["context"])
    assert model.prompt == f"{said}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert lines[-1]["context"][: len(first["context"])] == first["context"]
    model.reset()
    assert "context" in await refused(GENERATE, context=[999])
    assert "context" in await refused(GENERATE, context=[1] * 5000, status=400)


async def test_without_a_prompt_a_model_is_loaded(ask: Any, model: Any, front: Any) -> None:
    (line,) = await ask("", messages=[], keep_alive="5m")
    assert (line["done"], line["done_reason"], line["message"]["content"]) == (True, "load", "")
    answer = await ask("", GENERATE, prompt="", stream=False)
    assert (answer["done_reason"], answer["response"]) == ("load", "")
    assert model.streams == []
    for at_once in (0, 0.0, "0", "0s", "0m", "0h0.0s", "-0"):
        response = await front.http.post(GENERATE, json={"model": "tiny", "keep_alive": at_once, "stream": False})
        assert (response.status_code, response.headers[HEADER]) == (200, "keep_alive"), at_once
        assert response.json()["done_reason"] == "unload"


async def test_what_clients_of_ollama_send_unasked_is_named(front: Any, model: Any) -> None:
    options = {"num_gpu": 99, "repeat_last_n": 64, "made_up": 1, "num_ctx": 4096.0, "num_predict": 8.0, "seed": 1.0}
    body = {"model": "tiny", "messages": [{"role": "user"}], "options": options, "truncate": True, "extra": 1}
    response = await front.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    names = ["extra", "options.made_up", "options.num_gpu", "options.repeat_last_n", "truncate"]
    assert sorted(response.headers[HEADER].split(", ")) == names
    assert model.streams[-1].request.sampling.max_tokens == 8


@pytest.mark.parametrize("num_predict", [0, -1, -2, -5])
async def test_answers_without_a_limit_end_with_the_context(ask: Any, model: Any, num_predict: int) -> None:
    for path, more in ((CHAT, {}), (GENERATE, {}), (GENERATE, {"raw": True})):
        await ask("x", path, options={"num_predict": num_predict}, **more)
        request = model.streams[-1].request
        assert request.sampling.max_tokens == 4096 - len(request.token_ids)


@pytest.mark.parametrize("keep_alive", [-1, 1800, "5m", 0])
async def test_keep_alive_is_named_because_the_operator_decides(front: Any, keep_alive: Any) -> None:
    for path, more in ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "hi"})):
        body = {"model": "tiny", "stream": False, "keep_alive": keep_alive, **more}
        response = await front.http.post(path, json=body)
        assert (response.status_code, response.headers[HEADER]) == (200, "keep_alive")


async def test_hints_change_nothing(ask: Any, model: Any) -> None:
    hints = {"num_batch": 8, "num_gpu": 0, "main_gpu": 0, "num_thread": 4, "num_keep": 5, "numa": True}
    more = {"low_vram": False, "f16_kv": True, "use_mmap": True, "use_mlock": False, "mirostat_tau": 5.0}
    neutral = {"mirostat": 0, "mirostat_eta": 0.1, "tfs_z": 1.0, "typical_p": 1.0, "penalize_newline": True}
    await ask("", options={**hints, **more, **neutral, "vocab_only": False, "logits_all": False})
    await ask("", keep_alive=-1, truncate=False, shift=False)
    assert model.streams[0].request.token_ids == model.streams[1].request.token_ids


@pytest.mark.parametrize(
    ("field", "path", "fields"),
    [
        ("messages[0].images", CHAT, {"messages": [{**HI[0], "images": ["AAAA"]}]}),
        ("images", GENERATE, {"images": ["AAAA"]}),
        ("suffix", GENERATE, {"suffix": "end"}),
        ("template", GENERATE, {"template": "{{ .Prompt }}"}),
        ("width", GENERATE, {"width": 8}),
        ("height", GENERATE, {"height": 8}),
        ("steps", GENERATE, {"steps": 8}),
        ("system", GENERATE, {"raw": True, "system": "x"}),
        ("context", GENERATE, {"raw": True, "context": [1]}),
        ("keep_alive", CHAT, {"keep_alive": "soon"}),
        ("format", CHAT, {"format": "xml"}),
        ("format", CHAT, {"format": ""} | {"format": "yaml"}),
        ("think", CHAT, {"think": "enormously"}),
        ("top_logprobs", CHAT, {"top_logprobs": 2}),
        ("top_logprobs", CHAT, {"logprobs": True, "top_logprobs": 21}),
        ("messages[0].role", CHAT, {"messages": [{"role": "nobody", "content": "x"}]}),
        ("messages[0].tool_calls[0].function", CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
        ("tools[0].function.name", CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("options.temperature", CHAT, {"options": {"temperature": 3}}),
        ("options.top_p", GENERATE, {"options": {"top_p": -1}}),
        ("options.stop", CHAT, {"options": {"stop": [str(i) for i in range(65)]}}),
        ("options.repeat_penalty", CHAT, {"options": {"repeat_penalty": 0}}),
        ("options.repeat_last_n", CHAT, {"options": {"repeat_last_n": 128}}),
        ("options.mirostat", CHAT, {"options": {"mirostat": 3}}),
        ("options.tfs_z", CHAT, {"options": {"tfs_z": 0.5}}),
        ("options.typical_p", CHAT, {"options": {"typical_p": 1.5}}),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(refused: Any, field: str, path: str, fields: Any) -> None:
    assert field in await refused(path, **fields)


async def test_a_worker_s_refusal_names_the_field(model: Any, front: Any) -> None:
    async def refuse(_: Any, stream: Any, send: Any) -> None:
        field = "sampling.constraint.json_schema"
        raise StatusError(Reason.INVALID_FIELD, f"{field} cannot be kept", field=field)

    model.script = refuse
    body = {"model": "tiny", "messages": HI, "format": {"type": "object"}}
    response = await front.http.post(CHAT, json=body)
    assert (response.status_code, response.json()) == (400, {"error": "format cannot be kept"})


async def test_a_stream_that_fails_ends_with_the_error(ask: Any, model: Any, kit: Any) -> None:
    async def fail(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("Hi"), 0, None)
        raise StatusError(Reason.INTERNAL, "the worker broke")

    model.script = fail
    lines = await ask("")
    assert lines[0]["message"]["content"] == "Hi"
    assert list(lines[-1]) == ["error"]
    assert "done" not in lines[-1]


async def test_a_client_that_leaves_cancels_the_generation(front: Any, model: Any, kit: Any) -> None:
    async def never(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("Hi"), 0, None)
        await asyncio.Event().wait()

    model.script = never
    body = {"model": "tiny", "messages": HI}
    async with front.http.stream("POST", CHAT, json=body) as response:
        async for _ in response.aiter_raw():
            break
    await asyncio.wait_for(model.streams[0].cancelled.wait(), patience(5))


async def test_an_idle_stream_stays_readable(front: Any, model: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.05)

    async def pause(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("a"), 0, None)
        await asyncio.sleep(0.3)
        await send(kit.tokens_of("b"), 1, kit.inference_pb2.FINISH_REASON_LENGTH)

    model.script = pause
    response = await front.http.post(CHAT, json={"model": "tiny", "messages": HI})
    lines = response.text.splitlines()
    assert lines[1].startswith("  ")
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == "ab"


# --- models ---------------------------------------------------------------------------------------------------------


async def test_models_are_listed_and_run(front: Any, model: Any) -> None:
    card = model.card()
    (listed,) = (await front.http.get("/api/tags")).json()["models"]
    assert (listed["name"], listed["model"], listed["digest"]) == ("tiny", "tiny", card.fingerprint)
    assert listed["size"] == 0, "the size of a model without a host is not known"
    assert datetime.fromisoformat(listed["modified_at"]).timestamp() == card.created_s
    (running,) = (await front.http.get("/api/ps")).json()["models"]
    assert (running["name"], running["context_length"]) == ("tiny", 4096)
    assert datetime.fromisoformat(running["expires_at"]).year == 9999
    assert (await front.http.get("/api/version")).json() == {"version": "0.13.4"}


async def test_a_model_is_shown(front: Any, model: Any) -> None:
    for body in ({"model": "tiny"}, {"name": "tiny:latest", "verbose": False}):
        shown = (await front.http.post("/api/show", json=body)).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"]["openvino.context_length"] == 4096
        assert "<tool_call>" in shown["template"]
    response = await front.http.post("/api/show", json={"model": "tiny", "verbose": True})
    assert (response.status_code, response.headers[HEADER]) == (200, "verbose")


async def test_a_model_is_found_with_the_tag_latest(ask: Any, front: Any) -> None:
    assert (await ask("x", model="tiny:latest", stream=False))["model"] == "tiny"
    response = await front.http.post(CHAT, json={"model": "other:latest", "messages": HI})
    assert response.status_code == 404
    assert "'other' does not exist" in response.json()["error"]


async def test_a_pull_tells_whether_the_model_is_served(front: Any) -> None:
    response = await front.http.post("/api/pull", json={"model": "tiny", "insecure": True})
    assert [json.loads(line)["status"] for line in response.text.splitlines()][-1] == "success"
    response = await front.http.post("/api/pull", json={"name": "tiny", "stream": False})
    assert response.json() == {"status": "success"}
    response = await front.http.post("/api/pull", json={"model": "other"})
    assert response.status_code == 404
    assert "headrace pull" in response.json()["error"]
    for name in ("username", "password"):
        response = await front.http.post("/api/pull", json={"model": "tiny", name: "x"})
        assert (response.status_code, response.headers[HEADER]) == (200, name)


@pytest.mark.parametrize(
    ("method", "verb", "body"),
    [
        ("POST", "create", {"model": "m", "from": "tiny"}),
        ("POST", "copy", {"source": "tiny", "destination": "m"}),
        ("DELETE", "delete", {"model": "tiny"}),
    ],
)
async def test_what_only_an_operator_does_is_refused(front: Any, method: str, verb: str, body: Any) -> None:
    response = await front.http.request(method, f"/api/{verb}", json=body)
    assert response.status_code == 403
    assert f"does not {verb} models unless its operator allows it (--ollama-manage)" in response.json()["error"]


async def test_a_gateway_uploads_no_models(front: Any) -> None:
    response = await front.http.post("/api/push", json={"model": "tiny"})
    assert (response.status_code, response.json()["error"][:24]) == (400, "a gateway does not push ")
