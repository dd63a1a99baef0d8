"""`headrace chat` against a server that answers as a gateway does."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.cli.fleet.chat import ChatClient, Chunk, Conversation, _ask, statistics
from headrace.cli.main import cli
from headrace.common.commands import CommandError
from tests.http_server import body_of, http_server, respond

ONE_PIXEL = "R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw=="


class Server:
    """A server that answers each question with its last message reversed. `asked` records the requests."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.refusal: tuple[int, str] | None = None
        self.break_off = False
        self.invalid = ""
        self.reasoning = ""

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        content = body["messages"][-1]["content"]
        text = (content if isinstance(content, str) else content[-1]["text"])[::-1]
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None}
        if self.reasoning:
            yield {"choices": [{"index": 0, "delta": {"reasoning_content": self.reasoning}}], "usage": None}
        for letter in text:
            yield {"choices": [{"index": 0, "delta": {"content": letter}}], "usage": None}
        if not self.break_off:
            yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}
            yield {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": len(text)}}


@pytest.fixture
def server(cache: Path) -> Iterator[Server]:
    state = Server()

    def list_models(handler: BaseHTTPRequestHandler) -> None:
        if state.refusal is not None and state.refusal[0] == 401:
            respond(handler, 401)
            return
        respond(handler, 200, json.dumps({"data": [{"id": "m1"}, {"id": "m2"}]}).encode())

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(body_of(handler))
        state.asked.append(body)
        if state.refusal is not None:
            status, message = state.refusal
            respond(handler, status, json.dumps({"error": {"message": message}}).encode())
            return
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in state.events(body)]
        lines += [f"data: {state.invalid}\n\n"] if state.invalid else []
        end = "" if state.break_off else "data: [DONE]\n\n"
        respond(handler, 200, (": keep-alive\n\n" + "".join(lines) + end).encode())

    with http_server(list_models, answer) as state.url:
        yield state


def chat(server: Server, lines: str, *args: str) -> Result:
    return CliRunner().invoke(cli, ["chat", "--url", f"{server.url}/v1", *args], input=lines)


def test_each_line_of_a_pipe_gets_an_answer_on_standard_output(server: Server) -> None:
    result = chat(server, "abc\n\ndef\n")
    assert (result.exit_code, result.stdout) == (0, "cba\nfed\n")
    assert result.stderr.count("[3 tokens, ") == 2


def test_what_separates_lines_elsewhere_is_text_in_an_event(server: Server) -> None:
    result = chat(server, "a\u2028b\x85c\n")
    assert (result.exit_code, result.stdout) == (0, "c\x85b\u2028a\n")


def test_the_first_model_is_asked_unless_another_is_named(server: Server) -> None:
    chat(server, "a\n")
    chat(server, "a\n", "--model", "m2")
    assert [body["model"] for body in server.asked] == ["m1", "m2"]


def test_an_answer_is_as_long_as_it_is_allowed_to_be(server: Server) -> None:
    chat(server, "a\n")
    chat(server, "a\n", "--max-tokens", "7")
    assert [body.get("max_completion_tokens") for body in server.asked] == [None, 7]


def test_the_conversation_is_sent_along_until_reset(server: Server) -> None:
    chat(server, "ab\ncd\n/reset\nef\n", "--system", "be brief")
    system = {"role": "system", "content": "be brief"}
    turn = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    assert [body["messages"] for body in server.asked] == [
        [system, {"role": "user", "content": "ab"}],
        [system, *turn, {"role": "user", "content": "cd"}],
        [system, {"role": "user", "content": "ef"}],
    ]


def test_exit_leaves_without_asking(server: Server) -> None:
    assert chat(server, "/exit\nabc\n").stdout == ""
    assert server.asked == []


def test_what_the_server_refuses_is_told_in_its_words(server: Server) -> None:
    server.refusal = (400, "This model's maximum context length is 10 tokens")
    result = chat(server, "abc\n")
    assert result.exit_code == 1
    assert "error: This model's maximum context length is 10 tokens" in result.stderr


@pytest.mark.parametrize("flags", [(), ("--model", "m1")])
def test_a_missing_key_is_told_with_the_flag_for_it(server: Server, flags: tuple[str, ...]) -> None:
    server.refusal = (401, "no API key was given: send it as a header")
    result = chat(server, "abc\n", *flags)
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"error: {server.url} accepts no request without a valid key; give one with --api-key"
    )


