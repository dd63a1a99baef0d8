"""Disks and other workers that fail: every request gets its tokens, and no block is left behind.

HEADRACE_SOAK=1 runs 200 seeds instead of 6.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from headrace.protos import worker_pb2
from headrace.protos.block_hash import next_hash, token_bytes_of
from headrace.worker.engine import fetching as fetching_module
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.engine.fetching import Fetching
from headrace.worker.kv import disk_files as files
from headrace.worker.kv import disk_store, disk_tier
from headrace.worker.kv.block_bytes import BlockBytes, BlockShape
from headrace.worker.kv.disk_store import DiskStore
from headrace.worker.kv.disk_tier import DiskTier
from headrace.worker.kv.fetch import ChainedBlock, Persistence
from headrace.worker.kv.groups.evicting import EvictionBudget
from headrace.worker.kv.takeover import Offer, Takeover
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.peers import tier as peer_tier
from headrace.worker.peers.tier import PeerTier
from headrace.worker.request.eviction import Eviction
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request, RequestState
from headrace.worker.sampling.sampler import BatchSampler
from tests.worker.conftest import BLOCK_SIZE, KnownCosts
from tests.worker.fake_runner import FakeRunner, expected_tokens
from tests.worker.kv.groups.test_evicting import LAYERS, RULE, VOCAB_SIZE, LayeredRunner, alone
from tests.worker.kv.test_disk_tier import until

SEEDS = 200 if os.environ.get("HEADRACE_SOAK") == "1" else 6
NUM_BLOCKS = 24
COSTS = KnownCosts(1.0, 50.0)
ROOT = 1


class FailingModule:
    """A module of which some functions now and then fail, take long, or do only a part. Some reads call `hang`."""

    def __init__(self, module: Any, rng: random.Random, names: Sequence[str], rate: float) -> None:
        self._module, self._rng, self._names, self._rate = module, rng, names, rate
        self.hang: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if name not in self._names:
            return function

        def call(*args: Any) -> Any:
            if self._rng.random() >= self._rate:
                return function(*args)
            return self._fail(name, function, list(args))

        return call

    def _fail(self, name: str, function: Callable[..., Any], args: list[Any]) -> Any:
        kind = self._rng.choice(["EIO", "ENOSPC", "memory", "late", "late", "short", "hang", "hang"])
        if kind == "memory":
            raise MemoryError
        if kind in ("EIO", "ENOSPC"):
            raise OSError(getattr(errno, kind), "injected")
        if kind == "late":
            time.sleep(self._rng.uniform(0.0, 0.03))
        elif kind == "hang" and name == "preadv":
            self.hang()
        elif name == "pwrite":
            args[1] = memoryview(args[1])[: max(1, len(args[1]) // 2)]
        found = function(*args)
        if kind == "short" and name == "pread":
            return found[: len(found) // 2]
        if kind == "short" and name == "preadv":
            args[1][0][-1] ^= 1
        return found


class FailingSource:
    """A worker that has every block of some texts, and sends too many, too few, other ones, late, or dies."""

    def __init__(
        self, rng: random.Random, texts: Sequence[Sequence[int]], bytes_of: Callable[[int, bytes], Any]
    ) -> None:
        self._rng = rng
        self._blocks: dict[int, tuple[bytes, npt.NDArray[np.uint8]]] = {}
        self.chains: list[list[ChainedBlock]] = []
        for text in texts:
            parent, chain = ROOT, []
            for start in range(0, len(text) - BLOCK_SIZE + 1, BLOCK_SIZE):
                tokens = token_bytes_of(text[start : start + BLOCK_SIZE])
                chain.append(ChainedBlock(next_hash(parent, tokens), parent, not start))
                parent = chain[-1].block_hash
                self._blocks[parent] = tokens, bytes_of(start, tokens)
            self.chains.append(chain)

    def FetchBlocks(self, request: worker_pb2.FetchBlocksRequest, timeout: float) -> Any:
        return _Call(self._answer(list(request.hashes), timeout))

    def _answer(self, hashes: list[int], timeout_s: float) -> Iterator[worker_pb2.FetchBlocksResponse]:
        rng = self._rng
        kind = rng.choice(["right", "right", "late", "stalls", "refuses", "dies", "others", "twice", "damaged", "more"])
        if kind == "refuses":
            raise grpc.RpcError
        if kind == "others":
            rng.shuffle(hashes)
        if kind == "twice":
            hashes = [each for each in hashes for _ in range(2)]
        if kind == "more":
            hashes += rng.sample(sorted(self._blocks), 3)
        while hashes:
            count = rng.randint(1, 3)
            part, hashes = hashes[:count], hashes[count:]
            if kind == "late":
                time.sleep(rng.uniform(0.0, 0.01))
            found = [self._blocks[each] for each in part if each in self._blocks]
            response = worker_pb2.FetchBlocksResponse(
                checksums=[self.checksum(data) for _, data in found],
                blocks=[data.tobytes() for _, data in found],
                token_bytes=[tokens for tokens, _ in found],
            )
            if kind == "damaged" and rng.random() < 0.5 and found:
                response.blocks[0] = rng.choice([b"", response.blocks[0][:-1], bytes(len(response.blocks[0]))])
            yield response
            if kind == "stalls":
                time.sleep(min(timeout_s, 0.05))
                raise grpc.RpcError
            if kind == "dies" and rng.random() < 0.5:
                raise grpc.RpcError

    checksum: Callable[[npt.NDArray[np.uint8]], int]


class _Call:
    def __init__(self, messages: Iterator[worker_pb2.FetchBlocksResponse]) -> None:
        self._messages = messages

    def __iter__(self) -> Iterator[worker_pb2.FetchBlocksResponse]:
        return self._messages

    def cancel(self) -> None:
        pass


class FailingTransport:
    """Connections that cannot always be made."""

    version = 0

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def blocking_channel(self, source: str) -> Any:
        if self._rng.random() < 0.05:
            raise ValueError(f"{source} is no address")
        return SimpleNamespace(close=lambda: None)


class FailingWorker:
    """An engine whose disk and peers fail. With `evicts`, requests give up blocks; else some may have drafts."""

    def __init__(self, directory: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, *, evicts: bool) -> None:
        self.rng = rng
        failing = ("pread", "preadv", "pwrite", "fdatasync")
        store_os = FailingModule(os, rng, failing, 0.0)
        locks = FailingModule(fcntl, rng, ("flock",), 0.0)
        monkeypatch.setattr(disk_store, "os", store_os)
        monkeypatch.setattr(files, "os", store_os)
        monkeypatch.setattr(files, "fcntl", locks)
        monkeypatch.setattr(disk_tier, "_PAUSE_AFTER_FAILURE_S", 0.005)
        monkeypatch.setattr(disk_tier, "WRITE_SHARE", 1.0)
        monkeypatch.setattr(peer_tier, "_REST", 0.1)
        # Patience ends before a tier has answered, sometimes.
        monkeypatch.setattr(fetching_module, "_LEAST_PATIENCE_S", 0.02)
        monkeypatch.setattr(fetching_module, "_PATIENCE", 0.0)
        runner: Any = LayeredRunner(NUM_BLOCKS) if evicts else FakeRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
        parts = runner.parts if evicts else [runner.blocks]
        shapes = [BlockShape(1, BLOCK_SIZE, 8)] * len(parts)
        self.contents = BlockBytes([part.view(np.uint8).reshape(-1) for part in parts], shapes)
        num_bytes = sum(shape.num_bytes for shape in shapes)
        self.store = DiskStore(directory, "failing", 60 * 8192, num_bytes, BLOCK_SIZE)
        store_os._rate, locks._rate, store_os.hang = 0.05, 0.01, self.hang
        self._hanging: deque[tuple[int, threading.Event]] = deque()
        self._num_turns = 0
        self.disk = DiskTier(self.store, self.contents, num_bytes)
        self.peers = PeerTier("layout", self.contents, num_bytes, FailingTransport(rng))  # type: ignore[arg-type]
        speculation = "off" if evicts else rng.choice(["off", "ngram"])
        self.engine: Engine = build_engine(
            runner,
            BatchSampler(),
            NUM_BLOCKS,
            StepLimits(4, 16, 16, is_exact=True),
            step_costs=COSTS,
            speculation=speculation,
            groups=[EvictionBudget()] if evicts else (),
            persistence=Persistence(spill=self.disk),
        )
        self.scheduler = self.engine.scheduler
        self.pool = self.scheduler.kv_cache.pool
        self.takeover = Takeover(self.scheduler.kv_cache, self.peers)
        self.fetching = Fetching(self.scheduler, self.disk, self.peers, takeover=self.takeover)
        self.disk.start()
        texts = [[rng.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(6)]
        self.texts, self._text = texts, texts[0]
        self.num_joined = 0
        self.source = FailingSource(rng, texts, lambda start, tokens: _bytes_of(start, tokens, evicts=evicts))
        scratch = BlockBytes(list(np.zeros((len(shapes), 2 * shapes[0].num_bytes), np.uint8)), shapes)

        def checksum(data: npt.NDArray[np.uint8]) -> int:
            scratch.scatter(0, data)
            return scratch.checksum(0, BLOCK_SIZE)

        self.source.checksum = checksum
        monkeypatch.setattr(peer_tier, "worker_pb2_grpc", SimpleNamespace(WorkerStub=lambda _: self.source))

    def arrive(self, *, evicts: bool) -> Request:
        """Many requests begin like the one before, so they may wait for its fetch."""
        rng = self.rng
        if rng.random() < 0.6:
            self._text = rng.choice(self.texts)
        prompt = [*self._text[: rng.randint(4, 60)], rng.randrange(VOCAB_SIZE), 5]
        sampling = SamplingParams(max_tokens=rng.randint(1, 20), seed=0, temperature=0.0)
        source = rng.choice(["", "peer", "another"])
        request = Request("r", prompt, sampling, ROOT, kv_source=source, num_source_tokens=rng.randint(0, 80))
        request.eviction = Eviction(RULE) if evicts and rng.random() < 0.7 else None
        if not self.fetching.begin(request):
            self.scheduler.add(request)
        return request

    def offer(self) -> Offer:
        """Have another worker hand blocks over."""
        chain = self.rng.choice(self.source.chains)
        first = self.rng.randrange(len(chain)) if self.rng.random() < 0.3 else 0
        offer = Offer("peer", chain[first : first + self.rng.randint(1, 15)], 0.05)
        self.takeover.offer(offer)
        return offer

    def hang(self) -> None:
        """Let the disk's thread wait for a number of the engine's steps, while others need the blocks."""
        self._hanging.append((self._num_turns + self.rng.randrange(2000), threading.Event()))
        self._hanging[-1][1].wait()

    def turn(self) -> None:
        self._num_turns += 1
        while self._hanging and self._num_turns >= self._hanging[0][0]:
            self._hanging.popleft()[1].set()
        for request in self.fetching.take_ready():
            self.scheduler.add(request)
        self.engine.advance(lambda _: None, self.fetching.begin_late)
        self.num_joined += len(self.fetching._joined)
        self.check()

    def check(self) -> None:
        """Every block that is not free belongs to a running request, or to a fetch that somebody waits for."""
        self.scheduler.check()
        owned = {block for request in self.scheduler.running for block in request.block_table}
        for fetch, held in self.fetching._held.items():
            owned.update(held.held.blocks, (wanted.block for wanted in fetch.wanted))
        for fetch, running in self.takeover._running.items():
            owned.update(running.held.blocks, (wanted.block for wanted in fetch.wanted))
        assert self.pool.num_free_blocks == NUM_BLOCKS - len(owned)
        wanted = {wanted.block_hash for fetch in self.fetching._held for wanted in fetch.wanted}
        assert self.fetching._fetch_of.keys() <= wanted
        assert all(joined.fetch in self.fetching._held for joined in self.fetching._joined.values())
        for request in self.fetching._joined:
            assert request.state is RequestState.WAITING
            assert not request.block_table


def _bytes_of(start: int, tokens: bytes, *, evicts: bool) -> npt.NDArray[np.uint8]:
    """A block's bytes, as the runner would compute them."""
    values = np.frombuffer(tokens, np.uint32).astype(np.int64)
    if evicts:
        values = np.tile(values + VOCAB_SIZE * np.arange(start, start + BLOCK_SIZE), LAYERS)
    return values.view(np.uint8)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_fails_every_request_gets_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, evicts = random.Random(seed), seed % 3 == 0
    worker = FailingWorker(tmp_path, rng, monkeypatch, evicts=evicts)
    num_requests = 20 if evicts else 60
    alive: list[Request] = []
    offers: list[Offer] = []
    asked: list[Request] = []

    def more() -> bool:
        """How many blocks come in time depends on the threads, so some runs need more requests."""
        num_fetched = worker.disk.num_read + worker.peers.num_received
        return len(asked) < (num_requests if num_fetched > 5 else 10 * num_requests)

    while more() or alive:
        if more() and len(alive) < 7 and rng.random() < 0.4:
            asked.append(worker.arrive(evicts=evicts))
            alive.append(asked[-1])
        if alive and rng.random() < 0.02:
            request = alive[rng.randrange(len(alive))]
            if not worker.fetching.cancel(request):
                worker.scheduler.cancel(request)
            alive.remove(request)
            asked[asked.index(request)] = None  # type: ignore[call-overload]
        if more() and rng.random() < 0.05:
            offers.append(worker.offer())
        worker.turn()
        alive = [request for request in alive if request.state is not RequestState.FINISHED]
    until(lambda: not worker.turn() and not worker.scheduler.num_fetching and not worker._hanging)  # type: ignore[func-returns-value]
    for request in asked:
        if request is not None:
            answer = request.token_ids[request.num_prompt_tokens :].tolist()
            prompt = request.token_ids[: request.num_prompt_tokens].tolist()
            if evicts:
                rule = None if request.eviction is None else request.eviction.rule
                assert answer == alone(prompt, request.sampling.max_tokens, rule)
            else:
                assert answer == expected_tokens(prompt, request.sampling.max_tokens, VOCAB_SIZE)
    assert all(offer.ended.done() for offer in offers)
    assert worker.pool.num_free_blocks == NUM_BLOCKS
    assert worker.disk.is_alive()
    assert worker.disk.num_written
    assert worker.disk.num_read + worker.peers.num_received > 5
    assert evicts or worker.num_joined
    worker.disk.stop()
    worker.peers.stop()
