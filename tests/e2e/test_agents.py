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

from tests.e2e import agent_recordings
from tests.e2e.recorder import Recorder, recording
from tests.e2e.scripted_model import CONTEXT, calls, scripted_system
from tests.e2e.serving import HTTP
from tests.patience import patience

pytestmark = pytest.mark.e2e

MODULES = Path(__file__).parents[2] / ".make" / "clients" / "node_modules"
CLAUDE, CLINE, CONTINUE, OPENCODE, QWEN = (
    MODULES / ".bin" / name for name in ("claude", "cline", "cn", "opencode", "qwen")
)
AIDER, OPENHANDS = (Path(__file__).parents[2] / ".make" / name / "bin" / name for name in ("aider", "openhands"))
TASK_BOUND_S = 300
SOAK = os.environ.get("HEADRACE_SOAK") == "1"
NAME = "scripted"
SMALL_CONTEXT = 32768
"""Room for the prompt of Claude Code, and for little more."""
LEAST_CACHED = 0.9
TASK = "Read note.txt and write the number in it into answer.txt."
DONE = "The number is 42."
NEXT = "And what is it?"


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
            timeout=patience(TASK_BOUND_S),
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
    with recorded_system(tmp_path, script) as recorder:
        first = usages(claude_code(recorder.base_url, workplace, TASK))
        assert workplace.answer == "42\n"
        agent_recordings.check("claude-code", recorder.exchanges, NAME)
        (workplace.files / "answer.txt").unlink()
        second = usages(claude_code(recorder.base_url, workplace, TASK))
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
    with scripted_system(tmp_path, NAME, [DONE], SMALL_CONTEXT) as system:
        body = {"prompt": sentence, "add_special_tokens": False}
        num_tokens = HTTP.post(f"{system.base_url}/tokenize", json=body).json()["count"]

        def asked(num_more_tokens: int, *args: str) -> list[dict[str, Any]]:
            return claude_code(system.base_url, workplace, sentence * (num_more_tokens // num_tokens), *args)

        ((_, used),) = usages(asked(100))
        fits = asked(SMALL_CONTEXT - used - 2500, "--continue")
        shortened = asked(4000, "--continue")
    assert "compact_boundary" not in [event.get("subtype") for event in fits]
    assert "compact_boundary" in [event.get("subtype") for event in shortened]


def claude_code(base_url: str, workplace: Workplace, prompt: str, *args: str) -> list[dict[str, Any]]:
    """The events of a session with Claude Code's defaults, which ends with the answer of the script."""
    output = workplace.run(
        str(CLAUDE),
        *("--print", prompt, *args, "--model", NAME, "--allowedTools", "Read,Write"),
        *("--output-format", "stream-json", "--verbose"),
        ANTHROPIC_BASE_URL=base_url,
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


@contextmanager
def recorded_system(directory: Path, answers: Sequence[str], context: int = CONTEXT) -> Iterator[Recorder]:
    """What an agent does with a system that serves a model with these answers."""
    with scripted_system(directory, NAME, answers, context) as system, recording(system.base_url) as recorder:
        yield recorder


def script_of(read: tuple[str, dict[str, object]], write: tuple[str, dict[str, object]]) -> list[str]:
    """Answers that do the task with these calls."""
    return [calls(read), calls(write), DONE]


def assert_finished(recorder: Recorder, workplace: Workplace, *, num_turns: int, least_tokens: int) -> None:
    """The task is done. Nothing was refused, and every prompt but the first was in the cache. The first had at least so
    many tokens: it is the whole agent."""
    assert workplace.answer.strip() == "42"
    assert {one.status for one in recorder.exchanges} == {200}
    usages = [one.usage for one in recorder.turns]
    assert len(usages) == num_turns
    assert usages[0] is not None
    assert usages[0][1] >= least_tokens
    for usage in usages[1:]:
        assert usage is not None
        assert usage[0] >= LEAST_CACHED * usage[1]


def needs(program: Path, name: str) -> pytest.MarkDecorator:
    """Skip a test where the program is not installed."""
    return pytest.mark.skipif(not program.exists(), reason=f"{name} is not installed: make test-clients, with npm")


@needs(OPENCODE, "opencode")
def test_opencode_reads_and_writes_files_and_finds_its_turns_in_the_cache(workplace: Workplace, tmp_path: Path) -> None:
    script = script_of(
        ("read", {"filePath": str(workplace.files / "note.txt")}),
        ("write", {"filePath": str(workplace.files / "answer.txt"), "content": "42\n"}),
    )
    with recorded_system(tmp_path, script) as recorder:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{recorder.base_url}/v1", "apiKey": "unused"},
            "models": {NAME: {"limit": {"context": CONTEXT, "output": 4096}}},
        }
        config = {
            "model": f"headrace/{NAME}",
            "provider": {"headrace": provider},
            "autoupdate": False,
            "share": "disabled",
        }
        (workplace.files / "opencode.json").write_text(json.dumps(config))
        offline = {f"OPENCODE_DISABLE_{what}": "1" for what in ("AUTOUPDATE", "LSP_DOWNLOAD", "MODELS_FETCH")}
        for task in ([TASK], ["--continue", NEXT]):
            assert DONE in workplace.run(str(OPENCODE), "run", *task, **offline)
    assert_finished(recorder, workplace, num_turns=4, least_tokens=10_000)
    agent_recordings.check("opencode", recorder.exchanges, NAME)
    assert {one.ignored for one in recorder.exchanges} == {""}


@needs(QWEN, "Qwen Code")
def test_qwen_code_reads_and_writes_files_and_finds_its_turns_in_the_cache(
    workplace: Workplace, tmp_path: Path
) -> None:
    script = script_of(
        ("read_file", {"file_path": str(workplace.files / "note.txt")}),
        ("write_file", {"file_path": str(workplace.files / "answer.txt"), "content": "42\n"}),
    )
    with recorded_system(tmp_path, script) as recorder:
        for task in (["-p", TASK], ["--continue", "-p", NEXT]):
            output = workplace.run(
                str(QWEN),
                *("--auth-type", "openai", "--yolo", *task),
                OPENAI_BASE_URL=f"{recorder.base_url}/v1",
                OPENAI_API_KEY="unused",
                OPENAI_MODEL=NAME,
                QWEN_TELEMETRY_ENABLED="0",
            )
            assert DONE in output
    assert_finished(recorder, workplace, num_turns=4, least_tokens=10_000)
    agent_recordings.check("qwen-code", recorder.exchanges, NAME)
    # It asks for answers of 32,000 tokens, whatever is left of the context.
    assert all(one.ignored.startswith("max_tokens>") for one in recorder.turns)


@needs(CONTINUE, "the command line of Continue")
def test_continue_reads_and_writes_files_and_finds_its_turns_in_the_cache(workplace: Workplace, tmp_path: Path) -> None:
    script = script_of(
        ("Read", {"filepath": str(workplace.files / "note.txt")}),
        ("Write", {"filepath": str(workplace.files / "answer.txt"), "content": "42\n"}),
    )
    with recorded_system(tmp_path, script) as recorder:
        model = {
            "name": NAME,
            "provider": "openai",
            "model": NAME,
            "apiBase": f"{recorder.base_url}/v1",
            "apiKey": "unused",
            "roles": ["chat"],
            "capabilities": ["tool_use"],
        }
        config = workplace.home / "config.yaml"
        config.write_text(json.dumps({"name": "headrace", "version": "1.0.0", "schema": "v1", "models": [model]}))
        for task in (["-p", TASK], ["--resume", "-p", NEXT]):
            output = workplace.run(
                str(CONTINUE),
                *("--config", str(config), "--allow", "Read", "--allow", "Write", *task),
                CONTINUE_CLI_ENABLE_TELEMETRY="0",
                CONTINUE_METRICS_ENABLED="0",
            )
            assert DONE in output
    assert_finished(recorder, workplace, num_turns=4, least_tokens=2000)
    agent_recordings.check("continue", recorder.exchanges, NAME)
    assert {one.ignored for one in recorder.exchanges} == {""}


@needs(CLINE, "the command line of Cline")
def test_cline_reads_and_writes_files_and_finds_its_turns_in_the_cache(workplace: Workplace, tmp_path: Path) -> None:
    script = script_of(
        ("read_files", {"files": [{"path": str(workplace.files / "note.txt")}]}),
        ("editor", {"command": "create", "path": str(workplace.files / "answer.txt"), "new_text": "42\n"}),
    )
    with recorded_system(tmp_path, script) as recorder:
        # With a directory of its own, it starts no process that outlives it.
        own = ("--data-dir", str(workplace.home / "data"))
        provider = ("-p", "openai", "-b", f"{recorder.base_url}/v1", "-k", "unused", "-m", NAME)
        offline = {"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"}
        workplace.run(str(CLINE), "auth", *own, *provider, **offline)
        output = workplace.run(str(CLINE), *own, "--json", TASK, **offline)
    assert json.loads(output.splitlines()[-1])["text"] == DONE
    assert_finished(recorder, workplace, num_turns=3, least_tokens=8000)
    agent_recordings.check("cline", recorder.exchanges, NAME)
    assert {one.ignored for one in recorder.exchanges} == {""}


@pytest.mark.skipif(not OPENHANDS.exists(), reason="OpenHands is not installed: make openhands, with Python 3.12")
def test_openhands_reads_and_writes_files_and_finds_its_turns_in_the_cache(
    workplace: Workplace, tmp_path: Path
) -> None:
    told = {"security_risk": "LOW", "summary": "what the task asks"}
    script = script_of(
        ("file_editor", {"command": "view", "path": str(workplace.files / "note.txt"), **told}),
        (
            "file_editor",
            {"command": "create", "path": str(workplace.files / "answer.txt"), "file_text": "42\n", **told},
        ),
    )
    with recorded_system(tmp_path, script) as recorder:
        for task in (["-t", TASK], ["--resume", "--last", "-t", NEXT]):
            output = workplace.run(
                str(OPENHANDS),
                *("--headless", "--override-with-envs", *task),
                LLM_MODEL=f"openai/{NAME}",
                LLM_BASE_URL=f"{recorder.base_url}/v1",
                LLM_API_KEY="unused",
                LITELLM_LOCAL_MODEL_COST_MAP="True",
            )
            assert DONE in output
    assert_finished(recorder, workplace, num_turns=4, least_tokens=10_000)
    agent_recordings.check("openhands", recorder.exchanges, NAME)
    # A model of this name is given an effort, whether it thinks or not.
    assert {one.ignored for one in recorder.exchanges} == {"reasoning_effort"}


@pytest.mark.skipif(not AIDER.exists(), reason="aider is not installed: make test-clients")
@pytest.mark.parametrize(
    ("form", "edit"),
    [
        # In this form it starts as long again, to write the same with fewer words.
        *([("whole", "answer.txt\n```\n42\n```\n")] if SOAK else []),
        ("diff", "answer.txt\n```\n<<<<<<< SEARCH\nunknown\n=======\n42\n>>>>>>> REPLACE\n```\n"),
    ],
)
def test_aider_edits_a_file_and_commits_it(workplace: Workplace, tmp_path: Path, form: str, edit: str) -> None:
    """It uses no tools: edits are in the texts of its model, and so are its examples, as turns of a conversation."""
    identity = {
        f"GIT_{role}_{what}": "aider@example.com" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    (workplace.files / "answer.txt").write_text("unknown\n")
    workplace.run("git", "init", "--quiet")
    workplace.run("git", "add", ".")
    workplace.run("git", "commit", "--quiet", "--message", "begin", **identity)
    with recorded_system(tmp_path, [edit]) as recorder:

        def asked(*args: str) -> str:
            return workplace.run(
                str(AIDER),
                *("--openai-api-base", f"{recorder.base_url}/v1", "--openai-api-key", "unused"),
                *("--model", f"openai/{NAME}", "--edit-format", form, "--yes-always", *args),
                *("--no-analytics", "--no-check-update", "--no-show-model-warnings", "--no-stream"),
                *("--read", "note.txt", "answer.txt"),
                **identity,
            )

        output = asked("--message", TASK)
        first = recorder.exchanges[0]
        num_before = len(recorder.exchanges)
        asked("--message", NEXT, "--restore-chat-history", "--no-auto-commits")
    if form == "diff":
        agent_recordings.check("aider", recorder.exchanges, NAME)
    again = recorder.exchanges[num_before]
    assert "Applied edit to answer.txt" in output
    assert workplace.answer == "42\n"
    assert len(workplace.run("git", "log", "--oneline").splitlines()) == 2
    assert {one.status for one in recorder.exchanges} == {200}
    assert {one.ignored for one in recorder.exchanges} == {""}
    turns, more = first.request["messages"], again.request["messages"]
    assert [turn["role"] for turn in turns].count("assistant") >= 3  # which no model wrote
    # What changes stands in the middle of its prompts, so that the cache has the part before that.
    num_same = next(i for i, (one, other) in enumerate(zip(turns, more, strict=False)) if one != other)
    same = len(json.dumps(more[:num_same])) / len(json.dumps(more))
    assert again.usage is not None
    cached, total = again.usage
    assert cached >= LEAST_CACHED * same * total
