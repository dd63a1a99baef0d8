"""The gRPC API has the abilities of the HTTP API: tools, structure, reasoning, log-probabilities and the rest."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.struct_pb2 import Struct

from headrace.protos import text_pb2, text_pb2_grpc
from headrace.protos.inference_pb2 import Choices, Constraint, JsonObject
from headrace.protos.status import Reason, StatusError, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [text_pb2.ChatMessage(role="user", content="hi")]
WEATHER = text_pb2.ChatTool(
    name="weather",
    description="Tells it",
    parameters='{"type": "object", "properties": {"city": {"type": "string"}, "at": {"type": "integer"}}}',
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
HERMES = """\
{%- for tool in tools or [] %}{{ tool | tojson }}<tool_call>{%- endfor %}
{%- for message in messages %}{{ message.role + ': ' + (message.content or '') }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{ call.id + call.function | tojson }}{%- endfor %}
{{- message.tool_call_id }}<|im_end|>{%- endfor %}
{%- if enable_thinking is defined %}{{ 'think ' if enable_thinking else 'answer ' }}{%- endif %}{{ mood }}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(kit_of_module: Any, tiny_files: dict[str, bytes]) -> AsyncIterator[Any]:
    async with kit_of_module.serving_model(tiny_files, HERMES) as fake:
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def text(kit_of_module: Any, router: Any) -> AsyncIterator[Any]:
    async with (
        kit_of_module.serving_gateway(router.address) as gateway,
        grpc.aio.insecure_channel(gateway.grpc_address) as channel,
    ):
        yield text_pb2_grpc.TextStub(channel)


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


async def chat(text: Any, **fields: Any) -> list[text_pb2.ChatResponse]:
    fields.setdefault("messages", HI)
    return [answer async for answer in text.Chat(text_pb2.ChatRequest(**fields))]


async def complete(text: Any, **fields: Any) -> list[text_pb2.CompleteResponse]:
    return [answer async for answer in text.Complete(text_pb2.CompleteRequest(text="hello", **fields))]


async def failure(answers: Any) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers
    return error_of(caught.value)


async def test_a_call_comes_in_parts_that_add_up(text: Any, router: Any) -> None:
    router.answer = "Let me see. " + CALL
    answers = await chat(text, tools=[WEATHER])
    assert "".join(answer.content for answer in answers) == "Let me see."
    calls = [call for answer in answers for call in answer.tool_calls]
    assert (calls[0].name, calls[0].index) == ("weather", 0)
    assert calls[0].id.startswith("call_")
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Köln"}
    assert answers[-1].finish_reason == "tool_calls"
    assert '"description": "Tells it"' in router.prompt
    assert '"city": {"type": "string"}, "at"' in router.prompt, "the order is the caller's"


async def test_a_tool_choice_is_enforced(text: Any, router: Any) -> None:
    def grammar() -> str:
        return str(router.sampling.constraint.grammar)

    router.answer = CALL
    await chat(text, tools=[WEATHER], tool_choice={"mode": text_pb2.CHAT_TOOL_MODE_REQUIRED})
    assert "%json" in grammar()
    answers = await chat(text, tools=[WEATHER], tool_choice={"tool": "weather"}, parallel_tool_calls=False)
    assert "weather" in grammar()
    assert answers[-1].finish_reason == "stop"
    answers = await chat(text, tools=[WEATHER], tool_choice={"mode": text_pb2.CHAT_TOOL_MODE_NONE})
    assert not grammar()
    assert "".join(answer.content for answer in answers) == CALL
    strict = text_pb2.ChatTool(name="f", strict=True)
    await chat(text, tools=[strict], tool_choice={"mode": text_pb2.CHAT_TOOL_MODE_AUTO})
    assert "free_text" in grammar() or "TEXT" in grammar()
    error = await failure(chat(text, tools=[WEATHER], tool_choice={"tool": "fly"}))
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "tool_choice")


