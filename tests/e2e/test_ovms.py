"""Repositories of OpenVINO Model Server, served as they are by real processes."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.architectures.exports import PYTHON, exported_encoders
from tests.architectures.texts import made_up_texts
from tests.cli.ovms_files import embeddings_graph, llm_graph, rerank_graph
from tests.e2e.serving import BOUND_S, HTTP, READY_BOUND_S, Serve, headrace
from tests.e2e.shapes import MODEL as SHAPES
from tests.e2e.shapes import questions
from tests.e2e.small_model import small_model
from tests.patience import patience, until
from tests.ports import free_port

pytestmark = pytest.mark.e2e

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
OPTIONS = """\
models_path: "./",
plugin_config: '{"KV_CACHE_PRECISION": "u8", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32"}',
enable_prefix_caching: false
cache_size: 1,
max_num_seqs: 64,
max_tokens_limit: 20,
best_of_limit: 2,
tool_parser: "hermes3",
device: "CPU"
"""

CONVERTED = """
import sys
import openvino
from openvino_tokenizers import convert_tokenizer
from transformers import AutoTokenizer
directory = sys.argv[1]
converted = convert_tokenizer(AutoTokenizer.from_pretrained(directory), add_special_tokens=False)
openvino.save_model(converted, f"{directory}/openvino_tokenizer.xml")
"""


def copy(model: Path, target: Path, graph: str) -> None:
    """A model of a repository, with its graph."""
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("headrace.json"))
    (target / "graph.pbtxt").write_text(graph)


def write(config: Path, names: dict[str, str], **more: Any) -> None:
    entries = [{"name": name, "base_path": path} for name, path in names.items()]
    config.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": entries, **more}, indent=4))


def ask(serve: Serve, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Once"}], "temperature": 0, **fields}
    return httpx.post(f"{serve.base_url}/v3/chat/completions", json=body, timeout=patience(READY_BOUND_S))


def test_a_vision_language_model_reads_pictures(tmp_path: Path) -> None:
    copy(SHAPES, tmp_path / "shapes", llm_graph('models_path: "./", pipeline_type: VLM_CB, cache_size: 1'))
    config = tmp_path / "config.json"
    write(config, {"shapes": "shapes"})
    serve = Serve("--config", str(config), "--port", "0", "--threads", "1")
    try:
        serve.until_ready()
        client = openai.OpenAI(base_url=f"{serve.base_url}/v3", api_key="unused", timeout=patience(READY_BOUND_S))
        for question in questions()[:2]:
            urls = [f"data:image/png;base64,{base64.b64encode(picture).decode()}" for picture in question.pictures]
            parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content = [*parts, {"type": "text", "text": question.text}]
            answer = client.chat.completions.create(
                model="shapes", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=8
            )
            assert (answer.choices[0].message.content or "").strip() == question.reference
    finally:
        serve.end()


def reload(serve: Serve) -> httpx.Response:
    return httpx.post(f"{serve.base_url}/v1/config/reload", timeout=patience(4 * READY_BOUND_S))


def states(serve: Serve) -> dict[str, str]:
    answer = HTTP.get(f"{serve.base_url}/v1/config", timeout=patience(BOUND_S)).json()
    return {name: model["model_version_status"][0]["state"] for name, model in answer.items()}


def test_a_repository_is_served_and_reloaded(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    copy(small_model(), tmp_path / NAME, llm_graph(OPTIONS))
    (tmp_path / "resnet" / "1").mkdir(parents=True)
    write(config, {NAME: NAME}, model_config_list=[{"config": {"name": "resnet", "base_path": "resnet"}}])
    serve = Serve("--config", str(config), "--port", "0", "--threads", "1")
    try:
        serve.until_ready()
        # What has no effect and what is not served is told at the start.
        assert any(f"{NAME}: enable_prefix_caching has no effect: " in line for line in serve.logs)
        assert any("not served: resnet: " in line for line in serve.logs)
        assert any("KV cache 1.00 GiB of u8" in line for line in serve.logs)
        answer = ask(serve, NAME)
        assert (answer.status_code, answer.json()["model"]) == (200, NAME)
        assert answer.json()["usage"]["completion_tokens"] <= 20
        refused = ask(serve, NAME, max_tokens=21)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        content = answer.json()["choices"][0]["message"]["content"]

        # Another model comes, and a limit changes: the first model's process stays.
        (pid,) = (row["pid"] for row in serve.status() if row["role"] == "worker")
        (tmp_path / NAME / "graph.pbtxt").write_text(llm_graph(OPTIONS.replace("20", "30")))
        write(config, {NAME: NAME, "second": NAME})
        done = reload(serve)
        assert (done.status_code, done.json().keys()) == (201, {NAME, "second"})
        assert states(serve) == {NAME: "AVAILABLE", "second": "AVAILABLE"}
        assert pid in [row["pid"] for row in serve.status() if row["role"] == "worker"]
        assert ask(serve, "second", max_tokens=20).json()["choices"][0]["message"]["content"] == content
        assert ask(serve, NAME, max_tokens=21).status_code == 200
        assert reload(serve).status_code == 200

        # A file that cannot be read changes nothing; a model that cannot be served is named.
        config.write_text("{")
        done = reload(serve)
        assert (done.status_code, "is not JSON" in done.json()["error"]) == (412, True)
        write(config, {"second": NAME, "third": "nowhere"})
        done = reload(serve)
        assert done.status_code == 412
        assert done.json()["error"].startswith("third: there is no graph")
        assert states(serve) == {"second": "AVAILABLE"}
        gone = ask(serve, NAME)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert ask(serve, "second", max_tokens=4).status_code == 200
    finally:
        serve.end()


@pytest.mark.timeout(600)  # the model is exported once
def test_embeddings_are_pooled_as_the_graph_says(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("what exports models is not installed: make test")
    model = exported_encoders(["minilm"]) / "minilm"
    config = tmp_path / "config.json"
    copy(model, tmp_path / "gte", embeddings_graph('models_path: "./", pooling: MEAN, truncate: true'))
    # Exports for OVMS do not have these.
    for name in ("modules.json", "openvino_detokenizer.xml", "openvino_detokenizer.bin"):
        (tmp_path / "gte" / name).unlink()
    write(config, {"gte": "gte"})
    serve = Serve("--config", str(config), "--port", "0", "--threads", "1")
    try:
        serve.until_ready()
        texts = made_up_texts(1000)[:50]
        with openai.OpenAI(base_url=f"{serve.base_url}/v3", api_key="unused", max_retries=0) as client:
            answer = client.embeddings.create(model="gte", input=texts)
        vectors = np.array([entry.embedding for entry in answer.data])
        with np.load(model / "reference.npz") as file:
            assert (vectors * file["vectors"][:50]).sum(axis=1).min() >= 0.9999
    finally:
        serve.end()


@pytest.mark.timeout(600)  # the model is exported once
def test_documents_are_ranked_with_a_tokenizer_that_adds_no_special_tokens(tmp_path: Path) -> None:
    """OVMS's export of rerankers converts their tokenizers so, and without a detokenizer."""
    if not PYTHON.exists():
        pytest.skip("what exports models is not installed: make test")
    model = exported_encoders(["ranker"]) / "ranker"
    config = tmp_path / "config.json"
    copy(model, tmp_path / "bge", rerank_graph('models_path: "./", max_allowed_chunks: 40'))
    for path in (tmp_path / "bge").glob("openvino_*tokenizer.*"):
        path.unlink()
    subprocess.run([str(PYTHON), "-c", CONVERTED, str(tmp_path / "bge")], check=True, capture_output=True)
    write(config, {"bge": "bge"})
    serve = Serve("--config", str(config), "--port", "0", "--execution-mode", "accuracy")
    try:
        serve.until_ready()
        with np.load(model / "reference.npz") as file:
            expected = file["scores"][0][:20]
            num_queries = len(file["scores"])
        texts = made_up_texts(num_queries + 20)
        body = {"model": "bge", "query": texts[0], "documents": texts[num_queries:], "truncate_prompt_tokens": -1}
        answer = httpx.post(f"{serve.base_url}/v3/rerank", json=body, timeout=READY_BOUND_S)
        assert answer.status_code == 200, answer.text
        scores = {result["index"]: result["relevance_score"] for result in answer.json()["results"]}
        assert [scores[i] for i in range(20)] == pytest.approx(expected.tolist(), abs=1e-4)
        body["documents"] = ["x"] * 41
        assert httpx.post(f"{serve.base_url}/v3/rerank", json=body, timeout=READY_BOUND_S).status_code == 400
    finally:
        serve.end()


