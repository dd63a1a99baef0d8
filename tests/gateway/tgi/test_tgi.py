"""The API of Text Generation Inference over real HTTP, in front of a fake router."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.gateway.hints import HEADER
from headrace.protos.inference_pb2 import FINISH_REASON_STOP
from headrace.protos.status import Reason, StatusError
from tests.gateway.tool_model import TEXTS, in_pieces
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
GENERATE, STREAM, EITHER = "/generate", "/generate_stream", "/"


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(block.removeprefix("data:")) for block in text.split("\n\n") if block.startswith("data:")]


@pytest.fixture
def ask(front: Any, model: Any) -> Any:
    """Send a request to a model that writes the given text. Returns the answer, or the events of its stream."""

    async def post(text: str, path: str = GENERATE, inputs: str = "hi", **parameters: Any) -> Any:
        model.answer = text
        response = await front.http.post(path, json={"inputs": inputs, "parameters": parameters})
        assert response.status_code == 200, response.text
        if path == STREAM:
            assert response.headers["content-type"].startswith("text/event-stream")
            return events_of(response.text)
        return response.json()

    return post


# --- answers --------------------------------------------------------------------------------------------------------


async def test_a_prompt_is_continued_greedily(ask: Any, model: Any) -> None:
    assert await ask("Hello, wörld 😀!") == {"generated_text": "Hello, wörld 😀!"}
    assert model.prompt == "<|bos|>hi"
    assert (model.sampling.temperature, model.sampling.max_tokens) == (0, 100)


async def test_details_have_all_tokens_with_their_texts(ask: Any, model: Any, kit: Any) -> None:
    answer = await ask("Hé", details=True, decoder_input_details=True, top_n_tokens=2)
    details = answer["details"]
    assert {name: details[name] for name in ("finish_reason", "generated_tokens", "seed")} == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "seed": None,
    }
    assert [one["text"] for one in details["tokens"]] == ["H", "", "é", "<|im_end|>"]
    assert [one["special"] for one in details["tokens"]] == [False, False, False, True]
    assert [one["id"] for one in details["tokens"]] == [*kit.tokens_of("Hé"), kit.EOS]
    assert all(one["logprob"] < 0 for one in details["tokens"])
    assert [len(top) for top in details["top_tokens"]] == [2, 2, 2, 2]
    assert [one["text"] for one in details["prefill"]] == ["<|bos|>", "h", "i"]
    assert [one["logprob"] is None for one in details["prefill"]] == [True, False, False]


async def test_a_stream_has_an_event_for_each_token(ask: Any) -> None:
    events = await ask("Hé", STREAM, details=True, top_n_tokens=1)
    assert [one["index"] for one in events] == [1, 2, 3, 4]
    assert [one["token"]["text"] for one in events] == ["H", "", "é", "<|im_end|>"]
    assert [one["generated_text"] for one in events] == [None, None, None, "Hé"]
    details = {"finish_reason": "eos_token", "generated_tokens": 4, "seed": None, "input_length": 3}
    assert [one["details"] for one in events] == [None, None, None, details]
    assert all(len(one["top_tokens"]) == 1 for one in events)
    events = await ask("Hé", STREAM)
    assert events[-1]["details"] is None
    assert "top_tokens" not in events[0]


async def test_a_stream_whose_worker_is_lost_behind_the_last_token_has_a_last_event(
    front: Any, model: Any, kit: Any
) -> None:
    async def lose(_: Any, stream: Any, send: Any) -> None:
        for position, token in enumerate(kit.tokens_of("Hi")):
            await send([token], position, None)
        raise StatusError(Reason.DRAINING, "going")

    model.script = lose
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 2, "details": True}}
    events = events_of((await front.http.post(STREAM, json=body)).text)
    assert [one["token"]["text"] for one in events if not one["token"]["special"]] == ["H", "i"]
    assert events[-1]["generated_text"] == "Hi"
    assert (events[-1]["details"]["finish_reason"], events[-1]["details"]["generated_tokens"]) == ("length", 2)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS, data=st.data())
async def test_a_stream_adds_up_to_the_whole_answer(ask: Any, model: Any, text: str, data: st.DataObject) -> None:
    model.reset()
    model.script = in_pieces(text, data)
    stop = data.draw(st.sampled_from([None, ["t"], ["name", "é"], ["}zz", "\n\n"]]), label="stop")
    fields = {"details": True, "stop": stop, "max_new_tokens": 500}
    whole, events = await ask(text, **fields), await ask(text, STREAM, **fields)
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert "".join(one["token"]["text"] for one in events if not one["token"]["special"]) == whole["generated_text"]
    assert [one["token"] for one in events] == whole["details"]["tokens"]
    summary = {name: value for name, value in events[-1]["details"].items() if name != "input_length"}
    assert summary.items() <= whole["details"].items()


async def test_stop_texts_end_the_answer_and_are_part_of_it(ask: Any) -> None:
    for stop in (["zz", " th"], [" t"]):
        answer = await ask("Hello there", stop=stop, details=True)
        assert answer["generated_text"] == "Hello" + stop[-1]
        assert answer["details"]["finish_reason"] == "stop_sequence"
    assert (await ask("Hello", max_new_tokens=2, details=True))["details"]["finish_reason"] == "length"


async def test_the_full_text_begins_with_the_prompt(ask: Any) -> None:
    assert await ask(" there", return_full_text=True) == {"generated_text": "hi there"}
    assert (await ask(" there", STREAM, return_full_text=True))[-1]["generated_text"] == "hi there"


async def test_the_best_of_several_answers_comes_first(ask: Any, model: Any, kit: Any) -> None:
    async def script(router: Any, stream: Any, send: Any) -> None:
        text = "\x01" if len(model.streams) == 2 else "~"  # the fake worker finds low tokens more probable
        await send([*kit.tokens_of(text), kit.EOS], 0, FINISH_REASON_STOP)

    model.script = script
    details = (answer := await ask("", best_of=3, do_sample=True, details=True, seed=5))["details"]
    (best, *others) = [answer["generated_text"], *(one["generated_text"] for one in details["best_of_sequences"])]
    assert best == "\x01"
    assert sorted(others) == ["~", "~"]
    assert {details["seed"], *(one["seed"] for one in details["best_of_sequences"])} == {5, 6, 7}
    assert await ask("", best_of=2, do_sample=True) == {"generated_text": "~"}


async def test_at_the_root_stream_decides_and_whole_answers_are_lists(front: Any, model: Any) -> None:
    model.answer = "Hi"
    response = await front.http.post(EITHER, json={"inputs": "hi"})
    assert response.json() == [{"generated_text": "Hi"}]
    response = await front.http.post(EITHER, json={"inputs": "hi", "stream": True})
    assert events_of(response.text)[-1]["generated_text"] == "Hi"
    assert (await front.http.get("/")).headers["content-type"].startswith("text/html")


async def test_info_tells_the_bounds(front: Any, model: Any) -> None:
    for path in ("/info", "/info?model=tiny"):
        info = (await front.http.get(path)).json()
        assert (info["model_id"], info["max_total_tokens"]) == ("tiny", 4096)
        assert info["model_sha"] == model.card().fingerprint
    response = await front.http.get("/info?model=other")
    assert (response.status_code, response.json()["error_type"]) == (404, "validation")
    response = await front.http.get("/info?" + "&".join(f"p{number}=1" for number in range(40)))
    assert response.status_code == 400, "the number of parameters is bounded"


# --- requests -------------------------------------------------------------------------------------------------------


async def test_parameters_reach_the_worker(ask: Any, model: Any) -> None:
    await ask(
        "",
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        seed=11,
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        max_new_tokens=7,
        typical_p=0.75,
        watermark=False,
        adapter_id="tiny",
    )
    sampling = model.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.75, 11)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.max_tokens) == (1.5, 0.25, 7)
    assert sampling.typical_p == 0.75


async def test_drawing_is_asked_for_by_any_parameter_that_shapes_it(ask: Any, model: Any) -> None:
    for parameters, temperature in (
        ({}, 0),
        ({"temperature": 1.0}, 0),
        ({"top_p": 1.0}, 0),
        ({"do_sample": True}, 1),
        ({"top_k": 5}, 1),
        ({"top_p": 0.5}, 1),
        ({"temperature": 0.25}, 0.25),
    ):
        answer = await ask("", details=True, **parameters)
        assert model.sampling.temperature == temperature
        assert answer["details"]["seed"] == (model.sampling.seed if temperature else None)


async def test_a_model_s_own_defaults_do_not_hold(ask: Any, model: Any, kit: Any) -> None:
    await ask("", do_sample=True)
    sampling = model.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)


async def test_a_prompt_is_truncated_from_the_left(ask: Any, model: Any) -> None:
    await ask("", inputs="0123456789", truncate=3)
    assert model.prompt == "789"


async def test_a_grammar_holds_the_answer(ask: Any, model: Any) -> None:
    schema = {"type": "object"}
    for grammar in (
        {"type": "json", "value": schema},
        {"type": "json", "value": json.dumps(schema)},
        {"type": "json_schema", "value": {"name": "x", "schema": schema}},
    ):
        await ask("{}", grammar=grammar)
        assert json.loads(model.sampling.constraint.json_schema) == schema
    await ask("1", grammar={"type": "regex", "value": "[0-9]"})
    assert model.sampling.constraint.regex == "[0-9]"


@pytest.mark.parametrize(
    ("field", "path", "body"),
    [
        ("inputs", GENERATE, {"inputs": 5}),
        ("inputs is required", GENERATE, {"inputs": ...}),
        ("stream", GENERATE, {"stream": True}),
        ("stream", STREAM, {"stream": False}),
        ("adapter_id", GENERATE, {"model": "tiny", "parameters": {"adapter_id": "tiny"}}),
        *(
            (f"parameters.{name}", GENERATE, {"parameters": {name: value}})
            for name, value in {
                "best_of": 2,
                "decoder_input_details": True,
                "top_n_tokens": 2,
                "frequency_penalty": 3,
                "max_new_tokens": 0,
                "repetition_penalty": 0,
                "stop": [str(i) for i in range(65)],
                "temperature": -1,
                "top_k": -2,
                "top_p": 2,
                "truncate": 0,
                "typical_p": 1.5,
                "watermark": True,
            }.items()
        ),
        ("parameters.top_n_tokens", GENERATE, {"parameters": {"top_n_tokens": 21, "details": True}}),
        ("parameters.best_of", STREAM, {"parameters": {"best_of": 2, "do_sample": True}}),
        ("parameters.decoder_input_details", STREAM, {"parameters": {"decoder_input_details": True, "details": True}}),
        ("parameters.grammar", GENERATE, {"parameters": {"grammar": {"type": "regex", "value": {}}}}),
        ("parameters.grammar", GENERATE, {"parameters": {"grammar": {"type": "json_schema", "value": "{}"}}}),
        ("parameters.grammar", GENERATE, {"parameters": {"grammar": {"type": "lark", "value": "x"}}}),
        ("parameters.max_new_tokens", GENERATE, {"parameters": {"max_new_tokens": "many"}}),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    front: Any, model: Any, field: str, path: str, body: dict[str, Any]
) -> None:
    sent = {name: value for name, value in {"inputs": "hi", **body}.items() if value is not ...}
    response = await front.http.post(path, json=sent)
    assert response.status_code == 400, response.text
    error = response.json()
    assert list(error) == ["error", "error_type"]
    assert field in error["error"]
    assert error["error_type"] == "validation"
    assert model.streams == []


async def test_fields_that_nobody_knows_are_hints(front: Any) -> None:
    body = {"inputs": "hi", "nonsense": 1, "parameters": {"more": 2}}
    for path in (GENERATE, STREAM, "/"):
        response = await front.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert sorted(response.headers[HEADER].split(", ")) == ["nonsense", "parameters.more"]


async def test_a_prompt_that_does_not_fit_is_refused(front: Any, model: Any) -> None:
    for parameters in ({"max_new_tokens": 5000}, {"max_new_tokens": 4094}):
        response = await front.http.post(GENERATE, json={"inputs": "hi", "parameters": parameters})
        assert (response.status_code, response.json()["error_type"]) == (400, "validation")


async def test_failures_have_the_kind_that_clients_know(front: Any, model: Any, kit: Any) -> None:
    async def full(_: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.QUEUE_FULL, "full", retry_after_s=1.0)

    async def broken(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("Hi"), 0, None)
        raise StatusError(Reason.INTERNAL, "the worker broke")

    model.script = full
    response = await front.http.post(GENERATE, json={"inputs": "hi"})
    assert (response.status_code, response.json()["error_type"]) == (429, "overloaded")
    model.script = broken
    response = await front.http.post(STREAM, json={"inputs": "hi"})
    events = events_of(response.text)
    assert events[0]["token"]["text"] == "H"
    assert events[-1]["error_type"] == "generation"


async def test_a_client_that_leaves_cancels_the_generation(front: Any, model: Any, kit: Any) -> None:
    async def never(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("Hi"), 0, None)
        await asyncio.Event().wait()

    model.script = never
    async with front.http.stream("POST", STREAM, json={"inputs": "hi"}) as response:
        async for _ in response.aiter_raw():
            break
    await asyncio.wait_for(model.streams[0].cancelled.wait(), patience(5))
