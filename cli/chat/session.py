"""One chat: questions and their answers, and the commands that begin with a slash."""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from headrace.cli.chat.attachments import attachment, image_url
from headrace.cli.chat.client import ChatClient
from headrace.cli.chat.conversation import Conversation
from headrace.cli.chat.settings import SETTINGS, SWITCHES, Settings
from headrace.cli.chat.state_files import SavedChats
from headrace.cli.fleet.tables import print_columns
from headrace.common.commands import CommandError

HINT = "/? lists the commands, Ctrl-D leaves, Ctrl-C stops an answer"
# Text that looks like a command. A path such as /etc/hosts does not, and a space before the slash makes any line a
# question.
_LIKE_A_COMMAND = re.compile(r"/(?:\?|[A-Za-z]\w*)(?=\s|$)")
_PARTS = ("info", "system", "parameters", "history")
_OF_SCREEN = {"verbose": "Show the figures of each answer", "quiet": "Show no figures"}


def is_command(line: str) -> bool:
    """Whether a line has the form of a command, known or not."""
    return _LIKE_A_COMMAND.match(line) is not None


def statistics(num_tokens: int | None, asked_s: float, first_s: float | None, last_s: float) -> str:
    """`42 tokens, 38.1 tokens/s, first after 0.12 s`. The rate is that between the first and the last token."""
    if first_s is None:
        return "no answer"
    first = f"first after {first_s - asked_s:.2f} s"
    if num_tokens is None:
        return first
    if num_tokens < 2 or last_s <= first_s:
        return f"{num_tokens} tokens, {first}"
    return f"{num_tokens} tokens, {(num_tokens - 1) / (last_s - first_s):.1f} tokens/s, {first}"


def note(text: str) -> None:
    """Show the user a message that is not part of an answer."""
    click.secho(f"[{text}]", dim=True, err=True)


