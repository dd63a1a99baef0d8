"""The concatenation of a stream equals the whole answer, for every answer and every cut into messages.

Thousands of requests are made up; HEADRACE_SOAK=1 makes two hundred times as many (`python -m tests.soak gateway`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.gateway.chat.choice import Choice, Piece, WholeChoice
from headrace.gateway.chat.generation import Account, Job, Plan
from headrace.gateway.chat.logprobs import ChatLogprobs, CompletionLogprobs
from headrace.gateway.chat.output import Reading, WholeChat
from headrace.gateway.chat.output_parsers.families import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from headrace.gateway.chat.sampling import Sampling
from headrace.gateway.chat.tools import ToolUse
from headrace.gateway.openai.answers import Identity, Shown, whole_chat, whole_completion
from headrace.gateway.openai.streams import ChatStream, CompletionStream
from headrace.protos.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, GenerateRequest, GenerateResponse

SPECIAL = frozenset({0, 1})
TABLE = [
    b"<s>",
    b"</s>",
    *[bytes([i]) for i in b"ab"],
    b"ab",
    b"ba",
    *[bytes([i]) for i in "é€".encode()],
    "a€".encode(),
]
TOKENS = st.lists(st.integers(0, len(TABLE) + 1), max_size=12)
SOAK = 200 if os.environ.get("HEADRACE_SOAK") else 1
STOPS = st.lists(st.text("abé€", min_size=1, max_size=3), max_size=3)


def messages(tokens: list[int], cuts: list[int], stopped: bool) -> list[GenerateResponse]:
    """The tokens spread over messages that end at the cuts."""
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        message = GenerateResponse(start_pos=start, token_ids=tokens[start:end])
        for token in tokens[start:end]:
            message.logprobs.add(logprob=-token, rank=1, top_token_ids=[token], top_logprobs=[-token])
        found.append(message)
    found[0].num_cached_tokens = 3
    found[-1].finish.reason = FINISH_REASON_STOP if stopped else FINISH_REASON_LENGTH
    if stopped:
        found[-1].finish.stop_token_id = tokens[-1]
    return found


def run(tokens: list[int], cuts: list[int], stopped: bool, sampling: Sampling) -> list[Piece]:
    choice = Choice(TABLE, SPECIAL, sampling, block_size=2)
    pieces = []
    for message in messages(tokens, cuts, stopped):
        pieces.append(choice.push(message))
        if pieces[-1].ending is not None:
            break
    return pieces


def account(pieces: list[Piece]) -> Any:
    """Everything that a client can observe in some pieces."""
    logprobs = [one for piece in pieces for one in piece.logprobs]
    return "".join(p.text for p in pieces), logprobs, pieces[-1].ending, sum(p.num_tokens for p in pieces)


@settings(max_examples=250 * SOAK, deadline=None)
@given(
    tokens=TOKENS,
    stops=STOPS,
    stopped=st.booleans(),
    include=st.booleans(),
    skip=st.booleans(),
    logprobs=st.sampled_from([None, 1]),
    lists_all=st.booleans(),
    data=st.data(),
)
def test_the_cut_into_messages_changes_nothing(
    tokens: list[int],
    stops: list[str],
    stopped: bool,
    include: bool,
    skip: bool,
    logprobs: int | None,
    lists_all: bool,
    data: st.DataObject,
) -> None:
    stopped = stopped and bool(tokens)
    sampling = Sampling(
        stop=stops, include_stop=include, skip_special_tokens=skip, logprobs=logprobs, lists_hidden_end=lists_all
    )
    whole = account(run(tokens, [], stopped, sampling))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    if stopped:  # a finish comes with the token that ended the generation
        cuts = [cut for cut in cuts if cut < len(tokens)]
    pieces = run(tokens, cuts, stopped, sampling)
    assert account(pieces) == whole
    assert all(piece.ending is None for piece in pieces[:-1])
    text, found, ending, num_tokens = whole
    assert ending.num_generated_tokens == num_tokens
    assert ending.num_cached_tokens == 2, "whole blocks"
    if logprobs is not None:
        offsets = [one.offset for one in found]
        assert offsets == sorted(offsets)
        assert all(offset < len(text) for offset in offsets) or ending.stop_reason is None or lists_all
        if lists_all:
            assert len(found) == num_tokens
            assert all(offset <= len(text) for offset in offsets)


# --- whole requests, from the worker's messages to the bytes that a client gets ------------------------------------

WHO = Identity("id", "chat.completion", 1, "tiny", "fp")
SCHEMAS: dict[str, Any] = {"turn": {"type": "object"}, "stop": {}}
BYTES = [bytes([i]) for i in range(256)] + [b"</s>", b"<tool_call>", b"\xf0\x9f", b'", "', b"</"]
END = 256
# What models write, whole and broken off, and what only looks like it.
FRAGMENTS = {
    "hermes": [
        '<tool_call>\n{"name": "turn", "arguments": {"by": "l\u00e9ft", "deep": {"a": [1, {"b": "}"}]}}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>',
        "<tool_call>",
        '{"name": "turn"}',
    ],
    "llama3": [
        '{"name": "turn", "parameters": {"by": "\\"x\\""}}',
        '; {"name": "stop", "parameters": {}}',
        '{"name": 1}',
    ],
    "mistral": ['[TOOL_CALLS] [{"name": "turn", "arguments": {"by": "\U0001f600"}}]', "[TOOL_CALLS]"],
    "pythonic": ["[turn(by='left'), stop()]", "[turn(by="],
}
TEXTS = ["<think>", "</think>", "Hm. ", "\n\n", "caf\u00e9 \U0001f600", "< ", "ab", "{", "."]


# Stop strings.
CUTTING = ["ab", ".", "\u00e9", "\U0001f600", "</think>\n", "}}", "H"]


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A family, and the tokens of something that a model of it may write; not always whole characters."""
    family = draw(st.sampled_from(sorted(FRAGMENTS)))
    text = "".join(draw(st.lists(st.sampled_from(TEXTS + FRAGMENTS[family] * 4), min_size=1, max_size=6)))
    raw = text.encode()[: draw(st.sampled_from([None, None, None, 17, 60, 75, 110]))]
    tokens: list[int] = []
    while raw:
        longer = [i for i in range(END + 1, len(BYTES)) if raw.startswith(BYTES[i])]
        token = longer[0] if longer and draw(st.booleans()) else raw[0]
        tokens.append(token)
        raw = raw[len(BYTES[token]) :]
    return family, [*tokens, *draw(st.lists(st.integers(0, len(BYTES)), max_size=2))]


