"""The calls with which workers exchange KV blocks: the blocks that requests need, and those that a draining worker
hands over.

A router hands the blocks over. It calls HandOver of the worker that drains, which names its blocks, most recently used
first. The router distributes them and calls TakeBlocks of others, which fetch them. It ends HandOver when all is done.

If HandOver ends before all blocks are named, or while others fetch blocks, it has broken off: the router is gone, or it
believed for a moment that the worker takes requests. Then HandOver may be called again. The router leaves out what
others have by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TypeAlias

from headrace.protos import worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.worker.kv.cache import KVCache
from headrace.worker.kv.fetch import ChainedBlock
from headrace.worker.kv.takeover import Offer, Takeover
from headrace.worker.peers.source import BlockSource

log = logging.getLogger(__name__)

_Named: TypeAlias = AsyncGenerator[worker_pb2.HandOverResponse, None]

# A router learns within this time that the worker drains. After that the worker does not wait for a router.
BEGIN_S = 0.5
# The longest time that a worker waits until its blocks are handed over.
MAX_HANDOVER_S = 60.0
# The blocks of one TakeBlocks must arrive within this time.
_TAKE_TIMEOUT_S = 10.0
_BLOCKS_A_MESSAGE = 4096
_LOOK_S = 0.02


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
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()

    def reset(self) -> None:
        """A router may hand over once more, because the worker takes requests again or the handover broke off."""
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()  # a running handover sets the old ones

    async def name_blocks(self, *, draining: bool) -> _Named:
        """Answer HandOver: name the blocks, most recently used first, then wait until the router has distributed them.
        StatusError if the worker does not drain, or another router hands its blocks over."""
        if not draining:
            problem = "this worker does not drain; hand its blocks over when it does"
            raise StatusError(Reason.INVALID_FIELD, problem)
        if self._begun.is_set():
            raise StatusError(Reason.QUEUE_FULL, "another router hands the blocks over", retry_after_s=BEGIN_S)
        self._begun.set()
        ended, are_all_named = self._ended, False
        num_before = self.source.num_sent
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
            are_all_named = True
            yield worker_pb2.HandOverResponse()  # there are no more blocks
            await ended.wait()
        finally:
            log.info("%d KV blocks were handed over to other workers", self.source.num_sent - num_before)
            if ended is self._ended and not ended.is_set() and (self.source.is_sending or not are_all_named):
                self.reset()
            ended.set()
            self._takeover.refresh()

    async def wait(self, num_routers: Callable[[], int], timeout_s: float | None) -> None:
        """Wait until the blocks are handed over, at most `timeout_s`. Does not wait without routers or blocks. Waits
        for a router again after a handover that broke off."""
        if not self._most or not self._kv_cache.num_cached_blocks:
            return
        most_s = MAX_HANDOVER_S if timeout_s is None else min(timeout_s, MAX_HANDOVER_S)
        try:
            async with asyncio.timeout(most_s):
                while not self._ended.is_set():
                    async with asyncio.timeout(BEGIN_S):
                        while not self._begun.is_set():
                            if not num_routers():
                                return
                            await asyncio.sleep(_LOOK_S)
                    await self._ended.wait()
        except TimeoutError:
            self._begun.set()  # too late now
            self._ended.set()

    async def take(self, request: worker_pb2.TakeBlocksRequest, is_busy: Callable[[], bool] = lambda: False) -> int:
        """Fetch blocks from a draining worker. Returns how many arrived. `is_busy`: whether the worker has running
        requests; it then takes blocks for at most half of the time. Raises StatusError."""
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
        num_taken = await asyncio.shield(asyncio.wrap_future(offer.ended))  # the engine ends it
        if is_busy():
            await asyncio.sleep(loop.time() - start_s)
        return num_taken
