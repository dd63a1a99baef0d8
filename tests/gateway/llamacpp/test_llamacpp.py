"""The API of llama.cpp's server over real HTTP, in front of a fake router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.protos import router_pb2, worker_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def coder(kit_of_module: Any) -> AsyncIterator[Any]:
    """A fake router with a model for code."""
    kit = kit_of_module
    async with kit.serving_model(kit.tiny_graphs(add_bos=True, more_special=MARKS), kit.CHATML) as fake:
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def editor(coder: Any, kit_of_module: Any) -> AsyncIterator[Any]:
    """The gateway in front of it."""
    async with kit_of_module.serving_gateway(coder.address) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(router: Any, coder: Any) -> None:
    router.reset()
    coder.reset()


async def answer(gateway: Any, path: str = "/completion", **fields: Any) -> Any:
    response = await gateway.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block.startswith("data: ")]
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_an_answer_has_its_text_its_counts_and_its_timings(gateway: Any, router: Any) -> None:
    found = await answer(gateway, prompt="hi", seed=3, temperature=0.5, repeat_penalty=1.5)
    assert found["content"] == router.answer
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "eos", "")
    assert found["prompt"] == "<|bos|>hi"
    num_tokens = len(router.answer.encode()) + 1
    assert (found["tokens_evaluated"], found["tokens_predicted"]) == (3, num_tokens)
    settings = found["generation_settings"]
    assert (settings["seed"], settings["temperature"], settings["repeat_penalty"]) == (3, 0.5, 1.5)
    timings = found["timings"]
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (3, 0, num_tokens)
    assert timings["prompt_ms"] > 0
    assert timings["predicted_per_second"] * timings["predicted_ms"] == pytest.approx(1000 * num_tokens)
    sampling = router.sampling
    assert (sampling.seed, sampling.temperature, sampling.repetition_penalty) == (3, 0.5, 1.5)
    assert sampling.max_tokens == router.max_context_tokens - 3, "as many as there is room for"


async def test_a_stream_is_the_answer_in_pieces(gateway: Any, router: Any) -> None:
    *pieces, last = await answer(gateway, prompt="hi", stream=True, return_tokens=True)
    assert "".join(piece["content"] for piece in pieces) == router.answer
    assert not any(piece["stop"] for piece in pieces)
    assert [piece["tokens_predicted"] for piece in pieces] == sorted(piece["tokens_predicted"] for piece in pieces)
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "eos")
    assert last["timings"]["predicted_n"] == len(router.answer.encode()) + 1


@pytest.mark.parametrize(
    ("fields", "content", "kind", "word"),
    [
        ({"n_predict": 5}, "Hello", "limit", ""),
        ({"stop": [", w"]}, "Hello", "word", ", w"),
        ({"n_predict": 0}, "", "limit", ""),
    ],
)
async def test_an_answer_says_why_it_stopped(gateway: Any, fields: Any, content: str, kind: str, word: str) -> None:
    found = await answer(gateway, prompt="hi", **fields)
    assert (found["content"], found["stop_type"], found["stopping_word"]) == (content, kind, word)


async def test_probabilities_have_tokens_with_their_alternatives(gateway: Any) -> None:
    found = await answer(gateway, prompt="hi", n_probs=2, n_predict=2, return_tokens=True)
    probabilities = found["completion_probabilities"]
    assert [one["token"] for one in probabilities] == ["H", "e"]
    assert [one["id"] for one in probabilities] == found["tokens"]
    assert all(len(one["top_logprobs"]) == 2 and one["bytes"] == list(one["token"].encode()) for one in probabilities)


async def test_a_prompt_may_be_tokens_or_a_mixture(gateway: Any, router: Any) -> None:
    for prompt, read in (([5, 6], [5, 6]), (["h", 6], None), ([7, "h"], None)):
        await answer(gateway, prompt=prompt, n_predict=1)
        tokens = list(router.streams[-1].request.token_ids)
        assert tokens == read if read else 6 in tokens or 7 in tokens
    h = ord("h") + 3
    assert tokens == [7, h]
    response = await gateway.http.post("/completion", json={"prompt": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, 400)


async def test_biases_come_in_pairs_and_false_forbids(gateway: Any, router: Any) -> None:
    await answer(gateway, prompt="hi", logit_bias=[[5, 1.5], ["6", False]])
    assert dict(router.sampling.logit_bias) == {5: 1.5, 6: -100.0}
    await answer(gateway, prompt="hi", logit_bias={"5": -2})
    assert dict(router.sampling.logit_bias) == {5: -2.0}
    response = await gateway.http.post("/completion", json={"prompt": "hi", "logit_bias": [["word", 1]]})
    assert "logit_bias" in response.json()["error"]["message"]


async def test_what_clients_send_unasked_is_a_hint(gateway: Any) -> None:
    body = {"prompt": "hi", "repeat_last_n": 64, "n_keep": 5, "id_slot": 2, "cache_prompt": False, "seed": -1}
    response = await gateway.http.post("/completion", json=body)
    assert response.status_code == 200
    assert set(response.headers["x-headrace-ignored"].split(", ")) == {
        "repeat_last_n",
        "n_keep",
        "id_slot",
        "cache_prompt",
    }


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n_predict": -2}, "n_predict"),
        ({"repeat_last_n": 10}, "repeat_last_n"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 2}, "repeat_penalty"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"samplers": ["infill"]}, "samplers"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(gateway: Any, fields: Any, name: str) -> None:
    response = await gateway.http.post("/completion", json={"prompt": "hi", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], name in error["message"]) == (400, True)


# --- gaps -----------------------------------------------------------------------------------------------------------


def read(coder: Any, kit: Any) -> str:
    """The last prompt, with its special tokens."""
    table = [*kit.VOCAB, *(mark.encode() for mark in MARKS)]
    return b"".join(table[token] for token in coder.streams[-1].request.token_ids).decode()


async def test_an_infill_is_in_the_models_own_form(editor: Any, coder: Any, kit: Any) -> None:
    found = await answer(editor, "/infill", input_prefix="def f(", input_suffix="):\n", prompt="x", n_predict=4)
    assert found["content"] == "Hell"
    assert read(coder, kit) == "<|bos|><|fim_prefix|>def f(x<|fim_suffix|>):\n<|fim_middle|>"
    ends = {len(kit.VOCAB) + MARKS.index(mark) for mark in MARKS[3:]}
    assert set(coder.sampling.stop_token_ids) == ends
    extra = [{"filename": "a.py", "text": "A = 1\n"}]
    await answer(editor, "/infill", input_prefix="p", input_suffix="s", input_extra=extra, n_predict=1)
    before = "<|repo_name|>project\n<|file_sep|>a.py\nA = 1\n<|file_sep|>filename\n"
    assert read(coder, kit) == f"<|bos|>{before}<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"


async def test_a_text_that_looks_like_a_mark_stays_text(editor: Any, coder: Any, kit: Any) -> None:
    await answer(editor, "/infill", input_prefix="<|fim_middle|>", input_suffix="", n_predict=1)
    tokens = coder.streams[-1].request.token_ids
    assert tokens[-1] == len(kit.VOCAB) + MARKS.index("<|fim_middle|>")
    assert list(tokens).count(tokens[-1]) == 1


async def test_an_infill_that_is_too_long_is_cut_around_the_gap(editor: Any, coder: Any, kit: Any) -> None:
    long = "x" * 10_000
    await answer(editor, "/infill", input_prefix=f"{long}<", input_suffix=f">{long}", n_predict=100)
    prompt = read(coder, kit)
    assert "<<|fim_suffix|>>" in prompt
    assert len(coder.streams[-1].request.token_ids) == coder.max_context_tokens - 100


async def test_completions_take_a_suffix(editor: Any, coder: Any, kit: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"prompt": "a", "suffix": "b", "stream": False}),
    ):
        response = await editor.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert read(coder, kit) == "<|bos|><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"


async def test_a_model_that_fills_gaps_says_so(editor: Any, gateway: Any) -> None:
    for running, can in ((editor, True), (gateway, False)):
        shown = (await running.http.post("/api/show", json={"model": "tiny"})).json()
        assert ("insert" in shown["capabilities"]) is can


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
async def test_a_model_without_such_tokens_refuses_by_name(gateway: Any, path: str, body: Any, name: str) -> None:
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 400
    assert name in response.text
    assert "tiny" in response.text


# --- the server -----------------------------------------------------------------------------------------------------


async def test_a_conversation_is_written_as_the_model_reads_it(gateway: Any) -> None:
    found = await answer(gateway, "/apply-template", messages=[{"role": "user", "content": "hi"}])
    assert found["prompt"].endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_properties_describe_the_model(gateway: Any, router: Any) -> None:
    found = (await gateway.http.get("/props")).json()
    assert found["default_generation_settings"]["n_ctx"] == router.max_context_tokens
    assert found["default_generation_settings"]["params"]["top_k"] == 0
    assert "im_start" in found["chat_template"]
    assert found["model_alias"] == "tiny"
    assert found["modalities"] == {"vision": False, "audio": False}


async def test_slots_are_the_places_in_the_batches_of_the_models_workers(gateway: Any, router: Any) -> None:
    load = worker_pb2.Load(max_num_seqs=3, num_running=1)
    router.workers = [
        router_pb2.WorkerInfo(worker_id="w0", model="tiny", load=load),
        router_pb2.WorkerInfo(worker_id="w1", model="other", load=load),
    ]
    slots = (await gateway.http.get("/slots")).json()
    assert [(slot["id"], slot["worker"], slot["is_processing"]) for slot in slots] == [
        (0, "w0", True),
        (1, "w0", False),
        (2, "w0", False),
    ]


async def test_texts_are_tokenized_under_llama_cpps_names(gateway: Any) -> None:
    found = await answer(gateway, "/tokenize", content="hé")
    assert found["tokens"] == [ord("h") + 3, *(byte + 3 for byte in "é".encode())]
    found = await answer(gateway, "/tokenize", content="hé", add_special=True, with_pieces=True)
    assert [one["piece"] for one in found["tokens"]] == ["<|bos|>", "h", [0xC3], [0xA9]]
    found = await answer(gateway, "/detokenize", tokens=[ord("h") + 3])
    assert (found["content"], found["prompt"]) == ("h", "h")
