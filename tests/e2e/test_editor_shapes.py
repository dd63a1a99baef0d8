"""Requests in the shapes in which editors send them that no test runs: Continue, Cline and Zed. The texts are ours.

Each shape goes through a conversation: a question, a call, its result, an answer, and another question. Its answers are
read as strictly as its client reads them. Sources: the public repositories of the clients. goose goes through the same
conversation with its own providers.
"""

from __future__ import annotations

import json
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import agent_recordings
from tests.e2e.recorder import recording
from tests.e2e.scripted_model import calls, scripted_system
from tests.e2e.serving import BOUND_S, HTTP, Serve, headrace
from tests.patience import patience, until

pytestmark = pytest.mark.e2e

NAME = "scripted"
ARGUMENTS = {"path": "note.txt"}
TOOL = "read_file"
DONE = "The number is 42."
RESULT = "the number is 42\n"
QUESTION, NEXT = "Which number is in note.txt?", "And what is it?"
SYSTEM = "You are an assistant in an editor. Read files before you answer, and say what you found in them.\n" * 60
PARAMETERS = {
    "type": "object",
    "required": ["path"],
    "properties": {"path": {"type": "string", "description": "Relative to the project."}},
}
LEAST_CACHED = 0.9
PYTHON = Path(__file__).parents[2] / ".make" / "clients" / "bin" / "python"
GOOSE = Path(__file__).parent / "clients" / "goose_loop.py"
GOOSE_BOUND_S = 60
CALL_IN_TEXT = "<read_file>\n<path>note.txt</path>\n</read_file>"


@dataclass
class Answer:
    """What a client understood: a text, or a call and its id."""

    text: str
    call: tuple[str, dict[str, Any]] | None = None
    call_id: str = ""


class Client(ABC):
    """One client with one of its providers. `turns` is the conversation in its words."""

    path = "/v1/chat/completions"
    ignored = ""
    """Expected in `x-headrace-ignored`."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The next request."""

    @abstractmethod
    def read(self, answer: bytes) -> Answer:
        """What it understands. Fails where the client does."""

    def headers(self) -> dict[str, str]:
        return {"authorization": "Bearer unused", "content-type": "application/json"}

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    @abstractmethod
    def remember(self, answer: Answer) -> None:
        """Keep an answer, as a turn of the assistant."""

    @abstractmethod
    def tell(self, answer: Answer) -> None:
        """Keep the result of the answer's call."""


def events(answer: bytes) -> Iterator[dict[str, Any]]:
    """Those of a stream with `data: ` alone, which has an end."""
    *lines, end = [line for line in answer.decode().split("\n") if line]
    assert end == "data: [DONE]"
    for line in lines:
        yield json.loads(line.removeprefix("data: "))


