"""The whole path on real processes with the real model, through the openai client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.serving import BOUND_S, MODEL, READY_BOUND_S, Serve, alive, headrace, pulled_model, serving, until
from tests.e2e.small_model import small_model
from tests.patience import patience

pytestmark = pytest.mark.e2e

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(system: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, messages: list[dict[str, str]], **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)  # type: ignore[call-overload]


def answer_over(base_url: str, bound_s: float = BOUND_S) -> str:
    body = {"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_tokens": 16}
    response = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=patience(bound_s))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_the_capital_of_france_is_paris(client: openai.OpenAI) -> None:
    answer = ask(client, CAPITAL, temperature=0, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_standard_output_has_the_ready_line_and_nothing_else(system: Serve, client: openai.OpenAI) -> None:
    ask(client, CAPITAL, max_tokens=1)
    assert len(system.stdout) == 1


def test_every_log_line_names_its_process(system: Serve) -> None:
    names = {line.split(" | ")[0] for line in system.logs if " | " in line}
    assert names <= {"serve", "worker-0", "router", "gateway"}
    assert all(" | " in line for line in system.logs)


def test_a_stream_is_the_unary_answer_in_pieces(client: openai.OpenAI) -> None:
    story = [{"role": "user", "content": "Tell a short story about a mill, with a dragon 🐉 in it."}]
    unary = ask(client, story, temperature=0, max_tokens=96)
    chunks = list(ask(client, story, temperature=0, max_tokens=96, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert text == unary.choices[0].message.content
    assert reasons[-1] == unary.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == unary.usage.completion_tokens


async def test_64_streams_of_different_lengths_all_finish(system: Serve) -> None:
    async def stream(number: int) -> tuple[str | None, int]:
        chunks = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Count from {number} upwards."}],
            max_tokens=1 + number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        reason, num_tokens = None, 0
        async for chunk in chunks:
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
        return reason, num_tokens

    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="unused", max_retries=0) as client:
        finished = await asyncio.gather(*(stream(number) for number in range(64)))
    assert finished == [("length", 1 + number) for number in range(64)]


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "The mill wheel turns and turns. " * 40}]
    first = ask(client, long, max_tokens=1)
    second = ask(client, long, max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens < 64
    assert second.usage.prompt_tokens_details.cached_tokens >= second.usage.prompt_tokens - 64


def test_a_client_that_leaves_frees_its_blocks(system: Serve, client: openai.OpenAI) -> None:
    idle = system.metric("headrace_worker_kv_blocks_free")
    words = [{"role": "user", "content": "water " * 200}]
    stream = ask(client, words, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    until(lambda: system.metric("headrace_worker_kv_blocks_free") < idle, "blocks in use")
    stream.close()
    until(lambda: system.metric("headrace_worker_kv_blocks_free") == idle, "all blocks free again")
    until(lambda: system.metric("headrace_worker_requests_running") == 0, "no request running")


def test_stop_strings_end_the_answer_and_are_not_part_of_it(client: openai.OpenAI) -> None:
    whole = ask(client, CAPITAL, temperature=0, max_tokens=32).choices[0].message.content
    cut = ask(client, CAPITAL, temperature=0, max_tokens=32, stop=["Paris"]).choices[0]
    assert cut.message.content == whole.partition("Paris")[0]
    assert cut.finish_reason == "stop"


def test_what_a_client_says_goes_before_the_demo_models_own_settings(own_system: Serve) -> None:
    story = [{"role": "user", "content": "Tell a long story about a mill."}]

    def text(**fields: Any) -> str:
        asked = {"temperature": 0, "max_tokens": 96, "extra_body": {"ignore_eos": True, **fields}}
        with openai.OpenAI(base_url=f"{own_system.base_url}/v1", api_key="unused", max_retries=0) as client:
            return str(ask(client, story, **asked).choices[0].message.content)

    own = text()
    assert text(repetition_penalty=1.1) == own
    assert text(repetition_penalty=1) != own

    def length(path: str, **fields: Any) -> int:
        body = {"model": MODEL, "ignore_eos": True, **fields}
        response = httpx.post(f"{own_system.base_url}/v1/{path}", json=body, timeout=patience(READY_BOUND_S))
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        return int(usage.get("completion_tokens", usage.get("output_tokens")))

    asked: list[tuple[str, dict[str, Any], int]] = [
        ("chat/completions", {"messages": story}, 512),
        ("chat/completions", {"messages": story, "max_tokens": 520}, 520),
        ("responses", {"input": story}, 512),
        ("completions", {"prompt": "A mill"}, 16),
        ("completions", {"prompt": "A mill", "max_tokens": 20}, 20),
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        lengths = list(pool.map(lambda one: length(one[0], **one[1]), asked))
    assert lengths == [expected for _, _, expected in asked]


def test_a_completion_continues_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4)
    assert "Paris" in answer.choices[0].text


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_model_that_is_not_served_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="nosuch", messages=[{"role": "user", "content": "hello"}])
    assert raised.value.code == "model_not_found"
    assert "nosuch" in raised.value.message


def test_a_prompt_longer_than_the_context_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens") as raised:
        ask(client, [{"role": "user", "content": "water " * 9000}])
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")


def test_json_that_is_none_is_400(system: Serve) -> None:
    response = httpx.post(f"{system.base_url}/v1/chat/completions", content=b'{"model": ', timeout=patience(5))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_status_shows_every_process_ready(system: Serve) -> None:
    rows = system.status()
    assert sorted(row["role"] for row in rows) == ["gateway", "router", "worker"]
    assert {row["state"] for row in rows} == {"ready"}
    assert all(alive(row["pid"]) for row in rows)
    worker = next(row for row in rows if row["role"] == "worker")
    assert worker["kv_blocks"] >= worker["kv_blocks_free"] > 0
    shown = headrace("status").stdout
    assert all(row["name"] in shown for row in rows)


def test_explain_shows_where_a_chat_would_go(system: Serve, client: openai.OpenAI) -> None:
    story = "The water turns the wheel of the mill. " * 20
    ask(client, [{"role": "user", "content": story}], max_tokens=1)
    explained = headrace("explain", "--url", f"{system.base_url}/v1", story)
    assert explained.returncode == 0, explained.stderr
    row = next(line.split() for line in explained.stdout.splitlines() if line.startswith("-> worker-0"))
    cached, prompt = int(row[3]), int(row[5])
    assert prompt - 64 <= cached < prompt
    assert explained.stdout.splitlines()[-1] == "worker-0: there is no other worker"


def test_chat_answers_a_pipe(system: Serve) -> None:
    limits = ("--max-tokens", "40")
    chatted = headrace("chat", "--url", system.base_url, *limits, stdin="What is the capital of France?\n")
    assert chatted.returncode == 0, chatted.stderr
    assert chatted.stdout.strip()
    assert "tokens/s" in chatted.stderr


def test_a_lone_worker_that_is_killed_comes_back_and_requests_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # A router gives requests back three times and more before the model is loaded again.
    monkeypatch.setenv("HEADRACE_ROUTER_CAPACITY_WAIT", "0.2")
    # Streams are the same text after a resumption in this mode, whatever the CPU.
    flags = ("--execution-mode", "accuracy")
    with serving(*flags, model=small_model()) as system, ThreadPoolExecutor(1) as beside:
        story = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell a story about a mill."}],
            "temperature": 0,
            "max_tokens": 96,
            "ignore_eos": True,
        }
        url = f"{system.base_url}/v1/chat/completions"
        answered = httpx.post(url, json=story, timeout=patience(2 * READY_BOUND_S))
        whole = answered.json()["choices"][0]["message"]["content"]
        capital = answer_over(system.base_url)
        before = system.process_of("worker-0")
        text, asked = "", None
        with httpx.stream("POST", url, json={**story, "stream": True}, timeout=patience(2 * READY_BOUND_S)) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content", "")
                if asked is None and len(text) > 40:
                    os.kill(before["pid"], signal.SIGKILL)
                    until(lambda: not alive(before["pid"]), "the worker is gone")
                    asked = beside.submit(answer_over, system.base_url, 2 * READY_BOUND_S)
        assert text == whole
        assert asked is not None
        assert asked.result() == capital
        after = system.process_of("worker-0")
        assert (after["state"], after["restarts"]) == ("ready", 1)
        assert after["pid"] != before["pid"]
        assert len(system.stdout) == 1


@pytest.mark.parametrize("role", ["router", "gateway"])
def test_a_router_or_gateway_that_is_killed_comes_back_by_itself(own_system: Serve, role: str) -> None:
    capital = answer_over(own_system.base_url)
    before = own_system.process_of(role)
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: own_system.process_of(role)["pid"] not in (None, before["pid"]), f"another {role}")
    until(lambda: own_system.process_of(role)["state"] == "ready", f"the {role} is ready")
    until(own_system.is_ready, "requests can be answered")
    assert answer_over(own_system.base_url) == capital


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_every_process_within_5_seconds_and_ends_streams_cleanly(
    own_system: Serve, number: signal.Signals
) -> None:
    pids = [row["pid"] for row in own_system.status()]
    body = {"model": MODEL, "messages": CAPITAL, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{own_system.base_url}/v1/chat/completions", json=body, timeout=patience(BOUND_S)
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        own_system.process.send_signal(number)
        events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]" or '"error"' in events[-1]
    assert own_system.wait(5.0) == 0
    assert not any(alive(pid) for pid in pids)
    assert "killed" not in own_system.tail()


def test_a_second_signal_does_not_wait_for_streams(own_system: Serve) -> None:
    pids = [row["pid"] for row in own_system.status()]
    body = {"model": MODEL, "messages": CAPITAL, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{own_system.base_url}/v1/chat/completions", json=body, timeout=patience(BOUND_S)
    ) as response:
        assert next(response.iter_lines()).startswith("data: ")
        own_system.process.send_signal(signal.SIGINT)
        until(lambda: any("stopping" in line for line in own_system.logs), "the stop began")
        own_system.process.send_signal(signal.SIGINT)
        assert own_system.wait() == 1
    assert not any(alive(pid) for pid in pids)


def test_nothing_outlives_a_serve_that_is_killed(own_system: Serve) -> None:
    pids = [row["pid"] for row in own_system.status()]
    own_system.process.kill()
    until(lambda: not any(alive(pid) for pid in pids), "all processes gone")
    assert own_system.status() == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_two_workers_run_on_cpus_of_their_own_and_one_may_die() -> None:
    with serving("--workers", "2", model=small_model()) as system:
        until(lambda: [row["state"] for row in system.status()] == ["ready"] * 4, "all four processes ready")
        first, second = (system.process_of(name)["pid"] for name in ("worker-0", "worker-1"))
        assert not os.sched_getaffinity(first) & os.sched_getaffinity(second)
        os.kill(first, signal.SIGKILL)
        assert answer_over(system.base_url)


def test_a_busy_port_is_refused_with_a_remedy(system: Serve) -> None:
    refused = headrace("serve", MODEL, "--port", str(system.port))
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert f"error: port {system.port} on 127.0.0.1 is already in use" in refused.stderr
    assert "--port" in refused.stderr


@pytest.fixture
def model_copy(system: Serve, tmp_path: Path) -> Path:
    """A model directory that a test may damage."""
    copy = tmp_path / "copy"
    shutil.copytree(pulled_model(), copy, ignore=shutil.ignore_patterns("headrace.json"))
    return copy


def test_an_incomplete_model_directory_is_refused_and_each_missing_file_named(model_copy: Path) -> None:
    (model_copy / "openvino_model.bin").unlink()
    (model_copy / "openvino_detokenizer.xml").unlink()
    refused = headrace("serve", str(model_copy), "--port", "0")
    assert refused.returncode == 2
    assert "missing openvino_model.bin, openvino_detokenizer.xml" in refused.stderr


@pytest.mark.parametrize("damaged", ["openvino_model.xml", "openvino_model.bin"])
def test_a_corrupt_model_directory_is_refused_and_everything_stops(model_copy: Path, damaged: str) -> None:
    raw = (model_copy / damaged).read_bytes()
    (model_copy / damaged).write_bytes(raw[: len(raw) // 2])
    refused = headrace("serve", str(model_copy), "--port", "0", "--kv-cache-gb", "0.5")
    assert refused.returncode == 2, refused.stderr
    assert refused.stdout == ""
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert str(model_copy) in last


def test_a_kv_cache_that_does_not_fit_is_refused(system: Serve) -> None:
    refused = headrace("serve", MODEL, "--port", "0", "--kv-cache-gb", "100000")
    assert refused.returncode == 2
    assert "--kv-cache-gb" in refused.stderr.strip().splitlines()[-1]


def test_the_grpc_edge_takes_the_port_above_when_it_is_free(system: Serve) -> None:
    gateway = system.process_of("gateway")
    if gateway["grpc_address"] is None:
        assert any("no gRPC API" in line for line in system.logs)
        return
    host, _, port = gateway["grpc_address"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=patience(BOUND_S)):
        assert int(port) == system.port + 1
