"""Sends cached KV blocks to other workers.

A block is read without stopping the engine: it may be evicted while it is copied. So the source checks again after
copying, and the receiver compares a checksum. On the same host the receiver reads the blocks from the source's memory
itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from headrace.common.transport.channels import MAX_MESSAGE_BYTES
from headrace.protos import worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.worker.kv.block_bytes import BlockBytes
from headrace.worker.kv.cache import KVCache

_Responses: TypeAlias = AsyncGenerator[worker_pb2.FetchBlocksResponse, None]

# Other workers that may fetch at the same time.
MAX_FETCHES = 4
# Larger blocks do not fit into a message.
MAX_BLOCK_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
_MESSAGE_BYTES = 4 << 20
_BLOCKS_A_MESSAGE = 64
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class BlockFile:
    """The in-memory file of the blocks: its descriptor, the offset of the first cache, and the blocks of each."""

    descriptor: int
    offset: int
    num_blocks: int

    def message(self) -> worker_pb2.SharedMemory:
        """The message with which other workers find it."""
        found = os.fstat(self.descriptor)
        return worker_pb2.SharedMemory(
            pid=os.getpid(),
            file_descriptor=self.descriptor,
            device=found.st_dev,
            inode=found.st_ino,
            offset=self.offset,
            num_blocks=self.num_blocks,
        )


class _Part(NamedTuple):
    """The part of a block for layers with a window: the checksum of its bytes, and the bytes."""

    checksum: int
    data: bytes


class _Found(NamedTuple):
    """A block that was read: its number, the checksum of its bytes, its tokens, and the bytes if they are wanted."""

    block: int
    checksum: int
    token_bytes: bytes
    data: bytes
    part: _Part | None = None


class BlockSource:
    """The blocks of one worker. `layout` identifies their bytes. `file` is None if they are in private memory. `parts`
    are those for layers with a window, if these are separate."""

    def __init__(
        self,
        layout: str,
        kv_cache: KVCache,
        contents: BlockBytes,
        block_bytes: int,
        file: BlockFile | None,
        part_contents: BlockBytes | None = None,
    ) -> None:
        self.layout = layout
        self.num_sent = 0
        self._kv_cache = kv_cache
        self._contents = contents
        self._block_bytes = block_bytes
        self._file = file
        self._part_contents = part_contents
        self._num_running = 0

    async def send(self, request: worker_pb2.FetchBlocksRequest) -> _Responses:
        """Answer FetchBlocks: the blocks with the wanted hashes, up to the first that is missing. StatusError if the
        caller's blocks have another layout, or too many fetch at the same time."""
        if request.kv_layout != self.layout:
            problem = "the KV blocks of this worker have another layout than the caller's"
            raise StatusError(Reason.MODEL_CHANGED, problem, field="kv_layout")
        if self._num_running >= MAX_FETCHES:
            problem = f"{MAX_FETCHES} other workers fetch blocks here already"
            raise StatusError(Reason.QUEUE_FULL, problem, retry_after_s=_RETRY_AFTER_S)
        self._num_running += 1
        try:
            async for response in self._messages(request.hashes, request.host_id, request.with_parts):
                yield response
        finally:
            self._num_running -= 1

    def has_part(self, block_hash: int) -> bool:
        """Whether the block with this hash has its part for layers with a window. Any thread may call it."""
        located = self._kv_cache.locate(block_hash)
        return located is not None and self._kv_cache.slot_of(located[0]) is not None

    async def _messages(self, hashes: Sequence[int], caller: str, with_parts: Sequence[bool]) -> _Responses:
        is_shared = self._file is not None and bool(caller) and caller == host_id()
        count = _BLOCKS_A_MESSAGE if is_shared else max(1, _MESSAGE_BYTES // self._most_bytes)
        for start in range(0, len(hashes), count):
            part = hashes[start : start + count]
            wanted_parts = with_parts[start : start + count]
            found = await asyncio.to_thread(self._read, part, wanted_parts, with_data=not is_shared)
            response = worker_pb2.FetchBlocksResponse(
                checksums=[block.checksum for block in found], token_bytes=[block.token_bytes for block in found]
            )
            if is_shared:
                response.numbers.extend(block.block for block in found)
                if not start and self._file is not None:
                    response.memory.CopyFrom(self._file.message())
            else:
                response.blocks.extend(block.data for block in found)
            for block in found:
                if block.part is not None:
                    response.part_checksums.append(block.part.checksum)
                    response.parts.append(block.part.data)
            yield response
            self.num_sent += len(found)
            if len(found) < len(part):
                return

    @property
    def _most_bytes(self) -> int:
        return max(1, self._block_bytes + (0 if self._part_contents is None else self._part_contents.num_bytes))

    def _read(self, hashes: Sequence[int], with_parts: Sequence[bool], *, with_data: bool) -> list[_Found]:
        """Read blocks up to the first that is missing, or whose wanted part is."""
        found: list[_Found] = []
        data = np.empty(self._block_bytes if with_data else 0, np.uint8)
        for number, block_hash in enumerate(hashes):
            located = self._kv_cache.locate(block_hash)
            if located is None:
                break
            block, content = located
            if with_data:
                self._contents.gather(block, data)
            checksum = self._contents.checksum(block, self._kv_cache.block_size)
            part = None
            if number < len(with_parts) and with_parts[number]:
                part = self._read_part(block)
                if part is None:
                    break
            if self._kv_cache.locate(block_hash) != located:
                break  # it was evicted meanwhile
            found.append(_Found(block, checksum, content.token_bytes, data.tobytes(), part))
        return found

    def _read_part(self, block: int) -> _Part | None:
        """The part of a block; None if it has none."""
        slot, contents = self._kv_cache.slot_of(block), self._part_contents
        if contents is None or slot is None:
            return None
        data = np.empty(contents.num_bytes, np.uint8)
        contents.gather(slot, data)
        checksum = contents.checksum(slot, self._kv_cache.block_size)
        return _Part(checksum, data.tobytes()) if self._kv_cache.slot_of(block) == slot else None


@cache
def host_id() -> str:
    """Identifies this host as long as it runs; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
