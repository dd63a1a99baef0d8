"""tritonclient: infer over HTTP and gRPC, streams over gRPC, health, metadata, errors."""

import asyncio
import json
import os
import queue

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
from target import BASE_URL, MODEL, refusal
from tritonclient.utils import InferenceServerException

HTTP_ADDRESS = BASE_URL.removesuffix("/v1").removeprefix("http://")
GRPC_ADDRESS = os.environ["HEADRACE_TEST_GRPC"]
PROMPT = "The capital of France is"
SAMPLING = json.dumps({"temperature": 0, "max_tokens": 6})


def inputs_of(kind, *texts: str, **values):
    """The tensors of a request."""
    arrays = {
        "text_input": np.array([text.encode() for text in texts], dtype=np.object_),
        "sampling_parameters": np.array([SAMPLING.encode()], dtype=np.object_),
        **{name: np.array([value]) for name, value in values.items()},
    }
    kinds = {"O": "BYTES", "b": "BOOL", "f": "FP32", "i": "INT64"}
    found = []
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            array = array.astype(np.float32)
        tensor = kind(name, list(array.shape), kinds[array.dtype.kind])
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def texts_of(result) -> list[str]:
    """The texts of an answer."""
    return [text if isinstance(text, str) else text.decode() for text in result.as_numpy("text_output")]


def check(client, module) -> str:
    """Use a client; the text that it got."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert not client.is_model_ready("no-such-model")
    only = inputs_of(module.InferInput, PROMPT, exclude_input_in_output=True)
    (text,) = texts_of(client.infer(MODEL, only, request_id="a"))
    assert "Paris" in text
    asked = [module.InferRequestedOutput(name) for name in ("text_output", "finish_reason", "num_output_tokens")]
    result = client.infer(MODEL, inputs_of(module.InferInput, PROMPT, PROMPT), outputs=asked)
    assert texts_of(result) == [PROMPT + text] * 2
    assert list(result.as_numpy("finish_reason")) == [b"length"] * 2
    assert list(result.as_numpy("num_output_tokens")) == [6, 6]
    stopped = client.infer(MODEL, only, parameters={"stop": "aris"})
    assert texts_of(stopped)[0].strip() == "P"
    error = refusal(InferenceServerException, lambda: client.infer("no-such-model", only))
    assert "does not exist" in str(error)
    bad = inputs_of(module.InferInput, PROMPT, top_p=2.0)
    assert "top_p" in str(refusal(InferenceServerException, lambda: client.infer(MODEL, bad)))
    return text


http, grpc = over_http.InferenceServerClient(HTTP_ADDRESS), over_grpc.InferenceServerClient(GRPC_ADDRESS)
answers = [check(http, over_http), check(grpc, over_grpc)]
assert answers[0] == answers[1]
assert http.get_server_metadata()["name"] == grpc.get_server_metadata().name == "headrace"
assert http.get_model_metadata(MODEL)["versions"] == list(grpc.get_model_metadata(MODEL).versions) == ["1"]
plain = inputs_of(over_http.InferInput, PROMPT)
plain[0].set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_), binary_data=False)
shown = over_http.InferRequestedOutput("text_output", binary_data=False)
assert texts_of(http.infer(MODEL, plain, outputs=[shown])) == [PROMPT + answers[0]]

# Two requests on one stream, of which one fails.
arrived: queue.Queue = queue.Queue()
grpc.start_stream(lambda result, error: arrived.put((result, error)))
streamed = inputs_of(over_grpc.InferInput, PROMPT, stream=True)
grpc.async_stream_infer(MODEL, streamed, request_id="good", enable_empty_final_response=True)
parts, is_over = [], False
while not is_over:
    result, error = arrived.get(timeout=60)
    assert error is None, error
    response = result.get_response()
    assert response.id == "good"
    is_over = response.parameters["triton_final_response"].bool_param
    parts += [] if is_over else texts_of(result)
assert len(parts) > 2
assert "".join(parts) == answers[0]
grpc.async_stream_infer("no-such-model", streamed, request_id="bad")
result, error = arrived.get(timeout=60)
assert "does not exist" in str(error)
grpc.stop_stream()


async def asynchronously() -> str:
    """The text of an answer from the asynchronous client."""

    async def requests():
        yield {"model_name": MODEL, "inputs": inputs_of(over_grpc_aio.InferInput, PROMPT, stream=True)}

    async with over_grpc_aio.InferenceServerClient(GRPC_ADDRESS) as client:
        found = []
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            found += texts_of(result)
        return "".join(found)


assert asyncio.run(asynchronously()) == answers[0]
