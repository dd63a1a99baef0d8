"""The methods of the Worker service that exchange KV blocks with other workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from headrace.common.tasks import end_tasks
from headrace.protos import worker_pb2, worker_pb2_grpc
from headrace.protos.status import Reason, StatusError, abort
from headrace.worker.peers.handover import Handover
from headrace.worker.server.watch import WatchHub

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class BlockCalls:
    """Serves FetchBlocks, HandOver and TakeBlocks. `handover` is None if the worker exchanges no blocks."""

    def __init__(self, handover: Handover | None, hub: WatchHub) -> None:
        self._found = handover
        self._hub = hub

    async def fetch(
        self, request: worker_pb2.FetchBlocksRequest, context: Context
    ) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        """See FetchBlocks in the proto."""
        try:
            async with contextlib.aclosing(self._handover().source.send(request)) as responses:
                async for response in responses:
                    yield response
        except StatusError as error:
            await abort(context, error)

    async def hand_over(
        self, requests: AsyncIterator[worker_pb2.HandOverRequest], context: Context
    ) -> AsyncIterator[worker_pb2.HandOverResponse]:
        """See HandOver in the proto."""
        end: asyncio.Future[worker_pb2.HandoverEnd] = asyncio.get_running_loop().create_future()
        listening = asyncio.create_task(_listen(requests, end))
        try:
            named = self._handover().name_blocks(end, draining=self._hub.draining)
            async with contextlib.aclosing(named) as responses:
                async for response in responses:
                    yield response
        except StatusError as error:
            await abort(context, error)
        finally:
            await end_tasks(listening)

    async def take(self, request: worker_pb2.TakeBlocksRequest, context: Context) -> worker_pb2.TakeBlocksResponse:
        """See TakeBlocks in the proto."""
        try:
            if self._hub.draining:
                raise StatusError(Reason.DRAINING, "the worker is draining itself", retry_after_s=1.0)
            taken = await self._handover().take(request, self._is_busy)
            return worker_pb2.TakeBlocksResponse(num_blocks=taken.num_blocks, num_present=taken.num_present)
        except StatusError as error:
            await abort(context, error)

    async def wait(self, timeout_s: float | None) -> None:
        """Wait until the blocks of this draining worker are handed over, for at most `timeout_s` seconds; see
        `Handover.wait`."""
        if self._found is not None:
            await self._found.wait(lambda: self._hub.num_routers, timeout_s)

    def reset(self) -> None:
        """The worker takes requests again, so its blocks may be handed over once more when it drains next."""
        if self._found is not None:
            self._found.reset()

    def _is_busy(self) -> bool:
        return self._hub.report.load.num_running > 0

    def _handover(self) -> Handover:
        if self._found is None:
            raise StatusError(Reason.UNSUPPORTED, "this worker does not exchange KV blocks with others")
        return self._found


async def _listen(
    requests: AsyncIterator[worker_pb2.HandOverRequest], end: asyncio.Future[worker_pb2.HandoverEnd]
) -> None:
    """Wait for the router's final message, and set `end` to it. There may be none."""
    with contextlib.suppress(grpc.aio.BaseError):  # the call is over
        async for request in requests:
            if request.end and not end.done():
                end.set_result(request.end)


class BlockServicer(worker_pb2_grpc.WorkerServicer):
    """The methods of the Worker service with which workers exchange blocks."""

    def __init__(self, blocks: BlockCalls) -> None:
        self.blocks = blocks

    async def FetchBlocks(
        self, request: worker_pb2.FetchBlocksRequest, context: Context
    ) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        """See the proto."""
        async for response in self.blocks.fetch(request, context):
            yield response

    async def HandOver(
        self, request_iterator: AsyncIterator[worker_pb2.HandOverRequest], context: Context
    ) -> AsyncIterator[worker_pb2.HandOverResponse]:
        """See the proto."""
        async for response in self.blocks.hand_over(request_iterator, context):
            yield response

    async def TakeBlocks(
        self, request: worker_pb2.TakeBlocksRequest, context: Context
    ) -> worker_pb2.TakeBlocksResponse:
        """See the proto."""
        return await self.blocks.take(request, context)
