"""The directory of the fleet's members: every actor reports itself to it, and learns about the others.

The directory is one small actor. It keeps nothing that cannot be told again: after its death, a new one knows everyone
within `PERIOD_S`. Meanwhile nothing changes, because workers keep the routers that they know (`KnownRouters`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.ray.signals import Signal

PERIOD_S = 1.0
# A member that was not heard of for this long is not listed any more.
_FORGET_S = 10.0
# A router that the directory does not list is kept for this long: the directory may be new, and not know it yet.
_KEEP_S = 20.0


@dataclass(frozen=True, slots=True)
class Front:
    """A gateway and its router. `router` and `metrics` are HOST:PORT."""

    member_id: str
    node: str
    url: str
    router: str
    metrics: str
    signals: dict[str, Signal] = field(default_factory=dict)
    """By model, as this router sees it."""


@dataclass(frozen=True, slots=True)
class WorkerMember:
    """A worker. `restarts` counts those of its process, in the same actor."""

    member_id: str
    node: str
    model: str
    worker_id: str
    address: str
    metrics: str
    numa_nodes: tuple[int, ...]
    cpus: tuple[int, ...]
    pid: int | None
    restarts: int
    is_draining: bool = False


Member = Front | WorkerMember


class Directory:
    """The members. A member is forgotten when it has been silent for too long."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Member, float]] = {}

    def meet(self, member: Member) -> list[Front]:
        """Add or update a member, and return the gateways with their routers."""
        self._seen[member.member_id] = (member, time.monotonic())
        return [other for other in self.members() if isinstance(other, Front)]

    def leave(self, member_id: str) -> None:
        """Forget a member that ends."""
        self._seen.pop(member_id, None)

    def members(self) -> list[Member]:
        """All members, in the order of their ids."""
        now_s = time.monotonic()
        self._seen = {name: seen for name, seen in self._seen.items() if now_s - seen[1] < _FORGET_S}
        return [self._seen[name][0] for name in sorted(self._seen)]


class KnownRouters:
    """The routers at which a worker is registered. Pure."""

    def __init__(self) -> None:
        self._listed_s: dict[str, float] = {}

    def listed(self, addresses: Iterable[str], now_s: float) -> set[str]:
        """Apply an answer of the directory. Returns the addresses at which the worker should be registered now."""
        self._listed_s |= dict.fromkeys(addresses, now_s)
        self._listed_s = {one: at_s for one, at_s in self._listed_s.items() if now_s - at_s < _KEEP_S}
        return set(self._listed_s)


def merged(fronts: Iterable[Front], model: str) -> Signal:
    """The routers' combined knowledge of a model: the largest of each value, because a new router may not know all
    workers."""
    found: dict[str, float] = {}
    for front in fronts:
        for name, value in front.signals.get(model, {}).items():
            found[name] = max(found.get(name, 0.0), value)
    return found
