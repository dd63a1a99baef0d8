"""The endpoint picker behind a real Envoy: pods of a gateway and a worker each, and a router that knows the workers.

A pod's worker is scripted, but its prefix cache counts: a request finds the blocks that earlier ones have left there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import FLEET_NAME, PLAIN, Transport
from headrace.gateway.edge.http import HttpEdge, HttpServer, bound_socket
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.picking.picker import DESTINATION, EXTERNAL_PROCESSOR, SUBSET, EndpointPicker, PickerServer
from headrace.gateway.picking.tls import Bind, PickerTls, PickerTlsError, picker_bind
from headrace.gateway.protocol import OpenProtocol, Setup
from headrace.gateway.protocols import PROTOCOLS, endpoints
from headrace.gateway.server import Threads, services_behind
from headrace.gateway.services import Services
from headrace.protos import ext_proc_pb2, ext_proc_pb2_grpc, inference_pb2, worker_pb2
from headrace.protos.block_hash import block_hashes, root_hash
from tests.certificates import make_certificates
from tests.gateway.conftest import tokens_of
from tests.gateway.served import default_flags
from tests.patience import patience
from tests.ports import free_port
from tests.router.conftest import RunningRouter
from tests.router.fake_worker import BLOCK_SIZE, FakeWorker, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
IS_LONG = os.environ.get("HEADRACE_SOAK") == "1"
ENVOY = Path(__file__).parents[3] / ".make/envoy/bin/envoy"
needs_envoy = pytest.mark.skipif(not ENVOY.exists(), reason="there is no Envoy here; make test fetches it")
WORDS = tokens_of("yes")


class CachingWorker(FakeWorker):
    """A scripted worker with the blocks of the prompts that it has seen, the least recently used of which it evicts."""

    def __init__(self, host: str, bundle: bytes, max_blocks: int = 1500) -> None:
        super().__init__(host, tokenizer_sha256=hashlib.sha256(bundle).hexdigest())
        self.host, self.bundle, self.max_blocks = host, bundle, max_blocks
        self.recent: dict[int, None] = {}
        self.num_prompt_tokens = self.num_hit_tokens = 0

    async def start(self, address: str = "") -> FakeWorker:
        await super().start(address or f"{self.host}:0")
        self.address = f"{self.host}:{self.address.rpartition(':')[2]}"
        return self

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        yield worker_pb2.GetTokenizerResponse(chunk=self.bundle)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Any:
        tokens = request.token_ids
        hashes = block_hashes(root_hash(self.card.fingerprint, "", request.cache_salt), tokens, BLOCK_SIZE)
        hit = 0
        while hit < len(hashes) and hashes[hit] in self.recent:
            hit += 1
        self.num_prompt_tokens += len(tokens)
        self.num_hit_tokens += hit * BLOCK_SIZE
        new = [block for block in hashes if block not in self.recent]
        for block in reversed(hashes):  # the end of a chain goes first
            self.recent.pop(block, None)
            self.recent[block] = None
        evicted = list(self.recent)[: max(0, len(self.recent) - self.max_blocks)]
        for block in evicted:
            del self.recent[block]
        self.report(
            stored=[block for block in new if block in self.recent], evicted=[b for b in evicted if b not in new]
        )
        async for message in super().Generate(request, context):
            yield message

    def _messages(self, request: inference_pb2.GenerateRequest) -> Any:
        for number, token in enumerate(WORDS):
            yield inference_pb2.GenerateResponse(start_pos=number, token_ids=[token])
        finish = self._finish(request, inference_pb2.FINISH_REASON_LENGTH, len(WORDS))
        yield inference_pb2.GenerateResponse(start_pos=len(WORDS), finish=finish)


@dataclass
class Front:
    """A gateway in this process."""

    services: Services
    protocols: list[OpenProtocol]


@asynccontextmanager
async def services_of(address: str) -> AsyncIterator[Front]:
    threads = Threads()
    services = services_behind((address,), threads)
    opened = [protocol.open(Setup(services, default_flags(protocol))) for protocol in PROTOCOLS.values()]
    await services.models.listed()
    following = asyncio.create_task(services.models.run())
    try:
        yield Front(services, opened)
    finally:
        await end_tasks(following)
        await services.shadows.close()
        await services.upstream.close()
        await services.host.close()
        for protocol in opened:
            await protocol.close()
        services.models.close()
        threads.close()


@asynccontextmanager
async def serving(front: Front, host: str, port: int) -> AsyncIterator[None]:
    """Serve a gateway over HTTP."""
    controls = EdgeControls(EdgeSettings())
    edge = HttpEdge(
        endpoints(front.services, front.protocols), front.services.metrics,
        admission=controls.admission, bodies=controls.bodies,
    )  # fmt: skip
    server = HttpServer(edge, 2, controls.connections, controls.tls)
    task = asyncio.create_task(server.serve(sockets=[bound_socket(host, port)]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


@dataclass
class Pod:
    """A worker with a gateway of its own, on an address of its own."""

    worker: CachingWorker
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)


@dataclass
class Fleet:
    """Pods, their router, a gateway of that router, and the picker."""

    pods: list[Pod]
    router: RunningRouter
    front: Front
    endpoints: EndpointPicker
    picker_port: int
    port: int
    picker: PickerServer

    def forget(self) -> None:
        """Empty all caches and start counting."""
        for pod in self.pods:
            pod.worker.report(evicted=list(reversed(pod.worker.recent)))
            pod.worker.recent.clear()
            pod.worker.num_prompt_tokens = pod.worker.num_hit_tokens = 0

    @property
    def hits(self) -> float:
        """The part of the prompt tokens that were cached."""
        workers = [pod.worker for pod in self.pods]
        return sum(w.num_hit_tokens for w in workers) / sum(w.num_prompt_tokens for w in workers)


@asynccontextmanager
async def running_fleet(bundle: bytes, num_pods: int = 3) -> AsyncIterator[Fleet]:
    from headrace.router.dispatch.admission import AdmissionConfig
    from headrace.router.service import RequestBounds

    async with AsyncExitStack() as stack:
        port = free_port("0.0.0.0")
        pods = []
        for number in range(num_pods):
            pod = Pod(CachingWorker(f"127.0.0.{11 + number}", bundle))
            stack.push_async_callback(pod.worker.kill)
            stack.push_async_callback(pod.stack.aclose)
            await pod.worker.start()
            front = await pod.stack.enter_async_context(services_of(pod.worker.address))
            await pod.stack.enter_async_context(serving(front, pod.worker.host, port))
            pods.append(pod)
        workers: list[FakeWorker] = [pod.worker for pod in pods]
        router = RunningRouter(workers, lease_s=5.0, bounds=RequestBounds(), admission=AdmissionConfig())
        await router.server.start()
        stack.push_async_callback(router.server.stop, 0.0)
        stack.push_async_callback(router.channel.close)
        await router.until_ready(num_pods)
        front = await stack.enter_async_context(services_of(f"127.0.0.1:{router.port}"))
        endpoints = EndpointPicker(front.protocols, front.services.upstream, port, 1 << 20)
        picker = PickerServer(endpoints, lambda: front.services.models.ready)
        picker_port = await picker.start("127.0.0.1:0")
        stack.push_async_callback(picker.stop, 0.0)
        yield Fleet(pods, router, front, endpoints, picker_port, port, picker)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_bundle: bytes) -> AsyncIterator[Fleet]:
    """A fleet that tests leave as it is."""
    async with running_fleet(tiny_bundle) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def own_fleet(tiny_bundle: bytes) -> AsyncIterator[Fleet]:
    """A fleet of which a test ends parts."""
    async with running_fleet(tiny_bundle, num_pods=2) as running:
        yield running


def envoy_config(
    port: int, admin_port: int, picker_port: int, *, fail_open: bool, fallback: str, picker_tls: dict[str, Any] | None
) -> dict[str, Any]:
    """As the guide has it: ext_proc streams both ways; the endpoints are those of the metadata, in their order.
    `picker_tls` is how Envoy speaks TLS with the picker."""
    ext_proc = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "failure_mode_allow": fail_open,
        "message_timeout": "30s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    router = {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
    retry = {"retry_on": "connect-failure,reset", "num_retries": 3}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pods", "timeout": "60s", "retry_policy": retry}}
    filters = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{filters}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    override = {
        "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {
                            "@type": "type.googleapis.com/"
                            "envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
                        },
                    }
                }
            ]
        },
    }
    policy = {
        "typed_extension_config": {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    check = {
        "timeout": f"{patience(2):.0f}s",
        "interval": "0.2s",
        "no_traffic_interval": "0.2s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": EXTERNAL_PROCESSOR},
    }
    pods = [_address(host, int(number)) for host, _, number in (one.rpartition(":") for one in fallback.split(","))]
    return {
        "admin": {"address": _address("127.0.0.1", admin_port)["endpoint"]["address"]},
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": _address("127.0.0.1", port)["endpoint"]["address"],
                    "filter_chains": [
                        {
                            "filters": [
                                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "pods",
                    "connect_timeout": "2s",
                    "load_balancing_policy": {"policies": [policy]},
                    "load_assignment": {"cluster_name": "pods", "endpoints": [{"lb_endpoints": pods}]},
                },
                {
                    "name": "picker",
                    "connect_timeout": "2s",
                    "typed_extension_protocol_options": http2,
                    # Envoy fails open only before it has sent a body, so it must know that no picker is there.
                    "health_checks": [check],
                    "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
                    **({} if picker_tls is None else {"transport_socket": picker_tls}),
                    "load_assignment": {
                        "cluster_name": "picker",
                        "endpoints": [{"lb_endpoints": [_address("127.0.0.1", picker_port)]}],
                    },
                },
            ],
        },
    }


def tls_towards(ca: Path | None = None, client: Path | None = None) -> dict[str, Any]:
    """TLS of Envoy's. It checks the server by an authority, or not at all, and shows the certificate of `client`."""
    common: dict[str, Any] = {"alpn_protocols": ["h2"]}
    if ca is not None:
        name = {"san_type": "DNS", "matcher": {"exact": FLEET_NAME}}
        trusted = {"filename": str(ca / "ca.pem")}
        common["validation_context"] = {"trusted_ca": trusted, "match_typed_subject_alt_names": [name]}
    if client is not None:
        chain, key = {"filename": str(client / "cert.pem")}, {"filename": str(client / "key.pem")}
        common["tls_certificates"] = [{"certificate_chain": chain, "private_key": key}]
    kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    config = {"@type": kind, "sni": FLEET_NAME, "common_tls_context": common}
    return {"name": "envoy.transport_sockets.tls", "typed_config": config}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}


