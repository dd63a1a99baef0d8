"""`headrace chat` on a terminal: editing, history, completion, and files that are dragged in."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from headrace.cli.chat.attachments import paths_in
from headrace.cli.chat.state_files import History
from headrace.common.commands import CommandFailed
from tests.cli.chat_server import ChatServer, chat_server
from tests.cli.terminal import CTRL_C, CTRL_D, TAB, UP, Terminal, on_terminal
from tests.cli.test_chat import ONE_PIXEL

HEADRACE = (sys.executable, "-m", "headrace.cli", "chat")


@pytest.fixture
def server(cache: Path) -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state


def terminal(server: ChatServer, home: Path, *args: str) -> AbstractContextManager[Terminal]:
    """A chat of a user with this home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HEADRACE_"))}
    env = {**kept, "HOME": str(home), "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    return on_terminal(*HEADRACE, "--url", server.url, *args, env=env, cwd=home)


def leave(chat: Terminal) -> None:
    """End a chat at its next prompt."""
    chat.until("> ")
    chat.type(CTRL_D)
    assert chat.end() == 0


def test_a_line_is_recalled_in_a_later_chat_from_a_file_of_its_user(server: ChatServer, tmp_path: Path) -> None:
    with terminal(server, tmp_path) as first:
        first.until("m1; /? lists the commands")
        first.until("> ")
        first.type("abc\n")
        first.until("cba")
        leave(first)
    kept = tmp_path / ".local/state/headrace/history.jsonl"
    assert kept.read_text() == '"abc"\n'
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    with terminal(server, tmp_path) as second:
        second.until("> ")
        second.type(f"{UP}d\n")
        second.until("dcba")
        second.until("> ")
        second.type("/bye\n")
        assert second.end() == 0
    assert kept.read_text() == '"abc"\n"abcd"\n"/bye"\n'
    assert [body["messages"][-1]["content"] for body in server.asked] == ["abc", "abcd"]


def test_without_history_nothing_is_recalled_or_kept(server: ChatServer, tmp_path: Path) -> None:
    History(tmp_path / ".local/state/headrace/history.jsonl").add("old")
    with terminal(server, tmp_path, "--no-history") as chat:
        chat.until("> ")
        chat.type(f"{UP}new\n")
        chat.until("wen")
        leave(chat)
    assert [body["messages"][-1]["content"] for body in server.asked] == ["new"]
    assert (tmp_path / ".local/state/headrace/history.jsonl").read_text() == '"old"\n'


def test_a_history_that_cannot_be_kept_is_said_once_and_the_chat_goes_on(server: ChatServer, tmp_path: Path) -> None:
    state = tmp_path / ".local/state/headrace"
    state.mkdir(parents=True)
    (tmp_path / "elsewhere").write_text("")
    (state / "history.jsonl").symlink_to(tmp_path / "elsewhere")
    with terminal(server, tmp_path) as chat:
        for question, answer in (("abc", "cba"), ("def", "fed")):
            chat.until("> ")
            chat.type(f"{question}\n")
            chat.until(answer)
        leave(chat)
        assert chat.shown.count("--no-history does without") == 1
    assert (tmp_path / "elsewhere").read_text() == ""


def test_quotes_span_lines_and_ctrl_c_drops_what_was_begun(server: ChatServer, tmp_path: Path) -> None:
    with terminal(server, tmp_path) as chat:
        chat.until("> ")
        chat.type('"""lost\n')
        chat.until("... ")
        chat.until("Ctrl-D leaves", pressing=CTRL_C)
        chat.until("> ")
        chat.type('"""\n')
        chat.until("... ")
        chat.type("a\n")
        chat.until("... ")
        chat.type('b"""\n')
        leave(chat)
    assert [body["messages"][-1]["content"] for body in server.asked] == ["a\nb"]


def test_tab_completes_commands_fields_models_and_paths(server: ChatServer, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("n\n")
    with terminal(server, tmp_path) as chat:
        chat.until("> ")
        chat.type(f"/se{TAB}temper{TAB}0.5\n")
        chat.until("[temperature: 0.5]")
        chat.until("> ")
        chat.type(f"/file no{TAB}\n")
        chat.until("[1 for the next question]")
        chat.until("> ")
        chat.type(f"/mod{TAB}m{TAB}2\n")
        chat.until("[m2]")
        chat.until("> ")
        chat.type("x\n")
        chat.until("tokens")
        leave(chat)
    (body,) = server.asked
    assert (body["model"], body["temperature"]) == ("m2", 0.5)
    assert body["messages"][-1]["content"] == "notes.txt:\n```\nn\n```\n\nx"


def test_files_that_are_dragged_in_go_with_the_question(server: ChatServer, tmp_path: Path) -> None:
    (tmp_path / "a b.gif").write_bytes(base64.b64decode(ONE_PIXEL))
    (tmp_path / "notes.txt").write_text("n\n")
    with terminal(server, tmp_path) as chat:
        chat.until("> ")
        chat.type(f"'{tmp_path}/notes.txt'\n")
        chat.until("[1 for the next question]")
        chat.until("> ")
        chat.type(f"what is {tmp_path}/a\\ b.gif ?\n")
        chat.until("[2 for the next question]")
        chat.until("tokens")
        leave(chat)
    ((image, text),) = (body["messages"][-1]["content"] for body in server.asked)
    assert image["image_url"]["url"] == f"data:image/gif;base64,{ONE_PIXEL}"
    assert text["text"] == "notes.txt:\n```\nn\n```\n\nwhat is ?"


def test_ctrl_c_stops_an_answer_and_not_the_chat(server: ChatServer, tmp_path: Path) -> None:
    server.hold = True
    with terminal(server, tmp_path) as chat:
        chat.until("> ")
        chat.type("abc\n")
        chat.until("\nc")
        chat.until("[stopped]", pressing=CTRL_C)
        leave(chat)


def test_an_error_does_not_end_the_chat(server: ChatServer, tmp_path: Path) -> None:
    with terminal(server, tmp_path) as chat:
        chat.until("> ")
        chat.type("/sett\n")
        chat.until("error: there is no command /sett; did you mean /set?")
        leave(chat)


@pytest.mark.parametrize(
    ("line", "names", "rest"),
    [
        ("{d}/a.png", ["a.png"], ""),
        ("'{d}/b c.txt' {d}/a.png", ["b c.txt", "a.png"], ""),
        ("{d}/b\\ c.txt", ["b c.txt"], ""),
        ("file://{d}/b%20c.txt", ["b c.txt"], ""),
        ("compare {d}/a.png with ./a.png", ["a.png"], "compare with ./a.png"),
        ("what does {d}/b\\ c.txt say", [], "what does {d}/b\\ c.txt say"),
        ("a.png", [], "a.png"),
        ("{d}/none.png", [], "{d}/none.png"),
        ("it's", [], "it's"),
    ],
)
def test_paths_in_a_line(tmp_path: Path, line: str, names: list[str], rest: str) -> None:
    for name in ("a.png", "b c.txt"):
        (tmp_path / name).write_text("")
    found, left = paths_in(line.format(d=tmp_path))
    assert [Path(path).name for path in found] == names
    assert left == rest.format(d=tmp_path)


def test_a_long_history_is_shortened_and_what_is_not_valid_is_left_out(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    lines = [json.dumps(f"line {number}\nof two") for number in range(2100)]
    (tmp_path / "history.jsonl").write_text("\n".join([*lines, '"cut', "7"]) + "\n")
    entries = history.entries()
    assert (entries[-1], len(entries)) == ("line 2099\nof two", 998)
    assert len((tmp_path / "history.jsonl").read_bytes().splitlines()) == 1000
    assert (tmp_path / "history.jsonl").stat().st_mode & 0o777 == 0o600
    assert history.entries() == entries


def test_a_history_that_is_no_file_is_a_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="cannot be kept: Is a directory; --no-history"):
        History(tmp_path).entries()
