"""Telling routers that this worker exists, again and again, for a lease that is not renewed ends."""

from __future__ import annotations

import asyncio
import logging

import grpc

from headrace.protos import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RETRY_S = (0.1, 0.2, 0.5, 1.0)


class Registration:
    """Keeps one worker registered with one router until `close`."""

    def __init__(self, router: str, worker_id: str, address: str, options: list[tuple[str, int]]) -> None:
        self._router = router
        self._worker_id = worker_id
        self._address = address
        self._channel = grpc.aio.insecure_channel(router, options=options)
        self._stub = router_pb2_grpc.RouterStub(self._channel)
        self._task = asyncio.create_task(self._keep(), name=f"registration with {router}")

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
            try:
                response = await self._stub.Register(request, timeout=CALL_TIMEOUT_S, wait_for_ready=failures > 0)
            except grpc.RpcError as error:
                if failures == len(RETRY_S):
                    log.warning("cannot register with router %s: %s; going on trying", self._router, error.code())
                pause_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
                failures += 1
            else:
                if failures:
                    log.info("registered with router %s", self._router)
                failures = 0
                pause_s = response.lease_ms / 3000
            await asyncio.sleep(pause_s)
