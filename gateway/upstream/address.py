"""The address of a router or worker, with its channel and stubs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, TypeVar

import grpc

from headrace.common.kubernetes.services import service_of
from headrace.common.transport.channels import CHANNEL_OPTIONS, Options, Transport
from headrace.common.transport.session_client import SessionClient
from headrace.common.transport.silence import Silences
from headrace.protos.router_pb2_grpc import RouterStub
from headrace.protos.status import details_of
from headrace.protos.worker_pb2_grpc import WorkerStub

_CHANNEL_OPTIONS: Options = (
    *CHANNEL_OPTIONS,
    # A name may stand for several routers (dns:///NAME:PORT). gRPC connects to all of them, calls them in turn, and
    # resolves the name again when a connection is lost.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)
# Sessions with the routers of one name.
NAMED_SESSIONS = 4

_Result = TypeVar("_Result")


@dataclass(slots=True)
class Address:
    """One address. `is_worker` is learned from the first call: a worker has no Router service."""

    address: str
    channel: grpc.aio.Channel
    sessions: SessionClient
    router: Any
    worker: Any
    is_worker: bool = field(default=False)
    avoided_until_s: float = field(default=0.0)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection. If not, reading this starts one."""
        is_ready = self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY
        return is_ready and not self.sessions.is_silent

    async def call(
        self,
        router: Callable[[], Awaitable[_Result]],
        worker: Callable[[], Awaitable[_Result]],
        *,
        may_be_unsupported: bool = False,
    ) -> _Result:
        """Make the call `router`, or the call `worker` if the address has no Router service. Raises AioRpcError.

        With `may_be_unsupported`, a router may have the method and still refuse the call as UNIMPLEMENTED. Such a
        refusal has details and is raised.
        """
        if not self.is_worker:
            try:
                return await router()
            except grpc.aio.AioRpcError as error:
                is_refusal = may_be_unsupported and details_of(error) is not None
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED or is_refusal:
                    raise
                self.is_worker = True
        return await worker()


def connect(address: str, transport: Transport, silences: Silences, *, plain_grpc: bool) -> Address:
    """Make the channel to an address. `plain_grpc`: each generation is a separate RPC."""
    channel = transport.channel(address, _CHANNEL_OPTIONS)
    num_sessions = NAMED_SESSIONS if _may_be_several(address) else 1
    sessions = SessionClient(channel, num_sessions, plain_grpc=plain_grpc, silences=silences)
    return Address(address, channel, sessions, RouterStub(channel), WorkerStub(channel))


def _may_be_several(address: str) -> bool:
    """Whether the address may stand for several routers. Each session is with one of them."""
    if address.startswith("unix:"):
        return False
    try:
        ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return True
    return False


def fallback_of(service: str) -> str:
    """The address of a Kubernetes Service while none of its pods is known: its name in the cluster's DNS. Raises
    ValueError if this is not the address of a Service."""
    named = service_of(service)
    name = f"{named.name}.{named.namespace}" if named.namespace else named.name
    return f"dns:///{name}:{named.port}"


def best_of(in_turn: Sequence[Address]) -> Address:
    """The first of these addresses that is connected and not avoided; otherwise the next best. At least one must be
    given."""
    now_s = time.monotonic()
    # Reading the state of each address reconnects those that are not connected.
    connected = [address for address in in_turn if address.is_connected]
    unsuspected = [address for address in connected or in_turn if address.avoided_until_s <= now_s]
    return unsuspected[0] if unsuspected else min(in_turn, key=lambda address: address.avoided_until_s)
