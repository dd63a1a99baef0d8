"""The changes of the prefix cache as vLLM publishes them over ZeroMQ (--kv-events), for schedulers that read that form.

A message has three frames: a topic, a sequence number of 8 bytes, big-endian, from 0, and a batch in msgpack: an array
of the time in seconds, the events, and the rank in data parallelism, which is absent here. An event is a map with the
key `type`, as in vLLM since June 2026:

    BlockStored        block_hashes, parent_block_hash (nil for the first blocks of a prompt), token_ids, block_size,
                       lora_id (nil), medium, lora_name
    BlockRemoved       block_hashes, medium
    AllBlocksCleared   no keys; the first event of a worker: what was known of its address is void

A subscriber that applies all events knows the cached prefixes exactly: of the model and its LoRA adapters, but not
those with a cache salt, which only their owner may find, and not those with images, whose tokens a reader cannot
compute.

A ROUTER socket replays messages that a subscriber has missed. Its request is an empty frame and the number of the first
message, of 8 bytes. The answers are an empty frame, the number and the batch, for each of the last messages; the last
answer has the number -1 and an empty batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from headrace.common.tasks import end_tasks
from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.protos.block_hash import root_hash
from headrace.worker.config import ConfigurationError
from headrace.worker.kv.chain import Content

log = logging.getLogger(__name__)

MEDIUM = "CPU"
MAX_REPLAYED = 10_000
"""Messages that are kept for replays."""
# Blocks in one event, and events in one message.
_MAX_BLOCKS = 256
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_NO_ZMQ = "--kv-events needs pyzmq: install headrace[kv-events]"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks of one chain that have become findable, each after its predecessor. `token_ids` are the tokens of all of
    them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that cannot be found any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """No block can be found."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Chain(msgspec.Struct, frozen=True, gc=False):
    """The stored facts about a reported block: whether subscribers know it, and the adapter of its chain."""

    is_told: bool
    lora_name: str | None


class EventLog:
    """Turns the engine's reports, which have only hashes, into events with tokens and parents.

    The content of a block is read after the report. If the block is evicted before that, and comes back before the next
    report, no report says so. Such blocks are looked for again with each report.
    """

    def __init__(
        self,
        locate: Callable[[int], tuple[int, Content] | None],
        block_size: int,
        adapters_by_root: Callable[[], Mapping[int, str | None]],
    ) -> None:
        """`locate` finds a block and its content by its hash. `adapters_by_root` returns the root hashes of the chains
        that are told, each with the name of its adapter, None for the model itself."""
        self._locate = locate
        self._block_size = block_size
        self._adapters_by_root = adapters_by_root
        self._known: dict[int, _Chain] = {}
        self._missed: dict[int, None] = {}

    def events(self, stored: Iterable[int], evicted: Iterable[int]) -> list[KvEvent]:
        """The events of a report: removals first. Each list has hashes in the order of the report."""
        removed = []
        for block_hash in evicted:
            self._missed.pop(block_hash, None)
            chain = self._known.pop(block_hash, None)
            if chain is not None and chain.is_told:
                removed.append(block_hash)
        events: list[KvEvent] = [
            BlockRemoved(removed[start : start + _MAX_BLOCKS], MEDIUM) for start in range(0, len(removed), _MAX_BLOCKS)
        ]
        self._missed.update(dict.fromkeys(stored))
        roots: Mapping[int, str | None] | None = None
        last: BlockStored | None = None
        for block_hash in list(self._missed):
            located = self._locate(block_hash)
            if located is None:
                continue
            content = located[1]
            if content.is_first:
                roots = self._adapters_by_root() if roots is None else roots
                chain = _Chain(content.parent_hash in roots, roots.get(content.parent_hash))
            else:
                before = self._known.get(content.parent_hash)
                if before is None:
                    continue  # missed too: it comes first next time
                chain = before
            tokens = array("I", content.token_bytes)
            if chain.is_told and max(tokens) >= FIRST_PSEUDO_TOKEN:
                chain = _Chain(False, None)
            del self._missed[block_hash]
            self._known[block_hash] = chain
            if not chain.is_told:
                continue
            continues = last is not None and not content.is_first and last.block_hashes[-1] == content.parent_hash
            if last is None or not continues or len(last.block_hashes) >= _MAX_BLOCKS:
                parent = None if content.is_first else content.parent_hash
                last = BlockStored([], parent, [], self._block_size, None, MEDIUM, chain.lora_name)
                events.append(last)
            last.block_hashes.append(block_hash)
            last.token_ids.extend(tokens)
        return events