def test_the_command_of_ovms_serves_a_configuration_and_follows_it(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    copy(small_model(), tmp_path / NAME, llm_graph(OPTIONS))
    write(config, {NAME: NAME})
    port = str(free_port())
    args = ("--config_path", str(config), "--rest_port", port, "--rest_bind_address", "127.0.0.1")
    serve = Serve(*args, "--file_system_poll_wait_seconds", "1", "--log_level", "DEBUG", command="ovms")
    try:
        serve.until_ready()
        assert serve.base_url == f"http://127.0.0.1:{port}"
        answer = ask(serve, NAME)
        assert (answer.status_code, answer.json()["model"]) == (200, NAME)
        assert ask(serve, NAME, max_tokens=21).status_code == 400
        # The file is read again when it changes.
        write(config, {NAME: NAME, "second": NAME})
        available = {NAME: "AVAILABLE", "second": "AVAILABLE"}
        until(lambda: states(serve) == available, "the second model is served", 4 * READY_BOUND_S)
        assert ask(serve, "second", max_tokens=4).status_code == 200
    finally:
        serve.end()


def test_the_command_of_ovms_refuses_what_is_not_the_cpu() -> None:
    done = headrace("ovms", "--model_path", str(small_model()), "--target_device", "GPU", "--rest_port", "8000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: device GPU is not supported: headrace computes on CPUs only; say CPU, or use OVMS for it\n"
    )
