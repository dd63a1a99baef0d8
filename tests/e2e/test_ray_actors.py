"""The actors of a fleet on Ray with their real processes, but without Ray: a directory that is called directly."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.ray.commands import Node
from headrace.ray.directory import Directory, Front, WorkerMember
from headrace.ray.settings import Fleet, Model
from tests.e2e.serving import BOUND_S, MODEL, alive
from tests.e2e.small_model import small_model
from tests.e2e.streams import chat_body, run_streams
from tests.patience import patience

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make .venv/.ray installs it"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # The interpreter calls `__del__` of an actor that Serve has closed, and drops its coroutine.
    pytest.mark.filterwarnings("ignore:coroutine .*__del__"),
]

# Answers of two runs are compared, which only this mode promises on every CPU.
FLAGS = {"kv_cache_gb": 0.3, "max_num_seqs": 8, "execution_mode": "accuracy"}


class Handle:
    """What actors have of the directory: methods with `remote`. `is_lost` is while Ray replaces it."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            if self.is_lost:
                raise RuntimeError("no replica is running")
            return getattr(self.directory, name)(*args)

        return SimpleNamespace(remote=call)

    def fronts(self) -> list[Front]:
        return [one for one in self.directory.members() if isinstance(one, Front)]

    def workers(self) -> list[WorkerMember]:
        return [one for one in self.directory.members() if isinstance(one, WorkerMember)]


async def eventually(condition: Callable[[], Any], what: str, seconds: float = BOUND_S) -> None:
    """Wait for what the actors on this loop bring about."""
    waited_s = 0.0
    while not condition():
        assert waited_s < patience(seconds), f"not within {waited_s:.0f} s: {what}"
        await asyncio.sleep(0.05)
        waited_s += 0.05


@asynccontextmanager
async def fleet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_workers: int, *, on_demand: bool = False
) -> AsyncIterator[SimpleNamespace]:
    """Workers and a gateway on one node, made as Serve makes them. With `on_demand`, the first call of the workers'
    handle starts one, as Serve's scaling does; it is in `started`."""
    from headrace.ray import actors
    from headrace.ray.app import settings_of_gateways

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    node = Node("id", "host-a", "127.0.0.1", 2)
    monkeypatch.setattr(actors.nodes, "this_node", lambda resource: node)
    names = iter("abcdefgh")
    context = lambda: SimpleNamespace(replica_id=SimpleNamespace(unique_id=next(names)))  # noqa: E731
    monkeypatch.setattr(actors.serve, "get_replica_context", context)
    settings, model = Fleet((), worker_drain_s=5.0, gateway_drain_s=5.0), Model(str(small_model()), MODEL, flags=FLAGS)
    of_gateways = settings_of_gateways(replace(settings, models=(replace(model, min_workers=0, max_workers=1),)))
    handle = Handle()
    made: list[Any] = []
    started: list[asyncio.Task[Any]] = []

    def awaken() -> asyncio.Future[Any]:
        if not started:
            started.append(asyncio.create_task(make(actors.Worker, settings, model, handle)))
        # As of Serve's, its cancellation does not end the worker.
        return asyncio.shield(started[0])

    awakened = SimpleNamespace(deployment_name=f"worker-{MODEL}", awaken=SimpleNamespace(remote=awaken))

    async def make(kind: type, *arguments: Any) -> Any:
        # Serve too awaits the constructor of an object that it has made without calling it.
        actor = kind.__new__(kind)
        made.append(actor)
        await actor.__init__(*arguments)
        return actor

    try:
        front = make(actors.Front, of_gateways, handle, awakened) if on_demand else make(actors.Front, settings, handle)
        workers = [make(actors.Worker, settings, model, handle) for _ in range(num_workers)]
        found = await asyncio.gather(front, *workers)
        await eventually(lambda: len(handle.workers()) == num_workers, "the directory knows the workers")
        yield SimpleNamespace(
            front=found[0], workers=list(found[1:]), handle=handle, make=make, actors=actors, started=started
        )
    finally:
        for actor in reversed(made):
            await actor.__del__()


