"""A router in this process, fake workers for it, and a client."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from headrace.common.kubernetes.cluster import Cluster
from headrace.common.kubernetes.watch import Pace
from headrace.common.kubernetes.watches import ServiceWatches
from headrace.protos import inference_pb2, inference_pb2_grpc, router_pb2_grpc
from headrace.router.dispatch.admission import AdmissionConfig
from headrace.router.dispatch.forwarding import ForwardingConfig
from headrace.router.dispatch.holding import OnDemand
from headrace.router.dispatch.metrics import RouterMetrics
from headrace.router.dispatch.scaling import ScalingConfig
from headrace.router.fleet.fleet import Fleet, FleetConfig
from headrace.router.fleet.leases import LeaseReader
from headrace.router.fleet.registry import Registry
from headrace.router.placement.policy import Policy, place
from headrace.router.service import RequestBounds, RouterServer
from tests.patience import patience
from tests.router.fake_worker import FakeWorker, until

HEARTBEAT_MS = 100


class RunningRouter:
    """A listening router with its insides open, and a client's channel to it."""

    def __init__(
        self,
        workers: list[FakeWorker],
        *,
        lease_s: float,
        bounds: RequestBounds,
        admission: AdmissionConfig,
        plain_grpc: bool = False,
        leases: LeaseReader | None = None,
        services: Sequence[str] = (),
        cluster: Cluster | None = None,
        policy: Policy = place,
        on_demand: OnDemand = OnDemand(),  # noqa: B008  frozen
        scaling: ScalingConfig = ScalingConfig(),  # noqa: B008  frozen
    ) -> None:
        registry = Registry([worker.address for worker in workers], lease_s=lease_s)
        config = FleetConfig(heartbeat_ms=HEARTBEAT_MS, plain_grpc=plain_grpc)
        self.fleet = Fleet(registry, config, policy=policy, rng=random.Random(1))
        self.metrics = RouterMetrics()
        self.metrics.observe(self.fleet)
        self.services = None
        if cluster is not None:
            pace = Pace(first_pause_s=0.02, max_pause_s=0.2)
            registry_of = self.metrics.registry
            self.services = ServiceWatches(
                services, cluster, self.fleet.pods_seen, registry=registry_of, prefix="headrace_router", pace=pace
            )
        self.server = RouterServer(
            self.fleet,
            self.metrics,
            ForwardingConfig(),
            admission,
            bounds,
            leases=leases,
            on_demand=on_demand,
            scaling=scaling,
            services=self.services,
        )
        self.port = self.server.bind("127.0.0.1:0")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.router = router_pb2_grpc.RouterStub(self.channel)

    def call(self, tokens: list[int], max_tokens: int = 20, **fields: Any) -> Any:
        """A running Generate."""
        metadata = fields.pop("metadata", None)
        sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, **fields.pop("sampling", {}))
        request = inference_pb2.GenerateRequest(token_ids=tokens, sampling=sampling, **fields)
        return self.inference.Generate(request, metadata=metadata, timeout=patience(30))

    async def generate(
        self, tokens: list[int], max_tokens: int = 20, **fields: Any
    ) -> tuple[list[int], inference_pb2.Finish]:
        """The whole answer, checked to be without gap or repeat and to end in exactly one finish."""
        return await collected(self.call(tokens, max_tokens, **fields), len(fields.get("resume_token_ids", ())))

    async def until_ready(self, num_workers: int) -> None:
        """Return when that many workers take requests."""
        await until(lambda: self.fleet.num_ready == num_workers)

    async def until_idle(self) -> None:
        """Return when the last request has ended here too, a moment after its client knows; nothing may be left."""
        await until(lambda: self.server.inference.num_in_flight == 0)
        assert self.fleet.num_in_flight == 0
        for link in self.fleet.links():
            assert (link.num_in_flight, link.candidate().num_booked_requests if link.card else 0) == (0, 0)
        self.fleet.check()
        assert self.server.admission.num_waiting == 0
        self.server.admission.check()


async def collected(call: Any, first_pos: int = 0) -> tuple[list[int], inference_pb2.Finish]:
    """Tokens and finish of a running Generate, with the contract of the stream asserted."""
    tokens: list[int] = []
    finishes: list[inference_pb2.Finish] = []
    async for message in call:
        assert not finishes, "nothing follows a finish"
        assert message.start_pos == first_pos + len(tokens)
        tokens.extend(message.token_ids)
        if message.HasField("finish"):
            finishes.append(message.finish)
    assert len(finishes) == 1
    return tokens, finishes[0]


StartRouter = Callable[..., Any]
StartWorker = Callable[..., Any]


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    """Start fake workers that end with the test."""
    workers: list[FakeWorker] = []

    async def start(name: str = "w", **script: Any) -> FakeWorker:
        worker = FakeWorker(name, **script)
        workers.append(worker)
        return await worker.start()

    yield start
    for worker in workers:
        await worker.kill()


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    """Start routers that end with the test."""
    routers: list[RunningRouter] = []

    async def start(
        *workers: FakeWorker,
        lease_s: float = 5.0,
        capacity_wait_s: float = 5.0,
        max_in_flight: int = 1000,
        max_request_bytes: int = 1 << 26,
        plain_grpc: bool = False,
        leases: LeaseReader | None = None,
        services: Sequence[str] = (),
        cluster: Cluster | None = None,
        policy: Policy = place,
        on_demand: OnDemand = OnDemand(),  # noqa: B008  frozen
        scaling: ScalingConfig = ScalingConfig(),  # noqa: B008  frozen
        num_ready: int | None = None,
        **admission: Any,
    ) -> RunningRouter:
        bounds = RequestBounds(max_in_flight, max_request_bytes)
        config = AdmissionConfig(capacity_wait_s=capacity_wait_s, **admission)
        router = RunningRouter(
            list(workers),
            lease_s=lease_s,
            bounds=bounds,
            admission=config,
            plain_grpc=plain_grpc,
            leases=leases,
            services=services,
            cluster=cluster,
            policy=policy,
            on_demand=on_demand,
            scaling=scaling,
        )
        routers.append(router)
        await router.server.start()
        if router.services is not None:
            router.services.start()
        await router.until_ready(len(workers) if num_ready is None else num_ready)
        return router

    yield start
    for router in routers:
        await router.channel.close()
        if router.services is not None:
            await router.services.close()
        await router.server.stop(0.0)