@dataclass
class Envoy:
    """A running Envoy. `client` calls it, and it tells about itself at `admin`."""

    client: httpx.AsyncClient
    admin: str

    async def statistic(self, name: str) -> int:
        """Return one of its counters or gauges."""
        text = (await self.client.get(f"{self.admin}/stats", params={"filter": f"^{name}$"})).text
        return int(text.rpartition(":")[2])

    async def until_picker(self, *, is_healthy: bool) -> None:
        """Wait until it knows that the picker is there, or that it is gone."""
        async with asyncio.timeout(patience(20)):
            while bool(await self.statistic("cluster.picker.membership_healthy")) != is_healthy:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running_envoy(
    fleet: Fleet,
    directory: Path,
    *,
    fail_open: bool = True,
    picker_port: int | None = None,
    picker_tls: dict[str, Any] | None = None,
) -> AsyncIterator[Envoy]:
    """Envoy in front of the pods, with the fleet's picker or another."""
    port, admin_port = free_port("0.0.0.0"), free_port("0.0.0.0")
    admin = f"http://127.0.0.1:{admin_port}"
    fallback = ",".join(f"{pod.worker.host}:{fleet.port}" for pod in fleet.pods)
    how = {"fail_open": fail_open, "fallback": fallback, "picker_tls": picker_tls}
    config = envoy_config(port, admin_port, picker_port or fleet.picker_port, **how)  # type: ignore[arg-type]
    path = directory / "envoy.json"
    path.write_text(json.dumps(config))
    command = [str(ENVOY), "-c", str(path), "--concurrency", "1", "-l", "warning", "--disable-hot-restart"]
    with (directory / "envoy.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HOME": str(directory)})
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=patience(30)) as client:
            async with asyncio.timeout(patience(30)):
                while True:
                    assert process.poll() is None, (directory / "envoy.log").read_text()
                    try:
                        if (await client.get(f"{admin}/ready")).text.strip() == "LIVE":
                            break
                    except httpx.TransportError:
                        pass
                    await asyncio.sleep(0.05)
            yield Envoy(client, admin)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 20)


