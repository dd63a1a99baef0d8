"""Closing a connection in stages, so that its client can read the answer (RFC 9112, section 9.6).

If a socket is closed while bytes of the client are unread or still arrive, the system resets the connection, and the
client's system then discards what the client has not read yet: the answer is lost. So a connection whose client may
still be sending lingers: its sending side is closed, and what comes is read and dropped.

    open --close()--> lingering --the client closes; silent for 5 s; a bound is reached--> closed

Lingering connections are bounded in time, bytes and number, so that clients who never stop gain nothing by them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Of one connection. A client that reads only when it has sent its whole body reads the answer behind so many bytes.
MAX_LINGERING_BYTES = 48 * 1024 * 1024
_MAX_SILENCE_S = 5.0


@dataclass(slots=True)
class Lingering:
    """The lingering connections of a server, and their bounds: the seconds of each, and their number."""

    max_s: float
    max_connections: int = 1000
    _held: dict[LingeringTransport, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, transport: LingeringTransport) -> None:
        """Add a connection. If there are too many, the oldest one is closed."""
        if len(self._held) >= self.max_connections:
            next(iter(self._held)).end()
        self._held[transport] = None

    def remove(self, transport: LingeringTransport) -> None:
        """Remove a connection that has closed."""
        del self._held[transport]


class LingeringTransport(asyncio.Transport):
    """The transport of a server's connection, which lingers if it is closed while its client may be sending."""

    def __init__(
        self,
        transport: asyncio.Transport,
        lingering: Lingering,
        may_be_sending: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__()
        self._transport = transport
        self._lingering = lingering
        self._may_be_sending = may_be_sending
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._until_s = self._heard_s = 0.0
        self._num_bytes = 0

    # --- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close as soon as all is sent. If the client may be sending, linger."""
        if self.is_closing():
            return
        if self._may_be_sending():
            self.linger()
        else:
            self._transport.close()

    def linger(self) -> None:
        """Send what is written and nothing more, and drop what comes, until the client closes or a bound is reached."""
        if self.is_closing():
            return
        self._heard_s = time.monotonic()
        self._until_s = self._heard_s + self._lingering.max_s
        self._lingering.add(self)
        self._transport.resume_reading()
        if self._transport.can_write_eof():  # not over TLS, where the answer's length tells its end
            self._transport.write_eof()
        self._watch()

    def drop(self, num_bytes: int) -> None:
        """Count bytes that came to a closed connection and are dropped."""
        self._heard_s = time.monotonic()
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_LINGERING_BYTES:
            self.end()

    def end(self) -> None:
        """Close at once: do not linger, or stop lingering."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._lingering.remove(self)
        self._transport.close()

    def _watch(self) -> None:
        left_s = min(self._heard_s + _MAX_SILENCE_S, self._until_s) - time.monotonic()
        if left_s <= 0:
            self.end()
        else:
            self._timer = self._loop.call_later(left_s, self._watch)

    # --- as the transport -------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Whether it is closing or lingers."""
        return self._timer is not None or self._transport.is_closing()

    def write(self, data: Any) -> None:
        """Send bytes, unless the connection lingers."""
        if self._timer is None:
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Pause reading, unless the connection lingers."""
        if self._timer is None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See `asyncio.Transport`."""
        return self._transport.get_extra_info(name, default)
