"""KServe's protocol over gRPC, in front of a fake router."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace.common.stores.api_keys import ApiKey
from headrace.gateway.access.admission import AdmissionControl, OwnLimits
from headrace.gateway.access.limits import LocalLimits
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.kserve import service
from headrace.protos import kserve_pb2, kserve_pb2_grpc
from headrace.protos.kserve_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from headrace.protos.status import Reason, StatusError, error_of
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


@pytest_asyncio.fixture(loop_scope="module")
async def stub(gateway: Any) -> Any:
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        yield kserve_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(*texts: str, raw: bool = False, **parameters: Any) -> ModelInferRequest:
    """A request to continue texts."""
    made = ModelInferRequest(model_name="tiny", id="a")
    tensor = made.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    elements = [text.encode() for text in texts]
    if raw:
        made.raw_input_contents.append(b"".join(struct.pack("<I", len(one)) + one for one in elements))
    else:
        tensor.contents.bytes_contents.extend(elements)
    for name, value in parameters.items():
        kind = {bool: "bool", int: "int64", str: "string", float: "double"}[type(value)]
        made.parameters[name].CopyFrom(InferParameter(**{f"{kind}_param": value}))
    return made


def texts_of(response: ModelInferResponse, name: str = "text_output") -> list[str]:
    """The elements of an output of BYTES."""
    names = [output.name for output in response.outputs]
    raw, found = response.raw_output_contents[names.index(name)], []
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        found.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    return found


async def failure(call: Any) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of(caught.value)


async def test_server_and_models_are_described(stub: Any, router: Any) -> None:
    assert (await stub.ServerLive(kserve_pb2.ServerLiveRequest())).live
    assert (await stub.ServerReady(kserve_pb2.ServerReadyRequest())).ready
    assert (await stub.ServerMetadata(kserve_pb2.ServerMetadataRequest())).name == "headrace"
    for name, version, ready in (("tiny", "", True), ("tiny", "1", True), ("tiny", "2", False), ("other", "", False)):
        asked = kserve_pb2.ModelReadyRequest(name=name, version=version)
        assert (await stub.ModelReady(asked)).ready is ready
    described = await stub.ModelMetadata(kserve_pb2.ModelMetadataRequest(name="tiny"))
    assert (described.name, list(described.versions)) == ("tiny", ["1"])
    assert described.outputs[0].name == "text_output"
    error = await failure(stub.ModelMetadata(kserve_pb2.ModelMetadataRequest(name="other")))
    assert error.reason is Reason.MODEL_NOT_FOUND


@pytest.mark.parametrize("raw", [False, True])
async def test_texts_are_continued(stub: Any, router: Any, raw: bool) -> None:
    made = request("hi", "ho", raw=raw, max_tokens=5, exclude_input_in_output=True, temperature=0.5)
    answer = await stub.ModelInfer(made)
    assert (answer.model_name, answer.model_version, answer.id) == ("tiny", "1", "a")
    assert [list(output.shape) for output in answer.outputs] == [[2]]
    assert texts_of(answer) == ["Hello", "Hello"]
    assert router.sampling.temperature == 0.5
    assert texts_of(await stub.ModelInfer(request("hi", raw=raw, max_tokens=5))) == ["hiHello"]


async def test_inputs_are_tensors_of_their_types(stub: Any, router: Any) -> None:
    made = request("hi")
    for name, datatype, contents in (
        ("top_k", "INT32", {"int_contents": [3]}),
        ("seed", "UINT64", {"uint64_contents": [2**63]}),
        ("top_p", "FP32", {"fp32_contents": [0.5]}),
        ("ignore_eos", "BOOL", {"bool_contents": [True]}),
        ("stop", "BYTES", {"bytes_contents": [b"zz", b", w"]}),
        ("sampling_parameters", "BYTES", {"bytes_contents": [json.dumps({"max_tokens": 9}).encode()]}),
    ):
        (kind,) = contents
        made.inputs.add(name=name, datatype=datatype, shape=[len(contents[kind])], contents=contents)
    made.outputs.add(name="finish_reason")
    answer = await stub.ModelInfer(made)
    assert texts_of(answer, "finish_reason") == ["stop"]
    sampling = router.sampling
    assert (sampling.top_k, sampling.seed, sampling.top_p) == (3, 2**63, 0.5)
    assert (sampling.ignore_eos, sampling.max_tokens) == (True, 9)


async def test_failures_have_their_status_and_field(stub: Any, router: Any) -> None:
    for made, field in (
        (request("hi", stream=True), "stream"),
        (request("hi", temperature=3.0), "temperature"),
        (request(), "text_input"),
        (request("hi", sequence_id=5), "parameters.sequence_id"),
    ):
        error = await failure(stub.ModelInfer(made))
        assert error.reason in (Reason.INVALID_FIELD, Reason.UNSUPPORTED)
        assert field in (None, error.field)
    made = request("hi")
    made.inputs.add(name="ñ" * 10_000, datatype="INT32", shape=[1])
    error = await failure(stub.ModelInfer(made))
    assert (error.reason, set((error.field or "").rstrip("…"))) == (Reason.INVALID_FIELD, {"ñ"})
    made = request("hi")
    made.raw_input_contents.extend([b"", b""])
    assert (await failure(stub.ModelInfer(made))).field == "raw_input_contents"
    made = request("hi")
    made.inputs[0].parameters["shared_memory_region"].string_param = "x"
    assert "shared_memory_region" in (await failure(stub.ModelInfer(made))).message
    made = request("hi")
    made.model_version = "2"
    assert (await failure(stub.ModelInfer(made))).reason is Reason.NOT_FOUND
    assert router.streams == []


# --- streams --------------------------------------------------------------------------------------------------------


async def sent(*requests: ModelInferRequest) -> AsyncIterator[ModelInferRequest]:
    for one in requests:
        yield one


async def test_a_stream_has_the_parts_of_an_answer(stub: Any) -> None:
    made = request("hi", stream=True, max_tokens=5, return_finish_reason=True)
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    *parts, last = [one.infer_response async for one in stub.ModelStreamInfer(sent(made))]
    assert [texts_of(part) for part in parts] == [["H"], ["e"], ["l"], ["l"], ["o"]]
    assert [texts_of(part, "finish_reason")[0] for part in parts] == ["", "", "", "", "length"]
    finals = [one.parameters["triton_final_response"].bool_param for one in (*parts, last)]
    assert finals == [False] * 5 + [True]
    assert (len(last.outputs), last.id) == (0, "a")


async def test_a_stream_takes_several_requests_and_one_failure_ends_no_other(stub: Any) -> None:
    requests = [request("hi", stream=True, max_tokens=5), request("hi", temperature=3.0), request("hi", max_tokens=5)]
    for name, one in zip("abc", requests, strict=True):
        one.id = name
    found: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    async for one in stub.ModelStreamInfer(sent(*requests)):
        response = one.infer_response
        found[response.id] += [one.error_message] if one.error_message else texts_of(response)
    assert "".join(found["a"]) == "Hello"
    assert found["c"] == ["hiHello"]
    assert len(found["b"]) == 1
    assert "temperature" in found["b"][0]


async def test_a_stream_answers_a_bounded_number_of_requests_at_a_time(
    stub: Any, router: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_STREAM_REQUESTS", 2)
    gate = asyncio.Event()

    async def wait(_: Any, stream: Any, send: Any) -> None:
        await gate.wait()
        await send([kit.EOS], 0, kit.inference_pb2.FINISH_REASON_STOP)

    router.script = wait
    call = stub.ModelStreamInfer(sent(*(request("hi") for _ in range(5))))

    async def read() -> list[str]:
        return [one.infer_response.id async for one in call]

    reading = asyncio.create_task(read())
    while len(router.streams) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert len(router.streams) == 2
    gate.set()
    assert await reading == ["a"] * 5


async def test_a_client_that_leaves_cancels_its_generations(stub: Any, router: Any, kit: Any) -> None:
    async def never(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("Hi"), 0, None)
        await asyncio.Event().wait()

    router.script = never
    call = stub.ModelStreamInfer(sent(request("hi", stream=True), request("ho", stream=True)))
    for _ in range(2):
        await call.read()
    call.cancel()
    for stream in router.streams:
        await asyncio.wait_for(stream.cancelled.wait(), patience(5))
    assert len(router.streams) == 2


# --- keys -----------------------------------------------------------------------------------------------------------


class _Ring:
    """A key ring with one key, which allows two requests per minute."""

    key = ApiKey(id="k", name="k", sha256="0" * 64, tenant="t", created_s=0, requests_per_minute=2)

    def find(self, secret: str) -> ApiKey:
        if secret != "secret":
            raise StatusError(Reason.UNAUTHENTICATED, "no such key")
        return self.key


async def test_calls_need_a_key_and_count_against_its_limits(router: Any, kit: Any) -> None:
    controls = EdgeControls(EdgeSettings())
    ring: Any = _Ring()
    controls.admission = AdmissionControl(keys=ring, limits=OwnLimits(LocalLimits(lambda: time.monotonic_ns() // 1000)))
    metadata = (("authorization", "Bearer secret"),)
    async with (
        kit.serving_gateway(router.address, controls=controls) as gateway,
        grpc.aio.insecure_channel(gateway.grpc_address) as channel,
    ):
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert (await stub.ServerLive(kserve_pb2.ServerLiveRequest())).live
        error = await failure(stub.ModelReady(kserve_pb2.ModelReadyRequest(name="tiny")))
        assert error.reason is Reason.UNAUTHENTICATED
        call = stub.ModelStreamInfer(sent(request("hi")))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        made = request("hi", max_tokens=1)
        answers = [one async for one in stub.ModelStreamInfer(sent(made, made, made), metadata=metadata)]
        assert sorted(bool(one.error_message) for one in answers) == [False, False, True]
        assert (await failure(stub.ModelInfer(made, metadata=metadata))).reason is Reason.QUOTA
        ready = await stub.ModelReady(kserve_pb2.ModelReadyRequest(name="tiny"), metadata=metadata)
        assert ready.ready
