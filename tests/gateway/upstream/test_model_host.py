"""The gateway's client of a host of models."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import PLAIN, Transport
from headrace.gateway.upstream.model_host import ModelHost
from tests.certificates import make_certificates, replace_certificates
from tests.gateway.model_host import FakeHost, serving_host
from tests.patience import patience

BOUND_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(BOUND_S)):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def following(
    host: FakeHost, transport: Transport = PLAIN, in_use: Collection[str] = ()
) -> AsyncIterator[ModelHost]:
    """A client that follows the models of the host."""
    client = ModelHost(host.address, transport, in_use=in_use)
    run = asyncio.create_task(client.run())
    try:
        await until(lambda: client.is_known)
        yield client
    finally:
        await end_tasks(run)
        await client.close()


async def test_renewed_certificates_are_used_when_the_host_is_restarted(tmp_path: Path) -> None:
    # Each look at the files comes a second after the last one.
    files, new = make_certificates(tmp_path / "files"), make_certificates(tmp_path / "new")
    transport = Transport(files, clock=itertools.count().__next__)
    async with serving_host(transport=Transport(files)) as host:
        host.set("a", "LOADED")
        port = int(host.address.rpartition(":")[2])
        following_it = following(host, transport)
        client = await following_it.__aenter__()
    try:
        async with serving_host(port, Transport(replace_certificates(files, new))) as host:
            host.set("b", "LOADED")
            await until(lambda: "b" in client.models)
            await asyncio.wait_for(client.load("b"), patience(BOUND_S))
            assert host.loads == ["b"]
    finally:
        await following_it.__aexit__(None, None, None)


async def test_a_host_with_a_new_authority_is_followed_as_soon_as_the_own_certificates_are_renewed(
    tmp_path: Path,
) -> None:
    own, new = make_certificates(tmp_path / "own"), make_certificates(tmp_path / "new")
    transport = Transport(own, clock=itertools.count().__next__)
    async with serving_host(transport=Transport(new)) as host:
        host.set("a", "LOADED")
        client = ModelHost(host.address, transport)
        run = asyncio.create_task(client.run())
        await client.load("a")  # nobody answers
        assert host.loads == []
        assert not client.is_known
        replace_certificates(own, new)
        await until(lambda: client.is_known)
        await end_tasks(run)
        await client.close()


async def test_a_model_is_wanted_until_the_last_caller_has_left() -> None:
    async with serving_host() as host, following(host) as client:
        host.set("a", "UNLOADED", is_on_demand=True)
        first, second = (asyncio.create_task(client.load("a")) for _ in range(2))
        await until(lambda: host.wanted["a"] == 1)
        await end_tasks(first)
        third = asyncio.create_task(client.load("a"))
        await asyncio.sleep(0)
        await end_tasks(second)
        assert not third.done()
        assert host.loads == ["a"], "all share one call"
        await end_tasks(third)
        await until(lambda: host.wanted["a"] == 0)


async def test_a_caller_that_comes_when_the_last_one_has_left_has_the_model_loaded() -> None:
    async with serving_host() as host, following(host) as client:
        host.set("a", "UNLOADED", is_on_demand=True)
        first = asyncio.create_task(client.load("a"))
        await until(lambda: host.wanted["a"] == 1)
        await end_tasks(first)
        second = asyncio.create_task(client.load("a"))
        await until(lambda: len(host.loads) == 2)
        host.set("a", "LOADED", is_on_demand=True)
        await asyncio.wait_for(second, patience(BOUND_S))
        await until(lambda: host.wanted["a"] == 0)


async def test_a_model_that_running_requests_need_is_wanted_until_they_end() -> None:
    in_use = ["a"]
    async with serving_host() as host, following(host, in_use=in_use) as client:
        host.set("a", "UNLOADED", is_on_demand=True)
        await until(lambda: host.wanted["a"] == 1)
        caller = asyncio.create_task(client.load("a"))
        await asyncio.sleep(0)
        await end_tasks(caller)
        host.set("b", "UNLOADED", is_on_demand=True)
        await until(lambda: "b" in client.models)
        assert (host.loads, host.wanted["a"]) == (["a"], 1)
        in_use.clear()
        await until(lambda: host.wanted["a"] == 0)
        in_use.append("a")
        host.tell()
        await until(lambda: host.wanted["a"] == 1)
        assert host.loads == ["a", "a"]


async def test_a_model_that_running_requests_need_and_that_fails_is_not_asked_for_again() -> None:
    async with serving_host() as host, following(host, in_use=["a"]) as client:
        host.set("a", "UNLOADED", is_on_demand=True)
        await until(lambda: host.wanted["a"] == 1)
        host.set("a", "FAILED", problem="the disk is gone")
        await until(lambda: host.wanted["a"] == 0)
        host.set("b", "LOADED")
        await until(lambda: "b" in client.models)
        assert host.loads == ["a"]
