"""The members of the fleet: a fixed list of addresses, workers that registered with this router, workers that have a
lease in the shared store, and the pods of Kubernetes Services.

The router connects to these addresses from inside its network. So callers that neither a join token nor mutual TLS
authenticates may register only some of them (`check_target`).

Pure: callers pass the time. A member's link knows whether it can be reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from headrace.common.kubernetes.services import Condition, Endpoint, Endpoints, usable
from headrace.common.transport.channels import stays_on_host
from headrace.protos.status import Reason, StatusError

# The default maximum number of workers of one router.
MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class Member:
    """A worker to connect to. `worker_id` is empty for an address of the fixed list that never registered. `withheld`
    says why it gets no new requests, whatever it reports; empty if it may get some."""

    address: str
    worker_id: str
    withheld: str = ""


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
        """A read of the store has failed. No lease ends before the store could be read again for as long as a lease
        lasts."""
        self._reading_since_s = None

    def addresses(self) -> Mapping[str, str]:
        """The address of each worker that has a lease, by the worker's id."""
        return self._addresses


_WITHHELD = {Condition.NOT_READY: "its pod is not ready", Condition.TERMINATING: "its pod is terminating"}


class ServicePods:
    """The pods of Kubernetes Services, each worker's pod by its address. A pod stays until it has left its Service."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._pods: dict[str, dict[str, Member]] = {}  # by service, then by address
        self.num_left_out = 0
        """Pods beyond `max_workers`. They get no requests."""

    def seen(self, service: str, endpoints: Endpoints) -> set[str]:
        """Apply the pods of a Service. Returns the addresses of those that have left it."""
        takes = set(usable(endpoints))
        room = self._max_workers - sum(len(pods) for name, pods in self._pods.items() if name != service)

        def in_order(one: Endpoint) -> tuple[bool, str, str]:
            return one.address not in takes, one.pod, one.address

        kept = sorted(endpoints.values(), key=in_order)[: max(room, 0)]
        self.num_left_out = len(endpoints) - len(kept)
        before = self._pods.get(service, {})
        now = {
            one.address: Member(one.address, one.pod, "" if one.address in takes else _WITHHELD[one.condition])
            for one in kept
        }
        self._pods[service] = now
        return before.keys() - {address for pods in self._pods.values() for address in pods}

    def members(self) -> Iterable[Member]:
        """The pods of all Services."""
        for pods in self._pods.values():
            yield from pods.values()


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
        self.services = ServicePods(max_workers)

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
        """The members of the fleet by address. If several name one address, a registered worker counts before one with
        a lease in the store, then pods, then the fixed list. A pod's condition applies in any case."""
        members = {address: Member(address, "") for address in self._static}
        pods = {member.address: member for member in self.services.members()}
        members |= pods
        named = [
            # a registration is newer than the store's lease
            *((address, name) for name, address in self.shared.addresses().items() if name not in self._leases),
            *((lease.address, name) for name, lease in self._leases.items()),
        ]
        for address, worker_id in named:
            members[address] = Member(address, worker_id, pods[address].withheld if address in pods else "")
        return members


def check_target(address: str, peer: str) -> None:
    """Raise StatusError (PERMISSION_DENIED) if the caller at `peer`, in gRPC's notation, may not register this address.

    Callers on this host may register any address. Other callers may register only IP addresses of other hosts. Unix
    sockets, loopback addresses and host names are refused, because they can lead back to this host.
    """
    if _is_local(peer):
        return
    host, _, port = address.rpartition(":")
    try:
        target = ip_address(host.strip("[]"))
    except ValueError:
        target = None
    mapped = getattr(target, "ipv4_mapped", None) or target
    if mapped is None or not re.fullmatch("[0-9]{1,5}", port) or not _is_of_another_host(mapped):
        raise StatusError(
            Reason.PERMISSION_DENIED,
            "a worker on another host must register with IP:PORT, not with a host name, a unix socket or a loopback "
            "address; use --join-token-file or --tls-dir to allow these",
            field="address",
        )


def _is_of_another_host(target: IPv4Address | IPv6Address) -> bool:
    return not (target.is_loopback or target.is_unspecified or target.is_link_local or target.is_multicast)


def _is_local(peer: str) -> bool:
    """Whether a peer such as ipv4:10.0.0.7:4242, ipv6:%5B::1%5D:4242 or unix: is on this host."""
    kind, _, rest = peer.partition(":")
    return stays_on_host(peer if kind == "unix" else rest.replace("%5B", "[").replace("%5D", "]"))
