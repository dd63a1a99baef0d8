"""Fetches KV blocks from other workers.

If a fetch fails, its blocks are computed instead: a call has a deadline, and only blocks with the right tokens and
checksums are used. On one host the blocks are read from the other worker's memory. They are read with pread, which
returns an error if that worker ends or frees its memory. Blocks are received and checked in private memory, because
their place in the KV cache belongs to others as soon as nobody waits for them any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import grpc
import numpy as np

from headrace.common.transport.channels import PLAIN, Transport
from headrace.protos import worker_pb2, worker_pb2_grpc
from headrace.protos.block_hash import next_hash
from headrace.worker.kv.block_bytes import BlockBytes
from headrace.worker.kv.chain import TOKEN_BYTES
from headrace.worker.kv.fetch import NO_SLOT, Fetch, LearnedTime, Wanted, nobody
from headrace.worker.peers.calls import Calls, Channels
from headrace.worker.peers.source import host_id

log = logging.getLogger(__name__)

# The assumed speed, and the time until the first message, before the first fetch.
_FIRST_GUESS_BYTES_PER_S = 0.5e9
_FIRST_GUESS_SETUP_S = 0.005
# After a call in which a worker sent nothing, it is not asked for this many times the duration of the call.
_REST = 10.0
# While a call has waited for a message for more than this many times the usual time until the first one, no request
# begins to wait for its worker. `LearnedTime` takes so long a wait for a pause, too. A call of a busy worker on this
# host may take some tens of milliseconds, so the usual time counts for no less than the first guess.
_SILENCE = 10.0


class _ForeignBlocks(NamedTuple):
    """The open file of another worker's KV cache, and the offset of each cache in it."""

    descriptor: int
    offsets: Sequence[int]


