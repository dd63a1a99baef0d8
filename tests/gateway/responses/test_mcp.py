"""Tools of MCP servers in responses: a real gateway between a model of a fake router and a real MCP server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.responses import ResponseStreamEvent

from headrace.gateway.hints import HEADER
from headrace.gateway.protocol import CannotServeError
from tests.gateway.mcp_server import ADD, McpServer, serving_mcp
from tests.gateway.tool_model import events_of, without
from tests.patience import patience, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
RESPONSES = "/v1/responses"
MCP = {"type": "mcp", "server_label": "calc", "require_approval": "never"}
ASKED = {**MCP, "require_approval": "always"}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
MAX_CALLS = 3
OF_THE_MOMENT = {"id", "item_id", "created_at", "completed_at", "sequence_number", "call_id"}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


ADDING = called("calc__add", a=1, b=2)


@pytest.fixture(scope="module")
def served() -> Iterator[McpServer]:
    with serving_mcp() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fronted(
    model: Any, served: McpServer, kit_of_module: Any, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Any]:
    headers = tmp_path_factory.mktemp("mcp") / "headers.json"
    headers.write_text(json.dumps({"calc": {"Authorization": "Bearer of-the-operator"}}))
    flags = {"mcp_servers": {"calc": served.url}, "mcp_headers": Path(headers), "mcp_max_calls": MAX_CALLS}
    async with kit_of_module.serving_gateway(model.address, flags=flags) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(model: Any, served: McpServer) -> None:
    model.reset()
    served.reset()


@pytest.fixture
def writes(model: Any, kit: Any) -> Any:
    """Make the model write these texts, one for each round; the last one is repeated."""

    def script(*texts: str) -> None:
        left = [*texts]

        async def write(router: Any, stream: Any, send: Any) -> None:
            router.answer = left.pop(0) if len(left) > 1 else left[0]
            await kit.speak(router, stream, send)

        model.script = write

    return script


@pytest.fixture
def ask(fronted: Any, writes: Any) -> Any:
    """Create a response of a model that writes these texts; give it, or the events of its stream."""

    async def post(*texts: str, **fields: Any) -> Any:
        writes(*texts)
        body = {"model": "tiny", "input": "hi", "tools": [MCP], **fields}
        response = await fronted.http.post(RESPONSES, json=body)
        assert response.status_code == 200, response.text
        return events_of(response.text) if fields.get("stream") else response.json()

    return post


@pytest.fixture
def refused(fronted: Any, model: Any) -> Any:
    """Send a request that is refused. Returns the error."""

    async def post(status: int = 400, **fields: Any) -> Any:
        response = await fronted.http.post(RESPONSES, json={"model": "tiny", "input": "hi", "tools": [MCP], **fields})
        assert response.status_code == status, response.text
        assert model.streams == []
        return response.json()["error"]

    return post


# --- calls ----------------------------------------------------------------------------------------------------------


async def test_the_gateway_calls_a_tool_and_the_model_goes_on(ask: Any, model: Any, served: McpServer) -> None:
    answer = await ask(f"<think>Hm</think>{ADDING}", "It is 3.")
    listed, thought, call, message = answer["output"]
    assert listed["id"].startswith("mcpl_")
    assert listed == {
        "id": listed["id"],
        "type": "mcp_list_tools",
        "server_label": "calc",
        "tools": listed["tools"],
        "error": None,
    }
    assert listed["tools"][0] == {
        "name": "add",
        "description": ADD["description"],
        "input_schema": ADD["inputSchema"],
        "annotations": ADD["annotations"],
    }
    assert thought["content"][0]["text"] == "Hm"
    assert call["id"].startswith("mcp_")
    assert call == {
        "id": call["id"],
        "type": "mcp_call",
        "status": "completed",
        "server_label": "calc",
        "name": "add",
        "arguments": '{"a": 1, "b": 2}',
        "output": "3",
        "error": None,
        "approval_request_id": None,
    }
    assert message["content"][0]["text"] == "It is 3."
    assert answer["status"] == "completed"
    assert '"name": "calc__add", "description": "Add two numbers"' in model.prompt
    assert '<tool_call>calc__add{"a": 1, "b": 2}</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>' in model.prompt
    first, second = model.streams
    assert list(second.request.token_ids[: len(first.request.token_ids)]) == list(first.request.token_ids)
    lengths = [len(stream.request.token_ids) for stream in model.streams]
    assert answer["usage"]["input_tokens"] == sum(lengths)
    assert answer["usage"]["output_tokens"] == len(f"<think>Hm</think>{ADDING}") + 1 + len("It is 3.") + 1
    assert served.methods() == ["initialize", "notifications/initialized", "tools/list", "tools/call"]
    assert {headers["authorization"] for *_, headers in served.seen} == {"Bearer of-the-operator"}
    await asyncio.to_thread(until, lambda: not served.open, "the session ends", 5)


async def test_a_stream_has_the_events_of_lists_and_calls(ask: Any) -> None:
    events = await ask(ADDING, "3.", stream=True)
    kinds = [kind for kind, _ in itertools.groupby(event["type"].removeprefix("response.") for event in events)]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    deltas = [event for event in events if event["type"] == "response.mcp_call_arguments.delta"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert "".join(event["delta"] for event in deltas) == done[1]["arguments"]
    assert events[-1]["response"]["output"] == done
    whole = await ask(ADDING, "3.")
    assert without(OF_THE_MOMENT, events[-1]["response"]) == without(OF_THE_MOMENT, whole)


@pytest.mark.parametrize(
    ("written", "error", "model_reads"),
    [
        (
            called("calc__fail"),
            {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "it broke"}]},
            "it broke",
        ),
        (called("calc__add"), {"type": "mcp_protocol_error", "code": -32602, "message": "a is required"}, "required"),
        (
            called("calc__say", kind="much"),
            {
                "type": "mcp_protocol_error",
                "code": -32000,
                "message": "the tool's output has 70000 bytes, more than 65536; ask it for less",
            },
            "ask it for less",
        ),
    ],
)
async def test_the_error_of_a_tool_is_for_the_model(
    ask: Any, model: Any, written: str, error: Any, model_reads: str
) -> None:
    events = await ask(written, "It failed.", stream=True)
    answer = events[-1]["response"]
    _, call, message = answer["output"]
    assert (call["status"], call["output"], call["error"]) == ("failed", None, error)
    assert message["content"][0]["text"] == "It failed."
    assert "response.mcp_call.failed" in [event["type"] for event in events]
    assert model_reads in model.prompt.rpartition("<|im_start|>tool\n")[2]


async def test_a_server_that_refuses_calls_gives_the_model_its_status(ask: Any, served: McpServer) -> None:
    known = (await ask("x"))["output"][0]
    served.status = 503
    answer = await ask(ADDING, "No.", input=[{"role": "user", "content": "hi"}, known])
    assert answer["output"][0]["error"] == {
        "type": "http_error",
        "code": 503,
        "message": "the MCP server answered with the status 503",
    }


async def test_tools_that_the_conversation_has_listed_are_not_listed_again(ask: Any, served: McpServer) -> None:
    first = await ask(ADDING, "3.")
    served.seen.clear()
    second = await ask(called("calc__add", a=2, b=2), "4.", previous_response_id=first["id"], input="And 2 + 2?")
    assert [item["type"] for item in second["output"]] == ["mcp_call", "message"]
    assert second["output"][0]["output"] == "4"
    assert "tools/list" not in served.methods()
    stateless = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "And 2 + 2?"}]
    third = await ask(called("calc__add", a=2, b=2), "4.", input=stateless)
    assert third["output"][0]["output"] == "4"
    assert "tools/list" not in served.methods()


async def test_a_conversation_gets_the_calls(ask: Any, fronted: Any, model: Any) -> None:
    made = (await fronted.http.post("/v1/conversations", json={})).json()["id"]
    await ask(ADDING, "3.", conversation=made)
    listed = (await fronted.http.get(f"/v1/conversations/{made}/items", params={"order": "asc"})).json()["data"]
    assert [item["type"] for item in listed] == ["message", "mcp_list_tools", "mcp_call", "message"]
    await ask("x", conversation=made, input="And?")
    assert "<|im_start|>tool\n3<|im_end|>" in model.prompt


async def test_calls_have_a_maximum(ask: Any, model: Any, served: McpServer) -> None:
    answer = await ask(ADDING, ADDING, ADDING + ADDING, "Enough.")
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["mcp_list_tools", *4 * ["mcp_call"], "message"]
    assert [item.get("output") for item in answer["output"][1:5]] == ["3", "3", "3", None]
    assert "maximum of calls" in answer["output"][4]["error"]["message"]
    assert served.methods().count("tools/call") == MAX_CALLS
    assert "calc__add" not in model.prompt.split("<|im_start|>user")[0]
    served.seen.clear()
    fewer = await ask(ADDING + ADDING, "Enough.", max_tool_calls=1)
    assert [item["status"] for item in fewer["output"][1:]] == ["completed", "failed", "completed"]
    assert served.methods().count("tools/call") == 1


async def test_a_tool_of_the_caller_ends_the_response(ask: Any, model: Any) -> None:
    answer = await ask(ADDING + called("weather"), "x", tools=[MCP, WEATHER])
    assert [item["type"] for item in answer["output"]] == ["mcp_list_tools", "mcp_call", "function_call"]
    assert answer["output"][1]["output"] == "3"
    assert len(model.streams) == 1
    output = {"type": "function_call_output", "call_id": answer["output"][2]["call_id"], "output": "sun"}
    await ask("So.", tools=[MCP, WEATHER], input=[output], previous_response_id=answer["id"])
    assert model.prompt.count("<|im_start|>tool\n") == 2


async def test_a_required_call_is_required_once(ask: Any, model: Any) -> None:
    named = {"type": "mcp", "server_label": "calc", "name": "add"}
    for choice in ("required", named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        model.streams.clear()
        answer = await ask(ADDING, "3.", tool_choice=choice)
        assert [item["type"] for item in answer["output"]] == ["mcp_list_tools", "mcp_call", "message"]
        first, second = (stream.request.sampling for stream in model.streams)
        assert first.HasField("constraint")
        assert not second.HasField("constraint")


async def test_the_limit_of_tokens_is_for_all_rounds(ask: Any, model: Any) -> None:
    answer = await ask(ADDING, "It is 3.", max_output_tokens=len(ADDING) + 1 + 4)
    assert [stream.request.sampling.max_tokens for stream in model.streams] == [len(ADDING) + 5, 4]
    assert (answer["status"], answer["output"][-1]["content"][0]["text"]) == ("incomplete", "It i")
    cut = await ask(ADDING, "x", max_output_tokens=len(ADDING) - 20)
    assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert cut["output"][-1]["type"] == "mcp_call"
    full = await ask(ADDING, "x", max_output_tokens=len(ADDING) + 1)
    assert (full["status"], full["output"][-1]["output"]) == ("incomplete", "3")
    assert full["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_only_allowed_tools_reach_the_model(ask: Any, model: Any) -> None:
    for allowed in (["add"], {"tool_names": ["add"]}, {"read_only": True}):
        answer = await ask("x", tools=[{**MCP, "allowed_tools": allowed, "server_description": "Sums"}])
        assert [tool["name"] for tool in answer["output"][0]["tools"]] == ["add"]
        assert "calc__fail" not in model.prompt
        assert '"description": "calc: Sums\\n\\nAdd two numbers"' in model.prompt


async def test_tools_that_models_cannot_be_told_of_are_left_out(ask: Any, served: McpServer) -> None:
    served.tools = [ADD, {**ADD, "name": "with space"}, {**ADD, "name": "x" * 128}, {"title": "no name"}, 1]
    assert [tool["name"] for tool in (await ask("x"))["output"][0]["tools"]] == ["add"]


# --- approval -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_default", [False, True])
async def test_a_call_waits_for_approval(ask: Any, model: Any, served: McpServer, by_default: bool) -> None:
    tools = [{"type": "mcp", "server_label": "calc"} if by_default else ASKED]
    events = await ask(f"So: {ADDING}", tools=tools, stream=True)
    first = events[-1]["response"]
    request = first["output"][-1]
    assert request["id"].startswith("mcpr_")
    assert request == {
        "id": request["id"],
        "type": "mcp_approval_request",
        "server_label": "calc",
        "name": "add",
        "arguments": '{"a": 1, "b": 2}',
    }
    assert [event["item"] for event in events[-3:-1]] == [request, request]
    assert first["status"] == "completed"
    assert "tools/call" not in served.methods()
    approval = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    events = await ask("It is 3.", tools=tools, input=[approval], previous_response_id=first["id"], stream=True)
    second = events[-1]["response"]
    call, message = second["output"]
    assert (call["type"], call["output"], call["approval_request_id"]) == ("mcp_call", "3", request["id"])
    assert message["content"][0]["text"] == "It is 3."
    assert "So: <tool_call>calc__add" in model.prompt.replace("So:<tool", "So: <tool")
    assert "<|im_start|>tool\n3<|im_end|>" in model.prompt
    num_calls = served.methods().count("tools/call")
    user = {"role": "user", "content": "hi"}
    whole = [user, *first["output"], approval, *second["output"], {"role": "user", "content": "Thanks"}]
    await ask("x", tools=tools, input=whole)
    assert served.methods().count("tools/call") == num_calls == 1


async def test_a_call_that_is_not_approved_is_not_made(ask: Any, model: Any, served: McpServer) -> None:
    first = await ask(ADDING, tools=[ASKED])
    denial = {
        "type": "mcp_approval_response",
        "approval_request_id": first["output"][-1]["id"],
        "approve": False,
        "reason": "Too dear.",
    }
    answer = await ask("Well.", tools=[ASKED], input=[denial], previous_response_id=first["id"])
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert 'calc__add{"a": 1, "b": 2}</tool_call>' in model.prompt
    assert "<|im_start|>tool\nThe user did not approve this call. Too dear.<|im_end|>" in model.prompt
    assert "tools/call" not in served.methods()


@pytest.mark.parametrize(
    ("approval", "needs_it"),
    [
        ({"never": {"tool_names": ["add"]}}, False),
        ({"never": {"read_only": True}}, False),
        ({"never": {"tool_names": ["fail"]}}, True),
        ({"always": {"tool_names": ["fail"]}}, True),
    ],
)
async def test_approval_may_depend_on_the_tool(ask: Any, approval: Any, needs_it: bool) -> None:
    answer = await ask(ADDING, "x", tools=[{**MCP, "require_approval": approval}])
    assert answer["output"][1]["type"] == ("mcp_approval_request" if needs_it else "mcp_call")


async def test_what_cannot_be_approved_is_named(ask: Any, refused: Any, model: Any) -> None:
    first = await ask(ADDING, tools=[ASKED])
    model.streams.clear()
    approval = {"type": "mcp_approval_response", "approval_request_id": first["output"][-1]["id"], "approve": True}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": [{**approval, "approval_request_id": "mcpr_x"}]}, "input[0].approval_request_id"),
        ({"input": [{**approval, "approve": "yes"}]}, "input[0].approve"),
        ({"input": [{"type": "mcp_approval_response", "approve": True}]}, "input[0].approval_request_id"),
        ({"input": [approval], "tools": [{**ASKED, "allowed_tools": ["fail"]}]}, "input[0].approval_request_id"),
    ]
    for fields, param in cases:
        error = await refused(previous_response_id=first["id"], **{"tools": [ASKED], **fields})
        assert error["param"] == param


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "param", "remedy"),
    [
        ({"server_url": "http://evil/"}, "server_url", "give the server_label of one: calc"),
        ({"connector_id": "connector_gmail"}, "connector_id", "--mcp-server"),
        ({"headers": {"Authorization": "mine"}}, "headers", "--mcp-headers"),
        ({"authorization": "mine"}, "authorization", "--mcp-headers"),
        ({"server_label": "other"}, "server_label", "give one of calc"),
        ({"server_label": None}, "server_label", "must be a text"),
        ({"allowed_tools": "add"}, "allowed_tools", "must be a list of names"),
        ({"allowed_tools": {"read_only": 1}}, "allowed_tools.read_only", "true or false"),
        ({"allowed_tools": [1]}, "allowed_tools.tool_names", "list of texts"),
        ({"require_approval": "sometimes"}, "require_approval", "must be always, never"),
        ({"require_approval": {"never": 1}}, "require_approval.never", "must be a list of names"),
        ({"require_approval": {"seldom": {}}}, "require_approval", "must be always, never"),
    ],
)
async def test_what_a_tool_may_not_have_is_refused_by_name(
    refused: Any, served: McpServer, changes: Any, param: str, remedy: str
) -> None:
    error = await refused(tools=[WEATHER, {**MCP, **changes}])
    assert error["param"] == f"tools[1].{param}"
    assert error["message"].startswith(f"tools[1].{param}")
    assert remedy in error["message"]
    assert "mine" not in error["message"]
    assert served.seen == []


async def test_without_a_list_no_server_is_called(front: Any, served: McpServer) -> None:
    for tool, param in ((MCP, "server_label"), ({**MCP, "server_url": served.url}, "server_url")):
        body = {"model": "tiny", "input": "hi", "tools": [WEATHER, tool]}
        response = await front.http.post(RESPONSES, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, f"tools[1].{param}")
        assert "--mcp-server" in response.json()["error"]["message"]
    assert served.seen == []


async def test_other_wrong_choices_are_named(refused: Any) -> None:
    assert (await refused(tools=[MCP, MCP]))["param"] == "tools[1].server_label"
    for choice in ({"type": "mcp", "server_label": "x"}, {"type": "mcp", "server_label": "calc", "name": "x"}):
        assert (await refused(tool_choice=choice))["param"] == "tool_choice"


async def test_a_server_that_does_not_list_its_tools_fails_the_request(refused: Any, served: McpServer) -> None:
    served.status = 401
    error = await refused(424)
    assert (error["code"], error["param"]) == ("mcp_list_tools_failed", "tools[0].server_label")
    assert "status 401" in error["message"]
    assert served.url not in error["message"]
    assert "of-the-operator" not in error["message"]


# --- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_call(
    fronted: Any, writes: Any, served: McpServer, stream: bool
) -> None:
    writes(called("calc__slow"), "x")
    body = {"model": "tiny", "input": "hi", "tools": [MCP], "stream": stream}
    request = asyncio.create_task(fronted.http.post(RESPONSES, json=body))
    await asyncio.to_thread(until, served.called_slow.is_set, "the call arrives", 10)
    request.cancel()
    await asyncio.wait({request})
    await asyncio.to_thread(until, lambda: not served.open, "the session ends", 10)
    assert served.cancelled.is_set()
    assert served.open == set()


async def test_a_deadline_ends_a_call(fronted: Any, writes: Any, served: McpServer) -> None:
    writes(called("calc__slow"), "x")
    body = {"model": "tiny", "input": "hi", "tools": [MCP]}
    seconds = str(patience(1))
    response = await fronted.http.post(RESPONSES, json=body, headers={"x-request-timeout": seconds})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    await asyncio.to_thread(until, lambda: not served.open, "the session ends", 10)


async def test_a_response_in_the_background_calls_and_is_cancelled(ask: Any, fronted: Any, served: McpServer) -> None:
    async def until_status(response_id: str, *statuses: str) -> Any:
        async with asyncio.timeout(patience(10)):
            while True:
                found = (await fronted.http.get(f"{RESPONSES}/{response_id}")).json()
                if found["status"] in statuses:
                    return found
                await asyncio.sleep(0.02)

    begun = await ask(ADDING, "3.", background=True)
    found = await until_status(begun["id"], "completed", "failed")
    assert [item["type"] for item in found["output"]] == ["mcp_list_tools", "mcp_call", "message"]
    served.reset()
    begun = await ask(called("calc__slow"), "x", background=True)
    await asyncio.to_thread(until, served.called_slow.is_set, "the call arrives", 10)
    cancelled = (await fronted.http.post(f"{RESPONSES}/{begun['id']}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert cancelled["output"][-1]["status"] == "incomplete"
    await asyncio.to_thread(until, served.cancelled.is_set, "the server is told", 10)


async def test_an_input_with_tools_of_servers_is_counted(ask: Any, fronted: Any, model: Any) -> None:
    body = {"model": "tiny", "input": "hi", "tools": [MCP]}
    counted = (await fronted.http.post(f"{RESPONSES}/input_tokens", json=body)).json()
    answer = await ask("x")
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]


async def test_calls_are_counted(ask: Any, fronted: Any) -> None:
    def number(text: str, outcome: str) -> float:
        name = f'headrace_mcp_calls_total{{outcome="{outcome}",server="calc"}} '
        return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))

    before = (await fronted.http.get("/metrics")).text
    await ask(ADDING + called("calc__fail"), "x")
    after = (await fronted.http.get("/metrics")).text
    assert number(after, "ok") - number(before, "ok") == 1
    assert number(after, "tool_error") - number(before, "tool_error") == 1
    assert 'headrace_mcp_call_seconds_count{server="calc"}' in after


async def test_the_providers_client_reads_all_of_it(fronted: Any, writes: Any) -> None:
    client = AsyncOpenAI(base_url=f"{fronted.url}/v1", api_key="none", max_retries=0)
    writes(called("calc__fail") + ADDING, "Done.")
    tool: Any = MCP
    answer = await client.responses.create(model="tiny", input="hi", tools=[tool])
    assert [item.type for item in answer.output] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert answer.output_text == "Done."
    failed, good = (item for item in answer.output if item.type == "mcp_call")
    assert failed.error is not None
    assert failed.error.type == "mcp_tool_execution_error"
    assert good.output == "3"
    writes(ADDING, "Done.")
    kinds = set()
    stream = await client.responses.create(model="tiny", input="hi", tools=[tool], stream=True)
    async for event in stream:
        kinds.add(type(event).__name__)
    assert {
        "ResponseMcpListToolsInProgressEvent",
        "ResponseMcpListToolsCompletedEvent",
        "ResponseMcpCallInProgressEvent",
        "ResponseMcpCallArgumentsDeltaEvent",
        "ResponseMcpCallArgumentsDoneEvent",
        "ResponseMcpCallCompletedEvent",
    } <= kinds
    await client.close()


async def test_items_and_events_have_the_providers_types(ask: Any) -> None:
    events = await ask(ADDING + called("calc__fail") + called("calc__add"), "Done.", stream=True)
    events += await ask(ADDING, tools=[ASKED], stream=True)
    event_type: Any = pydantic.TypeAdapter(ResponseStreamEvent)
    kinds = set()
    for event in events:
        found = event_type.validate_json(json.dumps(event), strict=True)
        assert found.type == event["type"]
        if event["type"] == "response.output_item.done":
            kinds.add(type(found.item).__name__)
    assert kinds == {"McpListTools", "McpCall", "McpApprovalRequest", "ResponseOutputMessage"}


async def test_lists_of_other_servers_in_the_input_have_no_effect(fronted: Any, writes: Any) -> None:
    writes("x")
    other = {"type": "mcp_list_tools", "server_label": "other", "tools": [{"name": "f", "input_schema": {}}]}
    body = {"model": "tiny", "input": [{"role": "user", "content": "hi"}, other]}
    response = await fronted.http.post(RESPONSES, json=body)
    assert response.status_code == 200
    assert HEADER not in response.headers


async def test_a_bad_file_of_servers_is_named_at_the_start(model: Any, kit: Any, tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    twice = {"mcpServers": {"calc": {"url": "http://127.0.0.1:1/mcp"}}}
    for content, servers, problem in (
        ("{", {}, r"--mcp-config: .*mcp\.json is not JSON"),
        (json.dumps(twice), {"calc": "http://127.0.0.1:1/mcp"}, "there are two servers named 'calc'"),
    ):
        file.write_text(content)
        with pytest.raises(CannotServeError, match=problem):
            async with kit.serving_gateway(model.address, flags={"mcp_config": file, "mcp_servers": servers}):
                pass
