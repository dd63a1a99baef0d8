"""The peer of the router's decision: SelectionService of ai-dynamo-runtime, a Rust selector called from Python.

It learns what workers hold from ZMQ events that carry tokens, hashes them by itself, and is asked in process. Its
answer to `select_and_reserve` is a worker with the load booked, as ours is.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
_MODEL = "m"
_WAIT_S = 120.0


class PeerPrompt:
    """A prompt as the peer is asked about it: the hashes that it computes itself, made beforehand."""

    def __init__(self, tokens: list[int], block_hashes: list[int], sequence_hashes: list[int]) -> None:
        self.num_tokens = len(tokens)
        self.block_hashes = block_hashes
        self.sequence_hashes = sequence_hashes


class DynamoSelection:
    """The peer with its workers, numbered from 0. Raises ImportError if it is not installed."""

    def __init__(self, num_workers: int, block_size: int) -> None:
        import zmq
        from dynamo import _core

        self._core = _core
        self._block_size = block_size
        self._num_workers = num_workers
        self._service = _core.SelectionService(indexer_threads=1)
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PUB) for _ in range(num_workers)]
        for socket in self._sockets:
            socket.setsockopt(zmq.SNDHWM, 0)
        self._sequence = [0] * num_workers
        self._num_asked = 0

    async def start(self) -> None:
        """Make the workers known and wait for the service to listen to them."""
        for number, socket in enumerate(self._sockets):
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            worker = {
                "worker_id": number,
                "model_name": _MODEL,
                "block_size": self._block_size,
                "endpoint": f"http://127.0.0.1:{20_000 + number}",
                "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                "total_kv_blocks": 20_000,
                "max_num_batched_tokens": 256,
            }
            answer = await self._service.upsert_worker(worker)
            assert answer["lifecycle"] == "schedulable", answer
        await asyncio.sleep(1.0)  # what is published before a subscription is made is lost

    def store(self, worker: int, hashes: Sequence[int], tokens: Tokens) -> None:
        """Record that a worker holds these blocks, a chain from its root."""
        names = [value & (1 << 63) - 1 for value in hashes]
        event = ["BlockStored", names, None, tokens.tolist(), self._block_size, None]
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        self._sockets[worker].send_multipart([b"", struct.pack(">Q", self._sequence[worker]), batch])
        self._sequence[worker] += 1

    async def until_stored(self, worker: int, tokens: Tokens) -> None:
        """Return when this chain can be found at this worker. Raises TimeoutError."""
        request = {"model_name": _MODEL, "token_ids": tokens.tolist()}
        num_blocks = len(tokens) // self._block_size
        async with asyncio.timeout(_WAIT_S):
            while True:
                scores = await self._service.overlap_scores(request)
                if any(w["worker_id"] == worker and w["device_blocks"] == num_blocks for w in scores["workers"]):
                    return
                await asyncio.sleep(0.05)

    async def prompt(self, tokens: list[int]) -> PeerPrompt:
        """Hash a prompt; not part of a decision."""
        selection = self._name()
        answer = await self._service.select_and_reserve(
            {"model_name": _MODEL, "selection_id": selection, "token_ids": tokens}
        )
        await self._service.free_reservation(selection)
        blocks = self._core.compute_block_hash_for_seq(tokens, self._block_size)
        return PeerPrompt(tokens, [_signed(value) for value in blocks], answer["sequence_hashes"])

    async def decide(self, prompt: PeerPrompt) -> tuple[float, dict[str, Any]]:
        """Select a worker, and cancel the booking afterwards. Returns the seconds of the selection with its booking,
        and the result."""
        selection = self._name()
        request = {
            "model_name": _MODEL,
            "selection_id": selection,
            "block_hashes": prompt.block_hashes,
            "sequence_hashes": prompt.sequence_hashes,
            "isl_tokens": prompt.num_tokens,
        }
        began = time.perf_counter()
        answer = await self._service.select_and_reserve(request)
        seconds = time.perf_counter() - began
        await self._service.free_reservation(selection)
        return seconds, answer

    def close(self) -> None:
        """Stop everything."""
        self._service.shutdown()
        self._context.destroy(linger=0)

    def _name(self) -> str:
        self._num_asked += 1
        return str(self._num_asked)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
