"""The concatenation of a stream equals the whole answer, for every answer and every cut into messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.gateway.choice import Choice, Piece
from headrace.gateway.sampling import Sampling
from headrace.protos.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, GenerateResponse

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
    choice = Choice(TABLE, SPECIAL, sampling)
    pieces = []
    for message in messages(tokens, cuts, stopped):
        pieces.append(choice.push(message))
        if pieces[-1].ending is not None:
            break
    return pieces


def account(pieces: list[Piece]) -> Any:
    """All that a client can tell from some pieces."""
    logprobs = [one for piece in pieces for one in piece.logprobs]
    return "".join(p.text for p in pieces), logprobs, pieces[-1].ending, sum(p.num_tokens for p in pieces)


@given(
    tokens=TOKENS,
    stops=STOPS,
    stopped=st.booleans(),
    include=st.booleans(),
    skip=st.booleans(),
    logprobs=st.sampled_from([None, 1]),
    data=st.data(),
)
def test_the_cut_into_messages_changes_nothing(
    tokens: list[int],
    stops: list[str],
    stopped: bool,
    include: bool,
    skip: bool,
    logprobs: int | None,
    data: st.DataObject,
) -> None:
    stopped = stopped and bool(tokens)
    sampling = Sampling(stop=stops, include_stop=include, skip_special_tokens=skip, logprobs=logprobs)
    whole = account(run(tokens, [], stopped, sampling))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    if stopped:  # a finish comes with the token that ended the generation
        cuts = [cut for cut in cuts if cut < len(tokens)]
    pieces = run(tokens, cuts, stopped, sampling)
    assert account(pieces) == whole
    assert all(piece.ending is None for piece in pieces[:-1])
    text, found, ending, num_tokens = whole
    assert ending.num_generated_tokens == num_tokens
    assert ending.num_cached_tokens == 3
    if logprobs is not None:
        offsets = [one.offset for one in found]
        assert offsets == sorted(offsets)
        assert all(offset < len(text) for offset in offsets) or ending.stop_reason is None


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "router" in request.fixturenames:
        request.getfixturevalue("router").reset()


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
