"""The gateway's client of a host of models."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import PLAIN, Transport
from headrace.gateway.upstream.model_host import ModelHost
from tests.certificates import make_certificates, replace_certificates
from tests.gateway.model_host import FakeHost, serving_host

BOUND_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def following(host: FakeHost, transport: Transport = PLAIN) -> AsyncIterator[ModelHost]:
    """A client that follows the models of the host."""
    client = ModelHost(host.address, transport)
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
            await asyncio.wait_for(client.load("b"), BOUND_S)
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
