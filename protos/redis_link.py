"""Clients of the Redis that the processes of a fleet share, from its URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from redis.asyncio import Redis

RedisClient: TypeAlias = "Redis"
"""For those who use a client and import nothing of it."""

MAX_CONNECTIONS = 32
_SENTINEL_PORT = 26379


class SentinelUrl(NamedTuple):
    """What redis+sentinel://[[USER:]PASSWORD@]HOST[:PORT],.../SERVICE[/DB] says."""

    addresses: list[tuple[str, int]]
    service: str
    database: int
    username: str | None
    password: str | None


def sentinel_url(url: str) -> SentinelUrl | None:
    """The parts of a URL of sentinels; None for another URL. Raises ValueError for what begins like one and is none."""
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
    """A client for redis://, rediss://, unix:// or what `sentinel_url` reads.

    Connects with the first command; waiting for an answer, or for one of `MAX_CONNECTIONS` connections, ends after
    `timeout_s`. Raises ValueError for what is no such URL.
    """
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff

    def options(**more: object) -> dict[str, object]:
        retry = Retry(NoBackoff(), 0)  # whoever calls has something better to do than to wait
        # The newer protocol costs several exchanges for each connection, and brings nothing that is used here.
        common = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "protocol": 2}
        return {**common, "retry": retry, **more}

    named = sentinel_url(url)
    if named is None:
        pool = BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **options())
        return Redis.from_pool(pool)
    sentinel = Sentinel(named.addresses, sentinel_kwargs=options())  # type: ignore[no-untyped-call]
    more = options(db=named.database, max_connections=MAX_CONNECTIONS, username=named.username, password=named.password)
    master: Redis = sentinel.master_for(named.service, **more)  # type: ignore[arg-type]
    return master


def failures() -> tuple[type[Exception], ...]:
    """What a command raises when Redis is away, slow, or does not do it."""
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError)
