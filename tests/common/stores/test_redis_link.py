"""Redis clients: secrets come from files, and URLs of the same server are recognised."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.common.stores import redis_link
from headrace.common.stores.redis_link import connect, failures, secrets_for, server_of
from tests.redis_server import RedisServer

PASSWORD = "a-password-of-redis-0123456789"


async def test_the_password_comes_from_a_file_and_that_of_the_url_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redis-password").write_text(f"{PASSWORD}\n")
    server = RedisServer(tmp_path).start()
    try:
        server.client().config_set("requirepass", PASSWORD)
        for file, url, is_let_in in (
            (None, server.url, False),
            ("redis-password", server.url, True),
            ("redis-password", server.url.replace("//", "//:wrong@"), False),
        ):
            if file is not None:
                monkeypatch.setenv(redis_link.PASSWORD_FILE, str(tmp_path / file))
            client = connect(url, 2.0)
            try:
                await client.set("a", "1")
                assert is_let_in
            except failures():
                assert not is_let_in
            finally:
                await client.aclose()
    finally:
        server.kill()


def test_a_password_that_cannot_be_read_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(redis_link.PASSWORD_FILE, "/nowhere/redis-password")
    with pytest.raises(ValueError, match="/nowhere/redis-password"):
        connect("redis://127.0.0.1:1/0", 1.0)


def test_certificates_are_for_urls_with_tls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(redis_link.TLS_DIR, "/etc/fleet")
    assert secrets_for("redis://h/0") == {}
    found = secrets_for("rediss://h/0")
    assert found["ssl_ca_certs"] == "/etc/fleet/ca.pem"
    assert found["ssl_certfile"] == "/etc/fleet/cert.pem"
    pool = connect("rediss://h/0", 1.0).connection_pool
    assert pool.connection_kwargs["ssl_keyfile"] == "/etc/fleet/key.pem"


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("redis://h", "rediss://:p@h:6379/1?x=1", True),
        ("redis://h:6380", "redis://h", False),
        ("redis://[::1]/0", "redis://[::1]:6379/2", True),
        ("unix:///r.sock", "unix:///r.sock?db=1", True),
        ("unix:///r.sock", "unix:///q.sock", False),
        ("redis+sentinel://a,b:26379/s/0", "redis+sentinel://b,a/s/1", True),
        ("redis+sentinel://a/s/0", "redis+sentinel://a/t/0", False),
    ],
)
def test_urls_of_one_server_are_told_from_those_of_two(one: str, other: str, are_one: bool) -> None:
    assert (server_of(one) == server_of(other)) is are_one
