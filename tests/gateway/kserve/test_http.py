"""KServe's protocol over real HTTP, in front of a fake router."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.hints import HEADER
from headrace.gateway.kserve.tensors import Tensor, checked, decoded, encoded
from headrace.protos.inference_pb2 import CacheEviction
from headrace.protos.status import Reason, StatusError
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "/v2/models/tiny"
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
ONLY_ANSWER = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]}


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


@pytest.fixture
def infer(gateway: Any) -> Any:
    """POST infer with these inputs. Returns the tensors of the answer by name."""

    async def post(*inputs: dict[str, Any], path: str = f"{MODEL}/infer", **fields: Any) -> dict[str, Any]:
        response = await gateway.http.post(path, json={"inputs": inputs, **fields})
        assert response.status_code == 200, response.text
        answer = response.json()
        assert (answer["model_name"], answer["model_version"], answer.get("id")) == ("tiny", "1", fields.get("id"))
        return {one["name"]: one for one in answer["outputs"]}

    return post


def scalar(name: str, datatype: str, value: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value]}


def bytes_of(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


# --- infer ----------------------------------------------------------------------------------------------------------


async def test_a_text_is_continued(infer: Any, router: Any) -> None:
    for path in (f"{MODEL}/infer", f"{MODEL}/versions/1/infer"):
        (output,) = (await infer(TEXT, path=path, id="a", parameters={"max_tokens": 5})).values()
        assert output == {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["hiHello"]}
    assert router.prompt == "<|bos|>hi"
    (output,) = (await infer(TEXT, ONLY_ANSWER, parameters={"max_tokens": 50})).values()
    assert output["data"] == ["Hello, wörld 😀!"]


async def test_several_texts_are_several_elements(infer: Any, router: Any) -> None:
    texts = {**TEXT, "shape": [2, 1], "data": [["hi"], ["ho"]]}
    outputs = await infer(
        texts,
        ONLY_ANSWER,
        scalar("return_finish_reason", "BOOL", True),
        scalar("return_num_input_tokens", "BOOL", True),
    )
    assert outputs["text_output"]["shape"] == [2]
    assert outputs["finish_reason"]["data"] == ["length", "length"]
    assert outputs["num_input_tokens"]["data"] == [3, 3]
    assert sorted(len(one.request.token_ids) for one in router.streams) == [3, 3]


async def test_outputs_are_those_that_are_requested(infer: Any) -> None:
    names = ["num_output_tokens", "cumulative_logprob", "num_input_tokens", "finish_reason"]
    outputs = await infer(TEXT, outputs=[{"name": name} for name in names])
    assert list(outputs) == names
    assert outputs["num_output_tokens"] == {"name": names[0], "datatype": "UINT32", "shape": [1], "data": [16]}
    assert outputs["cumulative_logprob"]["data"][0] < 0
    flags = [scalar(f"return_{name}", "BOOL", True) for name in names]
    assert set(await infer(TEXT, *flags)) == {"text_output", *names}


@pytest.mark.parametrize("way", ["tensors", "parameters", "json"])
async def test_sampling_is_said_in_any_of_three_ways(infer: Any, router: Any, way: str) -> None:
    values: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "seed": 11, "max_tokens": 7, "ignore_eos": True}
    kinds = {"temperature": "FP32", "top_k": "INT32", "seed": "UINT64", "max_tokens": "INT32", "ignore_eos": "BOOL"}
    if way == "tensors":
        await infer(TEXT, *(scalar(name, kinds[name], value) for name, value in values.items()))
    elif way == "parameters":
        await infer(TEXT, parameters={name: str(value).lower() for name, value in values.items()})
    else:
        await infer(TEXT, scalar("sampling_parameters", "BYTES", json.dumps(values)))
    sampling = router.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 3, 11)
    assert (sampling.max_tokens, sampling.ignore_eos) == (7, True)


async def test_lists_are_tensors_of_several_elements(infer: Any, router: Any) -> None:
    stop = {"name": "stop", "datatype": "BYTES", "shape": [2], "data": ["zz", ", w"]}
    (output,) = (await infer(TEXT, stop, ONLY_ANSWER)).values()
    assert output["data"] == ["Hello"]
    ids = {"name": "stop_token_ids", "datatype": "INT32", "shape": [2], "data": [7, 8]}
    await infer(TEXT, ids, scalar("response_format", "BYTES", '{"type": "json_object"}'))
    assert list(router.sampling.stop_token_ids) == [7, 8]
    assert router.sampling.constraint.HasField("json_object")


@pytest.mark.parametrize("way", ["tensors", "parameters", "json"])
async def test_a_rule_for_giving_up_blocks_reaches_the_worker(gateway: Any, infer: Any, router: Any, way: str) -> None:
    router.cards = [router.card(max_evicting_context_tokens=9000)]
    await gateway.models.refresh()
    try:
        for rule in ({"max_cache_size": 64, "recent_size": 8}, False):
            text = json.dumps(rule)
            if way == "tensors":
                is_bool = isinstance(rule, bool)
                await infer(TEXT, scalar("cache_eviction", "BOOL" if is_bool else "BYTES", rule if is_bool else text))
            elif way == "parameters":
                await infer(TEXT, parameters={"cache_eviction": text})
            else:
                await infer(TEXT, scalar("sampling_parameters", "BYTES", json.dumps({"cache_eviction": rule})))
            wanted = CacheEviction(max_cache_size=64, recent_size=8) if rule else CacheEviction(max_cache_size=0)
            assert router.sampling.cache_eviction == wanted
    finally:
        router.reset()
        await gateway.models.refresh()


async def test_elements_may_be_bytes_behind_the_json(gateway: Any, router: Any) -> None:
    router.answer = "Hé"
    raws = {"text_input": bytes_of("hi"), "temperature": struct.pack("<f", 0.5), "exclude_input_in_output": b"\1"}
    kinds = {"text_input": "BYTES", "temperature": "FP32", "exclude_input_in_output": "BOOL"}
    inputs = [
        {"name": name, "datatype": kinds[name], "shape": [1], "parameters": {"binary_data_size": len(raw)}}
        for name, raw in raws.items()
    ]
    asked = [{"name": "finish_reason"}, {"name": "text_output", "parameters": {"binary_data": True}}]
    for more, binary in (({"parameters": {"binary_data_output": True}}, True), ({"outputs": asked}, True), ({}, False)):
        head = json.dumps({"inputs": inputs, **more}).encode()
        headers = {"inference-header-content-length": str(len(head))}
        response = await gateway.http.post(f"{MODEL}/infer", content=head + b"".join(raws.values()), headers=headers)
        assert response.status_code == 200, response.text
        size = int(response.headers.get("inference-header-content-length", len(response.content)))
        output = json.loads(response.content[:size])["outputs"][-1]
        assert output["name"] == "text_output"
        if binary:
            assert response.headers["content-type"] == "application/octet-stream"
            assert output["parameters"] == {"binary_data_size": len(response.content) - size}
            assert response.content[size:] == bytes_of("Hé")
        else:
            assert output["data"] == ["Hé"]
        assert router.sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("field", "inputs", "fields"),
    [
        ("text_input", [], {}),
        ("text_input", [{**TEXT, "datatype": "INT32", "data": [1]}], {}),
        ("text_input", [{**TEXT, "shape": [2]}], {}),
        ("text_input", [{**TEXT, "shape": [1] * 50}], {}),
        ("text_input", [{**TEXT, "shape": [10**400]}], {}),
        ("text_input", [{**TEXT, "data": [5]}], {}),
        ("text_input", [TEXT, TEXT], {}),
        ("inputs[0].data", [{**TEXT, "data": json.loads("[" * 200 + '"hi"' + "]" * 200)}], {}),
        ("inputs[0].data", [{**TEXT, "data": None}], {}),
        ("inputs[0].parameters.shared_memory_region", [{**TEXT, "parameters": {"shared_memory_region": "x"}}], {}),
        ("inputs[0].parameters.binary_data_size", [{**TEXT, "data": None, "parameters": {"binary_data_size": 9}}], {}),
        ("temperature", [TEXT, scalar("temperature", "FP16", 1)], {}),
        ("temperature", [TEXT, scalar("temperature", "FP32", 3)], {}),
        ("temperature", [TEXT, scalar("temperature", "FP32", "warm")], {}),
        ("temperature", [TEXT, {**scalar("temperature", "FP32", 1), "shape": [2], "data": [1, 1]}], {}),
        ("temperature", [TEXT, scalar("temperature", "FP32", 1)], {"parameters": {"temperature": 1}}),
        ("temperature", [TEXT], {"parameters": {"temperature": "warm"}}),
        ("top_k", [TEXT, scalar("top_k", "INT32", True)], {}),
        ("stream", [TEXT, scalar("stream", "BOOL", True)], {}),
        ("stream", [TEXT], {"parameters": {"stream": "perhaps"}}),
        ("image", [TEXT, scalar("image", "BYTES", "AAAA")], {}),
        ("n", [TEXT], {"parameters": {"n": 2}}),
        ("sampling_parameters", [TEXT, scalar("sampling_parameters", "BYTES", "{")], {}),
        ("sampling_parameters", [TEXT, scalar("sampling_parameters", "BYTES", "[]")], {}),
        ("parameters.sequence_id", [TEXT], {"parameters": {"sequence_id": 7}}),
        ("parameters.priority", [TEXT], {"parameters": {"priority": 1}}),
        ("parameters.timeout", [TEXT], {"parameters": {"timeout": 1}}),
        ("outputs", [TEXT], {"outputs": [{"name": "logits"}]}),
        (
            "outputs[0].parameters.classification",
            [TEXT],
            {"outputs": [{"name": "x", "parameters": {"classification": 1}}]},
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    gateway: Any, router: Any, field: str, inputs: list[Any], fields: dict[str, Any]
) -> None:
    response = await gateway.http.post(f"{MODEL}/infer", json={"inputs": inputs, **fields})
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"]
    assert field in response.json()["error"]
    assert router.streams == []


@pytest.mark.parametrize(
    ("raw", "size"), [(b"\5\0\0\0hi", 6), (b"\1\0", 2), (b"\2\0\0\0\xff\xff", 6), (b"\1\0\0\0hmore", 5)]
)
async def test_bytes_that_are_no_texts_are_refused(gateway: Any, raw: bytes, size: int) -> None:
    one = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [one]}).encode()
    for length in (str(len(head)), "many", "999999", "9" * 5000):
        headers = {"inference-header-content-length": length}
        response = await gateway.http.post(f"{MODEL}/infer", content=head + raw, headers=headers)
        assert response.status_code == 400, response.text


@settings(max_examples=100, deadline=None)
@given(st.data())
async def test_elements_survive_as_bytes(data: st.DataObject) -> None:
    bits = st.sampled_from([8, 16, 32, 64])
    size = data.draw(bits)
    datatype, values = data.draw(
        st.one_of(
            st.tuples(st.just("BYTES"), st.lists(st.text())),
            st.tuples(st.just("BOOL"), st.lists(st.booleans())),
            st.tuples(st.just(f"INT{size}"), st.lists(st.integers(-(2 ** (size - 1)), 2 ** (size - 1) - 1))),
            st.tuples(st.just(f"UINT{size}"), st.lists(st.integers(0, 2**size - 1))),
            st.tuples(st.just("FP64"), st.lists(st.floats(allow_nan=False))),
        )
    )
    raw = encoded(Tensor("x", datatype, (len(values),), values))
    found = checked("x", datatype, (len(values),), decoded("x", datatype, raw))
    assert list(found.values) == values


# --- generate -------------------------------------------------------------------------------------------------------


async def test_generate_takes_values_beside_the_text_and_in_parameters(gateway: Any, router: Any) -> None:
    for body in (
        {"text_input": "hi", "max_tokens": 5, "stop_words": "", "bad_words": "", "random_seed": 3},
        {"text_input": "hi", "parameters": {"max_tokens": 5, "stream": False, "seed": "3"}},
        {"text_input": "hi", "sampling_parameters": '{"max_tokens": "5", "seed": 3}'},
        {"text_input": "hi", "parameters": {"sampling_parameters": '{"max_tokens": "5", "seed": 3}'}},
    ):
        response = await gateway.http.post(f"{MODEL}/generate", json=body)
        assert response.status_code == 200, response.text
        assert response.json() == {"model_name": "tiny", "model_version": "1", "text_output": "hiHello"}
        assert (router.sampling.max_tokens, router.sampling.seed) == (5, 3)
    body = {"text_input": ["hi", "ho"], "exclude_input_in_output": True, "max_tokens": 5, "id": "a"}
    answer = (await gateway.http.post(f"{MODEL}/generate", json=body)).json()
    assert (answer["text_output"], answer["id"]) == (["Hello", "Hello"], "a")


async def test_generate_stream_has_an_event_for_each_part(gateway: Any) -> None:
    fields = {"return_finish_reason": True, "return_num_output_tokens": True, "max_tokens": 5}
    body = {"text_input": "hi", "stream": True, "parameters": fields}
    response = await gateway.http.post(f"{MODEL}/generate_stream", json=body)
    events = [json.loads(block.removeprefix("data: ")) for block in response.text.split("\n\n") if block]
    assert "".join(one["text_output"] for one in events) == "Hello"
    assert [one["finish_reason"] for one in events] == ["", "", "", "", "length"]
    assert sum(one["num_output_tokens"] for one in events) == 5
    body["stream"] = False
    response = await gateway.http.post(f"{MODEL}/generate_stream", json=body)
    (event,) = response.text.rstrip("\n").split("\n\n")
    assert json.loads(event.removeprefix("data: "))["text_output"] == "hiHello"


@pytest.mark.parametrize(
    ("field", "path", "body"),
    [
        ("text_input", "generate", {}),
        ("stream", "generate", {"stream": True}),
        ("text_input", "generate_stream", {"text_input": ["hi", "ho"]}),
        ("exclude_input_in_output", "generate_stream", {"exclude_input_in_output": False}),
        ("max_tokens", "generate", {"max_tokens": 0}),
        ("max_tokens", "generate", {"max_tokens": 5, "parameters": {"max_tokens": 5}}),
        ("id", "generate", {"id": 5}),
    ],
)
async def test_generate_refuses_by_name(gateway: Any, field: str, path: str, body: dict[str, Any]) -> None:
    sent = {"text_input": "hi", **body} if body else {}
    response = await gateway.http.post(f"{MODEL}/{path}", json=sent)
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]


async def test_parameters_that_nobody_knows_are_hints_and_inputs_are_refused(gateway: Any) -> None:
    body = {"text_input": "hi", "parameters": {"more": 2}, "nonsense": 1}
    response = await gateway.http.post(f"{MODEL}/generate", json=body)
    assert response.status_code == 200, response.text
    assert sorted(response.headers[HEADER].split(", ")) == ["more", "nonsense"]
    unknown = {"name": "logits_in", "datatype": "INT32", "shape": [1], "data": [1]}
    response = await gateway.http.post(f"{MODEL}/infer", json={"inputs": [TEXT, unknown]})
    assert (response.status_code, "no input 'logits_in'" in response.text) == (400, True)


async def test_a_stream_that_fails_ends_with_the_error(gateway: Any, router: Any, kit: Any) -> None:
    async def fail(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("Hi"), 0, None)
        raise StatusError(Reason.INTERNAL, "the worker broke")

    router.script = fail
    response = await gateway.http.post(f"{MODEL}/generate_stream", json={"text_input": "hi"})
    assert list(json.loads(response.text.split("data: ")[-1])) == ["error"]


async def test_one_text_that_fails_fails_the_request(gateway: Any, router: Any, kit: Any) -> None:
    async def fail(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("Hi"), 0, None)
        if stream is router.streams[0]:
            await send([kit.EOS], 2, kit.inference_pb2.FINISH_REASON_STOP)
            return
        await asyncio.sleep(0.05)
        raise StatusError(Reason.INTERNAL, "the worker broke")

    router.script = fail
    response = await gateway.http.post(f"{MODEL}/generate", json={"text_input": ["hi", "ho"]})
    assert response.status_code == 500


async def test_a_client_that_leaves_cancels_the_generation(gateway: Any, router: Any, kit: Any) -> None:
    async def never(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("Hi"), 0, None)
        await asyncio.Event().wait()

    router.script = never
    async with gateway.http.stream("POST", f"{MODEL}/generate_stream", json={"text_input": "hi"}) as response:
        async for _ in response.aiter_raw():
            break
    await asyncio.wait_for(router.streams[0].cancelled.wait(), patience(5))


# --- models ---------------------------------------------------------------------------------------------------------


async def test_server_and_models_are_described(gateway: Any, router: Any) -> None:
    server = (await gateway.http.get("/v2")).json()
    assert (server["name"], server["extensions"]) == ("headrace", ["binary_tensor_data", "generate"])
    for path in (MODEL, f"{MODEL}/versions/1"):
        described = (await gateway.http.get(path)).json()
        assert (described["name"], described["versions"]) == ("tiny", ["1"])
        assert {"name": "text_input", "datatype": "BYTES", "shape": [-1]} in described["inputs"]
        assert (await gateway.http.get(f"{path}/ready")).json() == {"name": "tiny", "ready": True}
    for path in ("/v2/models/other", "/v2/models/other/ready", f"{MODEL}/versions/2", f"{MODEL}/versions/2/ready"):
        response = await gateway.http.get(path)
        assert (response.status_code, list(response.json())) == (404, ["error"])
    assert (await gateway.http.post(f"{MODEL}/fly", json={})).status_code == 404


async def test_a_name_may_have_slashes(gateway: Any, router: Any) -> None:
    router.cards = [router.card(name="owner/tiny")]
    await gateway.models.refresh()
    for path in ("/v2/models/owner/tiny", "/v2/models/owner%2Ftiny"):
        response = await gateway.http.post(f"{path}/generate", json={"text_input": "hi", "max_tokens": 1})
        assert response.json() == {"model_name": "owner/tiny", "model_version": "1", "text_output": "hiH"}
        assert (await gateway.http.get(path)).json()["name"] == "owner/tiny"
