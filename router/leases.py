"""Workers' leases in Redis, read again and again.

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
from typing import cast

from headrace.protos.redis_link import connect, failures

log = logging.getLogger(__name__)

WORKERS_KEY = "headrace:workers"
WORKER_KEY = "headrace:worker:"
READ_INTERVAL_S = 0.5
_TIMEOUT_S = 1.0
_MAX_VALUE_BYTES = 4096


class LeaseReader:
    """Reads the leases until `close` and hands them to `seen`: worker id -> address. `lost` is called at each read that
    fails. Raises ValueError for a URL that is none."""

    def __init__(
        self, url: str, seen: Callable[[dict[str, str]], None], lost: Callable[[], None], *, max_workers: int = 1024
    ) -> None:
        self.is_connected = False
        self._redis = connect(url, _TIMEOUT_S)
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
        while True:
            try:
                async with asyncio.timeout(3 * _TIMEOUT_S):
                    leases = await self._read()
            except failures() as error:
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
