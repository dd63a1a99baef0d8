"""Detects that a worker has fallen silent, at no cost per message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.common.transport.silence import Peer


class SilenceTimer:
    """Calls `judge` with the peer until `stop`. `judge` returns the seconds until the next call.

    If it returns None, the peer counts as lost: `on_given_up` is called, and the timer ends.
    """

    def __init__(
        self, peer: Peer, first_s: float, judge: Callable[[Peer], float | None], on_given_up: Callable[[], object]
    ) -> None:
        self.peer = peer
        self.gave_up = False
        self._judge = judge
        self._on_given_up = on_given_up
        self._loop = asyncio.get_running_loop()
        self._arm(first_s)

    def stop(self) -> None:
        """Stop the timer."""
        self._handle.cancel()
        self.peer.close()

    def _arm(self, delay_s: float) -> None:
        self._handle = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        again_s = self._judge(self.peer)
        if again_s is None:
            self.gave_up = True
            self._on_given_up()
        else:
            self._arm(again_s)
