"""`headrace keys` and `headrace certs`."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli.fleet.key_store import FileStore
from headrace.cli.main import cli
from headrace.common.stores.api_keys import ApiKey, new_id, read_keys, sha256_of
from headrace.common.transport.channels import read_identity
from tests.redis_server import RedisServer


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


@pytest.fixture(params=["file", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path, shared_redis_server: RedisServer) -> list[str]:
    """The store of the keys."""
    shared_redis_server.client().flushall()
    return ["--file", str(tmp_path / "keys")] if request.param == "file" else ["--redis", shared_redis_server.url]


def test_a_key_is_shown_once_and_listed_without_what_is_secret_until_it_is_revoked(place: list[str]) -> None:
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "10000", "--max-concurrent", "4")
    made = run(
        "keys",
        "create",
        "alice",
        *place,
        *limits,
        "--tenant",
        "mill",
        "--cache-group",
        "house",
        "--model",
        "a",
        "--model",
        "b",
    )
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    assert secret.startswith("hr-")
    assert len(secret) > 40
    other = json.loads(run("keys", "create", "bob", *place, "--json").stdout)
    listed = run("keys", "list", *place, "--json")
    assert secret not in listed.output
    assert sha256_of(secret) not in listed.output
    alice, bob = sorted(json.loads(listed.stdout), key=lambda key: str(key["name"]))
    assert alice["requests_per_minute"] == 60
    assert (alice["tenant"], alice["models"], alice["max_priority"]) == ("mill", ["a", "b"], 0)
    assert (alice["cache_group"], bob["cache_group"]) == ("house", None)
    assert (bob["id"], bob["tenant"]) == (other["id"], other["id"])
    shown = run("keys", "list", *place).stdout
    assert "alice" in shown
    assert "10000" in shown
    assert run("keys", "revoke", "alice", *place).exit_code == 0
    assert run("keys", "revoke", other["id"], *place).exit_code == 0
    assert json.loads(run("keys", "list", *place, "--json").stdout) == []


def key_of(number: int) -> ApiKey:
    return ApiKey(new_id(), sha256_of(str(number)), f"k{number}", "t", 0)


def test_keys_that_are_made_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda i: FileStore(path).add(key_of(i)), range(12)))
    assert sorted(key.name for key in read_keys(path)) == sorted(f"k{i}" for i in range(12))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("keys", "list"), "--file FILE or --redis URL"),
        (("keys", "revoke", "nobody", "--file", "{tmp}/none"), "there is no file"),
        (("keys", "create", "x\ny", "--file", "{tmp}/keys"), "on one line"),
        (("keys", "create", "x", "--file", "{tmp}/no/keys"), "cannot be written"),
        (("keys", "list", "--redis", "http://u:hunter2@h"), "not a Redis URL"),
        (("keys", "list", "--redis", "redis://127.0.0.1:1"), "Redis failed"),
        (("certs", "create", "{tmp}/a", "--host", "a b"), "neither a name nor an IP address"),
        (("certs", "create", "{tmp}/a", "--ca", "{tmp}"), "--ca"),
        (("health", "127.0.0.1:1", "--tls-dir", "{tmp}"), "headrace certs create"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_remedy(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    done = run(*(argument.replace("{tmp}", str(tmp_path)) for argument in args))
    assert done.exit_code in (1, 2)
    assert said in done.output
    assert "hunter2" not in done.output


def test_certificates_are_for_the_fleet_and_for_the_names_that_were_given(tmp_path: Path) -> None:
    directory = tmp_path / "fleet"
    made = run("certs", "create", str(directory), "--host", "api.example", "--host", "10.0.0.7")
    assert made.exit_code == 0, made.output
    read_identity(directory)
    assert {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()} == {
        "ca.pem": 0o644,
        "ca-key.pem": 0o600,
        "cert.pem": 0o644,
        "key.pem": 0o600,
        "join-token": 0o600,
        "redis-password": 0o600,
        "redis.conf": 0o600,
    }
    shown = subprocess.run(
        ["openssl", "x509", "-in", str(directory / "cert.pem"), "-noout", "-ext", "subjectAltName"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in ("DNS:headrace.internal", "DNS:localhost", "DNS:api.example", "IP Address:10.0.0.7"):
        assert name in shown


def test_creating_again_renews_and_another_host_gets_the_same_authority_and_token(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run("certs", "create", str(first)).exit_code == 0
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    assert run("certs", "create", str(first)).exit_code == 0
    after = {path.name: path.read_bytes() for path in first.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"cert.pem", "key.pem"}
    assert run("certs", "create", str(second), "--ca", str(first)).exit_code == 0
    assert not (second / "ca-key.pem").exists()
    for name in ("ca.pem", "join-token"):
        assert (second / name).read_bytes() == after[name]
    read_identity(second)


@pytest.mark.parametrize("command", [("list",), ("revoke", "alice")])
def test_a_file_of_keys_that_is_not_there_is_an_error_for_all_but_the_first_key(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    result = run("keys", *command, "--file", str(tmp_path / "typo"))
    assert result.exit_code == 2
    assert f"error: there is no file {tmp_path / 'typo'}" in result.stderr
    assert not (tmp_path / "typo").exists()