def read_chunks(answer: bytes) -> Answer:
    """By the rules of the strictest of them: each event has choices, each choice an index, and each part of a call the
    index of the call. The first part has the id and the name; the last event before the end has the usage."""
    texts, arguments, found, usages = [], [], [], []
    reason = None
    for event in events(answer):
        assert {"id", "object", "created", "model", "choices"} <= event.keys()
        if event.get("usage"):
            usages.append(event["usage"])
        for choice in event["choices"]:
            assert choice["index"] == 0
            delta = choice["delta"]
            assert isinstance(delta.get("content"), str | None)
            texts.append(delta.get("content") or "")
            for part in delta.get("tool_calls") or []:
                assert part["index"] == 0
                if part.get("id"):
                    assert part["type"] == "function"
                    found.append((part["id"], part["function"]["name"]))
                arguments.append(part["function"].get("arguments") or "")
            reason = choice.get("finish_reason") or reason
    assert all(isinstance(usages[-1][name], int) for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
    if not found:
        assert reason == "stop"
        return Answer("".join(texts))
    assert reason == "tool_calls"
    ((call_id, name),) = found
    return Answer("".join(texts), (name, json.loads("".join(arguments))), call_id)


def function_call(answer: Answer) -> dict[str, Any]:
    assert answer.call is not None
    name, arguments = answer.call
    return {"id": answer.call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


FUNCTION = {"name": TOOL, "description": "Read a file", "parameters": PARAMETERS}


class ContinueOpenAI(Client):
    """An assistant's turn is never empty, but a space. Reasoning comes back under several names, empty too."""

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "x-api-key": "unused", "api-key": "unused", "accept": "application/json"}

    def body(self) -> dict[str, Any]:
        return {
            "messages": [{"role": "system", "content": SYSTEM}, *self.turns],
            "model": NAME,
            "max_tokens": 4096,
            "temperature": 0.5,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "stream": True,
            "stop": [],
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
            "parallel_tool_calls": False,
            "stream_options": {"include_usage": True},
        }

    def read(self, answer: bytes) -> Answer:
        return read_chunks(answer)

    def remember(self, answer: Answer) -> None:
        turn: dict[str, Any] = {"role": "assistant", "content": answer.text or " ", "reasoning_content": ""}
        if answer.call is not None:
            turn["tool_calls"] = [function_call(answer)]
            turn["reasoning_details"] = []
        self.turns.append(turn)

    def tell(self, answer: Answer) -> None:
        self.turns.append({"role": "tool", "content": RESULT, "tool_call_id": answer.call_id})


class ContinueInText(ContinueOpenAI):
    """For models without tools: they are described in the system's turn, calls and results are texts."""

    def body(self) -> dict[str, Any]:
        described = f"```tool_definition\nTOOL_NAME: {TOOL}\nTOOL_ARG: path (string, required)\nEND_ARG\n```\n"
        body = super().body()
        body["messages"][0] = {"role": "system", "content": SYSTEM + described}
        return {name: value for name, value in body.items() if name not in ("tools", "parallel_tool_calls")}

    def tell(self, answer: Answer) -> None:
        self.ask(f"Tool output for {TOOL} tool call:\n\n{RESULT}")


class OfChats(Client):
    """Streams of chats, and null contents beside calls."""

    def read(self, answer: bytes) -> Answer:
        return read_chunks(answer)

    def remember(self, answer: Answer) -> None:
        turn: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
        if answer.call is not None:
            turn["tool_calls"] = [function_call(answer)]
        self.turns.append(turn)


class ClineCompatible(OfChats):
    """Null contents beside calls, results as JSON in a text."""

    def body(self) -> dict[str, Any]:
        return {
            "model": NAME,
            "max_tokens": 8192,
            "temperature": 0,
            "messages": [{"role": "system", "content": SYSTEM}, *self.turns],
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def tell(self, answer: Answer) -> None:
        result = json.dumps([{"query": ARGUMENTS["path"], "result": RESULT, "success": True}])
        self.turns.append({"role": "tool", "tool_call_id": answer.call_id, "content": result})


class ClineInText(Client):
    """Calls are XML in the text, and turns of the user have several parts: the result, and what the editor shows."""

    def body(self) -> dict[str, Any]:
        return {
            "model": NAME,
            "messages": [{"role": "system", "content": SYSTEM}, *self.turns],
            "temperature": 0,
            "reasoning_effort": None,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, answer: bytes) -> Answer:
        read = read_chunks(answer)
        found = re.search(r"<read_file>\s*<path>(.*?)</path>\s*</read_file>", read.text)
        return Answer(read.text, None if found is None else (TOOL, {"path": found[1]}))

    def ask(self, text: str) -> None:
        shown = "<environment_details>\n# Open tabs\nnote.txt\n</environment_details>"
        parts = [{"type": "text", "text": one} for one in (f"<task>\n{text}\n</task>", shown)]
        self.turns.append({"role": "user", "content": parts})

    def remember(self, answer: Answer) -> None:
        self.turns.append({"role": "assistant", "content": answer.text})

    def tell(self, answer: Answer) -> None:
        self.ask(f"[read_file for '{ARGUMENTS['path']}'] Result:\n{RESULT}")


class ZedCompatible(Client):
    """An OpenAI-compatible provider in Zed's settings. Nothing that is empty is sent; contents are parts or null."""

    def body(self) -> dict[str, Any]:
        return {
            "model": NAME,
            "messages": [{"role": "system", "content": SYSTEM}, *self.turns],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 65536,
            "temperature": 1.0,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "tools": [{"type": "function", "function": FUNCTION}],
            "prompt_cache_key": "3f0d6c57-thread",
        }

    ignored = "max_completion_tokens>"

    def read(self, answer: bytes) -> Answer:
        return read_chunks(answer)

    def remember(self, answer: Answer) -> None:
        if answer.call is None:
            self.turns.append({"role": "assistant", "content": answer.text})
        else:
            self.turns.append({"role": "assistant", "content": None, "tool_calls": [function_call(answer)]})

    def tell(self, answer: Answer) -> None:
        self.turns.append({"role": "tool", "content": RESULT, "tool_call_id": answer.call_id})


class Ollama(Client):
    """What Ollama's clients have in common."""

    path = "/api/chat"

    def read(self, answer: bytes) -> Answer:
        texts, found = [], []
        lines = [json.loads(line) for line in answer.splitlines()]
        for line in lines:
            assert {"model", "created_at", "done"} <= line.keys()
            message = line["message"]
            assert message["role"] == "assistant"
            assert isinstance(message["content"], str)
            texts.append(message["content"])
            for call in message.get("tool_calls") or []:
                assert isinstance(call["function"]["arguments"], dict)
                found.append((call["id"], call["function"]["name"], call["function"]["arguments"]))
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert all(isinstance(lines[-1][name], int) for name in ("prompt_eval_count", "eval_count"))
        if not found:
            return Answer("".join(texts))
        ((call_id, name, arguments),) = found
        return Answer("".join(texts), (name, arguments), call_id)


class ZedOllama(Ollama):
    """Every option is there, null too. `num_ctx` is 16,384 at most, and the model stays loaded for ever."""

    ignored = "keep_alive"

    def body(self) -> dict[str, Any]:
        return {
            "model": NAME,
            "messages": [{"role": "system", "content": SYSTEM}, *self.turns],
            "stream": True,
            "keep_alive": -1,
            "options": {"num_ctx": 16384, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None},
            "tools": [{"type": "function", "function": FUNCTION}],
            "think": False,
        }

    def remember(self, answer: Answer) -> None:
        made = []
        if answer.call is not None:
            name, arguments = answer.call
            made = [{"id": answer.call_id, "function": {"name": name, "arguments": arguments}}]
        self.turns.append({"role": "assistant", "content": answer.text, "tool_calls": made, "thinking": None})

    def tell(self, answer: Answer) -> None:
        self.turns.append({"role": "tool", "tool_name": TOOL, "content": RESULT})


class ClineOllama(Ollama):
    """`num_ctx` is the context that its user set, however large, and images are an empty list."""

    ignored = "options.num_ctx>65536"

    def body(self) -> dict[str, Any]:
        return {
            "model": NAME,
            "messages": [{"role": "system", "content": SYSTEM}, *self.turns],
            "options": {"num_ctx": 131072, "temperature": 0},
            "tools": [{"type": "function", "function": FUNCTION}],
            "stream": True,
        }

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text, "images": []})

    def remember(self, answer: Answer) -> None:
        turn: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.call is not None:
            name, arguments = answer.call
            turn["tool_calls"] = [{"id": answer.call_id, "function": {"name": name, "arguments": arguments}}]
        self.turns.append(turn)

    def tell(self, answer: Answer) -> None:
        self.turns.append({"role": "tool", "tool_name": TOOL, "tool_call_id": answer.call_id, "content": RESULT})


