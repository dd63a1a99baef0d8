"""The calls with which workers exchange KV blocks: the blocks that requests need, and those that a draining worker
hands over.

A router hands the blocks over. It calls HandOver of the worker that drains, which names its blocks, most recently used
first. The router distributes them and calls TakeBlocks of others, which fetch them. Then it says that all is done.

All routers call HandOver, and take turns. If the call of one ends without a word, it has broken off: the router is
gone, or it believed for a moment that the worker takes requests. Then the next one has its turn, or the same one again.
It leaves out what others have by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TypeAlias

from headrace.common.tasks import end_tasks
from headrace.protos import worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.worker.kv.cache import KVCache
from headrace.worker.kv.fetch import ChainedBlock
from headrace.worker.kv.takeover import Offer, Taken, Takeover
from headrace.worker.peers.source import BlockSource

log = logging.getLogger(__name__)

_Named: TypeAlias = AsyncGenerator[worker_pb2.HandOverResponse, None]
_End: TypeAlias = "asyncio.Future[worker_pb2.HandoverEnd]"

# A router that is alive learns within this time that the worker drains, because it gives up a worker that it has not
# heard for 2.5 s. After that the worker does not wait for a router.
BEGIN_S = 3.0
# The longest time that a worker waits until its blocks are handed over.
MAX_HANDOVER_S = 60.0
# The blocks of one TakeBlocks must arrive within this time.
_TAKE_TIMEOUT_S = 10.0
_BLOCKS_A_MESSAGE = 4096
_LOOK_S = 0.02


class _Drain:
    """The progress of the handover since the worker began to drain: what routers have done about its blocks."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.is_over = asyncio.Event()
        """The blocks are handed over, or it is too late for it."""
        self.num_calls = 0
        """Routers that have or await their turn."""
        self.has_broken_off = False
        self.num_without_takers = 0
        """Routers that knew no worker that could take blocks."""

    def note(self, end: _End, num_sent: int) -> None:
        """Record that a router's call has ended, with or without its final message, and how many blocks others have
        fetched meanwhile."""
        how = end.result() if end.done() and not end.cancelled() else worker_pb2.HANDOVER_END_UNSPECIFIED
        if how == worker_pb2.HANDOVER_END_DONE:
            log.info("%d KV blocks were handed over to other workers", num_sent)
            self.is_over.set()
        elif how == worker_pb2.HANDOVER_END_NO_TAKERS:
            log.info("a router knows no other worker that could take KV blocks")
            self.num_without_takers += 1
        else:
            why = "there was no more time" if self.is_over.is_set() else "the router broke off"
            log.info("only %d KV blocks were handed over to other workers: %s", num_sent, why)
            self.has_broken_off = True

    def is_pointless(self, num_routers: int) -> bool:
        """Whether it is useless to wait for routers: all of them have said that they know no worker that takes blocks.
        A router whose handover broke off may come again, even if it does not watch the worker now."""
        return not self.has_broken_off and self.num_without_takers >= num_routers


class Handover:
    """Hands the blocks of a draining worker over, and takes those of others. At most `max_bytes` are handed over."""

    def __init__(
        self,
        source: BlockSource,
        takeover: Takeover,
        kv_cache: KVCache,
        block_bytes: int,
        max_bytes: int,
    ) -> None:
        self.source = source
        self._takeover = takeover
        self._kv_cache = kv_cache
        self._most = max_bytes // block_bytes
        self._drain = _Drain()

    def reset(self) -> None:
        """Allow the blocks to be handed over again at the next drain, because the worker takes requests again."""
        self._drain = _Drain()  # a running handover has the old one

    async def name_blocks(self, end: _End, *, draining: bool) -> _Named:
        """Answer HandOver: wait until it is this router's turn, name the blocks, most recently used first, then wait
        for `end`, the router's final message. StatusError if the worker does not drain, or if its blocks were already
        handed over."""
        if not draining:
            problem = "this worker does not drain; hand its blocks over when it does"
            raise StatusError(Reason.INVALID_FIELD, problem)
        drain = self._drain
        drain.num_calls += 1
        try:
            async with drain.turn, contextlib.aclosing(self._in_turn(drain, end)) as responses:
                async for response in responses:
                    yield response
        finally:
            drain.num_calls -= 1

    async def _in_turn(self, drain: _Drain, end: _End) -> _Named:
        if drain.is_over.is_set():
            raise StatusError(Reason.QUEUE_FULL, "another router has handed the blocks over", retry_after_s=BEGIN_S)
        num_before = self.source.num_sent
        too_late = asyncio.create_task(drain.is_over.wait())
        try:
            named = (await asyncio.to_thread(self._kv_cache.hottest_first))[: self._most]
            for start in range(0, len(named), _BLOCKS_A_MESSAGE):
                yield worker_pb2.HandOverResponse(
                    blocks=[
                        worker_pb2.ChainedBlock(
                            hash=content.block_hash,
                            parent_hash=content.parent_hash,
                            is_first=content.is_first,
                            has_part=self.source.has_part(content.block_hash or 0),
                        )
                        for content in named[start : start + _BLOCKS_A_MESSAGE]
                    ]
                )
            yield worker_pb2.HandOverResponse()  # there are no more blocks
            await asyncio.wait((end, too_late), return_when=asyncio.FIRST_COMPLETED)
        finally:
            drain.note(end, self.source.num_sent - num_before)
            self._takeover.refresh()
            await end_tasks(too_late)

    async def wait(self, num_routers: Callable[[], int], timeout_s: float | None) -> None:
        """Wait until the blocks are handed over, for at most `timeout_s` and `MAX_HANDOVER_S` seconds. Does not wait
        without blocks, or if none of the routers knows another worker. Waits for a router again after a handover that
        broke off."""
        if not self._most or not self._kv_cache.num_cached_blocks:
            return
        drain, loop = self._drain, asyncio.get_running_loop()
        end_s = loop.time() + (MAX_HANDOVER_S if timeout_s is None else min(timeout_s, MAX_HANDOVER_S))
        expected_by_s = loop.time() + BEGIN_S
        while not drain.is_over.is_set():
            if drain.num_calls:
                expected_by_s = loop.time() + BEGIN_S
            elif drain.is_pointless(num_routers()):
                return
            if loop.time() >= min(end_s, expected_by_s):
                drain.is_over.set()  # too late now
            await asyncio.sleep(_LOOK_S)

    async def take(self, request: worker_pb2.TakeBlocksRequest, is_busy: Callable[[], bool] = lambda: False) -> Taken:
        """Fetch blocks from a draining worker. `is_busy`: whether the worker has running requests; it then takes blocks
        for at most half of the time. Raises StatusError."""
        if request.kv_layout != self.source.layout:
            problem = "the KV blocks of this worker have another layout than the source's"
            raise StatusError(Reason.MODEL_CHANGED, problem, field="kv_layout")
        if not request.source:
            problem = "source is empty; give the gRPC target of the worker that has the blocks"
            raise StatusError(Reason.INVALID_FIELD, problem, field="source")
        blocks = [
            ChainedBlock(block.hash, block.parent_hash, block.is_first, block.has_part) for block in request.blocks
        ]
        offer = Offer(request.source, blocks, _TAKE_TIMEOUT_S)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        self._takeover.offer(offer)
        taken = await asyncio.shield(asyncio.wrap_future(offer.ended))  # the engine ends it
        if is_busy():
            await asyncio.sleep(loop.time() - start_s)
        return taken
