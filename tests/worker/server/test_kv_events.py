"""KV events in vLLM's form: a subscriber that reads nothing else knows exactly the cached prefixes."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from headrace.protos.block_hash import next_hash, root_hash, token_bytes_of
from headrace.worker.config import ConfigurationError
from headrace.worker.kv.chain import Content
from headrace.worker.server import kv_events
from headrace.worker.server.kv_events import AllBlocksCleared, BlockStored, EventLog, KvEventPublisher, roots_of
from tests.patience import patience
from tests.worker.conftest import BLOCK_SIZE, make_engine

ROOTS = {root_hash("f"): None, root_hash("f", "a" * 64): "tuned"}


# As subscribers declare them: vLLM's own structs, with the fields that schedulers read.
class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Rebuilds the cached prefixes from encoded batches alone."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str | None]] = {}

    def apply(self, raw: bytes) -> None:
        for event in msgspec.msgpack.decode(raw, type=Batch).events:
            if isinstance(event, Cleared):
                self.blocks.clear()
            elif isinstance(event, Removed):
                for block_hash in event.block_hashes:
                    assert isinstance(block_hash, int)
                    del self.blocks[block_hash]
                parents = {parent for parent, _, _ in self.blocks.values()}
                assert not parents & set(event.block_hashes), "a block went before the one behind it"
            else:
                self._store(event)

    def _store(self, event: Stored) -> None:
        assert event.medium == "CPU"
        assert event.block_size == BLOCK_SIZE
        assert len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes)
        parent = event.parent_block_hash
        for number, block_hash in enumerate(event.block_hashes):
            assert isinstance(block_hash, int)
            assert not isinstance(parent, bytes)
            tokens = event.token_ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
            assert parent is None or parent in self.blocks, "a block came before its parent"
            root = next(root for root, name in ROOTS.items() if name == event.lora_name)
            assert block_hash == next_hash(root if parent is None else parent, token_bytes_of(tokens))
            assert block_hash not in self.blocks
            self.blocks[block_hash] = (parent, tuple(tokens), event.lora_name)
            parent = block_hash

    def prefix(self, tokens: list[int], adapter: str | None = None) -> int:
        """How many tokens of a prompt are cached, by what the events said: found by tokens, not by our hashes."""
        children = {(parent, content, name): h for h, (parent, content, name) in self.blocks.items()}
        parent: int | None = None
        for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            found = children.get((parent, tuple(tokens[start : start + BLOCK_SIZE]), adapter))
            if found is None:
                return start
            parent = found
        return len(tokens) // BLOCK_SIZE * BLOCK_SIZE


def encoded(events: list[Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, events])


@pytest.mark.parametrize("seed", range(5))
def test_a_subscriber_knows_exactly_the_cached_prefixes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are read late, when the pool has already changed again."""
    monkeypatch.setattr(kv_events, "_MAX_BLOCKS", 3)
    rng = random.Random(seed)
    engine = make_engine(num_blocks=24, max_num_seqs=4, max_num_batched_tokens=24)
    pool = engine.scheduler.kv_cache.pool
    log = EventLog(pool.locate, BLOCK_SIZE, lambda: ROOTS)
    subscriber = Subscriber()
    late: deque[tuple[list[int], list[int]]] = deque()
    roots = [*ROOTS, root_hash("f", "", "a salt")]
    prefixes = [[rng.randrange(99) for _ in range(rng.randint(1, 40))] for _ in range(4)]
    for _ in range(400):
        if rng.random() < 0.4:
            prompt = [*rng.choice(prefixes), *(rng.randrange(99) for _ in range(rng.randint(1, 8)))]
            engine.request(prompt, max_tokens=rng.randint(1, 20), root_hash=rng.choice(roots))
        engine.step()
        if rng.random() < 0.5:
            late.append(pool.take_events())
        while late and rng.random() < 0.4:
            subscriber.apply(encoded(log.events(*late.popleft())))
    # At the end something is cached that a subscriber may know.
    engine.run()
    engine.request([*prefixes[0], *range(2 * BLOCK_SIZE)], root_hash=roots[0])
    engine.run()
    late.append(pool.take_events())
    while late:
        subscriber.apply(encoded(log.events(*late.popleft())))
    assert pool.num_evictions > 100
    wanted = {}
    of_salt = 0
    for content in pool.hottest_first():
        chain = [content]
        while not chain[-1].is_first:
            located = pool.locate(chain[-1].parent_hash)
            assert located is not None
            chain.append(located[1])
        if chain[-1].parent_hash not in ROOTS:
            of_salt += 1
            continue
        parent = None if content.is_first else content.parent_hash
        tokens = tuple(memoryview(content.token_bytes).cast("I"))
        wanted[content.block_hash] = (parent, tokens, ROOTS[chain[-1].parent_hash])
    assert subscriber.blocks == wanted
    assert wanted
    assert of_salt


