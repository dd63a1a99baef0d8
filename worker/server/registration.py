"""Announces this worker to routers, and renews the announcement before it expires.

There are two ways, which can be combined: registering with each named router, and publishing a lease in Redis for all
routers that read it (see router/fleet/leases.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

import grpc

from headrace.common.stores.redis_link import WORKER_KEY, WORKERS_KEY, connect
from headrace.common.stores.redis_link import failures as redis_failures
from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import PLAIN, Transport
from headrace.protos import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RETRY_S = (0.1, 0.2, 0.5, 1.0)

LEASE_S = 6.0
REDIS_TIMEOUT_S = 1.0


class Registration:
    """Keeps one worker registered with one router until `close`."""

    def __init__(self, router: str, worker_id: str, address: str, transport: Transport = PLAIN) -> None:
        self._router = router
        self._worker_id = worker_id
        self._address = address
        self._transport = transport
        self._connect()
        self._task = asyncio.create_task(self._keep(), name=f"registration with {router}")

    def _connect(self) -> None:
        self._version = self._transport.version
        self._channel = self._transport.channel(self._router)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    async def close(self) -> None:
        """Deregister if the router can be reached, and stop."""
        self._task.cancel()
        request = router_pb2.DeregisterRequest(worker_id=self._worker_id, address=self._address)
        try:
            await self._stub.Deregister(request, timeout=0.5)
        except grpc.RpcError as error:
            log.info("could not deregister from %s: %s", self._router, error.code())
        await self._channel.close()

    async def _keep(self) -> None:
        request = router_pb2.RegisterRequest(worker_id=self._worker_id, address=self._address)
        failures = 0
        while True:
            if self._transport.version != self._version:  # the certificates are new
                await self._channel.close()
                self._connect()
            try:
                response = await self._stub.Register(request, timeout=CALL_TIMEOUT_S, wait_for_ready=failures > 0)
            except grpc.RpcError as error:
                if failures == len(RETRY_S):
                    log.warning("cannot register with router %s: %s; still trying", self._router, error.code())
                pause_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
                failures += 1
            else:
                if failures:
                    log.info("registered with router %s", self._router)
                failures = 0
                pause_s = response.lease_ms / 3000
            await asyncio.sleep(pause_s)


class RedisLease:
    """Keeps one worker's lease in Redis until `close`. ValueError if the URL is not valid."""

    def __init__(
        self, url: str, worker_id: str, address: str, note: Callable[[bool], None] = lambda is_published: None
    ) -> None:
        """`note` is called after each attempt with whether the lease is published."""
        self._note = note
        self._redis = connect(url, REDIS_TIMEOUT_S)
        self._worker_id = worker_id
        self._value = json.dumps({"worker_id": worker_id, "address": address})
        self._task = asyncio.create_task(self._keep(), name="lease in Redis")

    async def close(self) -> None:
        """Remove the lease if Redis can be reached, and stop."""
        await end_tasks(self._task)
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                key = WORKER_KEY + self._worker_id
                # Another worker may use the id by now.
                if await self._redis.get(key) == self._value.encode():
                    await self._redis.delete(key)
                    await self._redis.srem(WORKERS_KEY, self._worker_id)
        except redis_failures() as error:
            log.info("could not remove the lease from Redis: %s", error or type(error).__name__)
        await self._redis.aclose()

    async def _keep(self) -> None:
        failures = 0
        while True:
            try:
                async with asyncio.timeout(3 * REDIS_TIMEOUT_S):
                    await self._publish()
            except redis_failures() as error:
                if failures == 0:
                    log.warning("cannot publish in Redis, still trying: %s", error or type(error).__name__)
                pause_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
                failures += 1
                self._note(False)
            else:
                self._note(True)
                if failures:
                    log.info("published in Redis again")
                failures = 0
                pause_s = LEASE_S / 3
            await asyncio.sleep(pause_s)

    async def _publish(self) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.set(WORKER_KEY + self._worker_id, self._value, px=int(LEASE_S * 1000))
            pipeline.sadd(WORKERS_KEY, self._worker_id)
            await pipeline.execute()
