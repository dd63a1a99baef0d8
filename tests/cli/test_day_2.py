"""What docs/how-to/day-2.md says of backups, with a real Redis. The tests of the documents run its other commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from click.testing import CliRunner

from headrace.cli.main import cli
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
