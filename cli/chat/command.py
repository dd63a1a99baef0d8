"""`headrace chat`: a conversation in the terminal over the OpenAI HTTP API. If standard input is a pipe, each line is a
question."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from headrace.cli.chat.attachments import TextFile, attachment_options, paths_in
from headrace.cli.chat.client import ChatClient
from headrace.cli.chat.conversation import Conversation
from headrace.cli.chat.session import HINT, Session, is_command
from headrace.cli.chat.settings import Settings
from headrace.cli.chat.state_files import History, SavedChats, state_directory
from headrace.cli.chat.typed_lines import Read, Typed, reader_of, terminal_reader, typed_lines
from headrace.cli.fleet.completers import complete_served_models
from headrace.cli.fleet.fleet_access import ApiAccess, api_options
from headrace.cli.fleet.gateway_access import default_url
from headrace.common.commands import CommandError


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat begins."""

    conversation: Conversation
    settings: Settings
    keeps_history: bool


def chat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a chat, which a command gets as `options`."""

    @attachment_options
    @functools.wraps(command)
    def with_options(
        *args: Any,
        system: str | None,
        max_tokens: int | None,
        images: list[str],
        files: list[str | TextFile],
        no_history: bool,
        **others: Any,
    ) -> Any:
        conversation = Conversation(system)
        for found in (*images, *files):
            conversation.attach(found)
        options = ChatOptions(conversation, Settings(max_tokens=max_tokens), not no_history)
        return command(*args, options=options, **others)

    length = click.option(
        "--max-tokens",
        type=click.IntRange(1),
        help="Maximum tokens of an answer.  [default: the rest of the model's context]",
    )
    history = click.option(
        "--no-history", is_flag=True, help="Neither recall nor keep what was typed in this and other chats."
    )
    return click.option("--system", help="System message.")(length(history(with_options)))


@click.command()
@click.argument("prompt", nargs=-1)
@click.option("--url", help="Server, such as http://127.0.0.1:8000.  [default: the one on this host]")
@click.option("--model", shell_complete=complete_served_models, help="Model to ask.  [default: the first one served]")
@chat_options
@api_options
def chat(prompt: tuple[str, ...], url: str | None, model: str | None, options: ChatOptions, access: ApiAccess) -> None:
    """Chat with a served model, or have it answer PROMPT and exit.

    In the conversation, /? shows the commands, such as /set for sampling fields and the system message, /file and
    /image for attachments of the next question, /save and /load. A question between triple quotes may have several
    lines. Ctrl-C stops an answer; /exit or Ctrl-D leaves.

    If standard input is a pipe, each line is a question. Answers go to standard output, reasoning and figures to
    standard error.
    """
    talk(ChatClient(url or default_url(), model, access), options, " ".join(prompt) or None)


def talk(client: ChatClient, options: ChatOptions, question: str | None = None) -> None:
    """Answer the given question, or the questions that are typed or piped in. Closes the client at the end."""
    state = state_directory()
    session = Session(client, options.conversation, options.settings, SavedChats(state / "chats"))
    try:
        if question is not None:
            session.ask(question)
        elif sys.stdin.isatty():
            click.secho(f"{client.model}; {HINT}", dim=True, err=True)
            history = History(state / "history.jsonl") if options.keeps_history else None
            _converse(session, _terminal(session, history), is_terminal=True)
        else:
            _converse(session, reader_of(sys.stdin), is_terminal=False)
    finally:
        client.close()


def _terminal(session: Session, history: History | None) -> Read:
    """The terminal, with a history if it can be read and written."""
    kept = history

    def keep(line: str) -> None:
        nonlocal kept
        if kept is not None:
            try:
                kept.add(line)
            except CommandError as error:
                kept = None
                error.show()

    try:
        entries = [] if history is None else history.entries()
    except CommandError as error:
        kept, entries = None, []
        error.show()
    return terminal_reader(entries, keep, session.complete)


def _converse(session: Session, read: Read, *, is_terminal: bool) -> None:
    def tell() -> None:
        click.echo(f"\n{HINT}", err=True)

    lines = typed_lines(read, on_interrupt=tell)
    while not session.is_over:
        try:
            typed = next(lines, None)
            if typed is None:
                return
            _take(session, typed, may_name_files=is_terminal)
        except CommandError as error:
            if not is_terminal:
                raise
            error.show()
        except KeyboardInterrupt:  # before an answer has begun, or during a command
            if not is_terminal:
                raise
            tell()


def _take(session: Session, typed: Typed, *, may_name_files: bool) -> None:
    """Execute a command, or ask a question. Files whose paths are typed or dragged in go with the question."""
    text = typed.text
    if may_name_files and not typed.is_quoted and not is_command(text):
        paths, text = paths_in(text)
        for path in paths:
            session.attach(path)
        if paths and text:
            session.ask(text)
            return
    session.obey_or_ask(text, is_quoted=typed.is_quoted)
