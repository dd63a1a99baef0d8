"""`headrace chat` against a server that answers as a gateway does."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.cli.chat.client import ChatClient, Chunk
from headrace.cli.chat.conversation import Conversation
from headrace.cli.chat.session import COMMANDS, Session, statistics
from headrace.cli.chat.settings import Settings
from headrace.cli.chat.state_files import SavedChats
from headrace.cli.main import cli
from headrace.common.commands import CommandError
from headrace.protos.sampling_fields import NUMBERS
from tests.cli.chat_server import ChatServer, chat_server

ONE_PIXEL = "R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw=="


@pytest.fixture
def server(cache: Path) -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state


def chat(server: ChatServer, lines: str, *args: str) -> Result:
    return CliRunner().invoke(cli, ["chat", "--url", f"{server.url}/v1", *args], input=lines)


def test_each_line_of_a_pipe_gets_an_answer_on_standard_output(server: ChatServer) -> None:
    result = chat(server, "abc\n\ndef\n")
    assert (result.exit_code, result.stdout) == (0, "cba\nfed\n")
    assert result.stderr.count("[3 tokens, ") == 2


def test_a_prompt_gets_one_answer_and_standard_input_is_left_alone(server: ChatServer) -> None:
    result = chat(server, "abc\n", "water", "mill")
    assert (result.exit_code, result.stdout) == (0, "llim retaw\n")
    assert len(server.asked) == 1


def test_what_separates_lines_elsewhere_is_text_in_an_event(server: ChatServer) -> None:
    result = chat(server, "a\u2028b\x85c\n")
    assert (result.exit_code, result.stdout) == (0, "c\x85b\u2028a\n")


def test_the_first_model_is_asked_unless_another_is_named(server: ChatServer) -> None:
    chat(server, "a\n")
    chat(server, "a\n", "--model", "m2")
    assert [body["model"] for body in server.asked] == ["m1", "m2"]


def test_an_answer_is_as_long_as_it_is_allowed_to_be(server: ChatServer) -> None:
    chat(server, "a\n")
    chat(server, "a\n", "--max-tokens", "7")
    assert [body.get("max_completion_tokens") for body in server.asked] == [None, 7]


def test_the_conversation_is_sent_along_until_reset(server: ChatServer) -> None:
    chat(server, "ab\ncd\n/reset\nef\n", "--system", "be brief")
    system = {"role": "system", "content": "be brief"}
    turn = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    assert [body["messages"] for body in server.asked] == [
        [system, {"role": "user", "content": "ab"}],
        [system, *turn, {"role": "user", "content": "cd"}],
        [system, {"role": "user", "content": "ef"}],
    ]


def test_exit_leaves_without_asking(server: ChatServer) -> None:
    assert chat(server, "/exit\nabc\n").stdout == ""
    assert server.asked == []


def test_what_the_server_refuses_is_told_in_its_words(server: ChatServer) -> None:
    server.refusal = (400, "This model's maximum context length is 10 tokens")
    result = chat(server, "abc\n")
    assert result.exit_code == 1
    assert "error: This model's maximum context length is 10 tokens" in result.stderr


@pytest.mark.parametrize("flags", [(), ("--model", "m1")])
def test_a_missing_key_is_told_with_the_flag_for_it(server: ChatServer, flags: tuple[str, ...]) -> None:
    server.refusal = (401, "no API key was given: send it as a header")
    result = chat(server, "abc\n", *flags)
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"error: {server.url} accepts no request without a valid key; give one with --api-key"
    )


@pytest.mark.parametrize("key", ["ключ", "hr-0123\n", "hr-\u201c0123\u201d"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(server: ChatServer, key: str) -> None:
    result = chat(server, "a\n", "--api-key", key)
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith("error: the key of --api-key (HEADRACE_API_KEY) has characters that are not")
    assert "0123" not in result.stderr
    assert not server.asked


def test_a_stream_without_its_end_is_a_failure(server: ChatServer) -> None:
    server.break_off = True
    result = chat(server, "abc\n")
    assert result.exit_code == 1
    assert "error: the answer broke off" in result.stderr


@pytest.mark.parametrize("event", ["{", "[]", '{"choices": 5}', '{"usage": {"prompt_tokens": 1}}'])
def test_an_event_that_is_not_valid_is_a_failure(server: ChatServer, event: str) -> None:
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


def test_ctrl_c_ends_the_answer_and_keeps_what_came_of_it(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_client: ChatClient, messages: list[dict[str, str]], _fields: object) -> Iterator[Chunk]:
        server.asked.append({"messages": messages})
        yield Chunk("ha")
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatClient, "answer", interrupted)
    result = chat(server, "ab\ncd\n")
    assert (result.exit_code, result.stdout) == (0, "ha\nha\n")
    assert [message["content"] for message in server.asked[1]["messages"]] == ["ab", "ha", "cd"]


def test_a_refused_turn_does_not_become_part_of_the_conversation() -> None:
    conversation = Conversation(system=None)
    conversation.messages_with(conversation.user_turn("too long"))
    turn = {"role": "user", "content": "short"}
    assert conversation.messages_with(conversation.user_turn("short")) == [turn]


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


def test_reasoning_is_shown_apart_from_the_answer(server: ChatServer) -> None:
    server.reasoning = "the letters, backwards"
    result = CliRunner().invoke(cli, ["chat", "--url", server.url], input="abc\nde\n")
    assert result.stdout == "cba\ned\n"
    assert result.stderr.count("the letters, backwards") == 2
    assert all("letters" not in message["content"] for body in server.asked for message in body["messages"])


@pytest.mark.parametrize(
    ("line", "remedy"),
    [("/rest", "did you mean /reset?"), ("/frobnicate it", "there are /help, /set, /show, ")],
)
def test_a_command_that_there_is_not_is_refused_and_asked_of_no_model(
    server: ChatServer, line: str, remedy: str
) -> None:
    result = CliRunner().invoke(cli, ["chat", "--url", server.url], input=f"{line}\n")
    assert result.exit_code == 2
    assert f"error: there is no command {line.split()[0]}; {remedy}" in result.stderr
    assert not server.asked


@pytest.mark.parametrize("line", ["/etc/hosts is what?", " /reset is a word?"])
def test_a_question_may_begin_with_a_slash(server: ChatServer, line: str) -> None:
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


def test_images_go_with_the_next_question_and_stay_in_its_turn(server: ChatServer, tmp_path: Path) -> None:
    first, second = _gif(tmp_path / "a b.gif"), _gif(tmp_path / "c.gif")
    result = chat(server, f"abc\n/image {second}\ndef\nghi\n", "--image", first, "--image", second)
    assert (result.exit_code, result.stdout) == (0, "cba\nfed\nihg\n")
    url = f"data:image/gif;base64,{ONE_PIXEL}"
    assert _images_in(server.asked[-1]) == [[url, url], [url], []]
    assert server.asked[-1]["messages"][0]["content"][-1] == {"type": "text", "text": "abc"}


def test_a_file_that_is_no_image_is_refused_by_name(server: ChatServer, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words")
    result = chat(server, "abc\n", "--image", str(tmp_path / "notes.txt"))
    assert result.exit_code != 0
    assert "notes.txt: the image is neither PNG, JPEG, WebP nor GIF" in result.stderr
    result = chat(server, f"/image {tmp_path}/none.png\n")
    assert "none.png cannot be read: No such file" in result.stderr
    assert "needs the name of an image file" in chat(server, "/image\n").stderr
    (tmp_path / "empty.png").touch()
    (tmp_path / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64))
    for name, problem in (
        ("", "cannot be read: Is a directory"),
        ("empty.png", "empty.png: the image is empty"),
        ("photo.heic", "photo.heic: the image is neither PNG, JPEG, WebP nor GIF. Convert it"),
        ("none.png", "none.png cannot be read: No such file"),
        ("nul\0.png", "cannot be read: embedded null byte"),
    ):
        for lines, options in (("abc\n", ("--image", f"{tmp_path}/{name}")), (f"/image {tmp_path}/{name}\n", ())):
            result = chat(server, lines, *options)
            assert problem in result.stderr, (name, options)
    assert server.asked == []


def test_a_refused_question_uses_up_its_images(server: ChatServer, tmp_path: Path) -> None:
    server.refusal = (400, "m1 reads no images")
    conversation = Conversation(images=[_gif(tmp_path / "a.gif")])
    session = Session(ChatClient(server.url), conversation, Settings(), SavedChats(tmp_path))
    with pytest.raises(CommandError, match="m1 reads no images"):
        session.ask("abc")
    assert conversation.images == []


# --- fields, files, saved conversations -------------------------------------------------------------------------------


def test_set_changes_the_requests_and_without_a_value_gives_the_field_back(server: ChatServer) -> None:
    lines = [
        "/set temperature 0.2",
        "/set parameter num_predict 7",
        '/set stop "\\n" END',
        "/set system Be brief.",
        "/set nothink",
        "/set format json",
        "ab",
        "/set temperature",
        "/set noformat",
        "/set system",
        "cd",
    ]
    result = chat(server, "\n".join(lines) + "\n")
    assert result.exit_code == 0, result.stderr
    first, second = server.asked
    set_fields = {"max_completion_tokens": 7, "stop": ["\n", "END"], "enable_thinking": False}
    assert first.items() >= {**set_fields, "temperature": 0.2, "response_format": {"type": "json_object"}}.items()
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert second.items() >= set_fields.items()
    assert not second.keys() & {"temperature", "response_format"}
    assert second["messages"][0] == {"role": "user", "content": "ab"}
    assert "[max_tokens: 7]" in result.stderr
    assert "[temperature: the model's default]" in result.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temprature 1", "there is nothing to set called 'temprature'; did you mean temperature?"),
        ("/set temperature 3", "temperature takes 0 to 2, and '3' is not that"),
        ("/set temperature nan", "temperature takes 0 to 2, and 'nan' is not that"),
        ("/set repetition_penalty 0", "repetition_penalty takes over 0, to 100, and '0' is not that"),
        ("/set top_k 1.5", "top_k takes -1 or more, and '1.5' is not that"),
        ("/set num_ctx 4096", "the context is that of the served model; set it with headrace serve"),
        ("/set", "/set needs a field and its value"),
        ("/show nothing", "/show takes info, system, parameters, history or nothing, and not 'nothing'"),
        ("/model m9", "serves no model m9; it serves m1, m2"),
        ("/clear all", "/clear takes nothing behind it"),
        ("/regen", "there is no answer yet to give again"),
        ("/load nothing", "there is no saved conversation nothing; saved are: none"),
        ("/save ..", "a saved conversation needs a name of letters"),
        ('"""no end', 'the text that began with """ has no end'),
    ],
)
def test_what_a_command_cannot_do_is_said_with_what_it_can(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    result = chat(server, f"{line}\n")
    assert result.exit_code == 2
    assert said in result.stderr
    assert not server.asked


def test_show_says_what_is_set_and_help_lists_every_field(server: ChatServer) -> None:
    shown = chat(server, "/set top_p 0.5\n/show\n/show system\n", "--system", "S").stderr
    assert re.search(rf"^model +m1 at {server.url}$", shown, re.MULTILINE)
    assert len(re.findall(r"^system +S$", shown, re.MULTILINE)) == 2
    assert re.search(r"^top_p +0.5$", shown, re.MULTILINE)
    listed = chat(server, "/?\n/? set\n").stderr
    assert all(f"\n{command.name} " in f"\n{listed}" for command in COMMANDS if command.argument)
    assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in NUMBERS)


def test_a_text_between_quotes_has_lines_and_is_no_command(server: ChatServer) -> None:
    result = chat(server, '"""/clear\nab\n"""\n"""c"""\n/set system """one\ntwo"""\nd\n')
    assert result.exit_code == 0, result.stderr
    contents = [body["messages"][-1]["content"] for body in server.asked]
    assert contents == ["/clear\nab", "c", "d"]
    assert server.asked[-1]["messages"][0] == {"role": "system", "content": "one\ntwo"}


def test_texts_of_files_go_with_the_next_question(server: ChatServer, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("\ufeff````\ncode\n````")
    (tmp_path / "b.txt").write_text("two\n")
    image = _gif(tmp_path / "c.gif")
    result = chat(server, f"x\n/file {tmp_path}/b.txt\n/read {image}\ny\nz\n", "--file", str(tmp_path / "a.md"))
    assert result.exit_code == 0, result.stderr
    first, second, third = (body["messages"][-1]["content"] for body in server.asked)
    assert first == "a.md:\n`````\n````\ncode\n````\n`````\n\nx"
    assert second[0]["image_url"]["url"] == f"data:image/gif;base64,{ONE_PIXEL}"
    assert second[1]["text"] == "b.txt:\n```\ntwo\n```\n\ny"
    assert third == "z"


def test_a_file_that_is_neither_text_nor_image_is_refused(server: ChatServer, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00\x01")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    for name in ("a.bin", "b.txt"):
        result = chat(server, "x\n", "--file", str(tmp_path / name))
        assert result.exit_code == 2
        assert f"{name} is neither text in UTF-8 nor a PNG" in result.stderr
    assert not server.asked


def test_a_conversation_is_saved_for_its_user_alone_and_goes_on_later(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    saved = chat(server, f"/set temperature 0.5\nab\n/save trip\n/save {tmp_path}/copy.json\n", "--system", "S")
    assert saved.exit_code == 0, saved.stderr
    kept = tmp_path / "state/headrace/chats/trip.json"
    assert kept.read_bytes() == (tmp_path / "copy.json").read_bytes()
    assert [path.stat().st_mode & 0o777 for path in (kept, kept.parent)] == [0o600, 0o700]
    again = chat(server, "/load\n/load trip\ncd\n/regen\n", "--model", "m2")
    assert again.exit_code == 0, again.stderr
    assert "[saved: trip]" in again.stderr
    assert "[1 turns; it was with m1]" in again.stderr
    assert again.stdout == "dc\ndc\n"
    for body in server.asked[-2:]:
        assert body["temperature"] == 0.5
        assert [message["content"] for message in body["messages"]] == ["S", "ab", "ba", "cd"]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"headrace_chat": 1, "system": 7, "turns": []},
        {"headrace_chat": 1, "system": None, "turns": [{"role": "assistant", "content": ""}] * 2},
        {"headrace_chat": 1, "system": None, "turns": [], "fields": {"temperature": 9}},
        {"headrace_chat": 1, "system": None, "turns": [], "fields": {"model": "other"}},
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(
    server: ChatServer, tmp_path: Path, document: dict[str, Any]
) -> None:
    (tmp_path / "odd.json").write_text(json.dumps(document))
    result = chat(server, f"/load {tmp_path}/odd.json\n")
    assert result.exit_code == 2, result.stderr
    assert f"error: {tmp_path}/odd.json" in result.stderr


def test_a_model_that_a_server_has_too_can_go_on(server: ChatServer) -> None:
    result = chat(server, "/model\nab\n/model m2\ncd\n")
    assert "[m1; served: m1, m2]" in result.stderr
    assert [(body["model"], len(body["messages"])) for body in server.asked] == [("m1", 1), ("m2", 3)]


def test_quiet_shows_no_figures(server: ChatServer) -> None:
    assert "tokens" not in chat(server, "/set quiet\nabc\n").stderr
