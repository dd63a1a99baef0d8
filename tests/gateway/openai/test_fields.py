"""Fields of completions and chats that add details to an answer or select among several answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


async def post(gateway: Any, path: str, **fields: Any) -> Any:
    own = {"messages": HI} if path == CHAT else {"prompt": "hello w"}
    response = await gateway.http.post(path, json={"model": "tiny", **own, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(gateway: Any, path: str, **fields: Any) -> list[Any]:
    own = {"messages": HI} if path == CHAT else {"prompt": "hello w"}
    response = await gateway.http.post(path, json={"model": "tiny", "stream": True, **own, **fields})
    *events, done = response.text.rstrip("\n").split("\n\n")
    assert done == "data: [DONE]", response.text
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(parts: list[Any], name: str) -> list[Any]:
    return [one for part in parts for one in part["choices"][0].get(name) or ()]


async def test_prompt_logprobs_list_each_token_of_the_prompt_but_the_first(gateway: Any, router: Any) -> None:
    expected = [
        None,
        {
            "262": {"logprob": -262 / 128, "rank": 9, "decoded_token": "hello"},
            "0": {"logprob": 0.0, "rank": 1, "decoded_token": "<|bos|>"},
        },
        {
            "263": {"logprob": -263 / 128, "rank": 9, "decoded_token": " w"},
            "0": {"logprob": 0.0, "rank": 1, "decoded_token": "<|bos|>"},
        },
    ]
    answer = await post(gateway, COMPLETIONS, prompt_logprobs=1, n=2)
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected, expected]
    chat = await post(gateway, CHAT, prompt_logprobs=0)
    tokens = list(router.streams[-1].request.token_ids)
    assert [one and list(one) for one in chat["prompt_logprobs"]] == [None, *[[str(i)] for i in tokens[1:]]]
    assert "prompt_logprobs" not in await post(gateway, CHAT)


@pytest.mark.parametrize("n", [1, 2])
async def test_echo_with_logprobs_lists_those_of_the_prompt_first(gateway: Any, router: Any, n: int) -> None:
    router.answer = "é!"
    fields = {"echo": True, "logprobs": 1, "n": n}
    answer = await post(gateway, COMPLETIONS, **fields)
    for choice in answer["choices"]:
        assert choice["text"] == "hello wé!"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["<|bos|>", "hello", " w", "�", "�", "!", "<|im_end|>"]
        assert logprobs["token_logprobs"][:3] == [None, -262 / 128, -263 / 128]
        assert logprobs["top_logprobs"][:2] == [None, {"<|bos|>": 0.0, "hello": -262 / 128}]
        assert logprobs["text_offset"] == [0, 0, 5, 7, 7, 8, 9]
    streamed = await chunks(gateway, COMPLETIONS, **fields)
    for choice in answer["choices"]:
        own = [part["choices"][0] for part in streamed if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        for name, whole in choice["logprobs"].items():
            assert [one for part in own if part["logprobs"] for one in part["logprobs"][name]] == whole


async def test_every_generated_token_of_a_completion_has_its_logprobs(gateway: Any, router: Any, kit: Any) -> None:
    """Clients that score prompts drop the last entry, which belongs to the one generated token."""
    router.answer = "ab.c"
    for fields, text, tokens in (
        ({}, "ab.c", ["a", "b", ".", "c", "<|im_end|>"]),
        ({"stop": ["."]}, "ab", ["a", "b", "."]),
        ({"stop": ["b."]}, "a", ["a", "b", "."]),
        ({"stop_token_ids": [kit.EOS], "include_stop_str_in_output": True}, "ab.c", ["a", "b", ".", "c", "<|im_end|>"]),
    ):
        for echo in (False, True):
            answer = await post(gateway, COMPLETIONS, logprobs=0, echo=echo, **fields)
            (choice,), prompt = answer["choices"], ["<|bos|>", "hello", " w"] if echo else []
            assert choice["text"] == "hello w" * echo + text
            logprobs = choice["logprobs"]
            assert logprobs["tokens"] == prompt + tokens
            assert len(tokens) == answer["usage"]["completion_tokens"]
            assert {len(values) for values in logprobs.values()} == {len(prompt + tokens)}
            assert all(offset <= len(choice["text"]) for offset in logprobs["text_offset"])
            streamed = await chunks(gateway, COMPLETIONS, logprobs=0, echo=echo, **fields)
            parts = [part["choices"][0]["logprobs"] for part in streamed]
            for name, values in logprobs.items():
                assert [one for part in parts if part for one in part[name]] == values


@pytest.mark.parametrize("num_top", [0, 1, 2])
async def test_top_logprobs_of_a_completion_hold_the_chosen_token(gateway: Any, router: Any, num_top: int) -> None:
    router.answer = "a"
    answer = await post(gateway, COMPLETIONS, logprobs=num_top, echo=True)
    logprobs = answer["choices"][0]["logprobs"]
    best = dict([("<|bos|>", 0.0), ("<|im_start|>", -0.25)][:num_top])
    assert logprobs["top_logprobs"][1:4] == [
        {**best, token: logprob}
        for token, logprob in zip(logprobs["tokens"][1:4], logprobs["token_logprobs"][1:4], strict=True)
    ]


async def test_max_tokens_0_with_echo_answers_with_the_prompt_alone(gateway: Any, router: Any) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0}
    answer = await post(gateway, COMPLETIONS, **fields)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello w", "length")
    assert choice["logprobs"]["tokens"] == ["<|bos|>", "hello", " w"]
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 3, "completion_tokens": 0}
    assert router.streams[0].request.sampling.max_tokens == 1
    streamed = await chunks(gateway, COMPLETIONS, **fields)
    assert "".join(part["choices"][0]["text"] for part in streamed) == "hello w"
    assert streamed[0]["choices"][0]["logprobs"] == choice["logprobs"]
    without = await post(gateway, COMPLETIONS, echo=True, max_tokens=0)
    assert without["choices"][0]["text"] == "hello w"
    assert not router.streams[-1].request.sampling.HasField("prompt_logprobs")


async def test_a_prompt_of_one_token_is_echoed_with_nothing_known_of_it(gateway: Any, kit: Any) -> None:
    fields = {"prompt": kit.tokens_of("a"), "echo": True, "logprobs": 1, "max_tokens": 0}
    logprobs = (await post(gateway, COMPLETIONS, **fields))["choices"][0]["logprobs"]
    assert logprobs == {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


async def test_best_of_gives_the_answers_whose_tokens_are_most_probable(gateway: Any, router: Any, kit: Any) -> None:
    async def by_seed(_: Any, stream: Any, send: Any) -> None:
        texts = {7: "zz", 8: "bb", 9: "aaaaaa", 10: "yy"}
        tokens = kit.tokens_of(texts[stream.request.sampling.seed])
        await send(tokens, 0, kit.inference_pb2.FINISH_REASON_LENGTH)

    router.script = by_seed
    for path, text in ((COMPLETIONS, lambda c: c["text"]), (CHAT, lambda c: c["message"]["content"])):
        answer = await post(gateway, path, best_of=4, n=2, seed=7)
        assert [text(choice) for choice in answer["choices"]] == ["aaaaaa", "bb"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 12
    several = await post(gateway, COMPLETIONS, prompt=["a", "b"], best_of=4, seed=7, logprobs=0)
    assert [choice["text"] for choice in several["choices"]] == ["aaaaaa", "aaaaaa"]
    assert len(several["choices"][0]["logprobs"]["tokens"]) == 6
    same = await post(gateway, COMPLETIONS, best_of=2, n=2, seed=7)
    assert [choice["text"] for choice in same["choices"]] == ["zz", "bb"]


async def test_bad_words_go_upstream_as_tokens_with_and_without_a_space(gateway: Any, router: Any, kit: Any) -> None:
    for path in (CHAT, COMPLETIONS):
        await post(gateway, path, bad_words=["hello", "w"])
        words = [list(word.token_ids) for word in router.streams[-1].request.sampling.bad_words]
        assert words == [[262], [*kit.tokens_of(" hello")[:1], 262], kit.tokens_of("w"), [263]]
    await post(gateway, CHAT, bad_words=["hello"] + ["w"] * 60)
    assert len(router.streams[-1].request.sampling.bad_words) == 4


async def test_token_ids_of_prompt_and_answer_are_shown_on_request(gateway: Any, router: Any, kit: Any) -> None:
    router.answer = "aé!"
    tokens = [*kit.tokens_of("aé!"), kit.EOS]
    chat = await post(gateway, CHAT, return_token_ids=True)
    prompt = list(router.streams[-1].request.token_ids)
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (prompt, tokens)
    streamed = await chunks(gateway, CHAT, return_token_ids=True)
    assert streamed[0]["prompt_token_ids"] == prompt
    assert joined(streamed, "token_ids") == tokens
    whole = await post(gateway, COMPLETIONS, return_token_ids=True)
    assert whole["choices"][0]["prompt_token_ids"] == [0, 262, 263]
    assert whole["choices"][0]["token_ids"] == tokens
    streamed = await chunks(gateway, COMPLETIONS, return_token_ids=True, n=2)
    for index in (0, 1):
        own = [part for part in streamed if part["choices"][0]["index"] == index]
        assert joined(own, "prompt_token_ids") == [0, 262, 263]
        assert joined(own, "token_ids") == tokens
    assert "token_ids" not in (await post(gateway, CHAT))["choices"][0]


async def test_a_stop_string_leaves_no_token_ids_behind_it(gateway: Any, router: Any, kit: Any) -> None:
    async def at_once(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("abcd"), 0, kit.inference_pb2.FINISH_REASON_LENGTH)

    router.script = at_once
    answer = await post(gateway, CHAT, return_token_ids=True, stop="b")
    assert answer["choices"][0]["token_ids"] == kit.tokens_of("ab")
    assert answer["usage"]["completion_tokens"] == 2


async def test_tokens_can_be_named_by_their_ids(gateway: Any, router: Any, kit: Any) -> None:
    router.answer = "a"
    chat = await post(gateway, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    (token,) = chat["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == (f"token_id:{kit.token_of(97)}", [97])
    assert token["top_logprobs"][0]["token"] == "token_id:0"
    completion = await post(gateway, COMPLETIONS, logprobs=1, return_tokens_as_token_ids=True)
    assert completion["choices"][0]["logprobs"]["tokens"] == [f"token_id:{kit.token_of(97)}", f"token_id:{kit.EOS}"]


async def test_a_prompt_is_truncated_from_its_beginning(gateway: Any, router: Any) -> None:
    answer = await post(gateway, COMPLETIONS, truncate_prompt_tokens=2, echo=True)
    assert list(router.streams[-1].request.token_ids) == [262, 263]
    assert answer["choices"][0]["text"] == "hello wHello, wörld �"
    assert answer["usage"]["prompt_tokens"] == 2
    await post(gateway, COMPLETIONS, prompt=list(range(3, 203)) * 2, truncate_prompt_tokens=-1, max_tokens=10)
    request = router.streams[-1].request
    assert (len(request.token_ids), request.token_ids[-1], request.sampling.max_tokens) == (246, 202, 10)
    await post(gateway, CHAT, messages=[{"role": "user", "content": "x" * 400}], truncate_prompt_tokens=-1)
    request = router.streams[-1].request
    assert (len(request.token_ids), request.sampling.max_tokens) == (255, 1)
    await post(gateway, COMPLETIONS, prompt=[5, 6], truncate_prompt_tokens=9)
    assert list(router.streams[-1].request.token_ids) == [5, 6]


async def test_the_usage_so_far_is_in_every_chunk_on_request(gateway: Any, router: Any) -> None:
    router.answer = "ab"
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, expected in ((CHAT, [0, 1, 2, 3, 3]), (COMPLETIONS, [1, 2, 3, 3])):
        found = await chunks(gateway, path, stream_options=options)
        assert [chunk["usage"]["completion_tokens"] for chunk in found] == expected
        num_prompt = len(router.streams[-1].request.token_ids)
        for chunk in found:
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == num_prompt
            assert usage["total_tokens"] == num_prompt + usage["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_timings_are_those_of_llama_cpp_on_request(gateway: Any, router: Any, path: str) -> None:
    router.answer, router.num_cached = "ab", 1
    whole = await post(gateway, path, timings_per_token=True)
    timings = whole["timings"]
    num_prompt = whole["usage"]["prompt_tokens"]
    assert (timings["cache_n"], timings["prompt_n"]) == (1, num_prompt - 1)
    assert timings["predicted_n"] == whole["usage"]["completion_tokens"] == 3
    assert timings["prompt_ms"] > 0
    assert timings["predicted_ms"] >= 0
    assert timings["prompt_per_token_ms"] * timings["prompt_n"] == pytest.approx(timings["prompt_ms"])
    found = await chunks(gateway, path, timings_per_token=True, stream_options={"include_usage": True})
    with_times = [chunk["timings"] for chunk in found if "timings" in chunk]
    assert len(with_times) >= len(found) - 1, "only the chunk with the role comes before the first token"
    numbers = [one["predicted_n"] for one in with_times]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 3
    assert all(one["cache_n"] == 1 for one in with_times)
    for stream in (False, True):
        plain = await chunks(gateway, path) if stream else [await post(gateway, path)]
        assert not any("timings" in chunk for chunk in plain)


async def test_timings_of_several_choices_are_those_of_all(gateway: Any, router: Any) -> None:
    router.answer = "ab"
    whole = await post(gateway, CHAT, timings_per_token=True, n=3)
    assert whole["timings"]["predicted_n"] == whole["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_padding_hides_the_length_of_deltas(gateway: Any, router: Any, path: str) -> None:
    router.answer = "abc"
    plain = await chunks(gateway, path)
    assert not any("obfuscation" in chunk for chunk in plain)
    padded = await chunks(gateway, path, stream_options={"include_obfuscation": True})
    lengths = set()
    for chunk in padded:
        choice = chunk["choices"][0]
        text = choice["delta"].get("content") if path == CHAT else choice["text"]
        if text:
            lengths.add(len(json.dumps(chunk)))
        chunk.pop("obfuscation", None)
    assert len(lengths) == 1
    of_the_moment = ("id", "created")
    shown = [[{k: v for k, v in one.items() if k not in of_the_moment} for one in found] for found in (plain, padded)]
    assert shown[0] == shown[1]


async def test_the_beams_of_a_search_end_at_texts_and_its_answers_are_cut_there(
    gateway: Any, router: Any, kit: Any
) -> None:
    pb2 = kit.inference_pb2

    async def search(fake: Any, stream: Any, send: Any) -> None:
        found = [pb2.Hypothesis(token_ids=kit.tokens_of(text), score=-1.0) for text in ("one;", "two;?", "three")]
        message = pb2.GenerateResponse(hypotheses=found)
        message.finish.reason = pb2.FINISH_REASON_LENGTH
        await fake.context_of(stream).write(message)

    router.script = search
    fields = {"use_beam_search": True, "n": 3, "stop": [";", "!"], "max_tokens": 5}
    answer = await post(gateway, COMPLETIONS, **fields)
    asked = router.streams[-1].request.sampling.beam_search
    assert (asked.width, list(asked.stop), asked.shows_special_tokens) == (3, [";", "!"], False)
    found = [(choice["text"], choice["finish_reason"], choice["stop_reason"]) for choice in answer["choices"]]
    assert found == [("one", "stop", ";"), ("two", "stop", ";"), ("three", "length", None)]
    assert answer["usage"]["completion_tokens"] == len("one;") + len("two;") + len("three")
    await post(gateway, COMPLETIONS, **fields, skip_special_tokens=False)
    assert router.streams[-1].request.sampling.beam_search.shows_special_tokens
    fields.pop("stop")
    assert (await post(gateway, COMPLETIONS, **fields))["choices"][1]["text"] == "two;?"
    assert not router.streams[-1].request.sampling.beam_search.stop
