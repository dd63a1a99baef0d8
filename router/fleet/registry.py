"""The members of the fleet: a fixed list of addresses, workers that registered with this router, and workers that have
a lease in the shared store.

Pure: callers pass the time. A member's link knows whether it can be reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.protos.status import Reason, StatusError

# The default maximum number of workers of one router.
MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class Member:
    """A worker to connect to. `worker_id` is empty for an address of the fixed list that never registered."""

    address: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class _Lease:
    address: str
    ends_at_s: float


class SharedLeases:
    """The workers with a lease in a shared store.

    The store may become unreachable, and may be empty when it returns. So a worker is forgotten only after the store
    was readable for `lease_s` without a break and lacked it: a live worker renews its lease within that time.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._addresses: dict[str, str] = {}
        self._seen_at_s: dict[str, float] = {}
        self._reading_since_s: float | None = None

    def seen(self, addresses: Mapping[str, str], now_s: float) -> None:
        """Apply a successful read of the store: worker id -> address."""
        if self._reading_since_s is None:
            self._reading_since_s = now_s
        for worker_id, address in addresses.items():
            self._addresses[worker_id] = address
            self._seen_at_s[worker_id] = now_s
        for worker_id, seen_at_s in list(self._seen_at_s.items()):
            if now_s - max(seen_at_s, self._reading_since_s) >= self._lease_s:
                del self._addresses[worker_id], self._seen_at_s[worker_id]

    def lost(self) -> None:
        """Note that a read of the store failed."""
        self._reading_since_s = None

    def addresses(self) -> Mapping[str, str]:
        """Worker id -> address."""
        return self._addresses


class Registry:
    """The members of the fleet.

    A registration lasts for `lease_s`. `max_workers` bounds the fixed list and the registered workers together.
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
        """Grant or renew a worker's lease. Returns whether the set of members changed. The newest registration of a
        name or an address replaces older ones.

        Raises StatusError: INVALID_FIELD for an empty name or address, QUEUE_FULL if there are too many members.
        """
        for field, value in (("worker_id", worker_id), ("address", address)):
            if not value:
                problem = f"{field} is empty; a registration needs the worker's name and address"
                raise StatusError(Reason.INVALID_FIELD, problem, field=field)
        before = self._leases.get(worker_id)
        is_renewal = before is not None and before.address == address
        if not is_renewal:
            self._end(self._holders.get(address, worker_id))
            self._end(worker_id)
            if len(self._static) + len(self._leases) >= self._max_workers:
                raise StatusError(
                    Reason.QUEUE_FULL,
                    f"this router already has {self._max_workers} workers, the limit of its --max-workers; raise it, "
                    "or register with another router",
                    retry_after_s=self.lease_s,
                )
        self._leases[worker_id] = _Lease(address, now_s + self.lease_s)
        self._holders[address] = worker_id
        return not is_renewal

    def deregister(self, worker_id: str, address: str) -> bool:
        """End a worker's lease if it is still for this address. Returns whether it was."""
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
            if worker_id not in self._leases:  # a registration is newer than the store's lease
                members[address] = Member(address, worker_id)
        for worker_id, lease in self._leases.items():
            members[lease.address] = Member(lease.address, worker_id)
        return members
