"""KV blocks from other workers: they arrive unchanged, and a peer that fails in any way costs only the computation."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.protos import worker_pb2, worker_pb2_grpc
from headrace.protos.status import StatusError, abort
from headrace.worker.engine import fetching
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.fetching import Fetching
from headrace.worker.kv.arena import KVArena, arena_bytes
from headrace.worker.kv.block_bytes import BlockBytes, BlockShape
from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.fetch import Fetch, LearnedTime
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.peers import source as source_module
from headrace.worker.peers import tier as tier_module
from headrace.worker.peers.source import BlockFile, BlockSource
from headrace.worker.peers.tier import PeerTier
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request, RequestState
from headrace.worker.sampling.sampler import BatchSampler
from tests.patience import patience
from tests.worker.conftest import BLOCK_SIZE, VOCAB_SIZE, EngineUnderTest, KnownCosts
from tests.worker.fake_runner import EMPTY, FakeRunner, expected_tokens

BOUND_S = 20.0
SHAPE = BlockShape(1, BLOCK_SIZE, 8)
OFFSET = 4096
LAYOUT = "layout"
NUM_BLOCKS = 24
PROMPT = list(range(200, 200 + 6 * BLOCK_SIZE + 2))


class Peer:
    """An engine over a fake runner whose blocks are in a file in memory. It fetches from others, and serves them."""

    def __init__(self, directory: Path, name: str, num_blocks: int = NUM_BLOCKS) -> None:
        runner = FakeRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
        self.descriptor = os.memfd_create(name)
        os.ftruncate(self.descriptor, OFFSET + runner.blocks.nbytes)
        memory = np.frombuffer(mmap.mmap(self.descriptor, 0), np.uint8)
        runner.blocks = memory[OFFSET:].view(np.int64).reshape(-1, BLOCK_SIZE)
        runner.blocks[:] = EMPTY
        contents = BlockBytes([memory[OFFSET:]], [SHAPE])
        costs, limits = KnownCosts(1.0, 50.0), StepLimits(4, 16, 16, is_exact=True)
        engine = build_engine(runner, BatchSampler(), num_blocks, limits, step_costs=costs)
        self.runner = runner
        self.under_test = EngineUnderTest(engine, runner)
        self.pool = engine.scheduler.kv_cache.pool
        self.tier = PeerTier(LAYOUT, contents, SHAPE.num_bytes)
        self.fetching = Fetching(engine.scheduler, None, self.tier)
        self.under_test.fetch_first = self.fetching.begin_late
        file = BlockFile(self.descriptor, OFFSET, num_blocks + 1)
        self.source = BlockSource(LAYOUT, engine.scheduler.kv_cache, contents, SHAPE.num_bytes, file)
        self.address = f"unix:{directory}/{name}.sock"
        self._server = Server(self.address, lambda request: self.source.send(request))

    def request(self, prompt: list[int], peer: str = "", num_tokens: int = 0) -> Request:
        sampling = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
        made = Request("r", prompt, sampling, 1, kv_source=peer, num_source_tokens=num_tokens)
        self.under_test.tokens[made] = []
        return made

    def ask(self, prompt: list[int], peer: str = "", num_tokens: int = 0) -> Request:
        """Send a request as the engine's thread does, and check the answer and the blocks."""
        request = self.request(prompt, peer, num_tokens)
        if self.fetching.begin(request):
            until(lambda: self.under_test.scheduler.has_requests or self.add_ready())
        else:
            self.under_test.scheduler.add(request)
        self.finish(request, prompt)
        return request

    def finish(self, request: Request, prompt: list[int]) -> None:
        while self.under_test.scheduler.has_requests or self.under_test.engine.has_outputs or self.fetching.num_held:
            self.under_test.step()
            self.add_ready()
        assert self.under_test.tokens[request] == expected_tokens(prompt, 2, VOCAB_SIZE)
        until(lambda: not self.add_ready() and not self.tier._running)
        assert self.under_test.scheduler.num_fetching == 0
        self.pool.check()
        assert self.pool.num_free_blocks == self.pool.num_blocks

    def add_ready(self) -> bool:
        ready = self.fetching.take_ready()
        for request in ready:
            self.under_test.scheduler.add(request)
        return bool(ready)

    def end(self) -> None:
        self.tier.stop()
        self._server.stop()
        os.close(self.descriptor)