@dataclass(slots=True)
class Session:
    """A chat with a model of a server. `obey_or_ask` takes what was typed."""

    client: ChatClient
    conversation: Conversation
    settings: Settings
    saved: SavedChats
    shows_figures: bool = field(init=False, default=True)
    is_over: bool = field(init=False, default=False)

    def obey_or_ask(self, line: str, *, is_quoted: bool = False) -> None:
        """Execute a command, or ask a question. Raises CommandError for a command that there is not, and for a failure
        of the server."""
        command = None if is_quoted else _LIKE_A_COMMAND.match(line)
        if command is not None:
            self._obey(command.group(), line[command.end() :].strip())
        elif question := line.strip():
            self.ask(question)

    def ask(self, question: str) -> None:
        """Print the answer to a question as it comes."""
        self._answer(self.conversation.user_turn(question))

    def attach(self, path: str) -> None:
        """Keep a file for the next question. Raises CommandError."""
        self.conversation.attach(attachment(path))
        self._tell_attachments()

    def _obey(self, name: str, argument: str) -> None:
        command = _BY_NAME.get(name)
        if command is None:
            near = difflib.get_close_matches(name, _BY_NAME, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(one.name for one in COMMANDS)}."
            raise CommandError(
                f"there is no command {name[:40]}; {meant} A space before the slash makes it a question."
            )
        if argument and not command.argument:
            raise CommandError(f"{command.name} takes nothing behind it, and there is {argument[:40]!r}")
        command.run(self, argument)

    def _answer(self, turn: dict[str, Any]) -> None:
        """Print the answer to a turn as it comes, and its reasoning and statistics on standard error. Ctrl-C ends the
        answer, not the chat."""
        asked_s = last_s = time.monotonic()
        first_s: float | None = None
        num_tokens: int | None = None
        is_reasoning = False
        pieces: list[str] = []
        answer = self.client.answer(self.conversation.messages_with(turn), self.settings.fields)
        try:
            for chunk in answer:
                last_s = time.monotonic()
                num_tokens = chunk.num_tokens
                if not chunk.text:
                    continue
                first_s = first_s if first_s is not None else last_s
                if chunk.is_reasoning:
                    click.secho(chunk.text, nl=False, dim=True, err=True)
                else:
                    if is_reasoning:
                        click.echo("\n", err=True)
                    pieces.append(chunk.text)
                    print(chunk.text, end="", flush=True)
                is_reasoning = chunk.is_reasoning
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False, err=True)
        except CommandError:
            self.conversation.drop_attachments()  # a model of texts would refuse the next questions, too
            raise
        finally:
            answer.close()  # type: ignore[attr-defined]
            print(flush=True)
        if pieces:
            self.conversation.add(turn, "".join(pieces))
        if self.shows_figures:
            note(statistics(num_tokens, asked_s, first_s, last_s))

    # --- commands ---------------------------------------------------------------------------------------------------

    def _help(self, argument: str) -> None:
        if not argument:
            print_columns([(f"{one.name} {one.argument}".strip(), one.meaning) for one in COMMANDS], err=True)
            click.echo(
                'A text between """ and """ may have several lines. A line of paths attaches the files.', err=True
            )
            return
        name = f"/{argument.removeprefix('/')}"
        if name not in _BY_NAME:
            raise CommandError(f"there is no command {name[:40]}; /? lists what there is")
        command = _BY_NAME[name]
        others = f" Also {', '.join(command.others)}." if command.others else ""
        click.echo(f"{command.name} {command.argument}: {command.meaning}.{others}", err=True)
        if name == "/set":
            fields = [
                ("field", "values", "default", "meaning"),
                ("system", "text", "", "The system message"),
                *((words, "", "", meaning) for words, (_, _, meaning) in SWITCHES.items()),
                *((words, "", "", meaning) for words, meaning in _OF_SCREEN.items()),
                *((name, one.values, one.default, one.meaning) for name, one in SETTINGS.items()),
            ]
            print_columns(fields, err=True)

    def _set(self, argument: str) -> None:
        argument = argument.removeprefix("parameter ").strip()
        name, _, text = argument.partition(" ")
        text = text.strip()
        if not name:
            raise CommandError(
                "/set needs a field and its value, such as /set temperature 0.2; /? set lists the fields"
            )
        if name == "system":
            self.conversation.system = text.strip('"') or None
            note("system message set" if text else "no system message")
        elif argument in _OF_SCREEN:
            self.shows_figures = argument == "verbose"
        elif self.settings.switch(argument):
            note(argument)
        else:
            note(self.settings.set(name, text))

    def _show(self, argument: str) -> None:
        rows = (
            [("model", f"{self.client.model} at {self.client.url}")],
            [("system", self.conversation.system or "none")],
            [*self.settings.described(), ("other fields", "the model's defaults")],
            [("turns", str(len(self.conversation.turns) // 2))],
        )
        parts = dict(zip(_PARTS, rows, strict=True))
        if argument and argument not in parts:
            raise CommandError(f"/show takes {', '.join(parts)} or nothing, and not {argument[:40]!r}")
        print_columns(parts[argument] if argument else [row for part in rows for row in part], err=True)

    def _model(self, argument: str) -> None:
        models = self.client.models()
        if argument and argument not in models:
            raise CommandError(f"{self.client.url} serves no model {argument[:100]}; it serves {', '.join(models)}")
        self.client.model = argument or self.client.model
        note(f"{self.client.model}" if argument else f"{self.client.model}; served: {', '.join(models)}")

    def _save(self, argument: str) -> None:
        if not argument:
            raise CommandError("/save needs a name or a path, such as /save trip or /save ./trip.json")
        document = {**self.conversation.document, "model": self.client.model, "fields": self.settings.fields}
        note(f"saved as {self.saved.save(argument, document)}")

    def _load(self, argument: str) -> None:
        if not argument:
            note(f"saved: {', '.join(self.saved.names()) or 'none'}")
            return
        document = self.saved.load(argument)
        fields = Settings()
        try:
            fields.replace(document.get("fields", {}))
            self.conversation.replace(document)
        except CommandError as error:
            raise CommandError(f"{argument}: {error.message}") from None
        self.settings = fields
        was = document.get("model")
        other = f"; it was with {was}" if isinstance(was, str) and was != self.client.model else ""
        note(f"{len(self.conversation.turns) // 2} turns{other}")

    def _clear(self, _argument: str) -> None:
        self.conversation.reset()

    def _again(self, _argument: str) -> None:
        self._answer(self.conversation.take_back())

    def _image(self, argument: str) -> None:
        self.conversation.attach(image_url(argument))
        self._tell_attachments()

    def _exit(self, _argument: str) -> None:
        self.is_over = True

    def _tell_attachments(self) -> None:
        num = len(self.conversation.images) + len(self.conversation.texts)
        note(f"{num} for the next question")

    # --- completion -------------------------------------------------------------------------------------------------

    def complete(self, line: str) -> Sequence[str]:
        """The possible completions of the line up to the cursor."""
        name, space, argument = line.partition(" ")
        if not line.startswith("/"):
            return []
        if not space:
            return [f"{one.name} " if one.argument else one.name for one in COMMANDS if one.name.startswith(line)]
        command = _BY_NAME.get(name)
        if command is None:
            return []
        offered = [text for text in command.complete(self, argument) if text.startswith(argument)]
        return [f"{name} {text}" for text in offered]

    def _settable(self, _argument: str) -> Sequence[str]:
        return [*(f"{name} " for name in ("system", *SETTINGS)), *SWITCHES, *_OF_SCREEN]

    def _served(self, _argument: str) -> Sequence[str]:
        try:
            return self.client.models()
        except CommandError:
            return []

    def _saved_names(self, argument: str) -> Sequence[str]:
        return _paths(argument) if "/" in argument else self.saved.names()


def _paths(beginning: str) -> Sequence[str]:
    """The files and directories whose paths begin with this text."""
    head, slash, _ = beginning.rpartition("/")
    try:
        with os.scandir(Path(f"{head}{slash}" or ".").expanduser()) as entries:
            return sorted(f"{head}{slash}{entry.name}{'/' if entry.is_dir() else ''}" for entry in entries)
    except OSError:
        return []


def _nothing(_session: Session, _argument: str) -> Sequence[str]:
    return []


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command of a chat. `argument` describes its argument; empty if it takes none."""

    name: str
    argument: str
    meaning: str
    run: Callable[[Session, str], None]
    others: tuple[str, ...] = ()
    """Names that other programs have for it."""
    complete: Callable[[Session, str], Sequence[str]] = _nothing


COMMANDS: Sequence[SlashCommand] = (
    SlashCommand("/help", "[COMMAND]", "Show the commands, or the fields of /set", Session._help, ("/?",)),
    SlashCommand(
        "/set",
        "FIELD [VALUE]",
        "Set a field of sampling or the system message; without a value, give it back to the model",
        Session._set,
        complete=Session._settable,
    ),
    SlashCommand(
        "/show",
        "[PART]",
        "Show the model, the system message and what was set",
        Session._show,
        complete=lambda _session, _argument: _PARTS,
    ),
    SlashCommand(
        "/model", "[NAME]", "Go on with another model of the server", Session._model, complete=Session._served
    ),
    SlashCommand(
        "/file",
        "PATH",
        "Send a text or image file along with the next question",
        Session.attach,
        ("/read",),
        lambda _session, argument: _paths(argument),
    ),
    SlashCommand(
        "/image",
        "FILE",
        "Show the model an image with the next question",
        Session._image,
        complete=lambda _session, argument: _paths(argument),
    ),
    SlashCommand("/save", "NAME", "Keep the conversation in a file", Session._save, complete=Session._saved_names),
    SlashCommand("/load", "[NAME]", "Go on with a saved conversation", Session._load, complete=Session._saved_names),
    SlashCommand("/regen", "", "Answer the last question again", Session._again),
    SlashCommand("/clear", "", "Forget the conversation", Session._clear, ("/reset",)),
    SlashCommand("/exit", "", "Leave", Session._exit, ("/bye", "/quit")),
)
_BY_NAME: Mapping[str, SlashCommand] = {name: one for one in COMMANDS for name in (one.name, *one.others)}