async def test_actors_serve_and_stop_and_lose_no_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bodies = [chat_body(number, 160, temperature=0) for number in range(4)]
    async with fleet(monkeypatch, tmp_path, 2) as ray:
        (front,) = ray.handle.fronts()
        first, second = ray.handle.workers()
        assert {first.worker_id, second.worker_id} == {"host-a/numa-0", "host-a/numa-1"}
        for worker in (first, second):
            assert worker.pid is not None
            assert os.sched_getaffinity(worker.pid) == set(worker.cpus)
        undisturbed = await run_streams(front.url, bodies)
        assert all(stream.error is None and stream.num_tokens == 160 for stream in undisturbed)

        # Its process is killed, and started again by the same actor.
        async def kill() -> None:
            os.kill(first.pid, signal.SIGKILL)

        disturbed = await run_streams(front.url, bodies, disturb_behind=10, disturb=kill)
        assert [stream.result for stream in disturbed] == [stream.result for stream in undisturbed]
        await eventually(lambda: sum(one.restarts for one in ray.handle.workers()) == 1, "it is told")
        await asyncio.gather(*(worker.check_health() for worker in ray.workers))
        # Serve's policy gets what the router knows.
        await eventually(lambda: ray.workers[1]._signal.get("workers") == 2.0, "the signal has arrived")
        signal_now = await ray.workers[1].record_autoscaling_stats()
        assert set(signal_now) == {"workers", "workers_wanted", "queue_wait_s", "kv_pressure"}

        # The directory is lost and comes back empty: the router keeps its workers.
        ray.handle.is_lost = True
        ray.handle.directory = Directory()
        assert [stream.result for stream in await run_streams(front.url, bodies)] == [
            stream.result for stream in undisturbed
        ]
        ray.handle.is_lost = False
        await eventually(lambda: len(ray.handle.workers()) == 2, "it knows everyone again")

        # Serve removes a worker while streams run. Its place is free then.
        async def remove() -> None:
            await ray.workers[0].__del__()

        disturbed = await run_streams(front.url, bodies, disturb_behind=10, disturb=remove)
        assert [stream.result for stream in disturbed] == [stream.result for stream in undisturbed]
        assert len(ray.handle.workers()) == 1
        await ray.make(
            ray.actors.Worker, Fleet((), worker_drain_s=5.0), Model(str(small_model()), MODEL, flags=FLAGS), ray.handle
        )
        await eventually(lambda: len(ray.handle.workers()) == 2, "another one has the place")
        assert {one.worker_id for one in ray.handle.workers()} == {"host-a/numa-0", "host-a/numa-1"}
        pids = [one.pid for one in ray.handle.workers()]
    assert not any(map(alive, pids))
    assert ray.handle.directory.members() == []


async def test_a_request_through_serves_proxy_is_passed_on_and_waits_for_the_first_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from starlette.requests import Request

    def request(method: str, path: str, body: bytes = b"", **scope: Any) -> Request:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        headers = [(b"content-type", b"application/json"), (b"host", b"proxy"), (b"connection", b"close")]
        named = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        return Request({**named, **scope}, receive)

    async with fleet(monkeypatch, tmp_path, 0, on_demand=True) as ray:
        assert (ray.handle.workers(), ray.started) == ([], [])
        body = json.dumps(chat_body(0, 12, temperature=0)).encode()
        first = await ray.front(request("POST", "/v1/chat/completions", body))
        text = b"".join([chunk async for chunk in first.body_iterator])
        assert first.status_code == 200, text
        assert text.endswith(b"data: [DONE]\n\n")
        assert len(ray.started) == 1
        models = await ray.front(request("GET", "/prefix/v1/models", root_path="/prefix"))
        text = b"".join([chunk async for chunk in models.body_iterator])
        assert (models.status_code, json.loads(text)["data"][0]["id"]) == (200, MODEL)
        body = json.dumps(chat_body(1, 12, temperature=0)).encode()
        answer = await ray.front(request("POST", "/v1/chat/completions", body))
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = [chunk async for chunk in answer.body_iterator]
        assert len(chunks) > 3  # as they come
        assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
        refused = await ray.front(request("POST", "/v1/chat/completions", b"{"))
        assert refused.status_code == 400


async def test_a_worker_that_cannot_start_says_why_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with fleet(monkeypatch, tmp_path, 0) as ray:
        settings = Fleet(())
        with pytest.raises(RuntimeError, match="unknown model 'no-such-model'"):
            await ray.make(ray.actors.Worker, settings, Model("no-such-model"), ray.handle)
        small = Model(str(small_model()), MODEL, flags=FLAGS, worker_args=("--speculation", "draft"))
        with pytest.raises(RuntimeError, match="needs a smaller model; name the directory with --draft-model"):
            await ray.make(ray.actors.Worker, settings, small, ray.handle)
        assert ray.handle.workers() == []
        # The places of both are free.
        claim = ray.actors.places.claim_places([None, None], 2, ray.actors.places.lock_directory("host-a"))
        assert claim is not None
        claim.release()
