"""Unmodified agents finish a task against a real system. A scripted model makes their tool calls certain.

Each turn of an agent sends its whole conversation again, so that all but the new part must come from the cache.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.scripted_model import CONTEXT, calls, write_scripted_model
from tests.e2e.serving import HTTP, Serve

pytestmark = pytest.mark.e2e

MODULES = Path(__file__).parents[2] / ".make" / "clients" / "node_modules"
CLAUDE = MODULES / ".bin" / "claude"
TASK_BOUND_S = 300
NAME = "scripted"
SMALL_CONTEXT = 32768
"""Room for the prompt of Claude Code, and for little more."""
LEAST_CACHED = 0.9
TASK = "Read note.txt and write the number in it into answer.txt."
DONE = "The number is 42."


@contextmanager
def scripted_system(directory: Path, answers: Sequence[str], context: int = CONTEXT) -> Iterator[Serve]:
    """A system that serves a model with these answers."""
    (directory / NAME).mkdir()
    write_scripted_model(directory / NAME, answers, context)
    serve = Serve(str(directory / NAME), "--port", "0", "--kv-cache-gb", "0.5")
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.end()


def environment(home: Path, **own: str) -> dict[str, str]:
    """An environment in which an agent knows nothing of this machine, and reaches nothing but this machine."""
    unreachable = "http://127.0.0.1:9"
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "HTTP_PROXY": unreachable,
        "HTTPS_PROXY": unreachable,
        "NO_PROXY": "127.0.0.1",
        **own,
    }


class Workplace:
    """Directories for an agent, with the files of its task."""

    def __init__(self, directory: Path) -> None:
        self.home, self.files = directory / "home", directory / "files"
        for path in (self.home, self.files):
            path.mkdir()
        (self.files / "note.txt").write_text("the number is 42\n")

    @property
    def answer(self) -> str:
        """What the agent wrote."""
        return (self.files / "answer.txt").read_text()

    def run(self, *command: str, **own: str) -> str:
        """The output of an agent, which ends without an error."""
        done = subprocess.run(
            command,
            cwd=self.files,
            env=environment(self.home, **own),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TASK_BOUND_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


needs_claude_code = pytest.mark.skipif(
    not CLAUDE.exists(), reason="Claude Code is not installed: make test-clients, with npm"
)


@needs_claude_code
def test_claude_code_reads_and_writes_files_and_finds_its_turns_in_the_cache(
    workplace: Workplace, tmp_path: Path
) -> None:
    note, answer = str(workplace.files / "note.txt"), str(workplace.files / "answer.txt")
    script = [
        calls(("ToolSearch", {"query": "select:TaskStop", "max_results": 1})),  # a deferred tool is loaded
        calls(("Read", {"file_path": note})),
        calls(("Write", {"file_path": answer, "content": "42\n"})),
        DONE,
    ]
    with scripted_system(tmp_path, script) as system:
        first = usages(claude_code(system, workplace, TASK))
        assert workplace.answer == "42\n"
        (workplace.files / "answer.txt").unlink()
        second = usages(claude_code(system, workplace, TASK))
    assert len(first) == len(second) == len(script)
    assert first[0][1] > 5000  # it is the whole agent, with its tools
    for cached, total in [*first[1:], *second]:
        assert cached >= LEAST_CACHED * total


@needs_claude_code
def test_claude_code_shortens_its_conversation_when_the_prompt_is_too_long(
    workplace: Workplace, tmp_path: Path
) -> None:
    """It looks for the provider's words."""
    sentence = "The river is by the house on the hill. "
    with scripted_system(tmp_path, [DONE], SMALL_CONTEXT) as system:
        body = {"prompt": sentence, "add_special_tokens": False}
        num_tokens = HTTP.post(f"{system.base_url}/tokenize", json=body).json()["count"]

        def asked(num_more_tokens: int, *args: str) -> list[dict[str, Any]]:
            return claude_code(system, workplace, sentence * (num_more_tokens // num_tokens), *args)

        ((_, used),) = usages(asked(100))
        fits = asked(SMALL_CONTEXT - used - 2500, "--continue")
        shortened = asked(4000, "--continue")
    assert "compact_boundary" not in [event.get("subtype") for event in fits]
    assert "compact_boundary" in [event.get("subtype") for event in shortened]


def claude_code(system: Serve, workplace: Workplace, prompt: str, *args: str) -> list[dict[str, Any]]:
    """The events of a session with Claude Code's defaults, which ends with the answer of the script."""
    output = workplace.run(
        str(CLAUDE),
        *("--print", prompt, *args, "--model", NAME, "--allowedTools", "Read,Write"),
        *("--output-format", "stream-json", "--verbose"),
        ANTHROPIC_BASE_URL=system.base_url,
        ANTHROPIC_AUTH_TOKEN="unused",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )
    events = [json.loads(line) for line in output.splitlines()]
    assert (events[-1]["type"], events[-1]["is_error"], events[-1]["result"]) == ("result", False, DONE)
    return events


def usages(events: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Of each answer of the model: the cached tokens of its prompt, and all of them."""
    found = {}
    for event in events:
        if event["type"] == "assistant":
            usage = event["message"]["usage"]
            cached = usage["cache_read_input_tokens"]
            found[event["message"]["id"]] = (cached, cached + usage["input_tokens"])
    return list(found.values())
