"""Runs fetches from other workers in threads, so that a worker that hangs delays only fetches from itself. The threads
open and close the channels too, because both may take a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import grpc

from headrace.common.transport.channels import Transport
from headrace.worker.kv.fetch import Fetch

# Number of calls at the same time. Silent ones do not count: they use nothing but a thread.
MAX_CALLS = 4
# Number of calls to one source at the same time.
MAX_OF_A_SOURCE = 2
_MAX_THREADS = 16
_MAX_CHANNELS = 16


class _Queued(NamedTuple):
    """A fetch, and the function that runs it."""

    fetch: Fetch
    run: Callable[[], None]


class Calls:
    """Runs fetches in the order of their arrival. Those that may not run yet wait without a thread. Thread-safe.

    A call is silent if its source has sent nothing for longer than `silence_s()` seconds. `on_end` is called in the
    fetch's thread when it has ended.
    """

    def __init__(self, silence_s: Callable[[], float], on_end: Callable[[Fetch], None]) -> None:
        self._silence_s = silence_s
        self._on_end = on_end
        self._executor = ThreadPoolExecutor(_MAX_THREADS, "kv-peers")
        self._lock = threading.Lock()
        self._queued: list[_Queued] = []
        self._heard_s: dict[Fetch, float] = {}
        """The running fetches, and when each got its last message or began."""
        self._is_stopped = False

    def begin(self, fetch: Fetch, run: Callable[[], None]) -> None:
        """Call `run` in a thread when it is the turn of this fetch. Raises RuntimeError after `stop`."""
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("this worker stops")
            self._queued.append(_Queued(fetch, run))
            self._advance()

    def advance(self) -> None:
        """Begin fetches whose turn has come because calls have become silent. Call it again and again."""
        if self._queued:
            with self._lock:
                self._advance()

    def hear(self, fetch: Fetch) -> None:
        """Note that a message of this fetch has arrived, so that its source does not count as silent."""
        with self._lock:
            self._heard_s[fetch] = time.monotonic()

    def silent_sources(self) -> set[str]:
        """The addresses of workers that have sent nothing for too long in a running call."""
        with self._lock:
            return {fetch.source for fetch in self._silent()}

    def stop(self) -> None:
        """Begin no more fetches. Queued ones never end."""
        with self._lock:
            self._is_stopped = True
            self._queued.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _silent(self) -> list[Fetch]:
        before_s = time.monotonic() - self._silence_s()
        return [fetch for fetch, heard_s in self._heard_s.items() if heard_s < before_s]

    def _advance(self) -> None:
        for queued in list(self._queued):
            # One that nobody waits for any more ends at once.
            if queued.fetch.is_given_up or self._may_begin(queued.fetch.source):
                self._queued.remove(queued)
                self._heard_s[queued.fetch] = time.monotonic()
                self._executor.submit(self._work, queued)

    def _may_begin(self, source: str) -> bool:
        num_running = len(self._heard_s)
        if num_running >= _MAX_THREADS or num_running - len(self._silent()) >= MAX_CALLS:
            return False
        return sum(fetch.source == source for fetch in self._heard_s) < MAX_OF_A_SOURCE

    def _work(self, queued: _Queued) -> None:
        try:
            queued.run()
        finally:
            with self._lock:
                del self._heard_s[queued.fetch]
                self._advance()
            self._on_end(queued.fetch)


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
        """Context manager: a channel to `source`, which stays open inside, unless `close` is called. Raises ValueError
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
