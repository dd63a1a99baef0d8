"""Workers' leases in Redis, read again and again; the router's only file that knows Redis.

    headrace:workers          set of worker ids
    headrace:worker:ID        {"worker_id": ID, "address": gRPC target}, gone when its lease ends

A worker writes both every third of its lease (see worker/registration.py). Redis is on no request's path: while it
cannot be read, what is known stays.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

WORKERS_KEY = "headrace:workers"
WORKER_KEY = "headrace:worker:"
READ_INTERVAL_S = 0.5
_TIMEOUT_S = 1.0
_MAX_VALUE_BYTES = 4096
_SENTINEL_PORT = 26379


def connect(url: str) -> Redis:
    """A client for redis://, rediss://, unix:// or redis+sentinel://[[USER:]PASSWORD@]HOST[:PORT],.../SERVICE[/DB].

    Connects with the first command. Raises ValueError for what is no such URL.
    """
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff

    def options(**more: object) -> dict[str, object]:
        retry = Retry(NoBackoff(), 0)  # whoever calls tries again anyway
        return {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "retry": retry, **more}

    parts = urlsplit(url)
    if parts.scheme != "redis+sentinel":
        client: Redis = Redis.from_url(url, **options())  # type: ignore[arg-type]
        return client
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
    master: Redis = sentinel.master_for(service, **options(db=int(database or 0), **secret))  # type: ignore[arg-type]
    return master


class LeaseReader:
    """Reads the leases until `close` and hands them to `seen`: worker id -> address. `lost` is called at each read that
    fails. Raises ValueError for a URL that is none."""

    def __init__(
        self, url: str, seen: Callable[[dict[str, str]], None], lost: Callable[[], None], *, max_workers: int = 1024
    ) -> None:
        self.is_connected = False
        self._redis = connect(url)
        self._seen = seen
        self._lost = lost
        self._max_workers = max_workers
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._run(), name="leases")

    async def close(self) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._redis.aclose()

    async def _run(self) -> None:
        from redis.exceptions import RedisError

        while True:
            try:
                async with asyncio.timeout(3 * _TIMEOUT_S):
                    leases = await self._read()
            except (RedisError, OSError, TimeoutError) as error:
                if self.is_connected:
                    log.warning("Redis cannot be read, known workers stay: %s", error or type(error).__name__)
                self.is_connected = False
                self._lost()
            else:
                if not self.is_connected:
                    log.info("reading leases from Redis: %d workers", len(leases))
                self.is_connected = True
                self._seen(leases)
            await asyncio.sleep(READ_INTERVAL_S)

    async def _read(self) -> dict[str, str]:
        # Bytes, since the client does not decode.
        ids = sorted(cast("set[bytes]", await self._redis.smembers(WORKERS_KEY)))[: self._max_workers]
        if not ids:
            return {}
        keys = [WORKER_KEY.encode() + worker_id for worker_id in ids]
        values = cast("list[bytes | None]", await self._redis.mget(keys))
        ended = [worker_id for worker_id, value in zip(ids, values, strict=True) if value is None]
        if ended:  # a worker that renews a moment later adds itself again
            await self._redis.srem(WORKERS_KEY, *ended)
        return dict(filter(None, map(parse_lease, values)))


def parse_lease(value: bytes | None) -> tuple[str, str] | None:
    """Worker id and address of a lease; None for what is none."""
    if value is None or len(value) > _MAX_VALUE_BYTES:
        return None
    try:
        lease = json.loads(value)
        worker_id, address = lease["worker_id"], lease["address"]
    except (ValueError, KeyError, TypeError):
        return None
    if not (isinstance(worker_id, str) and isinstance(address, str) and worker_id and address):
        return None
    return worker_id, address