class Server:
    """A gRPC server of FetchBlocks, on an event loop of its own."""

    def __init__(self, address: str, send: Callable[[worker_pb2.FetchBlocksRequest], AsyncIterator[Any]]) -> None:
        self._address = address
        self._send = send
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stopped: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._started.wait(patience(BOUND_S))

    async def _serve(self) -> None:
        send = self._send

        class Servicer(worker_pb2_grpc.WorkerServicer):
            async def FetchBlocks(self, request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    async for response in send(request):
                        yield response
                except StatusError as error:
                    await abort(context, error)

        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(Servicer(), server)
        server.add_insecure_port(self._address)
        await server.start()
        self._stopped = asyncio.Event()
        self._started.set()
        await self._stopped.wait()
        await server.stop(0)

    def stop(self) -> None:
        if self._thread.is_alive():
            assert self._stopped is not None
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(patience(BOUND_S))


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + patience(BOUND_S)
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Peer, Peer]]:
    """A peer that has computed PROMPT, and another one with a cache of another size. They wait for each other as long
    as a busy machine may take."""
    monkeypatch.setattr(fetching, "_LEAST_PATIENCE_S", BOUND_S)
    monkeypatch.setattr(tier_module, "_REST", 0.0)
    first, second = Peer(tmp_path, "first"), Peer(tmp_path, "second", NUM_BLOCKS + 7)
    first.ask(PROMPT)
    yield first, second
    first.end()
    second.end()


