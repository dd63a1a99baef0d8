"""`headrace explain`: tokens in, the router's terms out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from click.testing import CliRunner, Result

from headrace.cli.fleet.explain import body_of, difference, rows_of, tokens_of
from headrace.cli.main import cli
from headrace.common.commands import CommandError
from headrace.protos import router_pb2, router_pb2_grpc, worker_pb2
from headrace.protos.cache_scope import scoped_salt
from headrace.protos.status import Reason, StatusError

COST = router_pb2.CostTerms(prefill_ms=12.34, decode_ms=100, total_ms=112.34, ttft_ms=12.34)
TOLD = router_pb2.ExplainResponse(
    workers=[
        router_pb2.ExplainedWorker(
            worker_id="w0", state=router_pb2.WORKER_STATE_READY, num_cached_tokens=32, cost=COST
        ),
        router_pb2.ExplainedWorker(worker_id="w1", state=router_pb2.WORKER_STATE_DRAINING, detail="the worker drains"),
    ],
    worker_id="w0",
    reason=router_pb2.PLACEMENT_REASON_PREFIX,
    num_prompt_tokens=40,
)


class FakeRouter(router_pb2_grpc.RouterServicer):  # type: ignore[misc]
    """Records its requests."""

    def __init__(self) -> None:
        self.asked: list[router_pb2.ExplainRequest] = []
        self.address = ""

    def Explain(self, request: router_pb2.ExplainRequest, context: Any) -> router_pb2.ExplainResponse:
        self.asked.append(request)
        if request.model == "nosuch":
            status = StatusError(Reason.MODEL_NOT_FOUND, "no model 'nosuch' here")
            context.set_trailing_metadata(status.trailing_metadata())
            context.abort(status.row.grpc_code, status.message)
        return TOLD


@pytest.fixture
def router(tmp_path: Path, cache: Path) -> Iterator[FakeRouter]:
    fake = FakeRouter()
    fake.address = f"unix:{tmp_path}/router.sock"
    server = grpc.server(ThreadPoolExecutor(2))
    router_pb2_grpc.add_RouterServicer_to_server(fake, server)
    server.add_insecure_port(fake.address)
    server.start()
    yield fake
    server.stop(None).wait()


def explain(*args: str) -> Result:
    return CliRunner().invoke(cli, ["explain", *args])


def test_tokens_are_asked_for_as_they_are_and_the_choice_is_marked(router: FakeRouter) -> None:
    done = explain("--router", router.address, "--tokens", "1, 2 3", "--session-key", "s", "--max-tokens", "9")
    assert done.exit_code == 0, done.output
    (asked,) = router.asked
    assert (list(asked.token_ids), asked.session_key, asked.max_tokens) == ([1, 2, 3], "s", 9)
    lines = done.stdout.splitlines()
    assert any(line.startswith("-> w0") and "32 of 40" in line and "12.3" in line for line in lines)
    assert lines[-1] == "w0: it is the cheapest, and none has more of the prompt cached"


def test_a_tenant_is_asked_about_with_the_salt_that_gateways_send_for_it(router: FakeRouter) -> None:
    for flags in (["--tenant", "mill"], ["--tenant", "mill", "--cache-group", "house"]):
        assert explain("--router", router.address, "--tokens", "1", "--cache-salt", "s", *flags).exit_code == 0
    assert [asked.cache_salt for asked in router.asked] == [
        scoped_salt("tenant/mill", "s"),
        scoped_salt("group/house", "s"),
    ]


def test_json_is_the_answer_of_the_router(router: FakeRouter) -> None:
    done = explain("--router", router.address, "--tokens", "1", "--json")
    told = json.loads(done.stdout)
    assert (told["worker_id"], told["reason"]) == ("w0", "PLACEMENT_REASON_PREFIX")
    assert told["workers"][0]["cost"]["total_ms"] == 112.34
    assert not router.asked[0].HasField("max_tokens")


def test_a_worker_that_takes_no_requests_has_no_terms() -> None:
    first, second = rows_of(TOLD)
    assert len(first) == len(second)
    assert second[:3] == ["   w1", "draining", ""]


def test_a_role_is_beside_the_name() -> None:
    told = router_pb2.ExplainResponse()
    told.CopyFrom(TOLD)
    told.workers[0].role, told.workers[1].role = worker_pb2.ROLE_DECODE, worker_pb2.ROLE_PREFILL
    assert [row[0] for row in rows_of(told)] == ["-> w0 (decode)", "   w1 (prefill)"]


def test_what_the_router_refuses_is_told(router: FakeRouter) -> None:
    done = explain("--router", router.address, "--tokens", "1", "--model", "nosuch")
    assert done.exit_code == 1
    assert "no model 'nosuch' here" in done.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "either TEXT"),
        (("hello", "--tokens", "1"), "either TEXT"),
        (("--tokens", "1"), "--router ADDR"),
        (("--router", "unix:/nowhere.sock", "--tokens", "one"), "token ids such as 1,2,3"),
        (("--router", "127.0.0.1:1", "--tokens", "1"), "no router answers at 127.0.0.1:1; check the address, and give"),
        (("--router", "unix:/nowhere.sock", "--url", "http://127.0.0.1:9", "hello"), "no gateway at"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_remedy(cache: Path, args: tuple[str, ...], said: str) -> None:
    done = explain(*args)
    assert done.exit_code != 0
    assert said in done.output


def test_a_gateway_that_is_there_and_does_not_answer_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def silence(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("timed out", request=request)

    made, transport = httpx.Client, httpx.MockTransport(silence)
    monkeypatch.setattr(httpx, "Client", lambda **options: made(transport=transport, **options))
    done = explain("--router", "unix:/nowhere.sock", "--url", "http://gateway:8000", "hello")
    assert (done.exit_code, done.stderr) == (1, "error: http://gateway:8000 did not answer: timed out\n")


def test_a_text_is_tokenized_as_a_chat_by_the_gateway(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((str(request.url), json.loads(request.content), request.headers["authorization"]))
        return httpx.Response(200, json={"tokens": [5, 6]})

    made = httpx.Client
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "Client", lambda **options: made(transport=transport, **options))
    flags = ("--router", router.address, "--url", "http://h:1/v1", "--model", "m", "--api-key", "hr-1")
    done = explain("hello", *flags)
    assert done.exit_code == 0, done.output
    body = {"messages": [{"role": "user", "content": "hello"}], "return_image_identities": True, "model": "m"}
    assert seen == [("http://h:1/tokenize", body, "Bearer hr-1")]
    assert list(router.asked[0].token_ids) == [5, 6]


def test_token_ids_are_read_in_any_usual_form() -> None:
    assert tokens_of("1,2\n3 4") == [1, 2, 3, 4]
    for wrong in ("-1", "4294967296", "1" * 5000, "\u00b2"):
        with pytest.raises(CommandError):
            tokens_of(wrong)


def test_the_first_difference_of_two_prompts_is_shown_with_the_texts_around() -> None:
    lines = difference([1, 2, 3, 4], [1, 2, 9, 4, 5], lambda tokens: ",".join(map(str, tokens)))
    assert "of 4 and 5 tokens, have their first difference at token 2;" in lines[0]
    assert lines[1:] == ["   this one: '1,2' then '3,4'", "  the other: '1,2' then '9,4,5'"]
    assert difference([1], [1], str) == ["The prompts are the same: 1 tokens."]
    assert "at token 1;" in difference([1], [1, 2], str)[0]


def test_images_are_told_apart_and_have_no_text() -> None:
    first, other = [1, *range(1 << 31, (1 << 31) + 20), 7], [1, *range((1 << 31) + 50, (1 << 31) + 70), 7]
    lines = difference(first, other, lambda tokens: ",".join(map(str, tokens)))
    assert "at token 1;" in lines[0]
    assert lines[1:] == [
        "   this one: '1' then '<12 tokens of images>'",
        "  the other: '1' then '<12 tokens of images>'",
    ]
    assert difference([1, 1 << 31, 7], [1, 1 << 31, 8], str)[1].endswith("'[1]<1 tokens of images>' then '[7]'")


def test_the_bodies_of_two_requests_are_compared(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/detokenize":
            return httpx.Response(200, json={"prompt": "".join(map(chr, body["tokens"]))})
        said = "|".join(str(message["content"]) for message in body["messages"])
        return httpx.Response(200, json={"tokens": list(map(ord, said))})

    monkeypatch.setattr(
        "headrace.cli.fleet.fleet_access.ApiAccess.client",
        lambda self, url, timeout_s: httpx.Client(transport=httpx.MockTransport(answer)),
    )
    for name, checksum in (("a", "11"), ("b", "22")):
        body = {
            "system": [{"type": "text", "text": f"sum={checksum}"}],
            "messages": [{"role": "user", "content": "hello"}],
        }
        (tmp_path / name).write_text(json.dumps(body))
    result = CliRunner().invoke(
        cli,
        [
            *("explain", f"@{tmp_path / 'a'}", "--against", f"@{tmp_path / 'b'}"),
            *("--router", router.address, "--url", "http://gateway.example"),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "have their first difference at token 4" in result.output
    assert "this one: 'sum=' then '11|hello'" in result.output


@pytest.mark.parametrize("content", ["{", "[]", '{"prompt": "hi"}'])
def test_a_file_that_is_no_chat_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "body").write_text(content)
    with pytest.raises(CommandError, match="is not the body of a"):
        body_of(f"@{tmp_path / 'body'}")
    with pytest.raises(CommandError, match="cannot be read"):
        body_of(f"@{tmp_path / 'nothing'}")
