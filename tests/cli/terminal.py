"""A program on a pseudo terminal: what it shows, and what a person types."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.patience import patience

BOUND_S = 30.0
_ROWS, _COLUMNS = 40, 200
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CTRL_C, CTRL_D, UP, TAB = "\x03", "\x04", "\x1b[A", "\t"


class Terminal:
    """The terminal of a running program. `shown` is all that it has written, without escape sequences."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**env, "TERM": "xterm"},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(terminal)
        self._raw = b""
        self._seen = 0

    @property
    def shown(self) -> str:
        """All so far."""
        return _ESCAPES.sub("", self._raw.decode(errors="replace")).replace("\r", "")

    def type(self, text: str) -> None:
        """Type characters as they are."""
        os.write(self._controller, text.encode())

    def until(self, text: str, pressing: str = "") -> str:
        """Wait until this appears behind what earlier calls have waited for, and return what came up to its end. Keys
        that are given are pressed again and again: a Ctrl-C is lost while a prompt is written."""
        begun_s = pressed_s = time.monotonic()
        self.type(pressing)
        while (found := self.shown.find(text, self._seen)) < 0:
            is_over = not self._read()
            assert not is_over, f"the program has ended without {text!r}:\n{self.shown}"
            now_s = time.monotonic()
            if pressing and now_s - pressed_s > 1.0:
                pressed_s = now_s
                self.type(pressing)
            waited_s = now_s - begun_s
            assert waited_s < patience(BOUND_S), f"no {text!r} within {waited_s:.0f} s:\n{self.shown}"
        begin, self._seen = self._seen, found + len(text)
        return self.shown[begin : self._seen]

    def end(self) -> int:
        """The program's status, which ends by itself."""
        begun_s = time.monotonic()
        while self._read():
            assert time.monotonic() - begun_s < patience(BOUND_S), f"the program goes on:\n{self.shown}"
        return self.process.wait(patience(BOUND_S))

    def close(self) -> None:
        """End the program by force if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._controller)

    def _read(self) -> bool:
        """Read what there is within a moment. Returns False at the end."""
        if not select.select([self._controller], [], [], 0.1)[0]:
            return True
        try:
            piece = os.read(self._controller, 1 << 16)
        except OSError:  # EIO: no program has the terminal any more
            return False
        self._raw += piece
        return bool(piece)


@contextmanager
def on_terminal(*command: str, env: Mapping[str, str], cwd: Path) -> Iterator[Terminal]:
    """A program that runs on a terminal of its own."""
    terminal = Terminal(command, env, cwd)
    try:
        yield terminal
    finally:
        terminal.close()
