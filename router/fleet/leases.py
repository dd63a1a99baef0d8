"""Reads the workers' leases in Redis periodically.

    headrace:workers          set of worker ids
    headrace:worker:ID        {"worker_id": ID, "address": gRPC target}, expires with the lease

A worker writes both three times per lease (see worker/server/registration.py). Requests do not depend on Redis: while
it cannot be read, known workers stay, and a worker that reports stays even after its lease has ended. The reader
periodically writes `headrace:probe` to check that Redis accepts writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Callable
from typing import cast

from headrace.common.stores.redis_link import PROBE_KEY, WORKER_KEY, WORKERS_KEY, connect, failures
from headrace.common.tasks import end_tasks
from headrace.protos.router_pb2 import REDIS_STATE_OK, REDIS_STATE_UNREACHABLE, REDIS_STATE_UNWRITABLE, RedisState
from headrace.router.fleet.registry import MAX_WORKERS

log = logging.getLogger(__name__)

READ_INTERVAL_S = 0.5
_WRITE_EVERY = 10  # reads
_TIMEOUT_S = 1.0
_MAX_VALUE_BYTES = 4096


class LeaseReader:
    """Reads the leases periodically until `close`, and calls `seen` with them: worker id -> address. A read that fails
    calls `lost`. Raises ValueError if `url` is not a Redis URL."""

    def __init__(
        self,
        url: str,
        seen: Callable[[dict[str, str]], None],
        lost: Callable[[], None],
        *,
        max_workers: int = MAX_WORKERS,
    ) -> None:
        self.is_connected = False
        self.is_writable = True
        """Whether Redis accepts writes. A full Redis or a replica does not, and then leases expire."""
        self._redis = connect(url, _TIMEOUT_S)
        self._seen = seen
        self._lost = lost
        self._max_workers = max_workers
        self._num_left_out = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> RedisState:
        """Whether leases can be read and renewed."""
        if not self.is_connected:
            return REDIS_STATE_UNREACHABLE
        return REDIS_STATE_OK if self.is_writable else REDIS_STATE_UNWRITABLE

    def start(self) -> None:
        """Start a task that reads the leases until `close`."""
        self._task = asyncio.create_task(self._run(), name="leases")

    async def close(self) -> None:
        """Stop the task that reads the leases, and wait for its end."""
        if self._task is not None:
            await end_tasks(self._task)
        await self._redis.aclose()

    async def _run(self) -> None:
        for round_number in itertools.count():
            try:
                async with asyncio.timeout(3 * _TIMEOUT_S):
                    leases = await self._read()
                    if round_number % _WRITE_EVERY == 0:
                        await self._try_to_write()
            except failures() as error:
                if self.is_connected:
                    log.warning("cannot read Redis; known workers stay: %s", error or type(error).__name__)
                self.is_connected = False
                self._lost()
            else:
                if not self.is_connected:
                    log.info("reading leases from Redis: %d workers", len(leases))
                self.is_connected = True
                self._seen(leases)
            await asyncio.sleep(READ_INTERVAL_S)

    async def _try_to_write(self) -> None:
        try:
            await self._redis.set(PROBE_KEY, b"1" * 64, px=60_000)
        except failures() as error:
            if self.is_writable:
                log.warning("Redis rejects writes, so workers cannot renew their leases there: %s", error)
            self.is_writable = False
        else:
            self.is_writable = True

    async def _read(self) -> dict[str, str]:
        # The client does not decode, so these are bytes.
        ids = sorted(cast("set[bytes]", await self._redis.smembers(WORKERS_KEY)))
        self._tell_of_those_left_out(len(ids))
        ids = ids[: self._max_workers]
        if not ids:
            return {}
        keys = [WORKER_KEY.encode() + worker_id for worker_id in ids]
        values = cast("list[bytes | None]", await self._redis.mget(keys))
        ended = [worker_id for worker_id, value in zip(ids, values, strict=True) if value is None]
        if ended and self.is_writable:  # a worker that renews its lease later adds itself again
            with contextlib.suppress(*failures()):
                await self._redis.srem(WORKERS_KEY, *ended)
        return dict(filter(None, map(parse_lease, values)))

    def _tell_of_those_left_out(self, num_workers: int) -> None:
        """Warn if Redis has more workers than this router accepts, once for each number of workers."""
        num_left_out = max(num_workers - self._max_workers, 0)
        if num_left_out and num_left_out != self._num_left_out:
            log.warning(
                "Redis has %d workers, but this router accepts %d: %d get no requests from it; raise --max-workers",
                num_workers,
                self._max_workers,
                num_left_out,
            )
        self._num_left_out = num_left_out


def parse_lease(value: bytes | None) -> tuple[str, str] | None:
    """The worker id and address of a lease; None if it is malformed."""
    if value is None or len(value) > _MAX_VALUE_BYTES:
        return None
    try:
        lease = json.loads(value)
        worker_id = lease["worker_id"]
        address = lease["address"]
    except (ValueError, KeyError, TypeError):
        return None
    if not (isinstance(worker_id, str) and isinstance(address, str) and worker_id and address):
        return None
    return worker_id, address