def spread(tokens: list[int], cuts: Sequence[int], stopped: bool) -> list[GenerateResponse]:
    """The worker's messages, with an end of sequence if it stopped."""
    found = messages([*tokens, END] if stopped else tokens, [cut for cut in cuts if cut <= len(tokens)], stopped)
    for token in PROMPT[1:]:
        found[0].prompt_logprobs.add(logprob=-token / 4, rank=2, top_token_ids=[token], top_logprobs=[-token / 4])
    return found


PROMPT = [100, 101, 102]


class Request:
    """A made-up request, run twice: as a stream over any cuts, and whole over one message."""

    def __init__(self, draw: Any) -> None:
        self.family, _ = first = draw(answers())
        self.written = [first[1], *(draw(answers())[1] for _ in range(draw(st.integers(0, 2))))]
        self.stopped = [draw(st.booleans()) for _ in self.written]
        self.cuts = [sorted(draw(st.lists(st.integers(0, len(one)), max_size=10))) for one in self.written]
        self.logprobs = draw(st.sampled_from([None, 0, 1]))
        self.sampling = Sampling(
            stop=draw(st.just([]) | st.lists(st.sampled_from(CUTTING), max_size=3)),
            include_stop=draw(st.booleans()),
            skip_special_tokens=draw(st.booleans()),
            logprobs=self.logprobs,
            lists_hidden_end=draw(st.booleans()),
            prompt_logprobs=draw(st.sampled_from([None, 1])),
        )
        self.shown = Shown(
            usage=True,
            running_usage=draw(st.booleans()),
            num_prompt_tokens=len(PROMPT),
            prompts=[PROMPT] * len(self.written),
            token_ids=draw(st.booleans()),
            echoes=draw(st.sampled_from([[], ["def"] * len(self.written)])),
        )
        if self.sampling.prompt_logprobs is None and self.logprobs is not None:
            self.shown = Shown(usage=True, token_ids=self.shown.token_ids, prompts=self.shown.prompts)
        reasoning = draw(st.sampled_from([None, REASONING_FORMATS["think"]]))
        use = ToolUse(schemas=draw(st.sampled_from([SCHEMAS, SCHEMAS, SCHEMAS, {}])), parallel=draw(st.booleans()))
        self.reading = Reading(
            OutputFormat(TOOL_FORMATS[self.family], reasoning), use, draw(st.booleans()), frozenset()
        )
        job = Job(None, PROMPT, self.sampling, len(self.written))  # type: ignore[arg-type]
        self.plan = Plan(job, [GenerateRequest() for _ in self.written])

    def pieces(self, cut: bool) -> list[tuple[int, Piece]]:
        """The pieces of all choices, with those of the split choices interleaved."""
        found: list[tuple[int, int, Piece]] = []
        for index, tokens in enumerate(self.written):
            choice = Choice(BYTES, frozenset({END}), self.sampling, prompt=PROMPT)
            for number, message in enumerate(spread(tokens, self.cuts[index] if cut else [], self.stopped[index])):
                found.append((number, index, choice.push(message)))
                if found[-1][2].ending is not None:
                    break
        return [(index, piece) for _, index, piece in sorted(found, key=lambda one: one[:2])]

    def run(self, stream: Any, wholes: Sequence[Any], is_chat: bool) -> tuple[list[Any], Any]:
        """Events of the stream; the account of the whole, whose choices get their pieces."""
        readers = [self.reading.choice() for _ in self.written]
        account, raw = Account([self.plan]), b""
        for index, piece in self.pieces(cut=True):
            read = readers[index].push(piece) if is_chat else piece
            raw += stream.piece(index, read)
            if read.ending is not None:
                account.ended(index, read.ending)
        raw += stream.end(account.usage)
        *events, done = raw.decode().rstrip("\n").split("\n\n")
        assert done == "data: [DONE]"
        readers, whole_account = [self.reading.choice() for _ in self.written], Account([self.plan])
        for index, piece in self.pieces(cut=False):
            read = readers[index].push(piece) if is_chat else piece
            wholes[index].push(read)
            if read.ending is not None:
                whole_account.ended(index, read.ending)
        return [json.loads(event.removeprefix("data: ")) for event in events], whole_account.usage