def conversations(seed: int, number: int = 8, turns: int = 4) -> list[list[dict[str, Any]]]:
    """Bodies of chats, in which each turn repeats the ones before; the turns of different chats are mixed."""
    rng = random.Random(seed)
    chats: list[list[dict[str, str]]] = [
        [{"role": "system", "content": f"{number} {rng.random()} " * 8}] for number in range(number)
    ]
    bodies = []
    for turn in range(turns):
        order = list(range(number))
        rng.shuffle(order)
        for chat in order:
            chats[chat].append({"role": "user", "content": f"{turn} {rng.random()} " * 4})
            bodies.append({"model": "m", "messages": list(chats[chat]), "max_tokens": 8})
            chats[chat].append({"role": "assistant", "content": "yes"})
    return [bodies]


async def replayed(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]]) -> None:
    """Send the requests one after another; every answer must be whole."""
    for body in bodies:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "yes"


async def spread(fleet: Fleet, client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]]) -> None:
    """As `replayed`; but while a conversation begins, all workers except one in turn are busy."""
    number = 0
    for body in bodies:
        begins = len(body["messages"]) == 2
        number += begins
        for place, pod in enumerate(fleet.pods):
            busy = 5000 if begins and place != number % len(fleet.pods) else 0
            pod.worker.report(num_uncached_tokens=busy)
            (link,) = [link for link in fleet.router.fleet.links() if link.address == pod.worker.address]
            await until(lambda link=link, busy=busy: link.reported.load.num_uncached_tokens == busy)
        await replayed(client, [body])


