"""Workers, routers and gateways of the chart are all replaced under load, as `helm upgrade` does: no request fails, no
stream is cut, and the cached prefixes stay.

A prefix stays if a worker still has its blocks, and is found if requests get it from there. Under load a router may
rightly compute a short prefix elsewhere, so hits are compared with those under the same load before.

The API server is real, and pods are processes that start and end as the chart says (`tests/infra/pods.py`).
`python -m tests.soak rolling-update` replaces four workers, two routers and two gateways, and goes back to the image
before; with `-- -k small`, two workers, a router and a gateway once.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.common.transport.channels import Transport
from headrace.protos.router_pb2 import ExplainRequest
from headrace.protos.router_pb2_grpc import RouterStub
from tests.deploy.chart import helm_library, rendered
from tests.deploy.kustomization import Resource
from tests.e2e.serving import MODEL
from tests.e2e.small_model import small_model
from tests.e2e.streams import STREAM_BOUND_S, Stream, chat_body, hits
from tests.infra.cluster import RealCluster, real_cluster
from tests.infra.pods import Pods, pods_of
from tests.patience import patience

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("HEADRACE_SOAK") != "1", reason="minutes: python -m tests.soak rolling-update"),
]

SEED = int(os.environ.get("HEADRACE_SEED", "1"))
NUM_PROMPTS = 24
# Until a proxy of the Service has heard of a change.
PROXY_LAG_S = 1.0
WORKER_ARGS = ["--threads=1", "--kv-cache-gb=0.3", "--max-num-seqs=8", "--execution-mode=accuracy"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with real_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


class Clients:
    """Clients of the Service of the gateways. Each sends one stream after another, without a second try."""

    def __init__(self, pods: Pods, count: int) -> None:
        self.num_good = 0
        self.bad: list[str] = []
        self.gateways: set[str] = set()
        self._pods = pods
        self._is_over = False
        self._texts: dict[tuple[int, int], str] = {}
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(count)]

    async def more(self, count: int) -> None:
        """Return when so many more streams have ended."""
        target = self.num_good + count
        async with asyncio.timeout(patience(STREAM_BOUND_S)):
            while self.num_good < target and not self.bad:
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Send nothing new, and wait for what runs."""
        self._is_over = True
        async with asyncio.timeout(patience(STREAM_BOUND_S)):
            await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        rng = random.Random(SEED * 1000 + number)
        async with httpx.AsyncClient(timeout=patience(STREAM_BOUND_S), trust_env=False) as http:
            while not self._is_over:
                await self._stream(http, rng)

    async def _stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        number, max_tokens = rng.randrange(40), rng.choice((16, 64, 256))
        gateway = rng.choice(self._pods.addresses("headrace-gateway", PROXY_LAG_S))
        self.gateways.add(gateway)
        stream = Stream()
        body = chat_body(number, max_tokens, temperature=0)
        try:
            async with http.stream("POST", f"http://{gateway}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    stream.error = f"{response.status_code}: {(await response.aread()).decode()}"
                else:
                    async for line in response.aiter_lines():
                        stream.take(line)
        except httpx.HTTPError as error:
            stream.error = repr(error)
        expected = self._texts.setdefault((number, max_tokens), stream.text)
        if stream.error is not None or not stream.is_done or stream.num_tokens != max_tokens:
            self.bad.append(f"{gateway}: {stream.num_tokens} tokens of {max_tokens}, {stream.error or 'cut'}")
        elif stream.text != expected:
            self.bad.append(f"{gateway}: another answer to story {number}")
        else:
            self.num_good += 1


@asynccontextmanager
async def clients(pods: Pods, count: int) -> AsyncIterator[Clients]:
    """Load inside."""
    running = Clients(pods, count)
    try:
        yield running
    finally:
        await running.stop()


def chart(helm: Any, namespace: str, tag: str, replicas: dict[str, int], *, is_first: bool = False) -> list[Resource]:
    """The objects of a release of that image. Only the first one makes the secret, as with Helm itself."""
    values: dict[str, Any] = {
        "image": {"repository": "headrace", "tag": tag},
        "model": {"source": str(small_model()), "name": MODEL},
        "secrets": {"create": is_first},
        **{role: {"replicas": count} for role, count in replicas.items()},
    }
    values["worker"]["args"] = WORKER_ARGS
    return rendered(helm, values, namespace=namespace)


@dataclass(frozen=True)
class Size:
    """A fleet, its clients, and the images to which it is changed, the first one being 1."""

    replicas: dict[str, int]
    num_clients: int
    images: tuple[str, ...]


SIZES = {
    "small": Size({"worker": 2, "router": 1, "gateway": 1}, 4, ("2",)),
    # An upgrade, and the way back.
    "whole": Size({"worker": 4, "router": 2, "gateway": 2}, 8, ("2", "1")),
}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("size", ["small", "whole"])
async def test_an_upgrade_under_load_loses_nothing_and_keeps_the_hits(
    cluster: RealCluster, tmp_path: Path, size: str
) -> None:
    helm, namespace, fleet = helm_library(), f"update-{size}", SIZES[size]
    rng = random.Random(SEED)
    prompts = [[rng.randrange(10, 20_000) for _ in range(512)] for _ in range(NUM_PROMPTS)]
    cluster.make_namespace(namespace)
    cluster.apply_all(chart(helm, namespace, "1", fleet.replicas, is_first=True), namespace)
    async with pods_of(cluster, namespace, tmp_path / "pods") as pods:
        await pods.until_rolled_out("headrace:1", 180)
        await until_routed(pods)
        token = tmp_path / "join-token"
        token.touch(mode=0o600)
        token.write_bytes(b64decode(cluster.get("Secret", namespace, "headrace-secrets")["data"]["join-token"]))
        await hits(url_of(pods), prompts)
        idle, kept_before = await hits(url_of(pods), prompts), await kept(pods, token, prompts)
        assert min(idle, kept_before) > 0.9
        async with clients(pods, fleet.num_clients) as running:
            await running.more(2 * fleet.num_clients)
            before = await hits(url_of(pods), prompts)
            for image in fleet.images:
                began_s, old, num_before = time.monotonic(), {pod.uid for pod in pods.pods}, running.num_good
                cluster.apply_all(chart(helm, namespace, image, fleet.replicas), namespace)
                await pods.until_rolled_out(f"headrace:{image}", 600)
                await running.more(2 * fleet.num_clients)
                kept_after, after = await kept(pods, token, prompts), await hits(url_of(pods), prompts)
                print(
                    f"to image {image}: {running.num_good - num_before} streams in {time.monotonic() - began_s:.0f} s, "
                    f"{len(running.bad)} bad; hits {idle:.3f} when idle, {before:.3f} before, {after:.3f} after; "
                    f"kept {kept_before:.3f} before, {kept_after:.3f} after; {len(old)} pods replaced; seed {SEED}"
                )
                print("\n".join(handovers(pods)))
                assert old <= {pod.uid for pod in pods.ended}
                assert kept_after >= 0.9 * kept_before
                assert after >= 0.9 * before
        assert running.bad == []
        assert len(running.gateways) == len(pods.of("headrace-gateway")) * (1 + len(fleet.images))
        assert [pod for pod in (*pods.ended, *pods.pods) if pod.was_killed or pod.num_restarts] == []
        assert pods.failures == []


async def kept(pods: Pods, join_token: Path, prompts: list[list[int]]) -> float:
    """The share of the prompts' tokens that a worker has in its cache, as a router knows."""
    (address, *_) = pods.addresses("headrace-router", 0)
    channel = Transport(join_token_file=join_token).channel(address)
    try:
        explain = RouterStub(channel).Explain
        answers = [await explain(ExplainRequest(token_ids=prompt), timeout=patience(10)) for prompt in prompts]
    finally:
        await channel.close()
    num_kept = sum(max(worker.num_cached_tokens for worker in answer.workers) for answer in answers)
    return num_kept / sum(map(len, prompts))


def handovers(pods: Pods) -> list[str]:
    """What routers and workers have logged of handovers so far."""
    lines = [(pod.name, line) for pod in (*pods.ended, *pods.pods) for line in pod.log]
    return [f"{name}: {line}" for name, line in lines if "KV blocks" in line or "not handed over" in line]


async def until_routed(pods: Pods) -> None:
    """Wait until the proxy of the gateways' Service has heard of one."""
    async with asyncio.timeout(patience(30)):
        while not pods.addresses("headrace-gateway", PROXY_LAG_S):
            await asyncio.sleep(0.05)


def url_of(pods: Pods) -> str:
    """A gateway."""
    return f"http://{pods.addresses('headrace-gateway', PROXY_LAG_S)[0]}"
