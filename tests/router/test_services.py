"""A router that finds its workers by the slices of a Service: a real router, fake workers, a scripted API server and,
where it has been built, a real one.

HEADRACE_SOAK=1 makes the changes last for HEADRACE_SOAK_MINUTES, by default ten; `python -m tests.soak kubernetes` does
that.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from headrace.common.kubernetes.cluster import Cluster
from headrace.common.kubernetes.services import Condition, Endpoint
from headrace.protos import router_pb2
from headrace.router.fleet.links import LinkState
from headrace.router.fleet.registry import Member, Registry, ServicePods
from tests.api_server import ApiServer
from tests.deploy.chart import helm_library, rendered
from tests.infra.cluster import RealCluster, real_cluster
from tests.patience import patience
from tests.router.conftest import RunningRouter, StartRouter, collected
from tests.router.fake_worker import answer, until
from tests.router.service_pods import RealSlices, ScriptedSlices, SliceServer, WorkerPods, away, frozen
from tests.router.test_service import health_of

SOAK = os.environ.get("HEADRACE_SOAK") == "1"
MINUTES = float(os.environ.get("HEADRACE_SOAK_MINUTES", "10"))
PROMPT = [5, 6, 7, 8, 9]


Start = Callable[[], Awaitable[RunningRouter]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with real_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(params=["scripted", "real"])
async def pods(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[WorkerPods]:
    """The pods of a Service, told by an API server of ours, and by a real one to the chart's own service account."""
    server: SliceServer
    if request.param == "scripted":
        server = ScriptedSlices(await ApiServer().start(), tmp_path)
    else:
        cluster = request.getfixturevalue("cluster")
        objects = rendered(helm_library(), {})
        rights = [one for one in objects if one["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
        server = await RealSlices(cluster, tmp_path, rights).start()
    made = WorkerPods(server)
    yield made
    await made.close()


@pytest.fixture
def start(pods: WorkerPods, start_router: StartRouter) -> Start:
    """Start a router that follows the Service."""

    async def started() -> RunningRouter:
        followed = Cluster(pods.server.url, pods.server.credentials)
        router: RunningRouter = await start_router(services=[pods.service], cluster=followed)
        return router

    return started


def takers(router: RunningRouter) -> set[str]:
    return {link.worker_id for link in router.fleet.links() if link.is_ready}


async def until_takers(router: RunningRouter, *names: str) -> None:
    await until(lambda: takers(router) == set(names))


async def test_workers_are_found_by_their_pods_and_forgotten_with_them(pods: WorkerPods, start: Start) -> None:
    first = await pods.add()
    router = await start()
    await until_takers(router, first)
    second = await pods.add()
    await until_takers(router, first, second)
    assert await router.generate(PROMPT) == await router.generate(PROMPT)
    await pods.end(first)
    await until(lambda: [link.worker_id for link in router.fleet.links()] == [second])
    await router.until_idle()


async def test_a_pod_that_is_not_ready_gets_no_new_requests_and_keeps_its_streams(
    pods: WorkerPods, start: Start
) -> None:
    name = await pods.add()
    router = await start()
    await until_takers(router, name)
    pods.workers[name].budget = 3
    call = router.call(PROMPT)
    await until(lambda: pods.workers[name].is_stuck)
    other = await pods.add()
    await until_takers(router, name, other)
    await pods.change(name, ready=False)
    await until_takers(router, other)
    (info,) = [info for info in router.fleet.workers() if info.worker_id == name]
    assert (info.state, info.detail) == (router_pb2.WORKER_STATE_SUSPECT, "its pod is not ready")
    num_before = len(pods.workers[name].requests)
    for _ in range(5):
        await router.generate(PROMPT)
    assert len(pods.workers[name].requests) == num_before
    pods.workers[name].budget = None
    assert (await collected(call))[0] == answer(PROMPT, 20)
    await pods.change(name)
    await until_takers(router, name, other)


async def test_a_terminating_pod_keeps_its_streams_even_when_it_has_left_the_service(
    pods: WorkerPods, start: Start
) -> None:
    name = await pods.add()
    router = await start()
    await until_takers(router, name)
    pods.workers[name].budget = 3
    call = router.call(PROMPT)
    await until(lambda: pods.workers[name].is_stuck)
    other = await pods.add()
    await pods.change(name, terminating=True)
    await until_takers(router, other)
    pods.workers[name].report(draining=True)
    await until(lambda: {link.state for link in router.fleet.links()} == {LinkState.READY, LinkState.DRAINING})
    await pods.forget(name)
    await until(lambda: [link.worker_id for link in router.fleet.links()] == [other])
    assert router.fleet.num_in_flight == 1
    pods.workers[name].budget = None
    assert (await collected(call))[0] == answer(PROMPT, 20)
    assert pods.workers[other].requests == [], "the stream did not move"
    await router.until_idle()


async def test_while_no_pod_is_ready_the_workers_speak_for_themselves(pods: WorkerPods, start: Start) -> None:
    """A cluster that has lost its nodes from sight calls every pod not ready."""
    names = [await pods.add(), await pods.add()]
    router = await start()
    await until_takers(router, *names)
    await pods.change(names[0], ready=False)
    await until_takers(router, names[1])
    await pods.change(names[1], ready=False)
    await until_takers(router, *names)
    await pods.change(names[0])
    await until_takers(router, names[0])


async def test_while_the_api_server_is_away_the_fleet_goes_on(pods: WorkerPods, start: Start) -> None:
    names = [await pods.add(), await pods.add()]
    router = await start()
    await until_takers(router, *names)
    await pods.server.cut()
    assert router.services is not None
    await until(lambda: _value(router, "headrace_router_service_watch_up", service="worker") == 0.0)
    assert (await router.generate(PROMPT))[0] == answer(PROMPT, 20)
    await pods.workers[names[0]].kill()
    await until_takers(router, names[1])
    assert (await router.generate(PROMPT))[0] == answer(PROMPT, 20)
    await pods.workers[names[0]].restart()
    await until_takers(router, *names)
    await pods.forget(names[0])
    await pods.server.open()
    await until_takers(router, names[1])
    assert _value(router, "headrace_router_service_watch_up", service="worker") == 1.0
    assert _value(router, "headrace_router_service_pods", service="worker", condition="ready") == 1.0
    ends = _value(router, "headrace_router_service_watch_ends_total", service="worker", reason="unreachable")
    assert ends is not None
    assert ends >= 1


def _value(router: RunningRouter, name: str, **labels: str) -> float | None:
    return router.metrics.registry.get_sample_value(name, labels)


async def test_a_router_is_healthy_at_once_and_ready_when_it_knows_its_pods(pods: WorkerPods, start: Start) -> None:
    """So that a new router replaces an old one only when it knows what the old one knew."""
    await pods.server.forbid()
    router = await start()
    assert await health_of(router, "") == "SERVING"
    assert await health_of(router, "headrace.v1.Router") == "NOT_SERVING"
    await pods.server.allow()
    async with asyncio.timeout(patience(20)):
        while await health_of(router, "headrace.v1.Router") != "SERVING":
            await asyncio.sleep(0.01)


def test_pods_beyond_the_bound_are_left_out_and_those_that_are_ready_come_first() -> None:
    registry = Registry(max_workers=2)
    ready = [Endpoint(f"10.0.0.{number}:1", f"w{number}", Condition.READY) for number in (3, 2)]
    waiting = Endpoint("10.0.0.1:1", "w1", Condition.NOT_READY)
    assert registry.services.seen("s", {one.address: one for one in (waiting, *ready)}) == set()
    assert set(registry.members()) == {"10.0.0.2:1", "10.0.0.3:1"}
    assert registry.services.num_left_out == 1


def test_a_pod_that_two_services_have_leaves_with_the_second() -> None:
    services = ServicePods(10)
    pod = Endpoint("10.0.0.1:1", "w", Condition.READY)
    for service in ("a", "b"):
        services.seen(service, {pod.address: pod})
    assert services.seen("a", {}) == set()
    assert services.seen("b", {}) == {"10.0.0.1:1"}


def test_the_condition_of_a_pod_applies_to_a_worker_that_has_registered_as_well() -> None:
    registry = Registry()
    pods = [
        Endpoint("10.0.0.1:1", "pod-1", Condition.TERMINATING),
        Endpoint("10.0.0.2:1", "pod-2", Condition.READY),
    ]
    registry.services.seen("s", {one.address: one for one in pods})
    registry.register("w1", "10.0.0.1:1", now_s=0.0)
    assert registry.members()["10.0.0.1:1"] == Member("10.0.0.1:1", "w1", "its pod is terminating")
    assert registry.members()["10.0.0.2:1"] == Member("10.0.0.2:1", "pod-2", "")


class Churn:
    """Random changes of the pods of a Service, and faults of its API server, under clients that check every answer."""

    def __init__(self, pods: WorkerPods, router: RunningRouter, rng: random.Random, *, forget_every: int) -> None:
        """At every so many of its absences the API server forgets all versions from before."""
        self.pods = pods
        self.router = router
        self.rng = rng
        self.lags_s: list[float] = []
        self.kinds: Counter[str] = Counter()
        self.num_answers = 0
        self._forget_every = forget_every
        self._is_over = False

    async def run(self, num_changes: int, interval_s: float, bound_s: Callable[[], float]) -> None:
        """Make the changes, each when the membership is right after the last one and `interval_s` have passed. Fails
        if it is not right within `bound_s()`, or a request is lost."""
        clients = [asyncio.create_task(self._client(number)) for number in range(6)]
        for _ in range(4):
            await self.pods.add(token_s=0.002)
        await until_takers(self.router, *self.pods.ready)
        next_s = time.monotonic()
        for number in range(num_changes):
            await self._change("away" if number == 0 else self._fault())
            changed_s = time.monotonic()
            try:
                async with asyncio.timeout(bound_s()):
                    while takers(self.router) != self.pods.ready:
                        await asyncio.sleep(0.002)
            except TimeoutError:
                wrong = takers(self.router) ^ self.pods.ready
                raise AssertionError(f"not right in time about {wrong}, after {dict(self.kinds)}") from None
            self.lags_s.append(time.monotonic() - changed_s)
            assert not any(client.done() for client in clients), "a client has failed"
            next_s += interval_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        self._is_over = True
        await asyncio.gather(*clients)

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        while not self._is_over:
            prompt = [rng.randrange(10, 10_000) for _ in range(rng.randrange(5, 30))]
            num_tokens = rng.randrange(5, 60)
            tokens, _ = await self.router.generate(prompt, num_tokens)
            assert tokens == answer(prompt, num_tokens)
            self.num_answers += 1

    def _fault(self) -> str:
        """What happens to the API server at a change: nothing, in three quarters of the cases."""
        return self.rng.choice(["drop", "version", "frozen", "away"]) if self.rng.random() < 0.25 else ""

    async def _change(self, fault: str) -> None:
        """Change a pod, while the API server has a fault or none."""
        server = self.pods.server
        if fault == "drop":
            await server.drop()
        elif fault == "version":
            await server.move_on()
        elif fault == "frozen":
            async with frozen(server):
                await self._change_pod(self._quick_kinds())
                await asyncio.sleep(0.2)
        elif fault == "away":
            async with away(server):
                await self._change_pod(self._quick_kinds())
                await asyncio.sleep(0.2)
                if self.kinds["away"] % self._forget_every == 0:
                    self.kinds["forgotten"] += 1
                    await server.forget()
        if fault in ("", "drop", "version"):
            terminating = [name for name, pod in self.pods.pods.items() if pod.terminating]
            await self._change_pod(self._quick_kinds() + ["end", "end"] * bool(terminating))
        self.kinds[fault] += bool(fault)

    def _quick_kinds(self) -> list[str]:
        """What may be done to pods while the router does not hear of it. At least two stay ready."""
        pods = self.pods.pods.values()
        waiting = [pod for pod in pods if not pod.ready and not pod.terminating]
        return (
            ["add", "add waiting"] * (len(pods) < 10)
            + ["not ready", "terminate", "terminate", "crash"] * (len(self.pods.ready) > 2)
            + ["ready", "ready"] * bool(waiting)
        )

    async def _change_pod(self, kinds: list[str]) -> None:
        if not kinds:
            return
        pods = self.pods
        ready = sorted(pods.ready)
        others = sorted(pods.pods.keys() - pods.ready)
        terminating = [name for name in others if pods.pods[name].terminating]
        waiting = [name for name in others if not pods.pods[name].terminating]
        kind = self.rng.choice(kinds)
        self.kinds[kind] += 1
        if kind in ("add", "add waiting"):
            await pods.add(ready=kind == "add", token_s=0.002)
        elif kind == "not ready":
            await pods.change(self.rng.choice(ready), ready=False)
        elif kind == "ready":
            await pods.change(self.rng.choice(waiting))
        elif kind == "terminate":
            name = self.rng.choice(ready)
            pods.workers[name].report(draining=True)
            await pods.change(name, terminating=True)
        elif kind == "crash":
            await pods.end(self.rng.choice(ready))
        else:
            name = self.rng.choice(terminating)
            await until(lambda: pods.workers[name].num_running == 0)
            await pods.end(name)


@pytest.mark.timeout(1200 if SOAK else 180)
async def test_500_changes_a_minute_lose_no_request_and_the_membership_is_right(pods: WorkerPods, start: Start) -> None:
    router = await start()
    seed = int(os.environ.get("HEADRACE_SEED", "1"))
    began_s = time.monotonic()
    if SOAK:  # on a machine with nothing else to do
        churn = Churn(pods, router, random.Random(seed), forget_every=25)
        await churn.run(round(500 * MINUTES), 60 / 500, lambda: 2.0)
    else:
        churn = Churn(pods, router, random.Random(seed), forget_every=100)
        await churn.run(60, 0.0, lambda: patience(2.0))
    lasted_s = time.monotonic() - began_s
    await router.until_idle()
    lags_s = sorted(churn.lags_s)
    print(
        f"{len(lags_s)} changes in {lasted_s:.0f} s, {churn.num_answers} answers; membership right after p50 "
        f"{lags_s[len(lags_s) // 2] * 1000:.0f} ms, p99 {lags_s[len(lags_s) * 99 // 100] * 1000:.0f} ms, at most "
        f"{lags_s[-1] * 1000:.0f} ms; {dict(churn.kinds)}; ends of watches {_ends(router)}; seed {seed}"
    )
    assert churn.num_answers > 6
    assert churn.kinds["forgotten"] > 0
    assert _ends(router)["expired"] > 0


def _ends(router: RunningRouter) -> Counter[str]:
    """How often watches have ended otherwise than they should, by reason."""
    found: Counter[str] = Counter()
    for metric in router.metrics.registry.collect():
        if metric.name == "headrace_router_service_watch_ends":
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    found[sample.labels["reason"]] += int(sample.value)
    return found
