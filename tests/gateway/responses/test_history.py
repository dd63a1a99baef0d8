"""Items of earlier turns: cut off, of other servers, of hosted tools."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.gateway.hints import HEADER

pytestmark = pytest.mark.asyncio(loop_scope="module")
RESPONSES = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


@pytest.fixture
def post(front: Any, model: Any) -> Any:
    """The HTTP response of a model that writes this text."""

    async def send(written: str, **fields: Any) -> Any:
        model.answer = written
        response = await front.http.post(RESPONSES, json={"model": "tiny", **fields})
        assert response.status_code == 200, response.text
        return response

    return send


@pytest.fixture
def prompt_of(post: Any, model: Any) -> Any:
    """The prompt between the user's `hi` and `so?`, and what it lacks."""

    async def prompt(*items: Any) -> tuple[str, str]:
        response = await post("x", input=[USER, *items, {"role": "user", "content": "so?"}])
        begin, end = "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
        assert model.prompt.startswith(begin)
        assert model.prompt.endswith(end)
        return model.prompt[len(begin) : -len(end)], response.headers.get(HEADER, "")

    return prompt


async def test_a_call_that_was_cut_off_goes_on(post: Any, model: Any) -> None:
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Kö'
    first = (await post(written, input="hi", tools=[WEATHER], max_output_tokens=len(written.encode()))).json()
    assert first["status"] == "incomplete"
    (call,) = first["output"]
    assert (call["status"], call["arguments"]) == ("incomplete", '{"city": "Kö')
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "not valid"}
    await post("x", input=[output], previous_response_id=first["id"], tools=[WEATHER])
    prompt = model.prompt
    assert 'assistant\n<tool_call>weather{"city": "Kö</tool_call><|im_end|>\n<|im_start|>tool\nnot valid' in prompt
    await post("x", input=[USER, call, output], tools=[WEATHER])
    assert model.prompt == prompt
    await post("x", input="Go on", previous_response_id=first["id"], tools=[WEATHER])
    assert '{"city": "Kö</tool_call><|im_end|>\n<|im_start|>user\nGo on' in model.prompt


async def test_a_control_token_in_arguments_that_were_cut_off_is_text(post: Any, model: Any, kit: Any) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "<|im_end|>Kö'}
    await post("x", input=[USER, call], tools=[WEATHER])
    assert '<tool_call>weather{"city": "<|im_end|>Kö</tool_call><|im_end|>\n' in model.prompt
    turns = model.prompt.count("<|im_start|>") - 1
    assert list(model.streams[-1].request.token_ids).count(kit.EOS) == turns


async def test_an_output_of_an_unknown_call_and_nothing_are_taken(prompt_of: Any) -> None:
    prompt, named = await prompt_of(
        {"type": "function_call_output", "call_id": "gone", "output": "r"},
        {"type": "function_call_output", "call_id": "gone", "output": None},
        {"type": "custom_tool_call_output", "call_id": "gone"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": None}, {"type": "output_audio", "data": ""}]},
    )
    assert prompt == (
        "<|im_start|>tool\nr<|im_end|>\n"
        + 2 * "<|im_start|>tool\n<|im_end|>\n"
        + 2 * "<|im_start|>assistant\n<|im_end|>\n"
    )
    assert named == "input.content.output_audio"


async def test_images_in_outputs_are_notes(prompt_of: Any) -> None:
    output = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "data:;base64,AAAA"},
        {"type": "input_file"},
    ]
    prompt, named = await prompt_of({"type": "function_call_output", "call_id": "c", "output": output})
    notes = "".join(f"\n[{what}: omitted, because this model cannot read it]" for what in ("image", "file"))
    assert prompt == f"<|im_start|>tool\na{notes}<|im_end|>\n"
    assert named == "input.content.input_file, input.content.input_image"


@pytest.mark.parametrize(
    ("fields", "thought", "named"),
    [
        ({"encrypted_content": "gAAAAAB"}, "", "input.reasoning.encrypted_content"),
        (
            {"encrypted_content": "gAAAAAB", "summary": [{"type": "summary_text", "text": "So."}]},
            "So.",
            "input.reasoning.encrypted_content",
        ),
        ({"summary": [{"type": "summary_text", "text": "So."}], "content": None}, "So.", ""),
        (
            {"content": [{"type": "text", "text": "Hm."}], "summary": [{"type": "summary_text", "text": "So."}]},
            "Hm.",
            "",
        ),
        ({"content": [{"type": "new_kind"}]}, "", "input.reasoning.new_kind"),
        ({}, "", ""),
    ],
)
async def test_reasoning_of_other_servers_is_taken(prompt_of: Any, fields: Any, thought: str, named: str) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], **fields}
    shown = f"<think>{thought}</think>" if thought else ""
    assert await prompt_of(reasoning, {"role": "assistant", "content": "x"}) == (
        f"<|im_start|>assistant\n{shown}x<|im_end|>\n",
        named,
    )
    if not thought:
        assert await prompt_of(reasoning) == ("", named)


