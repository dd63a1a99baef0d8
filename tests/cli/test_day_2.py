"""What docs/how-to/day-2.md says of backups, with a real Redis, and of authorities and join tokens, with two ends that
call each other. The tests of the documents run its other commands."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from click.testing import CliRunner

from headrace.cli.main import cli
from headrace.common.transport.channels import Transport
from tests.certificates import make_certificates
from tests.common.transport.test_channels import BOUND_S, Clock, answer_of, serving
from tests.patience import patience
from tests.redis_server import RedisServer


def keys_of(server: RedisServer) -> list[str]:
    done = CliRunner().invoke(cli, ["keys", "list", "--redis", server.url, "--json"])
    assert done.exit_code == 0, done.output
    return [key["name"] for key in json.loads(done.stdout)]


def test_keys_come_back_from_a_copy_of_redis(tmp_path: Path) -> None:
    (tmp_path / "restored").mkdir()
    first = RedisServer(tmp_path, "--dir", str(tmp_path), "--dbfilename", "headrace.rdb").start()
    try:
        for name in ("shop", "lab"):
            made = CliRunner().invoke(cli, ["keys", "create", name, "--redis", first.url])
            assert made.exit_code == 0, made.output
        assert sorted(keys_of(first)) == ["lab", "shop"]
        first.client().save()
    finally:
        first.kill()
    shutil.copy(tmp_path / "headrace.rdb", tmp_path / "restored/dump.rdb")
    second = RedisServer(tmp_path, "--dir", str(tmp_path / "restored"), "--appendonly", "no").start()
    try:
        assert sorted(keys_of(second)) == ["lab", "shop"]
        revoked = CliRunner().invoke(cli, ["keys", "revoke", "shop", "--redis", second.url])
        assert revoked.exit_code == 0, revoked.output
        assert keys_of(second) == ["lab"]
    finally:
        second.kill()


async def call_each_other(ends: Sequence[tuple[Transport, str]]) -> None:
    """Each of two ends, with its address, takes the calls of the other."""
    for (caller, _), (_, address) in (ends, ends[::-1]):
        # A connection may time out on a crowded machine.
        async with asyncio.timeout(patience(BOUND_S)):
            while await answer_of(caller, address) != "OK":
                pass


@asynccontextmanager
async def two_ends(transports: Sequence[Transport]) -> AsyncIterator[list[tuple[Transport, str]]]:
    """Servers by these transports, with their addresses."""
    async with serving(transports[0]) as (first, _), serving(transports[1]) as (second, _):
        yield list(zip(transports, (first, second), strict=True))


async def test_hosts_accept_each_other_at_each_step_while_the_authority_is_replaced(tmp_path: Path) -> None:
    old, new = make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new")
    hosts = [make_certificates(tmp_path / name, ca=old) for name in ("host-0", "host-1")]
    both = (old / "ca.pem").read_bytes() + (new / "ca.pem").read_bytes()
    steps = (
        lambda host: (host / "ca.pem").write_bytes(both),
        lambda host: make_certificates(host, ca=new),
        lambda host: (host / "ca.pem").write_bytes((new / "ca.pem").read_bytes()),
    )
    async with two_ends([Transport(host, clock=Clock()) for host in hosts]) as ends:
        for step in steps:
            for host in hosts:
                await asyncio.to_thread(step, host)
                await call_each_other(ends)
        # And the old authority counts no more.
        left = make_certificates(tmp_path / "left", ca=old)
        assert await answer_of(Transport(left), ends[0][1]) == "UNAVAILABLE"


async def test_hosts_accept_each_other_at_each_step_while_the_join_token_is_replaced(tmp_path: Path) -> None:
    old, new = "1" * 64 + "\n", "2" * 64 + "\n"
    hosts = [tmp_path / "host-0", tmp_path / "host-1"]
    (tmp_path / "left").write_text(old)
    for host in hosts:
        host.write_text(old)
    async with two_ends([Transport(None, host, clock=Clock()) for host in hosts]) as ends:
        for content in (old + new, new + old, new):
            for host in hosts:
                host.write_text(content)
                await call_each_other(ends)
        assert await answer_of(Transport(None, tmp_path / "left"), ends[0][1]) == "UNAUTHENTICATED"
