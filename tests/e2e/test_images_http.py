"""Images over HTTP and gRPC, from a client's file to the answer: unmodified clients of many makers, and all pictures of
the reference."""

from __future__ import annotations

import base64
import concurrent.futures
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.protos import text_pb2, text_pb2_grpc
from tests.e2e.serving import HTTP, Serve
from tests.e2e.shapes import MODEL, Question, questions, swapped
from tests.patience import patience

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("clients")
ENVIRONMENT = ROOT / ".make" / "clients"
SCRIPT_BOUND_S = 120
NAME = MODEL.name
WIDTH = 16


@pytest.fixture(scope="module")
def system() -> Iterator[Serve]:
    """The model that names what is drawn in pictures."""
    serve = Serve(str(MODEL), "--port", "0", "--kv-cache-gb", "0.25", "--execution-mode", "accuracy")
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.end()


@pytest.fixture(scope="module")
def environment(system: Serve, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment that tells scripts the address of the system, two pictures and a question about them."""
    number = next(i for i, one in enumerate(swapped()) if one.reference == one.right != _twin(i).reference)
    asked, other = _twin(number), swapped()[number]
    directory = tmp_path_factory.mktemp("pictures")
    paths = [directory / "first.png", directory / "second.png"]
    for path, picture in zip(paths, asked.pictures, strict=True):
        path.write_bytes(picture)
    return {
        **os.environ,
        "HEADRACE_TEST_BASE_URL": f"{system.base_url}/v1",
        "HEADRACE_TEST_MODEL": NAME,
        "HEADRACE_TEST_PICTURES": os.pathsep.join(map(str, paths)),
        "HEADRACE_TEST_QUESTION": asked.text,
        "HEADRACE_TEST_RIGHT": asked.reference,
        "HEADRACE_TEST_SWAPPED": other.reference,
        "PYTHONPATH": str(ROOT),
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "DO_NOT_TRACK": "1",
    }


def _twin(number: int) -> Question:
    """The question whose pictures `swapped()[number]` has in the other order."""
    return questions()[2 * number + 1]


def run(command: list[str], environment: dict[str, str], directory: Path) -> None:
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(SCRIPT_BOUND_S),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("images_*.py")))
def test_a_python_client_sends_images_unmodified(environment: dict[str, str], script: str) -> None:
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        pytest.skip("the clients are not installed: make test")
    run([str(python), str(SCRIPTS / script)], environment, ROOT)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("images_*.mjs")))
def test_a_client_for_node_sends_images_unmodified(environment: dict[str, str], tmp_path: Path, script: str) -> None:
    modules = ENVIRONMENT / "node_modules"
    if not modules.exists():
        pytest.skip("the clients for Node are not installed: make test")
    node = shutil.which("node") or str(ENVIRONMENT / "bin" / "node")
    (tmp_path / "node_modules").symlink_to(modules)
    run([node, shutil.copy(SCRIPTS / script, tmp_path)], environment, tmp_path)


def ask(system: Serve, question: Question, **fields: Any) -> str:
    """The answer of a chat."""
    urls = [f"data:image/png;base64,{base64.b64encode(picture).decode()}" for picture in question.pictures]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": question.text}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **fields}
    answer = HTTP.post(f"{system.base_url}/v1/chat/completions", json=body, timeout=patience(120))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"]).strip()


def test_answers_are_those_of_the_reference_with_many_at_a_time(system: Serve) -> None:
    asked = [*questions(), *swapped()]
    with concurrent.futures.ThreadPoolExecutor(WIDTH) as pool:
        answers = list(pool.map(lambda question: ask(system, question), asked))
    assert answers == [question.reference for question in asked]


def test_grpc_and_http_give_the_same_answer(system: Serve) -> None:
    question = questions()[1]
    parts = [text_pb2.ChatPart(image=text_pb2.ChatImage(data=picture)) for picture in question.pictures]
    message = text_pb2.ChatMessage(role="user", parts=[*parts, text_pb2.ChatPart(text=question.text)])
    request = text_pb2.ChatRequest(messages=[message])
    request.params.temperature, request.params.max_tokens = 0.0, 8
    with grpc.insecure_channel(f"127.0.0.1:{system.port + 1}") as channel:
        stub = text_pb2_grpc.TextStub(channel)  # type: ignore[no-untyped-call]
        answer = "".join(piece.content for piece in stub.Chat(request, timeout=patience(60)))
    assert answer.strip() == question.reference == ask(system, question)


def test_an_image_that_only_the_worker_can_refuse_is_refused_by_name(system: Serve) -> None:
    header = questions()[0].pictures[0][:45]  # a size, and nothing of the picture
    url = f"data:image/png;base64,{base64.b64encode(header).decode()}"
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    answer = HTTP.post(f"{system.base_url}/v1/chat/completions", json=body, timeout=patience(60))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0]"
    assert answer.json()["error"]["message"].startswith("messages[0].content[0]: ")
    assert ask(system, questions()[0]) == questions()[0].reference