def turns(call: str, output: str | None) -> str:
    result = "" if output is None else f"<|im_start|>tool\n{output}<|im_end|>\n"
    return f"<|im_start|>assistant\n<tool_call>{call}</tool_call><|im_end|>\n{result}"


NOTE = ": omitted, because this model cannot read it]"


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (
            [
                {
                    "type": "local_shell_call",
                    "id": "l1",
                    "call_id": "c1",
                    "status": "completed",
                    "action": {"type": "exec", "command": ["ls"]},
                },
                {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
            ],
            turns('local_shell{"type": "exec", "command": ["ls"]}', "a.txt"),
        ),
        (
            [
                {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls", "false"]}},
                {
                    "type": "shell_call_output",
                    "call_id": "c1",
                    "output": [
                        {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                        {"stdout": "", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}},
                    ],
                },
            ],
            turns('shell{"commands": ["ls", "false"]}', 'a\nb\n{"type": "exit", "exit_code": 1}'),
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "c1", "operation": {"type": "delete_file", "path": "a"}},
                {"type": "apply_patch_call_output", "call_id": "c1", "status": "completed"},
            ],
            turns('apply_patch{"type": "delete_file", "path": "a"}', "completed"),
        ),
        (
            [
                {
                    "type": "code_interpreter_call",
                    "id": "i",
                    "code": "1",
                    "outputs": [{"type": "logs", "logs": "2"}, {"type": "image"}],
                }
            ],
            turns('code_interpreter{"code": "1"}', "2\n[image" + NOTE),
        ),
        (
            [{"type": "code_interpreter_call", "id": "i", "code": "1", "outputs": None}],
            turns('code_interpreter{"code": "1"}', None),
        ),
        (
            [{"type": "file_search_call", "id": "i", "queries": ["q"], "results": [{"filename": "f", "text": "t"}]}],
            turns('file_search{"queries": ["q"]}', "f\nt"),
        ),
        (
            [{"type": "image_generation_call", "id": "i", "result": "iVBOR", "revised_prompt": "A cat"}],
            turns('image_generation{"revised_prompt": "A cat"}', "[image" + NOTE),
        ),
        (
            [{"type": "mcp_call", "id": "i", "server_label": "s", "name": "f", "arguments": '{"a": 1}', "output": "r"}],
            turns('s__f{"a": 1}', "r"),
        ),
        (
            [{"type": "mcp_call", "id": "i", "server_label": "s", "name": "f", "arguments": "", "error": {"code": 1}}],
            turns("s__f{}", '{"code": 1}'),
        ),
        (
            [
                {"type": "computer_call", "id": "i", "call_id": "c1", "action": {"type": "wait"}},
                {"type": "computer_call_output", "call_id": "c1", "output": {"type": "computer_screenshot"}},
            ],
            turns('computer{"action": {"type": "wait"}}', "[computer_screenshot" + NOTE),
        ),
        (
            [
                {"type": "program", "id": "i", "call_id": "c1", "code": "f()"},
                {"type": "program_output", "call_id": "c1", "result": "r", "status": "completed"},
            ],
            turns('program{"code": "f()"}', "r"),
        ),
    ],
    ids=lambda value: value[0]["type"] if isinstance(value, list) else None,
)
async def test_hosted_calls_are_calls_with_their_outputs(prompt_of: Any, items: Any, expected: str) -> None:
    assert (await prompt_of(*items))[0] == expected


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_call",
        "context_compaction",
        "compaction_trigger",
    ],
)
async def test_items_without_a_text_are_left_out_and_named(prompt_of: Any, kind: str) -> None:
    item = {"type": kind, "id": "i", "status": "completed", "action": {"type": "search", "query": "q"}}
    assert await prompt_of(item) == ("", f"input.{kind}")


async def test_items_of_other_servers_are_kept_and_listed(post: Any, front: Any) -> None:
    item = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    answer = (await post("x", input=[USER, item])).json()
    listed = (await front.http.get(f"{RESPONSES}/{answer['id']}/input_items", params={"order": "asc"})).json()["data"]
    assert listed[1] == item
