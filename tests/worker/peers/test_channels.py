"""Channels to many sources: none is closed while blocks come through it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.common.transport.channels import Transport
from headrace.protos import worker_pb2
from headrace.worker.kv.fetch import Fetch, Wanted
from headrace.worker.peers import source as source_module
from headrace.worker.peers.tier import PeerTier
from tests.worker.peers.test_peers import BOUND_S, LAYOUT, SHAPE, Peer, Server, peers, until

__all__ = ["peers"]
NUM_SOURCES = 20  # more than there are channels


class Hanging:
    """A source that has what `peer` has. After its first messages it sends nothing until it is told to go on."""

    def __init__(self, address: str, peer: Peer) -> None:
        self.address = address
        self.num_first = 0
        self.num_calls = self.num_running = self.most_running = 0
        self._peer = peer
        self._goes_on = threading.Event()
        self._server = Server(address, self._send)

    async def _send(self, request: worker_pb2.FetchBlocksRequest) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        self.num_calls += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            responses = [response async for response in self._peer.source.send(request)]
            for number, response in enumerate(responses):
                while number == self.num_first and not self._goes_on.is_set():
                    await asyncio.sleep(0.001)
                yield response
        finally:
            self.num_running -= 1

    def go_on(self) -> None:
        self._goes_on.set()

    def end(self) -> None:
        self._goes_on.set()
        self._server.stop()


@pytest.fixture
def hanging(tmp_path: Path, peers: tuple[Peer, Peer]) -> Iterator[list[Hanging]]:
    made = [Hanging(f"unix:{tmp_path}/hanging{number}.sock", peers[0]) for number in range(3)]
    yield made
    for source in made:
        source.end()


def begin(peers: tuple[Peer, Peer], source: str) -> Fetch:
    """Let the second peer fetch the blocks of PROMPT from `source`."""
    first, second = peers
    contents = first.pool.hottest_first()
    wanted = [
        Wanted(block, content.block_hash or 0, content.parent_hash, content.token_bytes, content.is_first)
        for block, content in zip(second.pool.take(len(contents)), contents, strict=True)
    ]
    fetch = Fetch(wanted, source, BOUND_S)
    second.tier.fetch(fetch)
    return fetch


class Ended:
    """The fetches of the second peer that have ended."""

    def __init__(self, peers: tuple[Peer, Peer]) -> None:
        self._peer = peers[1]
        self._fetches: list[Fetch] = []

    def has(self, *fetches: Fetch) -> bool:
        for fetch in self._peer.tier.take_ended():
            self._fetches.append(fetch)
            self._peer.pool.release(wanted.block for wanted in fetch.wanted)
        return all(fetch in self._fetches for fetch in fetches)


def test_a_channel_is_not_closed_while_blocks_come_through_it(
    tmp_path: Path, peers: tuple[Peer, Peer], hanging: list[Hanging], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "_BLOCKS_A_MESSAGE", 2)
    ended = Ended(peers)
    hanging[0].num_first = 1
    fetch = begin(peers, hanging[0].address)
    until(lambda: fetch.num_read == 2)
    for number in range(NUM_SOURCES):
        other = begin(peers, f"unix:{tmp_path}/nobody{number}.sock")
        until(lambda each=other: ended.has(each))  # type: ignore[misc]
    hanging[0].go_on()
    until(lambda: ended.has(fetch))
    assert fetch.num_read == 6


class DeadChannel:
    """A channel whose calls fail."""

    def __init__(self, transport: NotingTransport, address: str) -> None:
        self._transport, self._address = transport, address

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise grpc.RpcError

        return lambda *_, **__: call

    def close(self) -> None:
        self._transport.note()
        self._transport.closed.append(self._address)


class NotingTransport(Transport):
    """Notes which channels are opened and closed, and which threads do that."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.threads: set[threading.Thread] = set()

    def note(self) -> None:
        self.threads.add(threading.current_thread())

    @property
    def version(self) -> int:
        self.note()
        return 0

    def blocking_channel(self, address: str) -> grpc.Channel:
        self.note()
        self.opened.append(address)
        return DeadChannel(self, address)  # type: ignore[return-value]


@pytest.fixture
def noting(peers: tuple[Peer, Peer]) -> Iterator[tuple[PeerTier, NotingTransport]]:
    """A tier whose fetches all fail, and its transport."""
    transport = NotingTransport()
    tier = PeerTier(LAYOUT, peers[1].tier._contents, SHAPE.num_bytes, transport)
    yield tier, transport
    tier.stop()


def visit(tier: PeerTier, source: str) -> None:
    fetch = Fetch([], source, BOUND_S)
    tier.fetch(fetch)
    until(lambda: tier.take_ended() == [fetch])


def test_the_channel_that_was_not_used_for_longest_is_closed(noting: tuple[PeerTier, NotingTransport]) -> None:
    tier, transport = noting
    for number in range(16):
        visit(tier, str(number))
    visit(tier, "0")
    visit(tier, "another")
    assert transport.closed == ["1"]
    visit(tier, "0")
    assert transport.opened.count("0") == 1


def test_the_engines_thread_neither_opens_nor_closes_channels(noting: tuple[PeerTier, NotingTransport]) -> None:
    tier, transport = noting
    for number in range(NUM_SOURCES):
        visit(tier, str(number))
    assert len(transport.opened) == NUM_SOURCES
    assert len(transport.closed) == NUM_SOURCES - 16
    assert threading.current_thread() not in transport.threads