@pytest.mark.parametrize("key", ["ключ", "hr-0123\n", "hr-\u201c0123\u201d"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(server: Server, key: str) -> None:
    result = chat(server, "a\n", "--api-key", key)
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith("error: the key of --api-key (HEADRACE_API_KEY) has characters that are not")
    assert "0123" not in result.stderr
    assert not server.asked


def test_a_stream_without_its_end_is_a_failure(server: Server) -> None:
    server.break_off = True
    result = chat(server, "abc\n")
    assert result.exit_code == 1
    assert "error: the answer broke off" in result.stderr


@pytest.mark.parametrize("event", ["{", "[]", '{"choices": 5}', '{"usage": {"prompt_tokens": 1}}'])
def test_an_event_that_is_not_valid_is_a_failure(server: Server, event: str) -> None:
    server.invalid = event
    result = chat(server, "abc\n")
    assert (result.exit_code, result.stdout) == (1, "cba\n")
    assert f"error: the answer broke off: the server sent {event!r}" in result.stderr


def test_no_server_is_a_clear_sentence(cache: Path) -> None:
    result = CliRunner().invoke(cli, ["chat", "--url", "http://127.0.0.1:9"], input="a\n")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: no server at http://127.0.0.1:9; start one with headrace serve, or name another with --url\n"
    )


def test_ctrl_c_ends_the_answer_and_keeps_what_came_of_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_client: ChatClient, messages: list[dict[str, str]]) -> Iterator[Chunk]:
        server.asked.append({"messages": messages})
        yield Chunk("ha")
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatClient, "answer", interrupted)
    result = chat(server, "ab\ncd\n")
    assert (result.exit_code, result.stdout) == (0, "ha\nha\n")
    assert [message["content"] for message in server.asked[1]["messages"]] == ["ab", "ha", "cd"]


def test_a_refused_turn_does_not_become_part_of_the_conversation() -> None:
    conversation = Conversation(system=None)
    conversation.messages_with("too long")
    assert conversation.messages_with("short") == [{"role": "user", "content": "short"}]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((11, 1.0, 1.5, 2.5), "11 tokens, 10.0 tokens/s, first after 0.50 s"),
        ((1, 1.0, 1.5, 1.5), "1 tokens, first after 0.50 s"),
        ((None, 1.0, 1.5, 2.5), "first after 0.50 s"),
        ((None, 1.0, None, 2.5), "no answer"),
    ],
)
def test_statistics(arguments: tuple[int | None, float, float | None, float], line: str) -> None:
    assert statistics(*arguments) == line


def test_reasoning_is_shown_apart_from_the_answer(server: Server) -> None:
    server.reasoning = "the letters, backwards"
    result = CliRunner().invoke(cli, ["chat", "--url", server.url], input="abc\nde\n")
    assert result.stdout == "cba\ned\n"
    assert result.stderr.count("the letters, backwards") == 2
    assert all("letters" not in message["content"] for body in server.asked for message in body["messages"])


@pytest.mark.parametrize(
    ("line", "remedy"),
    [("/rest", "did you mean /reset?"), ("/frobnicate it", "there are /help, /image, /reset, /exit")],
)
def test_a_command_that_there_is_not_is_refused_and_asked_of_no_model(server: Server, line: str, remedy: str) -> None:
    result = CliRunner().invoke(cli, ["chat", "--url", server.url], input=f"{line}\n")
    assert result.exit_code == 2
    assert f"error: there is no command {line.split()[0]}; {remedy}" in result.stderr
    assert not server.asked


@pytest.mark.parametrize("line", ["/etc/hosts is what?", " /reset is a word?"])
def test_a_question_may_begin_with_a_slash(server: Server, line: str) -> None:
    result = CliRunner().invoke(cli, ["chat", "--url", server.url], input=f"{line}\n")
    assert result.exit_code == 0
    assert [body["messages"][-1]["content"] for body in server.asked] == [line.strip()]


def _gif(path: Path) -> str:
    """A GIF of one pixel."""
    path.write_bytes(base64.b64decode(ONE_PIXEL))
    return str(path)


def _images_in(body: dict[str, Any]) -> list[list[str]]:
    """The images of each user's turn."""
    turns = [message["content"] for message in body["messages"] if message["role"] == "user"]
    return [
        [] if isinstance(turn, str) else [part["image_url"]["url"] for part in turn if part["type"] == "image_url"]
        for turn in turns
    ]


def test_images_go_with_the_next_question_and_stay_in_its_turn(server: Server, tmp_path: Path) -> None:
    first, second = _gif(tmp_path / "a b.gif"), _gif(tmp_path / "c.gif")
    result = chat(server, f"abc\n/image {second}\ndef\nghi\n", "--image", first, "--image", second)
    assert (result.exit_code, result.stdout) == (0, "cba\nfed\nihg\n")
    url = f"data:image/gif;base64,{ONE_PIXEL}"
    assert _images_in(server.asked[-1]) == [[url, url], [url], []]
    assert server.asked[-1]["messages"][0]["content"][-1] == {"type": "text", "text": "abc"}


def test_a_file_that_is_no_image_is_refused_by_name(server: Server, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words")
    result = chat(server, "abc\n", "--image", str(tmp_path / "notes.txt"))
    assert result.exit_code != 0
    assert "notes.txt: the image is neither PNG, JPEG, WebP nor GIF" in result.stderr
    result = chat(server, f"/image {tmp_path}/none.png\n")
    assert "none.png cannot be read: No such file" in result.stderr
    assert "needs the name of an image file" in chat(server, "/image\n").stderr
    assert server.asked == []


def test_a_refused_question_uses_up_its_images(server: Server, tmp_path: Path) -> None:
    server.refusal = (400, "m1 reads no images")
    conversation = Conversation(images=[_gif(tmp_path / "a.gif")])
    with pytest.raises(CommandError, match="m1 reads no images"):
        _ask(ChatClient(server.url), conversation, "abc")
    assert conversation.images == []