async def test_calls_and_their_results_go_to_the_template(text: Any, router: Any) -> None:
    call = text_pb2.ChatToolCall(id="call_7", name="weather", arguments='{"city": "Bonn"}')
    messages = [
        *HI,
        text_pb2.ChatMessage(role="assistant", tool_calls=[call], reasoning_content="Hm."),
        text_pb2.ChatMessage(role="tool", tool_call_id="call_7", content="rain"),
    ]
    await chat(text, messages=messages, tools=[WEATHER])
    prompt = router.prompt
    assert 'call_7{"name": "weather", "arguments": {"city": "Bonn"}}' in prompt
    assert "<think>Hm.</think>" in prompt
    assert "tool: raincall_7" in prompt


async def test_reasoning_comes_apart_and_is_counted(text: Any, router: Any) -> None:
    router.answer = "<think>Hm.</think>\n\nYes."
    answers = await chat(text, reasoning_effort="high")
    assert "".join(answer.reasoning_content for answer in answers) == "Hm."
    assert "".join(answer.content for answer in answers) == "Yes."
    assert answers[-1].usage.reasoning_tokens == 3
    assert "think " in router.prompt
    kwargs = Struct()
    kwargs.update({"mood": "merry"})
    await chat(text, chat_template_kwargs=kwargs)
    assert router.prompt.endswith("merry")


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint(json_schema='{"type": "object"}'), "constraint.json_schema"),
        (Constraint(json_object=JsonObject()), "constraint.json_object"),
        (Constraint(regex="a+"), "constraint.regex"),
        (Constraint(choice=Choices(texts=["a", "b"])), "constraint.choice"),
        (Constraint(grammar="start: /a/"), "constraint.grammar"),
    ],
)
async def test_a_constraint_goes_upstream_as_it_is_and_comes_back_by_its_name(
    text: Any, router: Any, constraint: Constraint, field: str
) -> None:
    async def refuse(_: Any, stream: Any, send: Any) -> None:
        assert stream.request.sampling.constraint == constraint
        wire = f"sampling.{field}"
        raise StatusError(Reason.INVALID_FIELD, f"{wire} is bad", field=wire)

    router.script = refuse
    params = text_pb2.TextParams(constraint=constraint)
    for asked in (chat(text, params=params), complete(text, params=params)):
        error = await failure(asked)
        assert (error.reason, error.field, error.message) == (Reason.INVALID_FIELD, field, f"{field} is bad")


async def test_log_probabilities_and_tokens_come_with_the_text(text: Any, router: Any, kit: Any) -> None:
    router.answer = "aé"
    params = text_pb2.TextParams(logprobs=1, return_token_ids=True)
    whole = [*kit.tokens_of("aé"), kit.EOS]
    for answers, listed in (
        (await chat(text, params=params), whole[:-1]),
        (await complete(text, params=params), whole),
    ):
        logprobs = [one for answer in answers for one in answer.logprobs]
        assert [one.token_id for one in logprobs] == listed
        assert b"".join(one.token for one in logprobs[:3]) == "aé".encode()
        assert logprobs[0].logprob == pytest.approx(-100 / 128)
        assert [(top.token_id, top.token, top.logprob) for top in logprobs[0].top] == [(0, b"<|bos|>", 0.0)]
        assert [token for answer in answers for token in answer.token_ids] == whole
    answers = await complete(text, params=text_pb2.TextParams(prompt_logprobs=0))
    assert [one.token for one in answers[0].prompt_logprobs] == [b"hello"]
    assert not any(answer.prompt_logprobs for answer in answers[1:])
    error = await failure(chat(text, params=text_pb2.TextParams(prompt_logprobs=0)))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "prompt_logprobs")


async def test_several_answers_are_numbered_and_the_very_last_message_has_the_usage(text: Any, router: Any) -> None:
    router.answer = "ab"
    params = text_pb2.TextParams(n=3, seed=5)
    for answers, name in ((await chat(text, params=params), "content"), (await complete(text, params=params), "text")):
        for index in range(3):
            own = [answer for answer in answers if answer.index == index]
            assert "".join(getattr(answer, name) for answer in own) == "ab"
            assert [answer.finish_reason for answer in own if answer.HasField("finish_reason")] == ["stop"]
        assert [answer.HasField("usage") for answer in answers] == [False] * (len(answers) - 1) + [True]
        assert answers[-1].usage.completion_tokens == 9


