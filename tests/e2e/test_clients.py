"""Unmodified clients of many makers against a real system, which serves the demo model with a template for tools.

The scripts of the heavier clients are in clients/, and run in an environment of their own that `make test` sets up;
without it they are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.serving import Serve, pulled_model
from tests.patience import patience

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("clients")
ENVIRONMENT = ROOT / ".make" / "clients"
SCRIPT_BOUND_S = 120
NAME = "smollm2-tools"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]

# The demo model's template with a place for tools, in the manner of Hermes.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nYou may call functions:' }}
{%- for tool in tools %}{{- '\\n' + tool.function | tojson }}{%- endfor %}
{{- '\\nCall like <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """The demo model under another name and with another template."""
    directory = tmp_path_factory.mktemp("model") / NAME
    directory.mkdir()
    for path in pulled_model().iterdir():
        if path.name not in ("headrace.json", "chat_template.jinja"):
            (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    serve = Serve(str(directory), "--port", "0", "--kv-cache-gb", "0.5")
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.end()


@pytest.fixture
def client(system: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def environment(system: Serve) -> dict[str, str]:
    """The environment that tells scripts the address of the system."""
    return {
        **os.environ,
        "HEADRACE_TEST_BASE_URL": f"{system.base_url}/v1",
        "HEADRACE_TEST_GRPC": f"127.0.0.1:{system.port + 1}",
        "HEADRACE_TEST_MODEL": NAME,
        "PYTHONPATH": str(ROOT),
        # What some clients report to their makers, they do not report from here.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "DO_NOT_TRACK": "1",
    }


def run(command: list[str], system: Serve, directory: Path) -> None:
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment(system),
        capture_output=True,
        text=True,
        timeout=patience(SCRIPT_BOUND_S),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("with_*.py")))
def test_a_python_client_works_unmodified(system: Serve, script: str) -> None:
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        pytest.skip("the clients are not installed: make test")
    run([str(python), str(SCRIPTS / script)], system, ROOT)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("with_*.mjs")))
def test_a_client_for_node_works_unmodified(system: Serve, tmp_path: Path, script: str) -> None:
    modules = ENVIRONMENT / "node_modules"
    if not modules.exists():
        pytest.skip("the clients for Node are not installed: make test")
    node = shutil.which("node") or str(ENVIRONMENT / "bin" / "node")
    (tmp_path / "node_modules").symlink_to(modules)
    run([node, shutil.copy(SCRIPTS / script, tmp_path)], system, tmp_path)


# --- openai-python, which the development environment has -------------------------------------------------------------


class Verdict(BaseModel):
    """The type of a parsed answer."""

    sure: bool
    mood: Literal["good", "bad"]


TOOL: Any = openai.pydantic_function_tool(Verdict, name="judge")


def test_openai_chats_and_streams(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=16)
    text = answer.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    with client.chat.completions.stream(model=NAME, messages=QUESTION, temperature=0, max_tokens=16) as stream:
        assert stream.get_final_completion().choices[0].message.content == text


def test_openai_calls_tools_and_streams_them(client: openai.OpenAI) -> None:
    fields: Any = {"model": NAME, "messages": QUESTION, "tools": [TOOL], "temperature": 0, "max_tokens": 96}
    answer = client.chat.completions.create(**fields, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    Verdict.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**fields, tool_choice="required", parallel_tool_calls=False) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    assert "".join(deltas) == call.function.arguments
    named: Any = {"type": "function", "function": {"name": "judge"}}
    answer = client.chat.completions.create(**fields, tool_choice=named)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls


def test_openai_leaves_the_model_its_choice(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=QUESTION, tools=[TOOL], temperature=0, max_tokens=48)
    message = answer.choices[0].message
    assert message.content or message.tool_calls


def test_openai_carries_calls_and_results_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "judge", "arguments": '{"sure": true}'}}
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "good"},
    ]
    answer = client.chat.completions.create(model=NAME, messages=messages, tools=[TOOL], max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def test_openai_parses_answers_into_types(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=NAME, messages=QUESTION, response_format=Verdict, temperature=0, max_tokens=64
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_openai_completes_texts_with_logprobs_and_echoes_prompts(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "Paris" in answer.choices[0].text
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert all(len(top) == 2 for top in logprobs.top_logprobs or ())
    echoed = client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=4, echo=True)
    assert echoed.choices[0].text == prompt + answer.choices[0].text
