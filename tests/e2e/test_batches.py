"""Batches through real processes that are killed, by OpenAI's client and by `headrace batch`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import BOUND_S, HEADRACE, MODEL, Serve, headrace, serving, until
from tests.e2e.small_model import small_model
from tests.patience import patience

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"
NUM_LINES = 24


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A few layers of the demo model, with a store of its own."""
    store = tmp_path_factory.mktemp("batches") / "store"
    with serving("--batch-store", str(store), "--execution-mode", "accuracy", model=small_model()) as serve:
        yield serve


@pytest.fixture
def client(system: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key="unused", max_retries=8, timeout=patience(60)) as made:
        yield made


def lines(number: int, max_tokens: int) -> bytes:
    """An input file of greedy chats with a common beginning."""
    system = {"role": "system", "content": "You are a helpful assistant. " * 20}
    rows = []
    for name in range(number):
        body = {
            "model": MODEL,
            "messages": [system, {"role": "user", "content": f"Say {name}."}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        rows.append({"custom_id": f"line {name}", "method": "POST", "url": CHAT, "body": body})
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def texts_of(content: bytes) -> dict[str, str]:
    """The answers of an output file by custom_id, each once."""
    rows = [json.loads(row) for row in content.splitlines()]
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
    assert len(found) == len(rows)
    return found


def run(client: openai.OpenAI, content: bytes) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def done(client: openai.OpenAI, batch: Any, least: int) -> bool:
    """Whether so many lines have an answer. A gateway that starts again does not answer."""
    try:
        return client.batches.retrieve(batch.id).request_counts.completed >= least
    except openai.APIError:
        return False


def test_no_answer_is_lost_or_made_twice_when_processes_are_killed(system: Serve, client: openai.OpenAI) -> None:
    content = lines(NUM_LINES, max_tokens=48)
    whole = run(client, content)
    until(lambda: done(client, whole, NUM_LINES), "the answers", 4 * BOUND_S)
    expected = texts_of(client.files.content(_ended(client, whole).output_file_id).content)
    assert len(expected) == NUM_LINES
    batch = run(client, content)
    for least, name in enumerate(("worker-0", "router", "gateway")):
        until(lambda least=least: done(client, batch, 4 * (1 + least)), "some answers", 4 * BOUND_S)
        os.kill(system.process_of(name)["pid"], signal.SIGKILL)
        until(system.is_ready, f"{name} to be back", 2 * BOUND_S)
    ended = _ended(client, batch)
    assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("completed", NUM_LINES, 0)
    assert texts_of(client.files.content(ended.output_file_id).content) == expected


def _ended(client: openai.OpenAI, batch: Any) -> Any:
    found: list[Any] = []

    def has_ended() -> bool:
        try:
            found.append(client.batches.retrieve(batch.id))
        except openai.APIError:
            return False
        return found[-1].status in ("completed", "failed", "expired", "cancelled")

    until(has_ended, "the end of the batch", 4 * BOUND_S)
    return found[-1]


def test_the_command_writes_the_answers_and_leaves_nothing(
    system: Serve, client: openai.OpenAI, tmp_path: Path
) -> None:
    before = [file.id for file in client.files.list()]
    given = tmp_path / "in.jsonl"
    given.write_bytes(
        lines(3, max_tokens=4) + b'{"custom_id": "odd", "method": "POST", "url": "/v1/chat/completions", '
    )
    wrong = headrace("batch", str(given), "--url", system.base_url, timeout_s=2 * BOUND_S)
    assert wrong.returncode == 1
    assert "line 4: the line is not JSON" in wrong.stderr
    assert not (tmp_path / "in.output.jsonl").exists()
    given.write_bytes(lines(3, max_tokens=4))
    ran = headrace("batch", str(given), "--url", system.base_url, timeout_s=2 * BOUND_S)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{tmp_path / 'in.output.jsonl'}\n"
    assert texts_of((tmp_path / "in.output.jsonl").read_bytes()).keys() == {"line 0", "line 1", "line 2"}
    assert "completed: 3 of 3 lines answered, 0 failed" in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.output.jsonl"]
    assert [file.id for file in client.files.list()] == before
    again = headrace("batch", str(given), "--url", system.base_url)
    assert again.returncode == 2
    assert "in.output.jsonl exists" in again.stderr


def test_the_command_goes_on_where_it_was_left(system: Serve, tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    given.write_bytes(lines(24, max_tokens=64))
    command = [*HEADRACE, "batch", str(given), "--url", system.base_url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as left:
        assert left.stderr is not None
        said = left.stderr.readline()
        assert "Ctrl-C leaves it running" in said
        left.send_signal(signal.SIGINT)
        said += left.stderr.read()
        assert left.wait(patience(BOUND_S)) == 130, said
    assert "the same command follows it" in said
    batch_id = json.loads((tmp_path / "in.output.jsonl.batch").read_text())["batch_id"]
    assert batch_id in said
    given.write_bytes(lines(25, max_tokens=64))
    changed = headrace("batch", str(given))
    assert changed.returncode == 2
    assert "has changed since its batch began" in changed.stderr
    given.write_bytes(lines(24, max_tokens=64))
    followed = headrace("batch", str(given), timeout_s=4 * BOUND_S)
    assert followed.returncode == 0, followed.stderr
    assert batch_id in followed.stderr
    assert len(texts_of((tmp_path / "in.output.jsonl").read_bytes())) == 24


def test_a_batch_is_cancelled_by_the_command(system: Serve, tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    given.write_bytes(lines(200, max_tokens=400))
    begun = headrace("batch", str(given), "--url", system.base_url, "--detach")
    assert begun.returncode == 0, begun.stderr
    cancelled = headrace("batch", str(given), "--cancel", timeout_s=2 * BOUND_S)
    assert cancelled.returncode == 1
    assert "cancelled: " in cancelled.stderr
    assert not (tmp_path / "in.output.jsonl.batch").exists()
