"""The thread of an encoder: it takes requests from the mailbox, begins batches, and delivers vectors and load
reports."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from headrace.worker.encoder.encoder import Encoder
from headrace.worker.engine.mailbox import Command, Mailbox
from headrace.worker.engine.serving_thread import ServingThread
from headrace.worker.engine.watchdog import end_process
from headrace.worker.request.step import RequestOutput

# How often waiting texts are checked for those that have waited too long.
_LOOK_S = 0.25


class EncoderThread(ServingThread):
    """Runs the encoder from `start` until the mailbox is stopped. The runner puts the places of batches that have ended
    into `ended`, and wakes the mailbox."""

    def __init__(
        self,
        encoder: Encoder,
        mailbox: Mailbox,
        ended: deque[int],
        on_failure: Callable[[str, BaseException], None] = end_process,
    ) -> None:
        super().__init__("encoder", mailbox, on_failure)
        self._encoder = encoder
        self._ended = ended
        self._num_taken = 0
        self._next_look_s = 0.0

    @property
    def longest_expected_step_s(self) -> float:
        """How many seconds a batch may take, judged by earlier ones."""
        return self._encoder.longest_batch_s

    def serve(self) -> None:
        """Take texts from the mailbox, encode them in batches and deliver their vectors, until the mailbox is
        stopped."""
        encoder = self._encoder
        self._mailbox.deliver((), encoder.report(self._num_taken))
        while (commands := self._take()) is not None:
            outputs = self._apply(commands)
            places = [self._ended.popleft() for _ in range(len(self._ended))]
            for place in places:
                outputs += encoder.end(place)
                encoder.begin_batches()
            encoder.begin_batches()
            outputs += self._overdue()  # only those for which there is no room
            self.num_turns += len(places)
            if commands or outputs or places:
                self._mailbox.deliver(outputs, encoder.report(self._num_taken))

    def _take(self) -> list[Command] | None:
        """Wait for a command or for the end of a batch, and return the new commands. None means stop."""
        self.is_idle = not self._encoder.has_work
        return self._mailbox.take(block=True, timeout_s=_LOOK_S if self._encoder.num_waiting else None)

    def _apply(self, commands: Sequence[Command]) -> list[RequestOutput]:
        outputs = []
        for request, is_cancel in commands:
            if is_cancel:
                self._encoder.cancel(request)
                continue
            self._num_taken += 1
            refused = self._encoder.add(request)
            if refused is not None:
                outputs.append(refused)
        return outputs

    def _overdue(self) -> list[RequestOutput]:
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + _LOOK_S
        return self._encoder.overdue()
