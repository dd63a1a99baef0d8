"""Codex, unmodified and with its defaults, finishes a task against a gateway whose model is scripted.

The model must surely call tools, which no small model does. So a router plays it: it reads the prompts that the gateway
made and answers in the format of the template. It counts as cached what a prefix cache would hold.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.protos.inference_pb2 import FINISH_REASON_STOP
from tests.e2e import agent_recordings
from tests.e2e.recorder import Recorder
from tests.gateway.conftest import (
    CHATML,
    EOS,
    MODEL,
    TOOL_TEMPLATE,
    VOCAB,
    FakeRouter,
    Gateway,
    serving_gateway,
    serving_router,
    tar_of,
    tiny_graphs,
    tokens_of,
)
from tests.patience import patience

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]
CODEX = Path(__file__).parents[2] / ".make" / "clients" / "node_modules" / ".bin" / "codex"
BOUND_S = 120
MAX_CONTEXT = 262_144
PROVIDER = """\
model = "{model}"
model_provider = "headrace"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.headrace]
name = "headrace"
base_url = "{url}/v1"
wire_api = "responses"
"""
OTHERWISE_DEFAULTS = "check_for_update_on_startup = false\n[analytics]\nenabled = false\n"
PATCH = "*** Begin Patch\n*** Add File: patched.txt\n+patched\n*** End Patch"
MAKE = ("exec_command", {"cmd": "echo made > made.txt"})
STEPS = (MAKE, ("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}\nEOF"}))
FREE_STEPS = (MAKE, ("apply_patch", {"input": PATCH + "\n"}))
"""The same with a tool of type `custom`, which Codex has for models that it knows."""
SCRIPT_STEPS = (("functions__exec", {"input": "await tools.exec_command({cmd: 'echo made > made.txt'});"}),)
"""A tool of type `custom` in a namespace that the conversation brings, which Codex has for the newest models."""


class Model:
    """Makes one call after each result, and then says that it is done."""

    def __init__(self, router: FakeRouter, steps: Sequence[tuple[str, dict[str, str]]]) -> None:
        router.script = self
        self._steps = steps
        self.prompts: list[str] = []
        self.grammar = ""
        """That of the last answer."""
        self.cached: list[float] = []
        """The share of each prompt that was in the cache."""
        self._kept: list[list[int]] = []

    async def __call__(self, router: FakeRouter, stream: Any, send: Any) -> None:
        prompt = list(stream.request.token_ids)
        router.num_cached = max((_common(prompt, one) for one in self._kept), default=0)
        self.cached.append(router.num_cached / len(prompt))
        text = b"".join(VOCAB[token] for token in prompt).decode()
        self.prompts.append(text)
        self.grammar = stream.request.sampling.constraint.grammar
        num_results = text.count("<|im_start|>tool\n") + text.count("<tool_response>\n")
        if num_results < len(self._steps):
            name, arguments = self._steps[num_results]
            call = {"name": name, "arguments": arguments}
            answer = f"<think>Hm.</think>Now {num_results}.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        else:
            answer = f"All done, {text.count('<|im_start|>assistant')} turns."
        tokens = tokens_of(answer)
        self._kept.append(prompt + tokens)
        await send(tokens, 0, None)
        await send([EOS], len(tokens), FINISH_REASON_STOP)


def _common(one: list[int], two: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@asynccontextmanager
async def serving(
    template: str, steps: Sequence[tuple[str, dict[str, str]]] = STEPS, name: str = MODEL
) -> AsyncIterator[tuple[Gateway, Model]]:
    """A gateway whose model has this name."""
    files = {**tiny_graphs(add_bos=True), "chat_template.jinja": template.encode()}
    router = FakeRouter(tar_of(files), max_context_tokens=MAX_CONTEXT)
    router.cards = [router.card(name=name)]
    model = Model(router, steps)
    async with serving_router(router), serving_gateway(router.address) as gateway:
        yield gateway, model


class Codex:
    """The client with a home and a project of its own."""

    def __init__(self, folder: Path, config: str, **environment: str) -> None:
        if not CODEX.exists():
            pytest.skip("codex is not installed: make test, with npm")
        self.project = folder / "project"
        self.project.mkdir()
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(config)
        proxies = {name for name in os.environ if name.lower().endswith("_proxy")}
        kept = {name: value for name, value in os.environ.items() if name not in proxies}
        self._environment = {**kept, "HOME": str(home), "CODEX_HOME": str(home), "DO_NOT_TRACK": "1", **environment}

    async def run(self, *args: str) -> list[dict[str, Any]]:
        """The events of a run that succeeds."""
        command = (str(CODEX), "exec", *args)
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.project,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(patience(BOUND_S)):
                out, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, (out + errors).decode()
        return [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]


def texts_of(events: list[dict[str, Any]]) -> list[str]:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item["text"] for item in items if item["type"] == "agent_message"]


FLAGS = ("--json", "--skip-git-repo-check", "--sandbox", "danger-full-access")


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, CHATML], ids=["with tools", "without tools"])
async def test_codex_calls_tools_and_goes_on(tmp_path: Path, template: str) -> None:
    async with serving(template) as (gateway, model):
        recorder = Recorder(gateway.url)
        codex = Codex(tmp_path, PROVIDER.format(model=MODEL, url=recorder.base_url))
        events = await codex.run(*FLAGS, "Make two files.")
        assert (codex.project / "made.txt").read_text() == "made\n"
        assert (codex.project / "patched.txt").read_text() == "patched\n"
        assert texts_of(events)[-1].startswith("All done")
        assert "Make two files." in model.prompts[0]
        assert '"exec_command"' in model.prompts[0]
        assert "multi_agent_v1__" in model.prompts[0]
        assert '"web_search"' not in model.prompts[0]
        assert len(model.prompts) == len(STEPS) + 1
        # Another run of the program goes on with the session.
        events = await codex.run("resume", "--last", *FLAGS[:2], "And now?")
        assert texts_of(events)[-1].startswith("All done")
        assert "And now?" in model.prompts[-1]
        assert min(model.cached[1:]) >= 0.9, model.cached
        usage = next(event["usage"] for event in events if event["type"] == "turn.completed")
        assert usage["cached_input_tokens"] > 0
        recorder.end()
    if template == TOOL_TEMPLATE:
        agent_recordings.check("codex", recorder.exchanges, MODEL)


async def test_codex_patches_with_a_custom_tool_that_has_a_grammar(tmp_path: Path) -> None:
    known = "gpt-5.5"
    async with serving(TOOL_TEMPLATE, FREE_STEPS, known) as (gateway, model):
        codex = Codex(tmp_path, PROVIDER.format(model=known, url=gateway.url))
        events = await codex.run(*FLAGS, "Make two files.")
        assert (codex.project / "made.txt").read_text() == "made\n"
        assert (codex.project / "patched.txt").read_text() == "patched\n"
        assert texts_of(events)[-1].startswith("All done")
        assert '"name": "apply_patch"' in model.prompts[0]
        assert '"tool_search"' not in model.prompts[0]
        assert "Begin Patch" in model.grammar
        assert min(model.cached[1:]) >= 0.9, model.cached


async def test_codex_runs_programs_with_tools_of_the_conversation(tmp_path: Path) -> None:
    known = "gpt-6-sol"
    async with serving(TOOL_TEMPLATE, SCRIPT_STEPS, known) as (gateway, model):
        codex = Codex(tmp_path, PROVIDER.format(model=known, url=gateway.url))
        events = await codex.run(*FLAGS, "Make a file.")
        assert (codex.project / "made.txt").read_text() == "made\n"
        assert texts_of(events)[-1].startswith("All done")
        assert min(model.cached[1:]) >= 0.9, model.cached


async def test_codex_takes_the_gateway_for_ollama(tmp_path: Path) -> None:
    async with serving(TOOL_TEMPLATE) as (gateway, model):
        codex = Codex(tmp_path, OTHERWISE_DEFAULTS, CODEX_OSS_BASE_URL=f"{gateway.url}/v1")
        events = await codex.run("--oss", "--local-provider", "ollama", "-m", MODEL, *FLAGS, "Make two files.")
        assert (codex.project / "made.txt").read_text() == "made\n"
        assert texts_of(events)[-1].startswith("All done")
        assert min(model.cached[1:]) >= 0.9, model.cached
