"""Reads the input of a chat from a terminal or a pipe: lines, and texts of several lines between triple quotes.

On a terminal, readline edits the line, recalls earlier ones and completes commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from headrace.common.commands import CommandError

_QUOTES = '"""'
PROMPT, PROMPT_INSIDE = "> ", "... "

Read = Callable[[str], str]
"""Gives a line for a prompt, without its end. EOFError at the end of the input."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A line, or a text of several. Within triple quotes, a text is a question whatever it looks like."""

    text: str
    is_quoted: bool = False


def typed_lines(read: Read, *, on_interrupt: Callable[[], object]) -> Iterator[Typed]:
    """The lines and texts until the end of the input. Ctrl-C drops what was begun. Raises CommandError for a text
    without an end."""
    while True:
        try:
            yield _next(read)
        except EOFError:
            return
        except KeyboardInterrupt:
            on_interrupt()


def _next(read: Read) -> Typed:
    line = read(PROMPT)
    head, quotes, rest = line.partition(_QUOTES)
    is_question = not head.strip()
    if not quotes or not (is_question or (head.startswith("/") and head.endswith(" "))):
        return Typed(line)
    lines = [rest]
    while not lines[-1].rstrip().endswith(_QUOTES):
        try:
            lines.append(read(PROMPT_INSIDE))
        except EOFError:
            raise CommandError(f"the text that began with {_QUOTES} has no end") from None
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    # The quotes may have lines of their own.
    if len(lines) > 1 and not lines[0]:
        del lines[0]
    if len(lines) > 1 and not lines[-1]:
        del lines[-1]
    return Typed(("" if is_question else head) + "\n".join(lines), is_quoted=is_question)


def reader_of(stream: TextIO) -> Read:
    """Reads a pipe, without prompts."""

    def read(_prompt: str) -> str:
        line = stream.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


def terminal_reader(
    entries: Sequence[str], keep: Callable[[str], object], complete: Callable[[str], Sequence[str]]
) -> Read:
    """Reads the terminal with readline. `entries` are recalled, oldest first, and `keep` gets each new one. `complete`
    gives what may stand in place of the text up to the cursor."""
    import readline

    found: Sequence[str] = []

    def completer(_word: str, state: int) -> str | None:
        nonlocal found
        if state == 0:
            found = complete(readline.get_line_buffer()[: readline.get_endidx()])
        return found[state] if state < len(found) else None

    readline.set_auto_history(False)
    readline.clear_history()
    for entry in entries:
        readline.add_history(entry)
    readline.set_completer_delims("")  # completions replace the whole line
    readline.set_completer(completer)
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")

    def read(prompt: str) -> str:
        try:
            line = input(prompt)
        except EOFError:
            print()
            raise
        length = readline.get_current_history_length()
        if line.strip() and (not length or line != readline.get_history_item(length)):
            readline.add_history(line)
            keep(line)
        return line

    sys.stdout.flush()
    return read