@needs_envoy
async def test_prefix_hits_behind_envoy_are_those_of_the_router(fleet: Fleet, tmp_path: Path) -> None:
    (bodies,) = conversations(1, number=24, turns=6) if IS_LONG else conversations(1)
    async with AsyncExitStack() as stack:
        port = free_port("0.0.0.0")
        await stack.enter_async_context(serving(fleet.front, "127.0.0.1", port))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=patience(30))
        )
        await spread(fleet, client, bodies)
    own = fleet.hits
    served = [len(pod.worker.requests) for pod in fleet.pods]
    assert own > 0.5
    fleet.forget()
    await until(lambda: len(fleet.router.fleet.index) == 0)
    # It refuses requests without a picker, so an answer has come by its choice.
    async with running_envoy(fleet, tmp_path, fail_open=False) as envoy:
        client = envoy.client
        await envoy.until_picker(is_healthy=True)
        await spread(fleet, client, bodies)
        print(f"prefix hits of {len(bodies)} requests: {own:.4f} by the router, {fleet.hits:.4f} behind Envoy")
        assert abs(fleet.hits - own) <= 0.01
        assert min(len(pod.worker.requests) - had for pod, had in zip(fleet.pods, served, strict=True)) > 0
        await until(lambda: fleet.router.fleet.num_in_flight == 0)  # every booking was released
        chunks = []
        async with client.stream("POST", "/v1/chat/completions", json={**bodies[0], "stream": True}) as streamed:
            async for line in streamed.aiter_lines():
                chunks += [line] if line.startswith("data: ") else []
        assert chunks[-1] == "data: [DONE]"
        # The endpoint itself says what is wrong with a request.
        wrong = await client.post("/v1/chat/completions", json={"model": "m", "messages": "none"})
        assert wrong.status_code == 400
        unknown = await client.post("/v1/chat/completions", json={**bodies[0], "model": "other"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        models = await client.get("/v1/models")
        assert models.json()["data"][0]["id"] == "m"


@needs_envoy
async def test_requests_go_on_when_an_endpoint_or_the_picker_dies(own_fleet: Fleet, tmp_path: Path) -> None:
    fleet = own_fleet
    (bodies,) = conversations(2, number=3, turns=2)
    async with running_envoy(fleet, tmp_path) as envoy:
        client = envoy.client
        await replayed(client, bodies)
        body = bodies[0]
        before = [len(pod.worker.requests) for pod in fleet.pods]
        await replayed(client, [body])
        (first,) = [pod for pod, had in zip(fleet.pods, before, strict=True) if len(pod.worker.requests) > had]
        # Only the pod's HTTP server is gone, so that the router still picks it: Envoy takes the next endpoint.
        await first.stack.aclose()
        served = sum(len(pod.worker.requests) for pod in fleet.pods if pod is not first)
        await replayed(client, [body])
        assert sum(len(pod.worker.requests) for pod in fleet.pods if pod is not first) == served + 1
        await fleet.picker.stop(0.0)
        others = [pod for pod in fleet.pods if pod is not first]
        await envoy.until_picker(is_healthy=False)
        served = sum(len(pod.worker.requests) for pod in others)
        for _ in range(4):
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert sum(len(pod.worker.requests) for pod in others) == served + 4


@asynccontextmanager
async def another_picker(fleet: Fleet, bind: Bind) -> AsyncIterator[int]:
    """The fleet's picker at another port, which listens so."""
    picker = PickerServer(fleet.endpoints, lambda: fleet.front.services.models.ready, bind)
    port = await picker.start("127.0.0.1:0")
    try:
        yield port
    finally:
        await picker.stop(0.0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of the fleet."""
    return make_certificates(tmp_path_factory.mktemp("certs") / "fleet")


@needs_envoy
@pytest.mark.parametrize("tls", [PickerTls.SELF_SIGNED, PickerTls.MUTUAL])
async def test_envoy_speaks_tls_with_the_picker(
    fleet: Fleet, certificates: Path, tmp_path: Path, tls: PickerTls
) -> None:
    """As proxies of the Inference Extension do without being told, and as strictly as they can."""
    towards = tls_towards(certificates, certificates) if tls is PickerTls.MUTUAL else tls_towards()
    (bodies,) = conversations(3, number=1, turns=2)
    # It refuses requests without a picker, so an answer has come by its choice.
    async with (
        another_picker(fleet, picker_bind(tls, Transport(certificates))) as port,
        running_envoy(fleet, tmp_path, fail_open=False, picker_port=port, picker_tls=towards) as envoy,
    ):
        await envoy.until_picker(is_healthy=True)
        await replayed(envoy.client, bodies)
        assert await envoy.statistic("cluster.picker.ssl.handshake") > 0


async def status_of(port: int, credentials: grpc.ChannelCredentials | None) -> str:
    """What the picker answers a probe of a proxy that knows its name."""
    options = (("grpc.ssl_target_name_override", FLEET_NAME), ("grpc.enable_http_proxy", 0))
    address = f"127.0.0.1:{port}"
    channel = (
        grpc.aio.insecure_channel(address)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=options)
    )
    async with channel:
        try:
            asked = health_pb2.HealthCheckRequest(service="liveness")
            await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=patience(5))
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_the_certificate_of_the_picker_is_that_of_the_fleet_or_its_own(fleet: Fleet, certificates: Path) -> None:
    transport = Transport(certificates)
    ca, certificate, key = (certificates / name for name in ("ca.pem", "cert.pem", "key.pem"))
    knowing = grpc.ssl_channel_credentials(ca.read_bytes())
    member = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), certificate.read_bytes())
    seen = []
    # A fleet with certificates uses them without being told.
    for tls in (None, PickerTls.MUTUAL, PickerTls.SELF_SIGNED, PickerTls.NONE):
        async with another_picker(fleet, picker_bind(tls, transport)) as port:
            seen.append([await status_of(port, credentials) for credentials in (knowing, member, None)])
            if tls is PickerTls.SELF_SIGNED:
                own = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
                assert await status_of(port, grpc.ssl_channel_credentials(own.encode())) == "OK"
    no = "UNAVAILABLE"
    assert seen == [["OK", "OK", no], [no, "OK", no], [no, no, no], [no, no, "OK"]]


async def test_without_a_certificate_the_remedy_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert picker_bind(None, PLAIN) == PLAIN.bind
    for tls in (PickerTls.FLEET, PickerTls.MUTUAL):
        with pytest.raises(PickerTlsError, match=f"--endpoint-picker-tls {tls} needs .* give --tls-dir DIR"):
            picker_bind(tls, PLAIN)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PickerTlsError, match=r"no certificate can be made \(there is no openssl command\); install"):
        picker_bind(PickerTls.SELF_SIGNED, PLAIN)


def headers(
    path: str = "/v1/chat/completions", *, end: bool = False, **metadata: Any
) -> ext_proc_pb2.ProcessingRequest:
    message = ext_proc_pb2.ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", raw_value=path.encode())
    message.request_headers.end_of_stream = end
    for namespace, values in metadata.items():
        fields = Struct()
        fields.update(values)
        message.metadata_context.filter_metadata[namespace.replace("__", ".")].CopyFrom(fields)
    return message


def body_of(content: bytes) -> ext_proc_pb2.ProcessingRequest:
    return ext_proc_pb2.ProcessingRequest(request_body=ext_proc_pb2.HttpBody(body=content, end_of_stream=True))


@dataclass
class Proxy:
    """A call of the picker."""

    call: Any

    async def say(self, *messages: ext_proc_pb2.ProcessingRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def hear(self) -> Any:
        async with asyncio.timeout(patience(20)):
            return await self.call.read()


@pytest_asyncio.fixture(loop_scope="module")
async def channel(fleet: Fleet) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.picker_port}") as opened:
        yield opened


async def test_the_endpoints_are_in_header_and_metadata_and_the_booking_lasts_as_long_as_the_request(
    fleet: Fleet, channel: grpc.aio.Channel
) -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi " * 40_000}]}).encode()
    proxy = Proxy(ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process())
    await proxy.say(headers(), body_of(raw))
    answer = await proxy.hear()
    (option,) = answer.request_headers.response.header_mutation.set_headers
    assert option.header.key == DESTINATION
    listed = option.header.raw_value.decode()
    assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == listed
    hosts = [f"{pod.worker.host}:{fleet.port}" for pod in fleet.pods]
    assert sorted(listed.split(",")) == hosts
    received = b""
    while True:
        piece = (await proxy.hear()).request_body.response.body_mutation.streamed_response
        received += piece.body
        if piece.end_of_stream:
            break
    assert received == raw
    assert fleet.router.fleet.num_in_flight == 1
    # Another host serves it than was picked first.
    other = listed.split(",")[1]
    response = ext_proc_pb2.ProcessingRequest(response_headers=ext_proc_pb2.HttpHeaders())
    fields = Struct()
    fields.update({f"{DESTINATION}-served": other})
    response.metadata_context.filter_metadata["envoy.lb"].CopyFrom(fields)
    await proxy.say(response)
    assert (await proxy.hear()).HasField("response_headers")
    await until(
        lambda: (
            [link.address.split(":")[0] for link in fleet.router.fleet.links() if link.num_in_flight]
            == [other.split(":")[0]]
        )
    )
    await proxy.call.done_writing()
    await until(lambda: fleet.router.fleet.num_in_flight == 0)
    fleet.router.fleet.check()


@pytest.mark.parametrize(("subset", "status"), [("{first}", 200), ("", 503), ("10.9.9.9:80", 503)])
async def test_a_subset_restricts_the_choice(fleet: Fleet, channel: grpc.aio.Channel, subset: str, status: int) -> None:
    first = f"{fleet.pods[0].worker.host}:{fleet.port}"
    proxy = Proxy(ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process())
    hint = {SUBSET: [endpoint for endpoint in [subset.format(first=first)] if endpoint]}
    await proxy.say(headers("/v1/models", end=True, envoy__lb__subset_hint=hint))
    answer = await proxy.hear()
    if status == 200:
        assert answer.request_headers.response.header_mutation.set_headers[0].header.raw_value.decode() == first
    else:
        assert answer.immediate_response.status.code == status
        set_headers = {
            option.header.key: option.header.raw_value for option in answer.immediate_response.headers.set_headers
        }
        assert set_headers["retry-after"] == b"1"


async def test_too_long_a_wait_is_429_and_no_worker_is_503(own_fleet: Fleet) -> None:
    fleet = own_fleet
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.picker_port}") as channel:
        await _is_refused(fleet, ext_proc_pb2_grpc.ExternalProcessorStub(channel))


async def _is_refused(fleet: Fleet, stub: Any) -> None:

    async def status() -> int:
        proxy = Proxy(stub.Process())
        await proxy.say(headers("/v1/models", end=True))
        return int((await proxy.hear()).immediate_response.status.code)

    for pod in fleet.pods:
        pod.worker.report(num_running=16, num_waiting=4000, decode_step_ms=100)
    links = fleet.router.fleet.links
    await until(lambda: all(link.reported.load.num_waiting == 4000 for link in links()))
    assert await status() == 429
    for pod in fleet.pods:
        await pod.worker.kill()
    await until(lambda: fleet.router.fleet.num_ready == 0)
    assert await status() == 503


async def test_health_has_the_services_of_the_protocol(fleet: Fleet, channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        async with asyncio.timeout(patience(20)):
            while (await health.Check(health_pb2.HealthCheckRequest(service=name))).status != 1:
                await asyncio.sleep(0.05)
