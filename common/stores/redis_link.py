"""Clients of the Redis that the processes of a fleet share, from its URL.

Secrets need not be in the URL: `HEADRACE_REDIS_PASSWORD_FILE` names a file with the password, read once, and
`HEADRACE_REDIS_TLS_DIR` a directory with ca.pem, cert.pem and key.pem for rediss://, read for each connection. Host
names are not checked, because a certificate signed by the fleet's authority proves membership, wherever Redis listens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from headrace.protos.router_pb2 import REDIS_STATE_OK, REDIS_STATE_UNREACHABLE, REDIS_STATE_UNWRITABLE, RedisState

if TYPE_CHECKING:
    from redis.asyncio import Redis

PROBE_KEY = "headrace:probe"
"""A key that processes write to find out whether Redis accepts writes."""

WORKERS_KEY = "headrace:workers"
"""The set of ids of workers with leases."""
WORKER_KEY = "headrace:worker:"
"""The beginning of the key of a lease. The worker's id follows."""

RedisClient: TypeAlias = "Redis"
"""The type, for modules that use a client without importing it."""

PASSWORD_FILE = "HEADRACE_REDIS_PASSWORD_FILE"
TLS_DIR = "HEADRACE_REDIS_TLS_DIR"
MAX_CONNECTIONS = 32
# What the client raises for bytes that it cannot parse, or for values that do not fit the command.
_NO_ANSWER = (ValueError, TypeError, LookupError, RecursionError)
_PORT = 6379
_SENTINEL_PORT = 26379


class SentinelUrl(NamedTuple):
    """The parts of redis+sentinel://[[USER:]PASSWORD@]HOST[:PORT],.../SERVICE[/DB]."""

    addresses: list[tuple[str, int]]
    service: str
    database: int
    username: str | None
    password: str | None


def sentinel_url(url: str) -> SentinelUrl | None:
    """The parts of a URL of sentinels; None for another URL. Raises ValueError for an invalid one."""
    parts = urlsplit(url)
    if parts.scheme != "redis+sentinel":
        return None
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.rpartition(":")
    service, _, database = parts.path.strip("/").partition("/")
    if not hosts or not service or not (database or "0").isdigit():
        raise ValueError("write redis+sentinel://HOST[:PORT],HOST[:PORT]/SERVICE[/DB]")
    found = [urlsplit(f"//{host}") for host in hosts.split(",")]
    addresses = [(one.hostname or "", one.port or _SENTINEL_PORT) for one in found]
    return SentinelUrl(addresses, service, int(database or 0), unquote(user) or None, unquote(password) or None)


def connect(url: str, timeout_s: float) -> RedisClient:
    """Create a client for redis://, rediss:// and unix:// URLs, and those that `sentinel_url` reads.

    It connects at the first command. A wait for a response, or for one of `MAX_CONNECTIONS` connections, ends after
    `timeout_s`. Raises ValueError for any other URL.
    """
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff

    def options(**more: object) -> dict[str, object]:
        retry = Retry(NoBackoff(), 0)  # the caller decides whether to try again
        # The newer protocol costs several round trips for each connection, and has no advantage here.
        common = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "protocol": 2}
        return {**common, "retry": retry, **more}

    named = sentinel_url(url)
    if named is None:
        more = secrets_for(url)
        pool = BlockingConnectionPool.from_url(
            url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **options(**more)
        )
        return Redis.from_pool(pool)
    sentinel = Sentinel(named.addresses, sentinel_kwargs=options())  # type: ignore[no-untyped-call]
    password = named.password or secrets_for(url).get("password")
    more = options(db=named.database, max_connections=MAX_CONNECTIONS, username=named.username, password=password)
    master: Redis = sentinel.master_for(named.service, **more)  # type: ignore[arg-type]
    return master


def secrets_for(url: str) -> dict[str, object]:
    """Options of a client from the environment. The URL takes precedence.

    Raises ValueError for a password that cannot be read.
    """
    found: dict[str, object] = {}
    if path := os.environ.get(PASSWORD_FILE):
        try:
            found["password"] = Path(path).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            raise ValueError(f"the password in {path} ({PASSWORD_FILE}) cannot be read") from None
    if url.startswith("rediss:") and (name := os.environ.get(TLS_DIR)):
        directory = Path(name)
        found |= {"ssl_ca_certs": str(directory / "ca.pem"), "ssl_check_hostname": False}
        found |= {"ssl_certfile": str(directory / "cert.pem"), "ssl_keyfile": str(directory / "key.pem")}
    return found


def server_of(url: str) -> tuple[str, ...]:
    """The server that a URL names: hosts and ports, or the path of a socket. Databases of one server are the same
    here."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return (parts.path,)
    hosts = parts.netloc.rpartition("@")[2].split(",")
    default = _SENTINEL_PORT if parts.scheme == "redis+sentinel" else _PORT
    service = parts.path.strip("/").partition("/")[0] if parts.scheme == "redis+sentinel" else ""
    return (service, *sorted(host if host.rpartition(":")[2].isdigit() else f"{host}:{default}" for host in hosts))


async def state_of(redis: RedisClient, num_bytes: int = 64) -> RedisState:
    """Whether a Redis can be used, by a write of `num_bytes`."""
    from redis.exceptions import ResponseError

    try:
        await redis.set(PROBE_KEY, b"1" * num_bytes, px=60_000)
    except ResponseError:
        return REDIS_STATE_UNWRITABLE
    except failures():
        return REDIS_STATE_UNREACHABLE
    return REDIS_STATE_OK


def word_for(state: RedisState) -> str:
    """The state in a word: ok, unwritable, unreachable or unspecified."""
    return RedisState.Name(state).removeprefix("REDIS_STATE_").lower()


def failures() -> tuple[type[Exception], ...]:
    """The exceptions of a command if Redis is unreachable, slow, or refuses it, or if the answer does not come from a
    Redis."""
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError, *_NO_ANSWER)