class ContinueOllama(ClineOllama):
    """It sends tools only if the last turn is the user's, so that results of tools have another prompt."""

    ignored = "keep_alive"

    def body(self) -> dict[str, Any]:
        body = {**super().body(), "options": {"num_ctx": 8192, "num_predict": 2048}, "keep_alive": 1800}
        if self.turns[-1]["role"] != "user":
            del body["tools"]
        return body

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def tell(self, answer: Answer) -> None:
        self.turns.append({"role": "tool", "content": RESULT})


class ZedAnthropic(Client):
    """Every block has `cache_control` or none, and results say that they are no errors."""

    path = "/v1/messages"
    ignored = "metadata"

    def headers(self) -> dict[str, str]:
        return {
            "x-api-key": "unused",
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "prompt-caching-2024-07-31",
            "content-type": "application/json",
        }

    def body(self) -> dict[str, Any]:
        return {
            "model": NAME,
            "max_tokens": 8192,
            "messages": self.turns,
            "tools": [{"name": TOOL, "description": "Read a file", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "auto"},
            "system": SYSTEM,
            "metadata": {"user_id": None},
            "temperature": 1.0,
            "stream": True,
        }

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": [self._cached({"type": "text", "text": text})]})

    def read(self, answer: bytes) -> Answer:
        texts, arguments, found = [], [], []
        for block in answer.decode().strip().split("\n\n"):
            kind, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert kind == f"event: {event['type']}"
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                found.append((event["content_block"]["id"], event["content_block"]["name"]))
            if event["type"] == "content_block_delta":
                delta = event["delta"]
                texts.append(delta.get("text", ""))
                arguments.append(delta.get("partial_json", ""))
        assert event == {"type": "message_stop"}
        if not found:
            return Answer("".join(texts))
        ((call_id, name),) = found
        return Answer("".join(texts), (name, json.loads("".join(arguments))), call_id)

    def remember(self, answer: Answer) -> None:
        if answer.call is None:
            block: dict[str, Any] = {"type": "text", "text": answer.text}
        else:
            block = {"type": "tool_use", "id": answer.call_id, "name": TOOL, "input": answer.call[1]}
        self.turns.append({"role": "assistant", "content": [block]})

    def tell(self, answer: Answer) -> None:
        result = {"type": "tool_result", "tool_use_id": answer.call_id, "is_error": False, "content": RESULT}
        self.turns.append({"role": "user", "content": [self._cached(result)]})

    def _cached(self, block: dict[str, Any]) -> dict[str, Any]:
        return {**block, "cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    answers = [calls((TOOL, ARGUMENTS)), DONE]
    with scripted_system(tmp_path_factory.mktemp("model"), NAME, answers) as serve:
        yield serve


@pytest.fixture(scope="module")
def system_without_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Its model always answers with a call in the manner of Cline's prompts."""
    answers = [f"I read it.\n{CALL_IN_TEXT}"]
    with scripted_system(tmp_path_factory.mktemp("model_without_tools"), NAME, answers) as serve:
        yield serve


def exchange(system: Serve, client: Client) -> tuple[Answer, float]:
    """The answer to a client's next request, and how much of the prompt was in the cache."""
    names = ("headrace_prompt_tokens_total", "headrace_prompt_tokens_cached_total")
    before = [system.metric(name) for name in names]
    response = HTTP.post(system.base_url + client.path, json=client.body(), headers=client.headers())
    assert response.status_code == 200, response.text
    ignored = response.headers.get("x-headrace-ignored", "")
    assert ignored == client.ignored or (client.ignored.endswith(">") and ignored.startswith(client.ignored))
    until(lambda: system.metric(names[0]) > before[0], "the request in the metrics", BOUND_S)
    tokens, cached = (system.metric(name) - old for name, old in zip(names, before, strict=True))
    return client.read(response.content), cached / tokens


ALWAYS_CACHED = (ContinueOpenAI, ClineCompatible, ClineOllama, ZedCompatible, ZedOllama, ZedAnthropic)


@pytest.mark.parametrize("kind", [*ALWAYS_CACHED, ContinueOllama], ids=lambda kind: kind.__name__)
def test_a_conversation_with_a_call(system: Serve, kind: type[Client]) -> None:
    client = kind()
    client.ask(QUESTION)
    answer, _ = exchange(system, client)
    assert answer.call == (TOOL, ARGUMENTS)
    assert answer.call_id
    client.remember(answer)
    client.tell(answer)
    answer, cached = exchange(system, client)
    assert answer == Answer(DONE)
    if kind in ALWAYS_CACHED:
        assert cached >= LEAST_CACHED
    client.remember(answer)
    client.ask(NEXT)
    answer, cached = exchange(system, client)
    assert answer == Answer(DONE)
    assert cached >= LEAST_CACHED


@pytest.mark.parametrize("kind", [ClineInText, ContinueInText], ids=lambda kind: kind.__name__)
def test_a_conversation_with_calls_in_the_text(system_without_tools: Serve, kind: type[Client]) -> None:
    """XML of the client is text of the answer, whatever the model's own form of calls."""
    client = kind()
    client.ask(QUESTION)
    for turn in range(3):
        answer, cached = exchange(system_without_tools, client)
        assert CALL_IN_TEXT in answer.text
        assert turn == 0 or cached >= LEAST_CACHED
        client.remember(answer)
        client.tell(answer)


def test_what_editors_ask_before_the_first_turn(system: Serve) -> None:
    bearer = {"authorization": "Bearer unused"}

    def asked(method: str, path: str, **others: Any) -> httpx.Response:
        return HTTP.request(method, system.base_url + path, headers=bearer, **others)

    (listed,) = asked("GET", "/api/tags").json()["models"]
    assert {"name", "modified_at", "size", "digest", "details"} <= listed.keys()
    assert {"format", "family", "families", "parameter_size", "quantization_level"} <= listed["details"].keys()
    for name in ({"model": listed["name"]}, {"name": NAME}, {"model": f"{NAME}:latest"}):
        shown = asked("POST", "/api/show", json=name).json()
        assert {"completion", "tools"} <= set(shown["capabilities"])
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] == 65536
    assert re.fullmatch(r"\d+\.\d+\.\d+", asked("GET", "/api/version").json()["version"])
    assert asked("GET", "/api/ps").json()["models"][0]["context_length"] == 65536
    (model,) = asked("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (NAME, "model", 65536)
    assert model["meta"] == {"n_ctx": 65536}  # where goose looks for the context
    for path in ("/", "/v1/models", "/api/version", "/api/tags"):
        assert asked("HEAD", path).status_code == 200
    # Of other servers: clients go on without an answer.
    for path in ("/v1/props", "/api/v0/models"):
        assert asked("GET", path).status_code == 404


@pytest.mark.skipif(not PYTHON.exists(), reason="goose's providers are not installed: make test-clients")
@pytest.mark.parametrize("provider", ["openai", "reasoning", "responses", "ollama", "anthropic"])
def test_goose_finishes_a_conversation_through_its_own_providers(system: Serve, provider: str) -> None:
    """With the name of a model of OpenAI's, it asks for responses."""
    model = "gpt-5" if provider == "responses" else NAME
    if model != NAME:
        assert headrace("models", "alias", model, NAME, "--port", str(system.port)).returncode == 0
    with recording(system.base_url) as recorder:
        done = subprocess.run(
            [PYTHON, GOOSE, provider, model, recorder.base_url],
            capture_output=True,
            text=True,
            timeout=patience(GOOSE_BOUND_S),
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    answered = [one for one in recorder.exchanges if one.status == 200]
    assert {one.status for one in recorder.exchanges if one not in answered} == {400}  # the prompt that is too long
    assert {one.ignored for one in answered} <= {"", "options"}
    agent_recordings.check(f"goose-{provider}", answered, model)