def roots_of(fingerprint: str, adapters: Iterable[tuple[str, str]]) -> dict[int, str | None]:
    """The root hashes of the chains of a model and of its adapters (name and SHA-256), without a cache salt."""
    return {root_hash(fingerprint): None} | {root_hash(fingerprint, sha256): name for name, sha256 in adapters}


class KvEventPublisher:
    """Publishes batches of events on a PUB socket, and replays them on a ROUTER socket. For one event loop."""

    def __init__(self, address: str, replay_address: str | None, topic: str) -> None:
        """Addresses in the form of ZeroMQ, such as tcp://*:5557. Raises ConfigurationError if one cannot be used, or
        without pyzmq."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError:
            raise ConfigurationError(_NO_ZMQ) from None
        self._zmq = zmq
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_REPLAYED)
        self._sequence = 0
        self._context = zmq.asyncio.Context()
        self._publisher: Any = self._context.socket(zmq.PUB, socket_class=cast("Any", zmq.Socket))  # never blocks
        self._replayer: Any = None if replay_address is None else self._context.socket(zmq.ROUTER)
        self._replaying: asyncio.Task[None] | None = None
        try:
            self._bind(self._publisher, address, "--kv-events")
            if replay_address is not None:
                self._bind(self._replayer, replay_address, "--kv-events-replay")
        except ConfigurationError:
            self._close()
            raise

    def _bind(self, socket: Any, address: str, flag: str) -> None:
        try:
            socket.bind(address)
        except self._zmq.ZMQError as error:
            problem = f"{flag} cannot listen on {address} ({error.strerror}): write an address such as tcp://*:5557"
            raise ConfigurationError(problem) from None

    @property
    def address(self) -> str:
        """The address of the PUB socket, with its port."""
        return str(self._publisher.getsockopt_string(self._zmq.LAST_ENDPOINT))

    @property
    def replay_address(self) -> str:
        """The address of the ROUTER socket, with its port; empty without one."""
        return "" if self._replayer is None else str(self._replayer.getsockopt_string(self._zmq.LAST_ENDPOINT))

    def start(self) -> None:
        """Answer requests for replays until `close`."""
        if self._replayer is not None:
            self._replaying = asyncio.create_task(self._replay(), name="replay of KV events")

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send the events as one batch. Slow subscribers lose batches, and ask for them again."""
        if not events:
            return
        number = self._sequence.to_bytes(_SEQUENCE_BYTES, "big")
        batch = self._encoder.encode([time.time(), events])
        self._sequence += 1
        self._sent.append((number, batch))
        self._publisher.send_multipart((self._topic, number, batch))

    async def _replay(self) -> None:
        while True:
            caller, *frames = await self._replayer.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != _SEQUENCE_BYTES:
                log.warning("a request for KV events is not an empty frame and a number of %d bytes", _SEQUENCE_BYTES)
                continue
            first = int.from_bytes(frames[1], "big")
            for number, batch in [sent for sent in self._sent if int.from_bytes(sent[0], "big") >= first]:
                await self._replayer.send_multipart((caller, b"", number, batch))
            await self._replayer.send_multipart((caller, b"", _END, b""))

    async def close(self) -> None:
        """Close the sockets."""
        if self._replaying is not None:
            await end_tasks(self._replaying)
        self._close()

    def _close(self) -> None:
        for socket in (self._publisher, self._replayer):
            if socket is not None:
                socket.close(0)
        self._context.term()
