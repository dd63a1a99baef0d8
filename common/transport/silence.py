"""Decides when a silent peer counts as lost, for all peers of one process.

Peers promise a message at least every heartbeat. Silence for several heartbeats means that a peer hangs, unless there
is another cause. A false alarm is expensive: other workers compute all streams of the peer again. Three cases are
handled:

- This process itself was blocked. Silence only counts while its event loop runs on schedule. Right after a standstill
  no peer is given up, because messages may still be unread.
- The host or the network is busy. Then many peers fall silent together. While at least half of them are silent, each
  may be silent `WIDER` times as long.
- The cause is unknown. Moving many streams at once makes it worse, so at most a quarter of the peers (at least one) is
  given up within the time of one bound; the others wait for their turn.

A connection that breaks needs no rule: its calls fail at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable

LOST_HEARTBEATS = 5
"""After this many missing heartbeats, a peer counts as hanging."""
# Seconds between two checks of the event loop, while there are peers.
TICK_S = 0.1
# A longer delay of a check is a standstill; for the grace time after it, no peer is given up.
STALL_S = 0.25
GRACE_S = 0.5
# How much longer peers may be silent while at least half of them are.
WIDER = 4.0
# The part of its bound after which a peer counts as silent.
_SILENT_SHARE = 0.6


class Silences:
    """Listens to the peers of one process. Used in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peers: dict[Hashable, dict[Peer, None]] = {}  # by name; one peer may be heard on several streams
        self._given_up: dict[Hashable, float] = {}  # names, with times
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = clock()
        self._late_s = 0.0  # time that does not count
        self._stalled_s = -GRACE_S  # when the last standstill ended

    def watch(self, name: Hashable, bound_s: float) -> Peer:
        """Listen to a stream of a peer, which may be silent for `bound_s`. It counts as heard now. Close it."""
        if not self._peers:
            self._ticked_s = self._clock()
            self._arm()
        peer = Peer(self, name, bound_s)
        self._peers.setdefault(name, {})[peer] = None
        return peer

    def now_s(self) -> float:
        """A clock that stops while the event loop is blocked. Only differences are meaningful."""
        return min(self._clock(), self._ticked_s + TICK_S) - self._late_s

    def tick(self) -> None:
        """Note that the event loop has run, and add its delay."""
        now_s = self._clock()
        late_s = max(now_s - self._ticked_s - TICK_S, 0.0)
        self._ticked_s = now_s
        self._late_s += late_s
        if late_s > STALL_S:
            self._stalled_s = self.now_s()

    def rename(self, peer: Peer, name: Hashable) -> None:
        """Assign the stream `peer` to the peer `name`, once the name is known. A peer is silent if all of its streams
        are."""
        self._peers.setdefault(name, {})[peer] = None
        streams = self._peers[peer.name]
        del streams[peer]
        if not streams:
            del self._peers[peer.name]
        peer.name = name

    def forget(self, peer: Peer) -> None:
        """Stop listening to this stream."""
        streams = self._peers.get(peer.name, {})
        streams.pop(peer, None)
        if not streams:
            self._peers.pop(peer.name, None)
        if not self._peers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def are_many_silent(self) -> bool:
        """Whether at least half of the peers, and no fewer than two, are silent on all of their streams."""
        num_silent = sum(all(peer.is_silent for peer in streams) for streams in self._peers.values())
        return num_silent >= 2 and 2 * num_silent >= len(self._peers)

    def gives_up(self, peer: Peer) -> bool:
        """Whether a peer that was silent for too long may be given up now; if so, it is counted."""
        now_s = self.now_s()
        is_stalled = self._clock() - self._ticked_s - TICK_S > STALL_S or now_s - self._stalled_s < GRACE_S
        if is_stalled:
            return False
        recent = {name: at_s for name, at_s in self._given_up.items() if now_s - at_s < peer.bound_s}
        num_peers = len(self._peers.keys() | recent.keys())
        if peer.name not in recent and len(recent) >= max(1, num_peers // 4):
            return False
        self._given_up = {peer.name: now_s} | recent
        return True

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._run)

    def _run(self) -> None:
        self.tick()
        self._arm()


class Peer:
    """A stream from a peer whose silence is monitored."""

    __slots__ = ("_heard_s", "_silences", "bound_s", "name")

    def __init__(self, silences: Silences, name: Hashable, bound_s: float) -> None:
        """See `Silences.watch`. `bound_s` may be changed later."""
        self.name = name
        self.bound_s = bound_s
        self._silences = silences
        self._heard_s = silences.now_s()

    def heard(self, name: Hashable = None) -> None:
        """Record a message; `name` is the peer's, if it is known."""
        self._heard_s = self._silences.now_s()
        if name is not None and name != self.name:
            self._silences.rename(self, name)

    @property
    def silent_s(self) -> float:
        """The duration of the peer's silence, by the clock of `Silences`."""
        return self._silences.now_s() - self._heard_s

    @property
    def is_silent(self) -> bool:
        """Whether the peer has been silent for long enough to be suspected."""
        return self.silent_s >= _SILENT_SHARE * self.bound_s

    def judge(self) -> float:
        """The seconds until the next check; 0 if the peer must be given up now."""
        left_s = self.bound_s - self.silent_s
        if left_s > 0:
            return left_s
        if self._silences.are_many_silent and self.silent_s < WIDER * self.bound_s:
            return self.bound_s / 5
        return 0.0 if self._silences.gives_up(self) else self.bound_s / 5

    def close(self) -> None:
        """Stop monitoring. May be called twice."""
        self._silences.forget(self)
