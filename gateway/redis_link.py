"""Clients of a Redis that gateways share, from one URL for all that they keep there."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from redis.asyncio import Redis

RedisClient: TypeAlias = "Redis"
"""For those who use a client and import nothing of it."""

MAX_CONNECTIONS = 32
_SENTINEL_PORT = 26379


def connect(url: str, timeout_s: float) -> Redis:
    """A client for redis://, rediss://, unix:// or redis+sentinel://[[USER:]PASSWORD@]HOST[:PORT],.../SERVICE[/DB].

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

    parts = urlsplit(url)
    if parts.scheme != "redis+sentinel":
        pool = BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **options())
        return Redis.from_pool(pool)
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.rpartition(":")
    service, _, database = parts.path.strip("/").partition("/")
    if not hosts or not service or not (database or "0").isdigit():
        raise ValueError("write redis+sentinel://HOST[:PORT],HOST[:PORT]/SERVICE[/DB]")
    addresses = []
    for host in hosts.split(","):
        one = urlsplit(f"//{host}")
        addresses.append((one.hostname or "", one.port or _SENTINEL_PORT))
    sentinel = Sentinel(addresses, sentinel_kwargs=options())
    secret = {"username": unquote(user) or None, "password": unquote(password) or None}
    more = options(db=int(database or 0), max_connections=MAX_CONNECTIONS, **secret)
    master: Redis = sentinel.master_for(service, **more)  # type: ignore[arg-type]
    return master


def failures() -> tuple[type[Exception], ...]:
    """What a command raises when Redis is away, slow, or does not do it."""
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError)