@pytest.mark.parametrize("is_shared", [True, False])
def test_blocks_arrive_unchanged(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    first, second = peers
    has_memory = []
    take = PeerTier._take

    def noted(tier: PeerTier, fetch: Any, response: worker_pb2.FetchBlocksResponse, foreign: Any, buffer: Any) -> bool:
        has_memory.append(foreign is not None)
        assert (len(response.blocks) == 0) is (foreign is not None)
        return take(tier, fetch, response, foreign, buffer)

    monkeypatch.setattr(PeerTier, "_take", noted)
    if not is_shared:
        monkeypatch.setattr("headrace.worker.peers.tier.host_id", lambda: "another host")
    request = second.ask([*PROMPT[:-2], 1, 2, 3], first.address, len(PROMPT))
    assert has_memory == [is_shared]
    assert request.num_cached_tokens == request.num_peer_tokens == 6 * BLOCK_SIZE
    assert second.tier.num_received == first.source.num_sent == 6
    assert second.fetching.counters()["prompt_tokens_from_peers"] == 6 * BLOCK_SIZE
    assert second.tier.bytes_per_s > 0
    assert len(second.pool.take_events()[0]) >= 6, "routers hear of them"


def test_only_what_is_missing_is_fetched(peers: tuple[Peer, Peer]) -> None:
    first, second = peers
    second.ask(PROMPT[: 2 * BLOCK_SIZE + 2])
    second.ask(PROMPT, first.address, len(PROMPT))
    assert second.tier.num_received == 4
    second.ask(PROMPT, first.address, len(PROMPT))
    assert second.tier.num_received == 4


def test_a_source_that_has_less_than_believed_gives_what_it_has(peers: tuple[Peer, Peer]) -> None:
    first, second = peers
    longer = [*PROMPT[:-2], *range(300, 330)]
    request = second.ask(longer, first.address, len(longer))
    assert request.num_cached_tokens == 6 * BLOCK_SIZE


def test_without_a_source_everything_is_computed(peers: tuple[Peer, Peer]) -> None:
    assert peers[1].ask(PROMPT).num_cached_tokens == 0


def test_a_prompt_that_is_cheaper_to_compute_is_computed(peers: tuple[Peer, Peer]) -> None:
    first, second = peers
    second.tier._block_time = LearnedTime(3600.0)
    assert second.ask(PROMPT, first.address, len(PROMPT)).num_cached_tokens == 0


def test_memory_that_cannot_be_opened_is_sent(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = peers
    first.source._file = BlockFile(os.open("/dev/null", os.O_RDONLY), OFFSET, NUM_BLOCKS + 1)
    message = first.source._file.message()
    monkeypatch.setattr(BlockFile, "message", lambda _: worker_pb2.SharedMemory(pid=message.pid, inode=1))
    request = second.ask(PROMPT, first.address, len(PROMPT))
    assert request.num_cached_tokens == 6 * BLOCK_SIZE
    os.close(first.source._file.descriptor)


def test_memory_that_was_freed_costs_the_computation(peers: tuple[Peer, Peer]) -> None:
    first, second = peers
    held = os.memfd_create("truncated")
    first.source._file = BlockFile(held, OFFSET, NUM_BLOCKS + 1)
    assert second.ask(PROMPT, first.address, len(PROMPT)).num_cached_tokens == 0
    os.close(held)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_block_that_changes_while_it_is_read_is_not_taken(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    first, second = peers
    if not is_shared:
        monkeypatch.setattr("headrace.worker.peers.tier.host_id", lambda: "")
    checksum = first.source._contents.checksum

    def changed(block: int, num_tokens: int) -> int:
        found = checksum(block, num_tokens)
        if block == 3:
            first.runner.blocks[block, 1] ^= 1
        return found

    if is_shared:
        monkeypatch.setattr(first.source._contents, "checksum", changed)
    else:
        monkeypatch.setattr(first.source._contents, "checksum", lambda block, n: checksum(block, n) ^ (block == 3))
    request = second.ask(PROMPT, first.address, len(PROMPT))
    assert 0 < request.num_cached_tokens < 6 * BLOCK_SIZE


def test_a_block_that_is_evicted_while_it_is_read_is_not_sent(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = peers
    locate, calls = BlockPool.locate, []

    def evicting(pool: BlockPool, block_hash: int) -> Any:
        if pool is first.pool:
            calls.append(block_hash)
            if len(calls) == 4:  # the look after the second block was copied
                pool.forget_all()
        return locate(pool, block_hash)

    monkeypatch.setattr(BlockPool, "locate", evicting)
    assert second.ask(PROMPT, first.address, len(PROMPT)).num_cached_tokens == BLOCK_SIZE


def answers(*responses: worker_pb2.FetchBlocksResponse, pause_s: float = 0.0) -> Any:
    async def send(_: worker_pb2.FetchBlocksRequest) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        for response in responses:
            yield response
            await asyncio.sleep(pause_s)

    return send


@pytest.mark.parametrize(
    "response",
    [
        worker_pb2.FetchBlocksResponse(checksums=[1], blocks=[bytes(SHAPE.num_bytes)], token_bytes=[bytes(16)]),
        worker_pb2.FetchBlocksResponse(checksums=[1], blocks=[b"short"], token_bytes=[bytes(16)]),
        worker_pb2.FetchBlocksResponse(checksums=[1, 2, 3]),
        worker_pb2.FetchBlocksResponse(
            checksums=[0], numbers=[1 << 31], memory=worker_pb2.SharedMemory(pid=1, file_descriptor=1)
        ),
        worker_pb2.FetchBlocksResponse(),
    ],
)
def test_a_peer_that_lies_costs_the_computation(
    tmp_path: Path, peers: tuple[Peer, Peer], response: worker_pb2.FetchBlocksResponse
) -> None:
    liar = Server(f"unix:{tmp_path}/liar.sock", answers(response))
    request = peers[1].ask(PROMPT, f"unix:{tmp_path}/liar.sock", len(PROMPT))
    assert request.num_cached_tokens == request.num_peer_tokens == 0
    liar.stop()


def test_right_bytes_of_other_tokens_are_not_taken(tmp_path: Path, peers: tuple[Peer, Peer]) -> None:
    first, second = peers

    async def send(request: worker_pb2.FetchBlocksRequest) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        request.host_id = ""
        async for response in first.source.send(request):
            response.token_bytes[0] = bytes(4 * BLOCK_SIZE)
            yield response

    liar = Server(f"unix:{tmp_path}/liar.sock", send)
    assert second.ask(PROMPT, f"unix:{tmp_path}/liar.sock", len(PROMPT)).num_cached_tokens == 0
    liar.stop()


def test_a_peer_that_stalls_costs_the_computation(
    tmp_path: Path, peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_PATIENCE", 0.0)
    monkeypatch.setattr(fetching, "_LEAST_PATIENCE_S", 0.25)
    stalling = Server(f"unix:{tmp_path}/stalling.sock", answers(worker_pb2.FetchBlocksResponse(), pause_s=BOUND_S))
    start_s = time.monotonic()
    request = peers[1].ask(PROMPT, f"unix:{tmp_path}/stalling.sock", len(PROMPT))
    assert time.monotonic() - start_s < BOUND_S / 2
    assert request.num_cached_tokens == 0
    stalling.stop()


def test_a_peer_that_sent_nothing_is_left_alone_for_longer_than_it_took(
    tmp_path: Path, peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_PATIENCE", 0.0)
    monkeypatch.setattr(fetching, "_LEAST_PATIENCE_S", 0.5)
    monkeypatch.setattr(tier_module, "_REST", 100.0)
    address, num_calls = f"unix:{tmp_path}/stalling.sock", 0

    async def stall(_: worker_pb2.FetchBlocksRequest) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        nonlocal num_calls
        num_calls += 1
        await asyncio.sleep(BOUND_S)
        yield worker_pb2.FetchBlocksResponse()

    stalling = Server(address, stall)
    for _ in range(3):
        peers[1].ask(PROMPT, address, len(PROMPT))
        peers[1].pool.forget_all()
    assert num_calls == 1
    assert peers[1].tier.is_resting(address)
    assert not peers[1].tier.is_resting(peers[0].address)
    stalling.stop()


def test_the_speed_of_a_peer_that_is_too_slow_is_learned(
    tmp_path: Path, peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = peers
    monkeypatch.setattr(fetching, "_PATIENCE", 0.0)
    monkeypatch.setattr(fetching, "_LEAST_PATIENCE_S", 0.6)
    monkeypatch.setattr(source_module, "_BLOCKS_A_MESSAGE", 1)

    async def slowly(request: worker_pb2.FetchBlocksRequest) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        async for response in first.source.send(request):
            yield response
            await asyncio.sleep(0.4)

    slow = Server(f"unix:{tmp_path}/slow.sock", slowly)
    before_s = second.tier._block_time.seconds
    second.ask(PROMPT, f"unix:{tmp_path}/slow.sock", len(PROMPT))
    assert 0 < second.tier.num_received < 6
    assert second.tier._block_time.seconds > before_s
    slow.stop()


def test_fetches_of_a_tier_that_has_stopped_or_that_nobody_waits_for_end(peers: tuple[Peer, Peer]) -> None:
    first, second = peers
    given_up = Fetch([], first.address, is_given_up=True)
    second.tier.fetch(given_up)
    until(lambda: second.tier.take_ended() == [given_up])
    assert first.source.num_sent == 0
    second.tier.stop()
    assert second.ask(PROMPT, first.address, len(PROMPT)).num_cached_tokens == 0


def test_a_peer_that_is_gone_costs_the_computation(peers: tuple[Peer, Peer]) -> None:
    first, second = peers
    first._server.stop()
    start_s = time.monotonic()
    assert second.ask(PROMPT, first.address, len(PROMPT)).num_cached_tokens == 0
    assert time.monotonic() - start_s < BOUND_S / 2


def test_a_peer_that_dies_in_the_middle_costs_the_rest(
    tmp_path: Path, peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = peers
    monkeypatch.setattr(source_module, "_BLOCKS_A_MESSAGE", 2)

    async def send(request: worker_pb2.FetchBlocksRequest) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        async for response in first.source.send(request):
            yield response
            raise RuntimeError("it died")

    dying = Server(f"unix:{tmp_path}/dying.sock", send)
    request = second.ask(PROMPT, f"unix:{tmp_path}/dying.sock", len(PROMPT))
    assert request.num_cached_tokens == 2 * BLOCK_SIZE
    dying.stop()


def test_blocks_of_another_layout_are_refused(peers: tuple[Peer, Peer]) -> None:
    first, second = peers
    first.source.layout = "another"
    assert second.ask(PROMPT, first.address, len(PROMPT)).num_cached_tokens == 0
    assert first.source.num_sent == 0


def test_only_some_fetch_at_a_time(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = peers
    monkeypatch.setattr(source_module, "MAX_FETCHES", 0)
    assert second.ask(PROMPT, first.address, len(PROMPT)).num_cached_tokens == 0
    monkeypatch.undo()
    second.ask(list(range(500, 520)))
    second.pool.forget_all()
    assert second.ask(PROMPT, first.address, len(PROMPT)).num_cached_tokens == 6 * BLOCK_SIZE


def test_a_request_that_is_cancelled_while_it_waits_leaves_no_block_behind(
    tmp_path: Path, peers: tuple[Peer, Peer]
) -> None:
    second = peers[1]
    stalling = Server(f"unix:{tmp_path}/stalling.sock", answers(worker_pb2.FetchBlocksResponse(), pause_s=0.2))
    request = second.request(PROMPT, f"unix:{tmp_path}/stalling.sock", len(PROMPT))
    assert second.fetching.begin(request)
    assert second.fetching.num_held == 1
    assert second.fetching.cancel(request)
    assert request.state is RequestState.FINISHED
    until(lambda: not second.add_ready() and second.under_test.scheduler.num_fetching == 0)
    second.pool.check()
    assert second.pool.num_free_blocks == second.pool.num_blocks
    stalling.stop()


@pytest.mark.parametrize("comes", [True, False])
def test_the_time_in_which_a_request_waits_for_its_blocks_is_noted(
    tmp_path: Path, peers: tuple[Peer, Peer], comes: bool
) -> None:
    first, second = peers
    first.ask(PROMPT)
    now_s = 0.0
    second.fetching._clock = lambda: now_s
    stalling = Server(f"unix:{tmp_path}/stalling.sock", answers(worker_pb2.FetchBlocksResponse(), pause_s=0.2))
    address = first.address if comes else f"unix:{tmp_path}/stalling.sock"
    request = second.request(PROMPT, address, len(PROMPT))
    assert second.fetching.begin(request)
    now_s = 0.1 if comes else 60.0
    until(second.add_ready)
    assert request.fetch_wait_s == now_s
    second.finish(request, PROMPT)
    stalling.stop()


def test_an_answer_that_may_become_long_leaves_room_for_blocks_of_others(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that name no max_tokens may use the whole context."""
    first, second = peers
    first.ask(PROMPT)
    monkeypatch.setattr(fetching, "_TOKENS_MEANWHILE", 2 * BLOCK_SIZE)
    scheduler = second.under_test.scheduler
    long = second.under_test.request([1, 2, 3], max_tokens=NUM_BLOCKS * BLOCK_SIZE - 8)
    second.under_test.step()
    assert second.fetching._num_spare() == second.pool.num_free_blocks - 2
    request = second.request(PROMPT, first.address, len(PROMPT))
    assert second.fetching.begin(request)
    until(second.add_ready)
    assert request.num_peer_tokens == 6 * BLOCK_SIZE
    scheduler.cancel(long)
    second.finish(request, PROMPT)


def test_requests_with_the_same_prefix_fetch_it_once(peers: tuple[Peer, Peer]) -> None:
    first, second = peers
    prompts = [[*PROMPT[:-2], number, *range(300, 330)] for number in range(4)]
    requests = [second.request(prompt, first.address, len(PROMPT)) for prompt in prompts]
    assert all(map(second.fetching.begin, requests))
    assert second.pool.num_free_blocks == second.pool.num_blocks - 6
    for request, prompt in zip(requests, prompts, strict=True):
        second.finish(request, prompt)
    assert second.tier.num_received == first.source.num_sent == 6
    assert [request.num_cached_tokens for request in requests] == [6 * BLOCK_SIZE] * 4


@pytest.mark.parametrize("is_shared", [True, False])
def test_bytes_that_come_after_nobody_waits_any_more_are_written_nowhere(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    first, second = peers
    has_come, gate = threading.Event(), threading.Event()

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            has_come.set()
            assert gate.wait(patience(BOUND_S))
            return function(*args)

        return call

    if is_shared:
        monkeypatch.setattr(os, "preadv", late(os.preadv))
    else:
        monkeypatch.setattr("headrace.worker.peers.tier.host_id", lambda: "another host")
        monkeypatch.setattr(tier_module, "np", SimpleNamespace(uint8=np.uint8, frombuffer=late(np.frombuffer)))
    request = second.request(PROMPT, first.address, len(PROMPT))
    assert second.fetching.begin(request)
    assert has_come.wait(patience(BOUND_S))
    assert second.fetching.cancel(request)
    assert second.pool.num_free_blocks == second.pool.num_blocks, "others may have them now"
    second.runner.blocks[:] = EMPTY
    gate.set()
    until(lambda: not second.add_ready() and not second.tier._running)
    assert (second.runner.blocks == EMPTY).all()
    assert second.tier.num_received == 0


def test_random_prompts_of_two_peers_always_get_the_right_tokens(peers: tuple[Peer, Peer]) -> None:
    rng = random.Random(7)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(6)]
    for _ in range(150):
        prompt = [*rng.choice(stems)[: rng.randint(8, 40)], rng.randrange(VOCAB_SIZE), 5]
        asked, other = rng.sample(peers, 2)
        asked.ask(prompt, other.address, len(prompt))
    assert sum(peer.tier.num_received for peer in peers) > 50


def test_offsets_in_an_arena_are_those_that_it_gives_out() -> None:
    shapes = [BlockShape(2, 4, 9), BlockShape(2, 4, 9), BlockShape(1, 4, 13)]
    size = 5 * sum(shape.num_bytes for shape in shapes)
    arena = KVArena(size, len(shapes), huge_pages=False)
    caches = [arena.take(5 * shape.num_bytes) for shape in shapes]
    contents = BlockBytes(caches, shapes)
    assert contents.offsets(100, 5) == [100 + cache.ctypes.data - arena.address for cache in caches]
    assert arena_bytes(size, len(shapes)) >= contents.offsets(0, 5)[-1]
    for number, part in enumerate(contents.parts(3)):
        part[:] = number + 1
    data = np.empty(sum(shape.num_bytes for shape in shapes), np.uint8)
    contents.gather(3, data)
    assert data.tolist() == [n + 1 for n, shape in enumerate(shapes) for _ in range(shape.num_bytes)]


@pytest.mark.parametrize("shapes", [[BlockShape(2, 4, 9), BlockShape(1, 4, 13)], [BlockShape(2, 4, 8)] * 3, [SHAPE]])
def test_a_private_block_has_the_checksum_of_its_copy(shapes: list[BlockShape]) -> None:
    arena = KVArena(5 * sum(shape.num_bytes for shape in shapes), len(shapes), huge_pages=False)
    contents = BlockBytes([arena.take(5 * shape.num_bytes) for shape in shapes], shapes)
    block = contents.private_block()
    block.scatter(0, np.random.default_rng(1).integers(0, 256, sum(shape.num_bytes for shape in shapes), np.uint8))
    contents.copy_from(block, 3)
    for num_tokens in range(1, 5):
        assert block.checksum(0, num_tokens) == contents.checksum(3, num_tokens) != contents.checksum(2, num_tokens)