class PeerTier:
    """Fetches blocks of the layout `layout`, and their `parts` for layers with a window if these are separate. It
    calls `on_arrival` when a fetch has ended."""

    def __init__(
        self,
        layout: str,
        contents: BlockBytes,
        block_bytes: int,
        transport: Transport = PLAIN,
        parts: BlockBytes | None = None,
        on_arrival: Callable[[], None] = nobody,
    ) -> None:
        self.on_arrival = on_arrival
        self.num_received = 0
        self._layout = layout
        self._contents = contents
        self._parts = parts
        self._block_bytes = block_bytes
        self._block_time = LearnedTime(block_bytes / _FIRST_GUESS_BYTES_PER_S)
        self._setup_time = LearnedTime(_FIRST_GUESS_SETUP_S)
        self._is_speed_known = False
        self._rests_until_s: dict[str, float] = {}
        self._calls = Calls(self._silence_s, self._end)
        self._running: set[Fetch] = set()
        self._ended: deque[Fetch] = deque()
        self._channels = Channels(transport)

    @property
    def bytes_per_s(self) -> float:
        """The learned speed of fetches from other workers, in bytes per second; 0 while it is unknown."""
        return self._block_bytes / self._block_time.seconds if self._is_speed_known else 0.0

    def is_resting(self, source: str) -> bool:
        """Engine thread: whether requests should not wait for this worker at the moment, because its last call took
        time and sent nothing, or because a running call has received nothing for too long."""
        return time.monotonic() < self._rests_until_s.get(source, 0.0) or source in self._calls.silent_sources()

    def fetch(self, fetch: Fetch) -> None:
        """Engine thread: begin a fetch from `fetch.source`. `take_ended` returns it when it has ended."""
        self._running.add(fetch)
        try:
            self._calls.begin(fetch, partial(self._run, fetch, time.monotonic() + fetch.timeout_s))
        except RuntimeError as error:  # the worker stops
            log.warning("KV blocks cannot be fetched from %s: %s; they are computed", fetch.source, error)
            self._end(fetch)

    def take_ended(self) -> list[Fetch]:
        """Engine thread: return the fetches that have ended since the last call."""
        self._calls.advance()
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        self._running.difference_update(ended)
        self.num_received += sum(fetch.num_read for fetch in ended)
        return ended

    def expected_s(self, num_blocks: int) -> float:
        """Expected seconds until `num_blocks` more blocks are fetched, including the wait for running fetches. Those
        from workers that send nothing use no time of others."""
        silent = self._calls.silent_sources()
        ahead = sum(len(fetch.wanted) - fetch.num_read for fetch in self._running if fetch.source not in silent)
        return self._setup_time.seconds + (ahead + num_blocks) * self._block_time.seconds

    def stop(self) -> None:
        """Begin no more fetches, and end the calls."""
        self._calls.stop()
        self._channels.close()

    def _silence_s(self) -> float:
        return _SILENCE * max(_FIRST_GUESS_SETUP_S, self._setup_time.seconds)

    def _end(self, fetch: Fetch) -> None:
        self._ended.append(fetch)
        self.on_arrival()

    def _run(self, fetch: Fetch, deadline_s: float) -> None:
        start_s = time.monotonic()
        if fetch.is_given_up or start_s >= deadline_s:
            return
        try:
            with self._channels.using(fetch.source) as channel:
                # Another process namespace has the same host id but other files. Then the blocks are sent.
                if not self._receive(fetch, channel, host_id(), deadline_s) and not fetch.num_read:
                    self._receive(fetch, channel, "", deadline_s)
        except (grpc.RpcError, ValueError, OSError) as error:  # ValueError: the address is wrong, or the worker stops
            reason = error.details() if isinstance(error, grpc.Call) else error
            log.info("KV blocks could not be fetched from %s: %s; the rest is computed", fetch.source, reason)
        except Exception:
            log.exception("KV blocks could not be fetched from %s; the rest is computed", fetch.source)
        finally:
            if not fetch.num_read:
                self._rest(fetch.source, time.monotonic() - start_s)

    def _rest(self, source: str, waited_s: float) -> None:
        """Do not ask a worker for some time, because it sent nothing for `waited_s`."""
        now_s = time.monotonic()
        resting = {name: until_s for name, until_s in self._rests_until_s.items() if until_s > now_s}
        resting[source] = max(resting.get(source, 0.0), now_s + _REST * waited_s)
        self._rests_until_s = resting

    def _receive(self, fetch: Fetch, channel: grpc.Channel, host: str, deadline_s: float) -> bool:
        """Fetch blocks. Returns False if this host's memory was offered and cannot be read."""
        stub = worker_pb2_grpc.WorkerStub(channel)
        start_s = time.monotonic()
        hashes = [wanted.block_hash for wanted in fetch.wanted[fetch.num_read :]]
        request = worker_pb2.FetchBlocksRequest(kv_layout=self._layout, hashes=hashes, host_id=host)
        if self._parts is not None:
            request.with_parts.extend(wanted.slot != NO_SLOT for wanted in fetch.wanted[fetch.num_read :])
        call = stub.FetchBlocks(request, timeout=max(0.0, deadline_s - start_s))
        first_s, num_before = 0.0, fetch.num_read
        buffer = _Buffer(self._contents, self._parts)
        with contextlib.ExitStack() as stack:
            stack.callback(call.cancel)
            stack.callback(lambda: self._learn(start_s, first_s, fetch.num_read - num_before))
            foreign: _ForeignBlocks | None = None
            for response in call:
                self._calls.hear(fetch)
                first_s = first_s or time.monotonic()
                if response.HasField("memory"):
                    foreign = self._open(response.memory)
                    if foreign is None:
                        return False
                    stack.callback(os.close, foreign.descriptor)
                if not self._take(fetch, response, foreign, buffer):
                    break
        return True

    def _take(
        self,
        fetch: Fetch,
        response: worker_pb2.FetchBlocksResponse,
        foreign: _ForeignBlocks | None,
        buffer: _Buffer,
    ) -> bool:
        """Fill blocks from a message. `buffer` has room for one. Returns whether to continue."""
        parts = zip(response.parts, response.part_checksums, strict=True)
        for number, checksum in enumerate(response.checksums):
            if fetch.is_given_up or fetch.num_read == len(fetch.wanted):
                return False
            wanted = fetch.wanted[fetch.num_read]
            if foreign is not None:
                is_whole = _read(buffer.block, foreign, response.numbers[number])
            else:
                is_whole = _unpack(buffer.block, response.blocks[number])
            token_bytes = response.token_bytes[number]
            is_whole = is_whole and _is_right(buffer, wanted, token_bytes, checksum)
            if wanted.slot != NO_SLOT:
                is_whole = is_whole and buffer.take_part(*next(parts, (b"", 0)))
            if not is_whole:
                log.warning("%s sent a KV block that is not what it should be; the rest is computed", fetch.source)
                return False
            if not fetch.fill(partial(self._fill, buffer, wanted), token_bytes):
                return False
        return True

    def _fill(self, buffer: _Buffer, wanted: Wanted, block: int) -> None:
        if not wanted.part_only:
            self._contents.copy_from(buffer.block, block)
        if wanted.slot != NO_SLOT and self._parts is not None and buffer.part is not None:
            self._parts.copy_from(buffer.part, wanted.slot)

    def _open(self, memory: worker_pb2.SharedMemory) -> _ForeignBlocks | None:
        """The memory of another worker of this host; None if this process cannot read it."""
        try:
            descriptor = os.open(
                f"/proc/{memory.pid}/fd/{memory.file_descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            return None
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != (memory.device, memory.inode):
            os.close(descriptor)
            return None
        return _ForeignBlocks(descriptor, self._contents.offsets(memory.offset, memory.num_blocks))

    def _learn(self, start_s: float, first_s: float, num_blocks: int) -> None:
        """Learn from a call, even if it did not finish in time."""
        if num_blocks:
            self._setup_time.observe(first_s - start_s)
            self._block_time.observe((time.monotonic() - first_s) / num_blocks)
            self._is_speed_known = True


def _read(buffer: BlockBytes, foreign: _ForeignBlocks, number: int) -> bool:
    """Copy a block of another worker. Returns False if its memory ends before."""
    return all(
        os.preadv(foreign.descriptor, [part.data], offset + number * part.nbytes) == part.nbytes
        for part, offset in zip(buffer.parts(0), foreign.offsets, strict=True)
    )


class _Buffer:
    """Private memory for a block, and for its part if these are separate."""

    def __init__(self, contents: BlockBytes, parts: BlockBytes | None) -> None:
        self.block = contents.private_block()
        self.part = None if parts is None else parts.private_block()
        self.block_size = contents.block_size or (0 if parts is None else parts.block_size)

    def take_part(self, data: bytes, checksum: int) -> bool:
        """Copy the bytes of a part. Returns False if they have another size or are damaged."""
        if self.part is None or not _unpack(self.part, data):
            return False
        return self.part.checksum(0, self.block_size) == checksum


def _unpack(buffer: BlockBytes, data: bytes) -> bool:
    """Copy the bytes of a block. Returns False if they have another size."""
    if len(data) != buffer.num_bytes:
        return False
    buffer.scatter(0, np.frombuffer(data, np.uint8))
    return True


def _is_right(buffer: _Buffer, wanted: Wanted, token_bytes: bytes, checksum: int) -> bool:
    """Whether the received block is the wanted one, and undamaged."""
    size = buffer.block_size
    if wanted.token_bytes:
        is_meant = token_bytes == wanted.token_bytes
    else:
        is_whole = len(token_bytes) == TOKEN_BYTES * size
        is_meant = is_whole and next_hash(wanted.parent_hash, token_bytes) == wanted.block_hash
    return is_meant and buffer.block.checksum(0, size) == checksum
