"""POST /v1/completions, /tokenize, /detokenize, models, health and metrics, over real HTTP."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


async def post(gateway: Any, path: str, **fields: Any) -> Any:
    response = await gateway.http.post(path, json={"model": "tiny", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(gateway: Any, **fields: Any) -> list[Any]:
    response = await gateway.http.post("/v1/completions", json={"model": "tiny", "stream": True, **fields})
    *events, done = response.text.rstrip("\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_text_is_continued_with_16_tokens_unless_told_otherwise(gateway: Any, router: Any, kit: Any) -> None:
    answer = await post(gateway, "/v1/completions", prompt="hello w")
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello, wörld �", "length")  # cut inside of 😀
    assert answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 16
    # the model's own beginning of sequence, "hello" and " w" by their merges
    assert list(router.streams[0].request.token_ids) == [0, 262, 263]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 9}, {"echo": True, "max_tokens": 0}])
async def test_the_newer_name_of_the_length_wins(gateway: Any, router: Any, fields: dict[str, Any]) -> None:
    answer = await post(gateway, "/v1/completions", prompt="hello w", max_completion_tokens=5, **fields)
    assert (answer["usage"]["completion_tokens"], router.sampling.max_tokens) == (5, 5)
    for wrong in ({"max_completion_tokens": 0}, {"max_completion_tokens": 5, "max_tokens": -1}):
        response = await gateway.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **wrong})
        assert response.json()["error"]["param"] == list(wrong)[-1]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", "b"], [[0, 3 + 97], [0, 3 + 98]]),
        ("", [[0]]),
    ],
)
async def test_prompts_come_as_texts_tokens_or_lists_of_them(
    gateway: Any, router: Any, prompt: Any, expected: Any
) -> None:
    answer = await post(gateway, "/v1/completions", prompt=prompt)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert sorted(list(stream.request.token_ids) for stream in router.streams) == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_special_tokens_around_a_text_can_be_left_out(gateway: Any, router: Any) -> None:
    await post(gateway, "/v1/completions", prompt="a", add_special_tokens=False)
    assert list(router.streams[0].request.token_ids) == [3 + 97]


async def test_choices_are_numbered_prompt_by_prompt(gateway: Any, router: Any, kit: Any) -> None:
    async def own_prompt(_: Any, stream: Any, send: Any) -> None:
        await send(list(stream.request.token_ids), 0, kit.inference_pb2.FINISH_REASON_LENGTH)

    router.script = own_prompt
    answer = await post(gateway, "/v1/completions", prompt=[kit.tokens_of("a"), kit.tokens_of("b")], n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["a", "a", "b", "b"]
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 2, "completion_tokens": 4}


async def test_echo_puts_the_prompt_before_the_answer_streamed_or_not(gateway: Any, router: Any, kit: Any) -> None:
    router.answer = "!"
    for prompt in ("hi", kit.tokens_of("hi")):
        whole = await post(gateway, "/v1/completions", prompt=prompt, echo=True)
        assert whole["choices"][0]["text"] == "hi!"
        streamed = await chunks(gateway, prompt=prompt, echo=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "hi!"


async def test_a_stream_ends_with_one_finish_and_an_empty_text(gateway: Any, router: Any) -> None:
    router.answer = "ab"
    found = await chunks(gateway, prompt="a", stream_options={"include_usage": True})
    *texts, last, usage = found
    assert [chunk["choices"][0]["text"] for chunk in texts] == ["a", "b"]
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "stop")
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)


async def test_logprobs_are_parallel_lists_with_offsets_into_the_text(gateway: Any, router: Any) -> None:
    router.answer = "aé!"
    logprobs = (await post(gateway, "/v1/completions", prompt="a", logprobs=1))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "�", "�", "!", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"][0] == -100 / 128
    assert logprobs["top_logprobs"][0] == {"<|bos|>": 0.0, "a": -100 / 128}


async def test_tokenize_takes_a_text_or_a_conversation(gateway: Any) -> None:
    answer = await post(gateway, "/tokenize", prompt="hello w", return_token_strs=True)
    assert answer == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [0, 262, 263],
        "token_strs": ["<|bos|>", "hello", " w"],
    }
    assert (await post(gateway, "/tokenize", prompt="a", add_special_tokens=False))["tokens"] == [100]
    messages = [{"role": "user", "content": "a"}]
    chat = await post(gateway, "/tokenize", messages=messages)
    without = await post(gateway, "/tokenize", messages=messages, add_generation_prompt=False)
    assert chat["tokens"][: without["count"]] == without["tokens"]
    assert chat["count"] > without["count"]
    for body in ({}, {"prompt": "a", "messages": messages}):
        assert (await gateway.http.post("/tokenize", json={"model": "tiny", **body})).status_code == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
async def test_what_is_of_conversations_is_refused_beside_a_text(gateway: Any, name: str, value: Any) -> None:
    body = {"model": "tiny", "prompt": "a", name: value}
    response = await gateway.http.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert "messages" in response.json()["error"]["message"]


async def test_tokens_are_taken_as_they_are(gateway: Any, router: Any) -> None:
    for prompt in ([5, 6], [[5, 6], [7]]):
        body = {"model": "tiny", "prompt": prompt}
        response = await gateway.http.post("/v1/completions", json={**body, "add_special_tokens": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "add_special_tokens")
        await post(gateway, "/v1/completions", prompt=prompt, add_special_tokens=False)
    assert list(router.streams[0].request.token_ids) == [5, 6]


async def test_a_model_without_a_detokenizer_gives_no_texts_of_tokens(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = (await gateway.models.find("tiny")).text.tokenizer
    monkeypatch.setattr(tokenizer, "token_bytes", [])
    for path, body in (("/detokenize", {"tokens": [5]}), ("/tokenize", {"prompt": "a", "return_token_strs": True})):
        answer = await gateway.http.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the model 'tiny' has no detokenizer")


def _both(text: str) -> dict[str, str]:
    """A text under vLLM's name and under llama.cpp's."""
    return {"prompt": text, "content": text}


async def test_detokenize_gives_the_text_special_tokens_included(gateway: Any, kit: Any) -> None:
    tokens = [1, 262, *kit.tokens_of(" é")]
    assert await post(gateway, "/detokenize", tokens=tokens) == _both("<|im_start|>hello é")
    assert await post(gateway, "/detokenize", tokens=[]) == _both("")
    assert await post(gateway, "/detokenize", tokens=[269]) == _both("")
    response = await gateway.http.post("/detokenize", json={"model": "tiny", "tokens": [270]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")


async def test_a_long_text_is_tokenized_like_a_short_one(gateway: Any) -> None:
    answer = await post(gateway, "/tokenize", prompt="hello w" * 1000, add_special_tokens=False)
    assert answer["tokens"] == [262, 263] * 1000
    text = (await post(gateway, "/detokenize", tokens=answer["tokens"]))["prompt"]
    assert text == "hello w" * 1000


@pytest.mark.parametrize("prefix", ["/v1", "/v3"])
async def test_models_are_listed_and_found_by_name(gateway: Any, prefix: str) -> None:
    listed = (await gateway.http.get(f"{prefix}/models")).json()
    assert listed["object"] == "list"
    card = {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "headrace",
        "type": "model",
        "display_name": "tiny",
        "created_at": "2023-11-14T22:13:20Z",
        "root": "tiny",
        "parent": None,
        "max_model_len": 256,
        "meta": {"n_ctx": 256},
        "task": "generate",
        "dimensions": None,
        "architecture": {"modality": "text->text", "input_modalities": ["text"], "output_modalities": ["text"]},
        "images": None,
        "state": "loaded",
        "problem": None,
    }
    assert listed == {"object": "list", "data": [card], "has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert (await gateway.http.get(f"{prefix}/models/tiny")).json() == card
    missing = await gateway.http.get(f"{prefix}/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_gateway_with_a_model_is_live_and_ready(gateway: Any) -> None:
    for prefix in ("", "/v2"):
        for state in ("live", "ready"):
            response = await gateway.http.get(f"{prefix}/health/{state}")
            assert (response.status_code, response.json()) == (200, {"status": state})
    for path in ("/health", "/ping"):
        response = await gateway.http.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ready"})
    assert (await gateway.http.head("/health/live")).content == b""


async def test_the_version_is_that_of_the_package(gateway: Any) -> None:
    assert (await gateway.http.get("/version")).json() == {"version": importlib.metadata.version("headrace")}


async def test_metrics_show_requests_tokens_and_the_fleet(gateway: Any, router: Any, kit: Any) -> None:
    worker = kit.router_pb2.WorkerInfo(worker_id="w0", state=kit.router_pb2.WORKER_STATE_READY)
    worker.load.num_blocks, worker.load.num_free_blocks, worker.load.num_cached_blocks = 10, 9, 8
    worker.load.num_running, worker.load.num_waiting, worker.load.num_uncached_tokens = 3, 2, 1
    worker.load.counters.tokens_generated = 77
    lost = kit.router_pb2.WorkerInfo(worker_id="w1", state=kit.router_pb2.WORKER_STATE_UNREACHABLE)
    router.workers = [worker, lost]

    async def sample(name: str) -> float:
        lines = (await gateway.http.get("/metrics")).text.splitlines()
        return sum(float(line.split(" ")[1]) for line in lines if line.split(" ")[0] == name)

    names = [
        'headrace_requests_total{endpoint="completions",outcome="ok"}',
        "headrace_prompt_tokens_total",
        "headrace_generated_tokens_total",
        "headrace_time_to_first_token_seconds_count",
        "headrace_time_per_output_token_seconds_count",
    ]
    before = [await sample(name) for name in names]
    await post(gateway, "/v1/completions", prompt=[5, 6, 7], max_tokens=4)
    after = [await sample(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 3, 4, 1, 1]
    for name, value in {
        "up": 1,
        "kv_blocks": 10,
        "kv_blocks_free": 9,
        "kv_blocks_cached": 8,
        "requests_running": 3,
        "requests_waiting": 2,
        "uncached_tokens": 1,
        "tokens_generated_total": 77,
        "requests_cancelled_total": 0,
    }.items():
        assert await sample(f'headrace_worker_{name}{{worker="w0"}}') == value
    text = (await gateway.http.get("/metrics")).text
    assert 'headrace_worker_up{worker="w1"} 0.0' in text
    assert 'headrace_worker_kv_blocks{worker="w1"}' not in text
