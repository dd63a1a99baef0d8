"""The channels to other workers. The threads that fetch open and close them, because both may take a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from headrace.common.transport.channels import Transport

_MAX_CHANNELS = 16


class _Opened:
    """A channel, and the number of calls that use it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.num_users = 0


class Channels:
    """Keeps the most recently used channels open, and those in use. Thread-safe."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._opened: dict[tuple[str, int], _Opened] = {}
        """By address and version of the certificates; the most recently used is the last."""
        self._is_closed = False

    @contextmanager
    def using(self, source: str) -> Iterator[grpc.Channel]:
        """Context manager: a channel to `source`, which is not closed meanwhile, except by `close`. Raises ValueError
        if the address cannot be used, or after `close`."""
        key = source, self._transport.version
        with self._lock:
            if self._is_closed:
                raise ValueError("this worker stops")
            opened = self._opened.pop(key, None) or _Opened(self._transport.blocking_channel(source))
            self._opened[key] = opened
            opened.num_users += 1
            surplus = self._take_surplus()
        try:
            for channel in surplus:
                channel.close()
            yield opened.channel
        finally:
            with self._lock:
                opened.num_users -= 1

    def close(self) -> None:
        """Close all channels, which ends their calls, and open no more."""
        with self._lock:
            self._is_closed = True
            channels = [opened.channel for opened in self._opened.values()]
            self._opened.clear()
        for channel in channels:
            channel.close()

    def _take_surplus(self) -> list[grpc.Channel]:
        """Forget the channels that were not used for longest. Returns them."""
        idle = [key for key, opened in self._opened.items() if not opened.num_users]
        surplus = idle[: max(0, len(self._opened) - _MAX_CHANNELS)]
        return [self._opened.pop(key).channel for key in surplus]
