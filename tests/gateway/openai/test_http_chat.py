"""POST /v1/chat/completions, over real HTTP in front of a fake router."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from headrace.protos import inference_pb2
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


async def chat(gateway: Any, **fields: Any) -> Any:
    response = await gateway.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def events(gateway: Any, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
    """Events of a stream, parsed; the last one is the text [DONE]."""
    body = {"model": "tiny", "messages": HI, "stream": True, **fields}
    async with gateway.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        raw = (await response.aread()).decode()
    found = [event.removeprefix("data: ") for event in raw.split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


async def test_an_answer_has_the_models_text_and_the_account(gateway: Any, router: Any) -> None:
    router.num_cached = 5
    answer = await chat(gateway)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == router.answer
    assert choice["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    num_prompt = len(router.streams[0].request.token_ids)
    num_answer = len(router.answer.encode()) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def test_cached_tokens_from_other_tiers_than_memory_are_told(gateway: Any, router: Any) -> None:
    router.num_cached, router.num_from_disk, router.num_from_peers = 9, 4, 2
    details = (await chat(gateway))["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 9, "cached_tokens_by_tier": {"memory": 3, "disk": 4, "peers": 2}}
    *_, usage, _ = await events(gateway, stream_options={"include_usage": True})
    assert usage["usage"]["prompt_tokens_details"] == details


async def test_the_prompt_is_the_templates_text_without_a_second_beginning(gateway: Any, router: Any, kit: Any) -> None:
    await chat(gateway)
    text = "user\nhi"
    tail = "\n", "assistant\n"
    expected = [1, *kit.tokens_of(text), 2, *kit.tokens_of(tail[0]), 1, *kit.tokens_of(tail[1])]
    assert list(router.streams[0].request.token_ids) == expected


async def test_a_stream_has_role_then_text_then_one_finish_then_usage_then_done(gateway: Any, router: Any) -> None:
    router.answer = "aé"
    found = await events(gateway, stream_options={"include_usage": True})
    assert found[-1] == "[DONE]"
    *chunks, usage = found[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "é"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    for name in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({chunk[name] for chunk in [*chunks, usage]}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_a_stream_without_include_usage_never_mentions_it(gateway: Any) -> None:
    assert all(event == "[DONE]" or "usage" not in event for event in await events(gateway))


async def test_the_same_is_under_v3(gateway: Any, router: Any) -> None:
    found = await events(gateway, "/v3/chat/completions")
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in found[:-1])
    assert text == router.answer


async def test_a_stop_string_ends_the_answer_and_cancels_the_generation(gateway: Any, router: Any, kit: Any) -> None:
    async def endless(_: Any, stream: Any, send: Any) -> None:
        for position, token in enumerate(kit.tokens_of("one, two, three")):
            await send([token], position, None)
        await kit.asyncio.Event().wait()

    router.script = endless
    answer = await chat(gateway, stop=[", three", ", t"])
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "one"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ", t")
    assert answer["usage"]["completion_tokens"] == len("one, t")
    await kit.asyncio.wait_for(router.streams[0].cancelled.wait(), patience(5))


async def test_the_stop_string_stays_on_request(gateway: Any, router: Any) -> None:
    router.answer = "one, two"
    answer = await chat(gateway, stop=",", include_stop_str_in_output=True)
    assert answer["choices"][0]["message"]["content"] == "one,"


async def test_a_stop_token_of_the_caller_is_named_and_not_shown(gateway: Any, router: Any, kit: Any) -> None:
    async def stop_at_comma(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("one"), 0, None)
        await send(kit.tokens_of(","), 3, kit.inference_pb2.FINISH_REASON_STOP)

    router.script = stop_at_comma
    comma = kit.tokens_of(",")[0]
    choice = (await chat(gateway, stop_token_ids=[comma]))["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("one", comma)
    assert list(router.streams[0].request.sampling.stop_token_ids) == [comma]


async def test_all_sampling_fields_reach_the_worker(gateway: Any, router: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": -1,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    await chat(
        gateway,
        **fields,
        logit_bias={"5": -100, "6": 2.5},
        max_tokens=50,
        max_completion_tokens=40,
        stop_token_ids=[9],
        allowed_token_ids=[1, 2, 3],
        prompt_cache_key="session",
        cache_salt="salt",
        priority=-3,
    )
    request = router.streams[0].request
    sampling = request.sampling
    fields["seed"] = 2**64 - 1
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert dict(sampling.logit_bias) == {5: -100.0, 6: 2.5}
    assert sampling.max_tokens == 40
    assert list(sampling.allowed_token_ids) == [1, 2, 3]
    assert (request.session_key, request.cache_salt, request.priority) == ("session", "salt", -3)
    assert request.tokenizer_sha256 == hashlib.sha256(router.bundle).hexdigest()


async def test_the_models_card_fills_in_what_the_caller_leaves_out(gateway: Any, router: Any, kit: Any) -> None:
    defaults = kit.inference_pb2.SamplingParams(temperature=0.25, top_k=40, top_p=0.5)
    longest = kit.inference_pb2.SamplingParams(max_tokens=100)
    router.cards = [
        router.card(name="with-defaults", default_sampling=defaults),
        router.card(name="with-a-length", default_sampling=longest),
    ]
    await chat(gateway, model="with-defaults", top_p=0.75)
    sampling = router.streams[0].request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 40, 0.75)
    assert sampling.HasField("seed")
    num_prompt = len(router.streams[0].request.token_ids)
    assert sampling.max_tokens == 256 - num_prompt
    await chat(gateway, model="with-a-length")
    assert router.sampling.max_tokens == 100
    await chat(gateway, model="with-a-length", max_tokens=120)
    assert router.sampling.max_tokens == 120
    await gateway.http.post("/v1/completions", json={"model": "with-a-length", "prompt": "a"})
    assert router.sampling.max_tokens == 16


async def test_several_answers_are_several_generations_with_seeds_of_their_own(gateway: Any, router: Any) -> None:
    answer = await chat(gateway, n=3, seed=10)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(choice["message"]["content"] == router.answer for choice in answer["choices"])
    assert sorted(stream.request.sampling.seed for stream in router.streams) == [10, 11, 12]
    assert len({stream.request.request_id for stream in router.streams}) == 3
    num_prompt = len(router.streams[0].request.token_ids)
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == 3 * (len(router.answer.encode()) + 1)


async def test_a_stream_of_several_answers_finishes_each_of_them_once(gateway: Any, router: Any) -> None:
    found = await events(gateway, n=3)
    texts = {0: "", 1: "", 2: ""}
    finishes = []
    for chunk in found[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            finishes.append(choice["index"])
    assert set(texts.values()) == {router.answer}
    assert sorted(finishes) == [0, 1, 2]


async def test_logprobs_have_tokens_bytes_and_alternatives(gateway: Any, router: Any) -> None:
    router.answer = "é"
    choice = (await chat(gateway, logprobs=True, top_logprobs=2))["choices"][0]
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == ("�", [0xC3])
    assert second["bytes"] == [0xA9]
    assert first["logprob"] == -(3 + 0xC3) / 128
    assert [top["token"] for top in first["top_logprobs"]] == ["<|bos|>", "<|im_start|>"]
    assert [top["logprob"] for top in first["top_logprobs"]] == [0.0, -0.25]


async def test_logprobs_without_alternatives_and_no_logprobs_at_all(gateway: Any, router: Any) -> None:
    router.answer = "a"
    with_them = (await chat(gateway, logprobs=True))["choices"][0]
    assert with_them["logprobs"]["content"][0]["top_logprobs"] == []
    assert (await chat(gateway))["choices"][0]["logprobs"] is None


async def test_special_tokens_are_shown_only_on_request(gateway: Any, router: Any, kit: Any) -> None:
    async def special(_: Any, stream: Any, send: Any) -> None:
        await send([1, *kit.tokens_of("a"), 1], 0, kit.inference_pb2.FINISH_REASON_LENGTH)

    router.script = special
    assert (await chat(gateway))["choices"][0]["message"]["content"] == "a"
    shown = await chat(gateway, skip_special_tokens=False)
    assert shown["choices"][0]["message"]["content"] == "<|im_start|>a<|im_start|>"


async def test_text_parts_and_the_developer_role_are_taken(gateway: Any, router: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await chat(gateway, messages=[{"role": "developer", "content": parts}])
    first = list(router.streams[0].request.token_ids)
    await chat(gateway, messages=[{"role": "system", "content": "a\nb"}])
    assert first == list(router.streams[1].request.token_ids)


async def test_a_final_message_is_continued(gateway: Any, router: Any, kit: Any) -> None:
    messages = [*HI, {"role": "assistant", "content": "It is"}]
    await chat(gateway, messages=messages, continue_final_message=True)
    assert list(router.streams[0].request.token_ids)[-6:] == kit.tokens_of("\nIt is")


async def test_fields_that_change_nothing_here_are_taken(gateway: Any) -> None:
    neutral = {
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "modalities": ["text"],
        "best_of": 1,
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_retention": "in_memory",
        "logit_bias": None,
        "stop": None,
        "no_such_field": [1, 2],
    }
    answer = await chat(gateway, **neutral)
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_prediction_reaches_the_worker_and_the_account_has_what_came_of_it(
    gateway: Any, router: Any, kit: Any
) -> None:
    async def speak(router: Any, stream: Any, send: Any) -> None:
        message = inference_pb2.GenerateResponse(start_pos=0, token_ids=kit.tokens_of("abc"))
        message.num_drafted_tokens, message.num_accepted_tokens = 5, 2
        await router.context_of(stream).write(message)
        await send(kit.tokens_of("d"), 3, inference_pb2.FINISH_REASON_LENGTH)

    router.script = speak
    content = [{"type": "text", "text": "ab"}, {"type": "text", "text": "xyz"}]
    for n in (1, 2):
        router.streams.clear()
        answer = await chat(gateway, prediction={"type": "content", "content": content}, n=n)
        assert answer["choices"][0]["message"]["content"] == "abcd"
        assert [list(one.request.prediction_token_ids) for one in router.streams] == [kit.tokens_of("abxyz")] * n
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == 2 * n
        assert details["rejected_prediction_tokens"] == 3 * n
