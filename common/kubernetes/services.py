"""The pods of a Service, with their addresses and conditions, read from its EndpointSlices. Pure.

A Service has one or more slices (API group discovery.k8s.io/v1). A pod may be in several of them: in one for each
family of addresses, and for a moment in two while the controller moves it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

SCHEME = "kubernetes:///"
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_ADDRESS = re.compile(rf"{SCHEME}(?P<name>{_LABEL})(\.(?P<namespace>{_LABEL}))?:(?P<port>[0-9]{{1,5}})")


@dataclass(frozen=True, slots=True)
class Service:
    """A Service, and the port on which its pods listen."""

    name: str
    namespace: str
    """Empty for the namespace of this process."""
    port: int


def is_service(address: str) -> bool:
    """Whether an address names a Service rather than a process."""
    return address.startswith("kubernetes:")


def service_of(address: str) -> Service:
    """The Service of kubernetes:///NAME[.NAMESPACE]:PORT. Raises ValueError with the remedy."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ValueError(
            f"{address[:200]!r} is not a service: write {SCHEME}NAME[.NAMESPACE]:PORT with the port on which its pods "
            "listen"
        )
    return Service(found["name"], found["namespace"] or "", int(found["port"]))


class Condition(enum.Enum):
    """Whether a pod takes requests, as Kubernetes sees it."""

    READY = "ready"
    NOT_READY = "not_ready"
    TERMINATING = "terminating"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A pod of a Service: its gRPC target, its name, and its condition."""

    address: str
    pod: str
    condition: Condition


Endpoints = Mapping[str, Endpoint]
"""The pods of a Service by address."""


class _Shape(msgspec.Struct, rename="camel"):
    """The base of what is read from the API. Fields that are not named here are ignored."""


class _Conditions(_Shape):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _TargetRef(_Shape):
    name: str = ""
    uid: str = ""


class _SliceEndpoint(_Shape):
    addresses: list[str] | None = None
    conditions: _Conditions | None = None
    target_ref: _TargetRef | None = None


class _Port(_Shape):
    port: int | None = None


class _Metadata(_Shape):
    name: str = ""
    resource_version: str = ""


class EndpointSlice(_Shape):
    """A slice of a Service's endpoints."""

    metadata: _Metadata
    address_type: str = "IPv4"
    endpoints: list[_SliceEndpoint] | None = None
    ports: list[_Port] | None = None


class _ListMetadata(_Shape):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class SliceList(_Shape):
    """The answer to a list. `metadata.continue_` is empty in the last part of it."""

    metadata: _ListMetadata
    items: list[EndpointSlice] | None = None


class WatchEvent(_Shape):
    """A line of a watch. `object` is a slice, or a `Status` if `type` is ERROR."""

    type: str
    object: msgspec.Raw


class Status(_Shape):
    """The API's description of an error."""

    code: int = 0
    reason: str = ""
    message: str = ""


# The states of a pod that is in several slices: what has begun to terminate never becomes ready again, and otherwise
# one slice may be older than the other.
_PRECEDENCE = (Condition.TERMINATING, Condition.READY, Condition.NOT_READY)
_FAMILIES = ("IPv4", "IPv6")


def endpoints_of(slices: Iterable[EndpointSlice], port: int) -> dict[str, Endpoint]:
    """The pods in the slices of a Service, by address. A pod with addresses of both families has its IPv4 address."""
    pods: dict[str, dict[str, set[Condition]]] = {}  # pod -> "family address" -> conditions
    names: dict[str, str] = {}
    for one in slices:
        if one.address_type not in _FAMILIES:
            continue
        for entry in one.endpoints or ():
            if not entry.addresses:
                continue
            address = entry.addresses[0]
            target = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            ref = entry.target_ref or _TargetRef()
            pod = ref.uid or ref.name or target
            names[pod] = ref.name
            pods.setdefault(pod, {}).setdefault(target, set()).add(_condition_of(entry.conditions or _Conditions()))
    found = {}
    for pod, targets in pods.items():
        target = min(targets, key=lambda target: (target.startswith("["), target))
        conditions = set[Condition]().union(*targets.values())
        condition = next(one for one in _PRECEDENCE if one in conditions)
        found[target] = Endpoint(target, names[pod], condition)
    return found


def _condition_of(given: _Conditions) -> Condition:
    """The condition of an endpoint. Absent conditions mean: ready, and not terminating."""
    if given.terminating:
        return Condition.TERMINATING
    return Condition.NOT_READY if given.ready is False else Condition.READY


def usable(endpoints: Endpoints) -> Collection[str]:
    """The addresses that may get new requests: those of ready pods. If no pod is ready, all of them, because a cluster
    that cannot reach its nodes reports all pods as not ready although they serve."""
    ready = [address for address, one in endpoints.items() if one.condition is Condition.READY]
    return ready or list(endpoints)


def ports_of(slices: Iterable[EndpointSlice]) -> set[int]:
    """The ports that the slices name."""
    return {port.port for one in slices for port in one.ports or () if port.port is not None}


def decode(raw: bytes, shape: type[Any]) -> Any:
    """Decode JSON to one of the shapes above. Raises ValueError."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