def test_a_block_that_comes_back_between_two_reports_is_told() -> None:
    """It was gone when its report was read, and no later report names it."""
    first = Content(
        next_hash(root_hash("f"), token_bytes_of([1, 2, 3, 4])), root_hash("f"), token_bytes_of([1, 2, 3, 4]), True
    )
    assert first.block_hash is not None
    pool: dict[int, tuple[int, Content]] = {}
    log = EventLog(pool.get, BLOCK_SIZE, lambda: ROOTS)
    assert log.events([first.block_hash], []) == []
    pool[first.block_hash] = (0, first)
    assert log.events([], []) == [BlockStored([first.block_hash], None, [1, 2, 3, 4], BLOCK_SIZE, None, "CPU", None)]
    assert log.events([], []) == []
    (removed,) = log.events([], [first.block_hash])
    assert removed.block_hashes == [first.block_hash]  # type: ignore[union-attr]


def test_chains_with_images_are_not_told() -> None:
    pool: dict[int, tuple[int, Content]] = {}
    parent = root_hash("f")
    hashes = []
    for number, tokens in enumerate(([1, 2, 3, 4], [1 << 31, 6, 7, 8], [9, 9, 9, 9])):
        content = Content(next_hash(parent, token_bytes_of(tokens)), parent, token_bytes_of(tokens), number == 0)
        assert content.block_hash is not None
        pool[content.block_hash] = (number, content)
        hashes.append(parent := content.block_hash)
    log = EventLog(pool.get, BLOCK_SIZE, lambda: ROOTS)
    (stored,) = log.events(hashes, [])
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == hashes[:1]
    assert log.events([], hashes[:0:-1]) == []


def test_the_roots_are_those_of_the_model_and_its_adapters() -> None:
    assert roots_of("f", [("tuned", "a" * 64)]) == ROOTS


async def received(socket: Any) -> list[bytes]:
    async with asyncio.timeout(patience(20)):
        frames: list[bytes] = await socket.recv_multipart()
        return frames


async def test_batches_are_published_and_replayed() -> None:
    publisher = KvEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@10.0.0.7:8000@m")
    context = zmq.asyncio.Context()
    subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        publisher.start()
        subscriber.connect(publisher.address)
        subscriber.subscribe(b"kv@")
        asker.connect(publisher.replay_address)
        sent = 0
        while not await subscriber.poll(50):  # the subscription takes a moment to arrive
            publisher.publish([AllBlocksCleared()])
            sent += 1
        topic, number, _ = await received(subscriber)
        first = int.from_bytes(number, "big")
        assert topic == b"kv@10.0.0.7:8000@m"
        publisher.publish([])
        publisher.publish([BlockStored([7], None, [1, 2, 3, 4], 4, None, "CPU", None)])
        while True:
            _, number, raw = await received(subscriber)
            assert int.from_bytes(number, "big") == first + 1
            first += 1
            (event,) = msgspec.msgpack.decode(raw, type=Batch).events
            if isinstance(event, Stored):
                break
        assert first == sent
        assert event == Stored([7], None, [1, 2, 3, 4], 4, None, "CPU", None)
        # What vLLM's events look like on the wire: a batch is an array, an event a map.
        (plain,) = msgspec.msgpack.decode(raw)[1]
        assert plain["type"] == "BlockStored"
        await asker.send_multipart([b"nonsense"])
        await asker.send_multipart([b"", (0).to_bytes(8, "big")])
        numbers = []
        while True:
            empty, number, raw = await received(asker)
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert raw == b""
                break
            numbers.append(int.from_bytes(number, "big"))
        assert numbers == list(range(sent + 1))
        with pytest.raises(ConfigurationError, match="--kv-events-replay cannot listen"):
            KvEventPublisher("tcp://127.0.0.1:*", publisher.replay_address, "t")
    finally:
        subscriber.close(0)
        asker.close(0)
        context.term()
        await publisher.close()