async def test_every_other_parameter_reaches_the_worker(text: Any, router: Any, kit: Any) -> None:
    params = text_pb2.TextParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=2**64 - 1,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[7],
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=2.0,
        logit_bias={9: -3.0},
        allowed_token_ids=[100, 101],
        bad_words=["w"],
        truncate_prompt_tokens=1,
        prompt_cache_key="key",
        cache_salt="salt",
        priority=-4,
    )
    await complete(text, params=params)
    request = router.streams[-1].request
    sampling = request.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos"):
        assert getattr(sampling, name) == getattr(params, name), name
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert getattr(sampling, name) == getattr(params, name), name
    assert (list(sampling.stop_token_ids), dict(sampling.logit_bias)) == ([7], {9: -3.0})
    assert list(sampling.allowed_token_ids) == [100, 101]
    assert [list(word.token_ids) for word in sampling.bad_words] == [kit.tokens_of("w"), [263]]
    assert list(request.token_ids) == [262]
    assert (request.session_key, request.cache_salt, request.priority) == ("key", "salt", -4)


async def test_stops_and_special_tokens_are_shown_on_request(text: Any, router: Any, kit: Any) -> None:
    async def special(_: Any, stream: Any, send: Any) -> None:
        await send([1, *kit.tokens_of("ab.c")], 0, kit.inference_pb2.FINISH_REASON_LENGTH)

    router.script = special
    params = text_pb2.TextParams(stop=["."], include_stop=True, skip_special_tokens=False)
    assert "".join(answer.content for answer in await chat(text, params=params)) == "<|im_start|>ab."
    assert "".join(answer.text for answer in await complete(text)) == "ab.c"


async def test_the_last_message_goes_on(text: Any, router: Any) -> None:
    messages = [*HI, text_pb2.ChatMessage(role="assistant", content="Well,")]
    await chat(text, messages=messages, continue_final_message=True)
    assert router.prompt.endswith("Well,")
    error = await failure(chat(text, continue_final_message=True, add_generation_prompt=True))
    assert error.field == "continue_final_message"


async def test_a_conversation_is_tokenized_with_its_tools(text: Any) -> None:
    plain = await text.Tokenize(text_pb2.TokenizeRequest(messages=HI))
    with_tools = await text.Tokenize(text_pb2.TokenizeRequest(messages=HI, tools=[WEATHER]))
    assert len(with_tools.token_ids) > len(plain.token_ids)
    bare = await text.Tokenize(text_pb2.TokenizeRequest(text="hello", add_special_tokens=False))
    assert list(bare.token_ids) == [262]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [text_pb2.ChatTool(name="f", parameters="{")]}, "tools[0].parameters"),
        ({"tools": [text_pb2.ChatTool(name="a b")]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": {"mode": text_pb2.CHAT_TOOL_MODE_REQUIRED}}, "tool_choice"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"params": text_pb2.TextParams(constraint=Constraint())}, "constraint"),
        ({"params": text_pb2.TextParams(constraint=Constraint(regex=""))}, "constraint.regex"),
        ({"params": text_pb2.TextParams(logprobs=21)}, "logprobs"),
        ({"params": text_pb2.TextParams(n=0)}, "n"),
        ({"params": text_pb2.TextParams(bad_words=[" "])}, "bad_words"),
        ({"params": text_pb2.TextParams(max_tokens=0)}, "max_tokens"),
        ({"messages": [text_pb2.ChatMessage(role="robot")]}, "messages[0].role"),
    ],
)
async def test_what_is_wrong_is_named_as_in_the_proto(text: Any, router: Any, fields: Any, field: str) -> None:
    error = await failure(chat(text, **fields))
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
    assert field.rpartition(".")[2].split("[")[0] in error.message
    assert router.streams == []
