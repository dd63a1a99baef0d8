"""ollama: other names of models, models of files, and unloading."""

import os
from concurrent.futures import ThreadPoolExecutor

import ollama
from target import BASE_URL, MODEL, refusal

client = ollama.Client(BASE_URL.removesuffix("/v1"))


def names() -> set[str]:
    """The models that the server lists."""
    return {one.model for one in client.list().models}


def answer(model: str) -> str:
    """The beginning of a text."""
    return client.generate(model, "Once", raw=True, options={"temperature": 0, "num_predict": 8}).response


assert client.copy(MODEL, "mine").status == "success"
assert "mine" in names()
assert answer("mine") == answer(MODEL)
assert client.create("made", from_="mine").status == "success"
assert [part.status for part in client.create("made", from_=MODEL, stream=True)][-1] == "success"
assert answer("made:latest") == answer(MODEL)
error = refusal(ollama.ResponseError, lambda: client.create("made", from_=MODEL, system="Be brief."))
assert "system is not supported" in error.error
assert client.delete("made").status == "success"
assert client.delete("mine").status == "success"
assert not {"made", "mine"} & names()
assert refusal(ollama.ResponseError, lambda: client.delete("mine")).status_code == 404
assert refusal(ollama.ResponseError, lambda: client.delete(MODEL)).status_code == 403
assert refusal(ollama.ResponseError, lambda: client.copy("no-such-model", "x")).status_code == 404

# A model of a file that is sent.
GGUF = os.environ["HEADRACE_TEST_GGUF"]
digest = client.create_blob(GGUF)
statuses = [part.status for part in client.create("sent:v1", files={"sent.gguf": digest}, stream=True)]
assert statuses[-1] == "success", statuses
assert "sent:v1" in names()
count = client.chat("sent:v1", [{"role": "user", "content": "hi"}], options={"num_predict": 4}).eval_count
assert count is not None
assert 1 <= count <= 4
error = refusal(ollama.ResponseError, lambda: client.create("other", files={"sent.gguf": digest}))
assert (error.status_code, "no blob was uploaded for 'sent.gguf'" in error.error) == (404, True)
error = refusal(ollama.ResponseError, lambda: client.create("other", files={"a.gguf": digest}, quantize="q4_K_M"))
assert "quantize is not supported" in error.error
assert "send a file of the quantisation" in error.error
# A copy is like the first name. The model is deleted with its last name, while a stream of it ends.
assert client.copy("sent:v1", "copied").status == "success"
assert client.delete("sent:v1").status == "success"
assert "copied" in names()
parts = client.generate("copied", "hi", raw=True, options={"num_predict": 300}, stream=True)
first = next(parts)
with ThreadPoolExecutor(1) as beside:
    deleted = beside.submit(client.delete, "copied")
    assert [first, *parts][-1].done_reason in ("stop", "length")
    assert deleted.result().status == "success"
assert not {"sent:v1", "copied"} & names()
for gone in (lambda: client.delete("sent:v1"), lambda: client.generate("copied", "hi")):
    assert refusal(ollama.ResponseError, gone).status_code == 404
broken = client.create_blob(__file__)
error = refusal(ollama.ResponseError, lambda: client.create("other", files={"a.gguf": broken}))
assert "'a.gguf' is no GGUF file" in error.error
assert answer(MODEL)

assert MODEL in {one.model for one in client.ps().models}
assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
assert MODEL not in {one.model for one in client.ps().models}
assert MODEL in names()
