"""A thread that serves a mailbox, and the state that other threads see: whether it works, and its position in the
code."""

from __future__ import annotations

import abc
import sys
import threading
import traceback
from collections.abc import Callable

from headrace.worker.engine.mailbox import Mailbox

# How many frames of the stack to log if the thread is stuck.
_TOLD_FRAMES = 6


class ServingThread(threading.Thread, abc.ABC):
    """Runs `serve` from `start` until the mailbox is stopped. If anything raises, `on_failure` is called and the thread
    ends."""

    def __init__(self, name: str, mailbox: Mailbox, on_failure: Callable[[str, BaseException], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.num_turns = 0
        """Number of steps or batches that ended, plus the number of times when there was nothing to do. For
        `Watchdog`."""
        self.is_idle = True
        """Whether there is nothing to do. For `Watchdog`."""
        self._mailbox = mailbox
        self._on_failure = on_failure

    @property
    @abc.abstractmethod
    def longest_expected_step_s(self) -> float:
        """The maximum expected time of the current step or batch, given earlier ones."""

    @abc.abstractmethod
    def serve(self) -> None:
        """Take commands and compute, until the mailbox is stopped."""

    def run(self) -> None:
        """Serve until the mailbox is stopped. Calls `on_failure` with what `serve` raises."""
        try:
            self.serve()
        except BaseException as error:
            if not self._mailbox.is_stopped:  # if it is stopped, nobody receives this
                self._on_failure(f"the {self.name} failed", error)

    def position(self) -> str:
        """The position of the thread in the code, innermost function first. Other threads call it for the log."""
        frame = sys._current_frames().get(self.ident or 0)
        frames = traceback.extract_stack(frame, _TOLD_FRAMES) if frame is not None else []
        return " < ".join(f"{at.filename.rpartition('/')[2]}:{at.lineno} {at.name}" for at in reversed(frames))
