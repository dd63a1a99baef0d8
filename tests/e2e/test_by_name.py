"""From an empty machine and a model's name to a streamed answer, with a fake hub."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openvino as ov
import pytest
from gguf import GGMLQuantizationType

from headrace.cli.models.model_cache import read_manifest
from tests.architectures.exports import PYTHON, written_checkpoints
from tests.e2e.serving import Serve, alive, headrace, until
from tests.e2e.small_model import small_model
from tests.gguf_models import TinyModel, write_gguf
from tests.hub import Hub, running_hub
from tests.patience import patience

pytestmark = pytest.mark.e2e
# Each export takes half a minute.
ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
CHECKPOINT = "llama"


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """A small model with weights as safetensors."""
    return written_checkpoints([CHECKPOINT])[CHECKPOINT]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model in each form, and a machine without any."""
    openvino = small_model()
    for name in ("cache", "run", "gguf"):
        (tmp_path / name).mkdir()
    with running_hub() as hub:
        hub.add_directory("owner/model", openvino)
        for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16):
            write_gguf(TinyModel(default=kind), tmp_path / "gguf" / f"tiny-{kind.name}.gguf")
        hub.add_directory("owner/tiny-GGUF", tmp_path / "gguf")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
        monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
        monkeypatch.setenv("HEADRACE_SERVE_KV_CACHE_GB", "0.2")
        yield hub


@pytest.mark.parametrize(
    ("name", "fetched"),
    [
        ("owner/model", "openvino_model.bin"),
        ("owner/tiny-GGUF:f16", "tiny-F16.gguf"),
    ],
)
def test_one_command_goes_from_a_name_to_an_answer(hub: Hub, tmp_path: Path, name: str, fetched: str) -> None:
    answered = headrace("run", name, "the", "mill", "--max-tokens", "6", timeout_s=120)
    assert answered.returncode == 0, answered.stderr
    assert fetched in hub.fetched(name.partition(":")[0])
    assert "to download" in answered.stderr
    assert re.search(r"\[\d tokens, .* first after", answered.stderr)
    assert answered.stdout.strip()
    assert list((tmp_path / "run" / "headrace").iterdir()) == []
    num_seen = len(hub.seen)
    piped = headrace("run", name, "--offline", "--max-tokens", "2", stdin="the\nmill\n", timeout_s=120)
    assert (piped.returncode, len(hub.seen)) == (0, num_seen), piped.stderr
    assert piped.stderr.count("first after") == 2


@pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models")
def test_one_command_goes_from_safetensors_to_an_answer(
    checkpoint: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_directory("owner/checkpoint", checkpoint)
    monkeypatch.setenv("HEADRACE_EXPORT_PYTHON", str(PYTHON))
    answered = headrace("run", "owner/checkpoint:int4", "w1", "w2", "--max-tokens", "6", timeout_s=180)
    assert answered.returncode == 0, answered.stderr
    assert "safetensors, to be exported with weights in int4" in answered.stderr
    assert "compressing the weights to int4_asym" in answered.stderr
    assert re.search(r"\[\d tokens, .* first after", answered.stderr)
    directory = tmp_path / "cache" / "models" / "owner--checkpoint:int4"
    manifest = read_manifest(directory)
    assert manifest is not None
    assert manifest.source["group_size"] == "128"
    assert (directory / "openvino_model.bin").stat().st_size < (checkpoint / "model.safetensors").stat().st_size / 2
    assert not list(directory.glob(".*"))
    again = headrace("pull", "owner/checkpoint", "--weights", "int4", timeout_s=60)
    assert (again.returncode, "already there" in again.stderr) == (0, True)
    other = headrace("pull", "owner/checkpoint", "--weights", "int4", "--group-size", "32", timeout_s=60)
    assert (other.returncode, "choose another name with --name" in other.stderr) == (2, True)


@pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models")
@pytest.mark.skipif(not ALL, reason="HEADRACE_ARCHITECTURES=1 exports it in other forms, too")
def test_weights_of_an_export_are_chosen_by_the_methods_that_are_named(
    checkpoint: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_directory("owner/checkpoint", checkpoint)
    monkeypatch.setenv("HEADRACE_EXPORT_PYTHON", str(PYTHON))
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"w{number} w{number + 1} the mill\n" for number in range(20)))
    careful = ("--awq", "--scale-estimation", "--dataset", str(texts), "--name", "careful")
    pulled = headrace("pull", "owner/checkpoint", "--weights", "int4", "--group-size", "-1", *careful, timeout_s=240)
    assert pulled.returncode == 0, pulled.stderr
    assert "weights in int4, with AWQ and scale estimation by the texts in texts.txt" in pulled.stderr
    graph = ov.Core().read_model(tmp_path / "cache/models/careful/openvino_model.xml")
    options = {name: graph.get_rt_info(["nncf", "weight_compression", name]).value for name in _METHODS}
    assert options == {"awq": "True", "scale_estimation": "True", "group_size": "-1"}
    assert {len(shape) for kind, shape in weights_of(graph) if kind == ov.Type.u4} == {2}, "one scale for a row"


@pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models")
@pytest.mark.skipif(not ALL, reason="HEADRACE_ARCHITECTURES=1 exports it in other forms, too")
def test_weights_in_fp16_are_so_and_int8_is_the_rule(
    checkpoint: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_directory("owner/checkpoint", checkpoint)
    monkeypatch.setenv("HEADRACE_EXPORT_PYTHON", str(PYTHON))
    pulled = headrace("pull", "owner/checkpoint:fp16", timeout_s=240)
    assert pulled.returncode == 0, pulled.stderr
    graph = ov.Core().read_model(tmp_path / "cache/models/owner--checkpoint:fp16/openvino_model.xml")
    assert {kind for kind, shape in weights_of(graph) if math.prod(shape) > 1000} == {ov.Type.f16}
    pulled = headrace("pull", "owner/checkpoint", timeout_s=240)
    assert pulled.returncode == 0, pulled.stderr
    said = ("to download", "weights in int8, close to the original", "reading the weights")
    assert sorted(said, key=pulled.stderr.index) == list(said)


_METHODS = ("awq", "scale_estimation", "group_size")


def weights_of(graph: ov.Model) -> list[tuple[ov.Type, list[int]]]:
    """The types and shapes of a graph's constants with two dimensions or more."""
    constants = [node for node in graph.get_ordered_ops() if node.get_type_name() == "Constant"]
    found = [(node.get_output_element_type(0), list(node.get_output_shape(0))) for node in constants]
    return [(kind, shape) for kind, shape in found if len(shape) > 1]


def test_run_uses_the_server_that_runs(hub: Hub) -> None:
    serve = Serve("owner/tiny-GGUF:q8_0", "--port", "0")
    try:
        serve.until_ready()
        answered = headrace("run", "owner/tiny-GGUF:q8_0", "the mill", "--max-tokens", "4")
        assert answered.returncode == 0, answered.stderr
        assert f"owner/tiny-GGUF:q8_0 is served at {serve.base_url}" in answered.stderr
        served = httpx.get(f"{serve.base_url}/v1/models/owner/tiny-GGUF:q8_0", timeout=patience(5)).json()
        assert served["id"] == "owner/tiny-GGUF:q8_0"
        refused = headrace("models", "rm", "owner/tiny-GGUF:q8_0")
        assert refused.returncode == 2
        assert f"is being served at {serve.base_url}" in refused.stderr
        pids = [row["pid"] for row in serve.status()]
    finally:
        serve.end()
    until(lambda: not any(map(alive, pids)), "all processes are gone")
    assert headrace("models", "rm", "owner/tiny-GGUF:q8_0").returncode == 0


def test_a_gguf_model_heeds_stop_strings_and_allowed_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADRACE_SERVE_KV_CACHE_GB", "0.2")
    serve = Serve(str(write_gguf(TinyModel(), tmp_path / "tiny.gguf")), "--port", "0")
    try:
        serve.until_ready()

        def ask(path: str, **body: Any) -> Any:
            answer = httpx.post(f"{serve.base_url}{path}", json=body, timeout=patience(30))
            assert answer.status_code == 200, answer.text
            return answer.json()

        asked = {"prompt": "the mill", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        text = ask("/v1/completions", **asked)["choices"][0]["text"]
        stop = text[len(text) // 2 :][:2]
        (cut,) = ask("/v1/completions", **asked, stop=[stop])["choices"]
        assert (cut["text"], cut["finish_reason"]) == (text[: text.index(stop)], "stop")
        allowed = ask("/tokenize", prompt="ab", add_special_tokens=False)["tokens"]
        (held,) = ask("/v1/completions", **asked, allowed_token_ids=allowed)["choices"]
        assert (len(held["text"]), held["finish_reason"]) == (16, "length")
        assert set(held["text"]) <= set("ab")
    finally:
        serve.end()


def test_pull_refuses_what_serve_refuses_with_the_same_sentence(hub: Hub, tmp_path: Path) -> None:
    files = hub.repositories["owner/model"].revisions["main"]
    directory = tmp_path / "windows"
    directory.mkdir()
    config = {**json.loads(files["config.json"]), "layer_types": ["sliding_attention"]}
    for name, content in {**files, "config.json": json.dumps(config).encode()}.items():
        (directory / name).write_bytes(content)
    hub.add_directory("owner/windows", directory)
    sentence = "cannot be served: layers of its architecture (llama) see a window of the context only"
    for command in (["pull", "owner/windows"], ["run", "owner/windows", "hello"], ["pull", str(directory)]):
        refused = headrace(*command, timeout_s=60)
        assert (refused.returncode, sentence in refused.stderr) == (2, True), refused.stderr
        assert refused.stderr.splitlines()[-1].startswith("error: the model in ")
    assert headrace("models", "list").stdout == ""
    served = headrace("serve", str(directory), "--port", "0", timeout_s=60)
    assert (served.returncode, sentence in served.stderr) == (2, True), served.stderr