def of_choice(events: list[Any], index: int) -> list[Any]:
    return [event["choices"][0] for event in events if event["choices"] and event["choices"][0]["index"] == index]


def joined(parts: list[Any], name: str) -> list[Any]:
    return [one for part in parts for one in part.get(name) or ()]


def check_common(request: Request, events: list[Any], whole: Any) -> None:
    """Checks for chats and completions alike."""
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    if request.shown.running_usage:
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
    else:
        assert all(event["usage"] is None for event in events[:-1])
    for choice in whole["choices"]:
        parts = of_choice(events, choice["index"])
        *before, last = parts
        assert all(part["finish_reason"] is None for part in before)
        for name in ("finish_reason", "stop_reason"):
            assert last[name] == choice[name]
        assert joined(parts, "token_ids") == choice.get("token_ids", [])
    if request.shown.token_ids:
        assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]


@settings(max_examples=500 * SOAK, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_streamed_chat_adds_up_to_the_whole_one(data: st.DataObject) -> None:
    request = Request(data.draw)
    logprobs = None if request.logprobs is None else ChatLogprobs(BYTES)
    wholes = [WholeChat(24) for _ in request.written]
    events, usage = request.run(ChatStream(WHO, logprobs, request.shown), wholes, is_chat=True)
    whole = json.loads(whole_chat(WHO, wholes, logprobs, usage, request.shown, BYTES))
    check_common(request, events, whole)
    for choice in whole["choices"]:
        parts = of_choice(events, choice["index"])
        deltas = [part["delta"] for part in parts]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        message = choice["message"]
        assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert reasoning == message.get("reasoning_content", "")
        calls: list[list[str]] = []
        for call in joined(deltas, "tool_calls"):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        expected = [[one["function"]["name"], one["function"]["arguments"]] for one in message.get("tool_calls", ())]
        assert calls == expected
        listed = [one for part in parts if part["logprobs"] for one in part["logprobs"]["content"]]
        assert listed == (choice["logprobs"]["content"] if choice["logprobs"] else [])


@settings(max_examples=250 * SOAK, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_streamed_completion_adds_up_to_the_whole_one(data: st.DataObject) -> None:
    request = Request(data.draw)
    logprobs = None if request.logprobs is None else CompletionLogprobs(BYTES, request.logprobs)
    wholes = [WholeChoice() for _ in request.written]
    events, usage = request.run(CompletionStream(WHO, logprobs, request.shown), wholes, is_chat=False)
    whole = json.loads(whole_completion(WHO, wholes, logprobs, usage, request.shown, BYTES))
    check_common(request, events, whole)
    for choice in whole["choices"]:
        parts = of_choice(events, choice["index"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert joined(parts, "prompt_token_ids") == choice.get("prompt_token_ids", [])
        for name, values in (choice["logprobs"] or {}).items():
            assert [one for part in parts if part["logprobs"] for one in part["logprobs"][name]] == values
        if choice["logprobs"]:
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == sorted(offsets)
            assert all(offset <= len(choice["text"]) for offset in offsets)


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "router" in request.fixturenames:
        request.getfixturevalue("router").reset()


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=25 * SOAK, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_a_stream_over_http_adds_up_to_the_whole_answer(
    gateway: Any, router: Any, kit: Any, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 263), min_size=1, max_size=20), label="tokens")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens))), label="cuts") | {len(tokens)})
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "n": data.draw(st.integers(1, 2), label="n"),
        "stop": data.draw(st.lists(st.text("ab\n", min_size=1, max_size=2), max_size=2), label="stop"),
        "logprobs": data.draw(st.booleans(), label="logprobs"),
        "skip_special_tokens": data.draw(st.booleans(), label="skip"),
    }

    async def cut(_: Any, stream: Any, send: Any) -> None:
        for start, end in zip([0, *cuts], cuts, strict=False):
            finish = kit.inference_pb2.FINISH_REASON_LENGTH if end == len(tokens) else None
            await send(tokens[start:end], start, finish)

    router.script = cut
    whole = (await gateway.http.post("/v1/chat/completions", json=fields)).json()
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    raw = (await gateway.http.post("/v1/chat/completions", json=fields)).text
    *events, usage, done = [event.removeprefix("data: ") for event in raw.rstrip("\n").split("\n\n")]
    assert done == "[DONE]"
    assert json.loads(usage)["usage"] == whole["usage"]
    chunks = [json.loads(event)["choices"][0] for event in events]
    for choice in whole["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["delta"].get("content", "") for chunk in own) == choice["message"]["content"]
        assert [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]] == [choice["finish_reason"]]
        streamed = [one for chunk in own if chunk["logprobs"] for one in chunk["logprobs"]["content"]]
        assert streamed == (choice["logprobs"]["content"] if choice["logprobs"] else [])
