"""Who belongs to the fleet: a fixed list of addresses, workers that registered here and renew their lease, and workers
whose lease was seen in a store that all routers share.

Pure: time is handed in. Whether a member can be reached is the business of its link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.protos.status import Reason, StatusError

# Default bound of the workers of one router.
MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that should be linked. `worker_id` is empty for an address of the fixed list that never registered."""

    address: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class _Lease:
    address: str
    ends_at_s: float


class SharedLeases:
    """Workers as a shared store shows them.

    The store may be unreachable, and may come back empty. A worker is therefore only forgotten when the store was
    readable for `lease_s` without a break and did not show it: it would have renewed its lease by then.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._addresses: dict[str, str] = {}
        self._seen_at_s: dict[str, float] = {}
        self._reading_since_s: float | None = None

    def seen(self, addresses: Mapping[str, str], now_s: float) -> None:
        """The store was read: worker id -> address."""
        if self._reading_since_s is None:
            self._reading_since_s = now_s
        for worker_id, address in addresses.items():
            self._addresses[worker_id] = address
            self._seen_at_s[worker_id] = now_s
        for worker_id, seen_at_s in list(self._seen_at_s.items()):
            if now_s - max(seen_at_s, self._reading_since_s) >= self._lease_s:
                del self._addresses[worker_id], self._seen_at_s[worker_id]

    def lost(self) -> None:
        """The store could not be read."""
        self._reading_since_s = None

    def addresses(self) -> Mapping[str, str]:
        """Worker id -> address."""
        return self._addresses


class Registry:
    """The members of the fleet.

    `lease_s` is how long a registration lasts; `max_workers` bounds those of the fixed list and the registered ones.
    """

    def __init__(
        self, static_addresses: Iterable[str] = (), *, lease_s: float = 6.0, max_workers: int = MAX_WORKERS
    ) -> None:
        self.lease_s = lease_s
        self._static = tuple(dict.fromkeys(static_addresses))
        self._max_workers = max_workers
        self._leases: dict[str, _Lease] = {}
        self._holders: dict[str, str] = {}  # address -> the worker that has its lease
        self.shared = SharedLeases(lease_s)

    def register(self, worker_id: str, address: str, now_s: float) -> bool:
        """Grant or renew the lease of a worker; whether members are others than before. The newest registration of a
        name or of an address holds.

        Raises StatusError: INVALID_FIELD for an empty name or address, QUEUE_FULL when there are too many members.
        """
        for field, value in (("worker_id", worker_id), ("address", address)):
            if not value:
                problem = f"{field} is empty: name the worker and say where it listens"
                raise StatusError(Reason.INVALID_FIELD, problem, field=field)
        before = self._leases.get(worker_id)
        is_renewal = before is not None and before.address == address
        if not is_renewal:
            self._end(self._holders.get(address, worker_id))
            self._end(worker_id)
            if len(self._static) + len(self._leases) >= self._max_workers:
                raise StatusError(
                    Reason.QUEUE_FULL,
                    f"this router has {self._max_workers} workers, as many as its --max-workers allows; raise it, or "
                    "register with another router",
                    retry_after_s=self.lease_s,
                )
        self._leases[worker_id] = _Lease(address, now_s + self.lease_s)
        self._holders[address] = worker_id
        return not is_renewal

    def deregister(self, worker_id: str, address: str) -> bool:
        """End a lease, if it is still the one of this address; whether it was."""
        lease = self._leases.get(worker_id)
        if lease is None or lease.address != address:
            return False
        self._end(worker_id)
        return True

    def expire(self, now_s: float) -> None:
        """End the leases that were not renewed in time."""
        for worker_id, lease in list(self._leases.items()):
            if lease.ends_at_s <= now_s:
                self._end(worker_id)

    def _end(self, worker_id: str) -> None:
        lease = self._leases.pop(worker_id, None)
        if lease is not None:
            del self._holders[lease.address]

    def members(self) -> dict[str, Member]:
        """Address -> member, one for each address."""
        members = {address: Member(address, "") for address in self._static}
        for worker_id, address in self.shared.addresses().items():
            if worker_id not in self._leases:  # who registers here says where it is now
                members[address] = Member(address, worker_id)
        for worker_id, lease in self._leases.items():
            members[lease.address] = Member(lease.address, worker_id)
        return members
