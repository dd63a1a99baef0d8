"""Measures a router's cost by the number of its workers: `python -m benchmarks.router.fleet [--workers 64 512 4096]`.

It measures the CPU time of one `Fleet.place` for a prompt of 2,000 tokens, including hashing; of one load report, while
no request waits, and while one request waits and all workers are full; and the resident memory of the prefix index per
entry, with chains of up to 512 blocks at one to four workers each. The links are never connected.

It also measures the cost of a message of a worker's Watch, including gRPC, for messages with load and blocks, and with
either alone. Another process sends the messages as fast as they are read.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import multiprocessing.connection
import random
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import grpc

from headrace.protos import inference_pb2, worker_pb2, worker_pb2_grpc
from headrace.router.dispatch.admission import Admission, AdmissionConfig
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.links import LinkState, WorkerLink
from headrace.router.fleet.registry import Registry
from headrace.router.fleet.routed_request import RoutedRequest
from headrace.router.placement.prefix_index import PrefixIndex
from headrace.router.placement.prompt import Prompt

NUM_ENTRIES = 1_000_000
CHAIN_BLOCKS = 512
PROMPT_TOKENS = 2000
# Blocks that a worker reports in one message.
REPORTED_BLOCKS = 32
# Blocks that come, and that go, with a message of a Watch; messages that are timed of each kind.
EVENT_BLOCKS = 8
NUM_MESSAGES = 30_000
CARD = worker_pb2.ModelCard(name="m", fingerprint="a" * 64, max_context_tokens=32_768, block_size=32, vocab_size=1000)


def load(num_running: int) -> worker_pb2.Load:
    """A load report with this many running requests of at most 64."""
    return worker_pb2.Load(
        num_running=num_running,
        num_blocks=30_000,
        num_free_blocks=20_000,
        num_cached_blocks=9_000,
        prefill_tokens_per_s=1000,
        decode_step_ms=30,
        max_num_seqs=64,
    )


def cpu_us(action: Callable[[], None], times: int) -> float:
    """The mean CPU time of a call in this process, in microseconds."""
    began = time.process_time()
    for _ in range(times):
        action()
    return (time.process_time() - began) / times * 1e6


def ready_fleet(num_workers: int) -> Fleet:
    """A fleet whose workers are all ready, with some load."""
    fleet = Fleet(Registry([f"10.0.{number >> 8}.{number & 255}:50061" for number in range(num_workers)]))
    with mock.patch.object(WorkerLink, "start"):
        fleet._sync()
    for link in fleet.links():
        link.card = CARD
        link._take_load(load(10), ())
        link._enter(LinkState.READY, "")
    return fleet


def made_request(rng: random.Random) -> RoutedRequest:
    """A request whose prompt is cached nowhere."""
    tokens = array("I", (rng.randrange(900) for _ in range(PROMPT_TOKENS)))
    return RoutedRequest(inference_pb2.GenerateRequest(model="m"), Prompt(tokens))


async def measure(num_workers: int) -> None:
    """Print decision and reports of a fleet of this size."""
    fleet = ready_fleet(num_workers)
    admission = Admission(fleet, AdmissionConfig())
    rng = random.Random(1)
    requests = iter([made_request(rng) for _ in range(400)])
    placed = []
    decision_us = cpu_us(lambda: placed.append(fleet.place(next(requests), CARD, ())), 300)
    for place in placed:
        assert place is not None
        place.link.release(place.booking)
    links = fleet.links()

    def report(num_running: int) -> None:
        rng.choice(links)._take_load(load(num_running), ())

    idle_us = cpu_us(lambda: report(10), 4000)
    for link in links:
        link._take_load(load(70), ())
    waiting = asyncio.create_task(admission.place(next(requests), inference_pb2.GenerateRequest(model="m"), CARD, None))
    await asyncio.sleep(0)
    assert admission.num_waiting == 1, "all are full"
    waiting_us = cpu_us(lambda: report(70), 4000)
    waiting.cancel()
    print(
        f"{num_workers:5d} workers: decision {decision_us:5.0f} us; a report {idle_us:4.1f} us, while a request waits "
        f"{waiting_us:4.1f} us"
    )


def messages_of(kind: str, number: int) -> worker_pb2.WatchResponse:
    """The message with this number in a watch of the given kind."""
    first = number * EVENT_BLOCKS + 1
    message = worker_pb2.WatchResponse(epoch=1, sequence=number)
    message.kv_events.reset = number == 0
    if "blocks" in kind:
        gone = max(first - 1000 * EVENT_BLOCKS, 1)
        message.kv_events.stored.extend(range(first, first + EVENT_BLOCKS))
        message.kv_events.evicted.extend(range(gone, min(gone + EVENT_BLOCKS, first)))
    if "load" in kind:
        message.load.CopyFrom(load(number % 64))
        message.load.num_arrived = 1
    return message


class Sender(worker_pb2_grpc.WorkerServicer):
    """Sends one kind of message, without end."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def GetModelCard(self, request: Any, context: Any) -> worker_pb2.GetModelCardResponse:
        """The card."""
        return worker_pb2.GetModelCardResponse(card=CARD, worker_id="w", epoch=1)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        """The messages."""
        for number in itertools.count():
            yield messages_of(self._kind, number)


def send(kind: str, port: multiprocessing.connection.Connection) -> None:
    """Serve a Sender until the process is ended."""

    async def serve() -> None:
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(Sender(kind), server)
        port.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


async def measure_messages(kind: str, port: int) -> None:
    """Print the cost of reading a message."""
    num_read, reached = 0, asyncio.Event()

    def count(_: WorkerLink) -> None:
        nonlocal num_read
        num_read += 1
        if num_read % NUM_MESSAGES == 0:
            reached.set()

    link = WorkerLink(f"127.0.0.1:{port}", PrefixIndex(100_000, 1000, 30.0), on_load=count)
    link.start()
    await reached.wait()
    began_s, began = time.process_time(), num_read
    reached.clear()
    await reached.wait()
    cost_us = (time.process_time() - began_s) / (num_read - began) * 1e6
    await link.close()
    print(f"a message with {kind}: {cost_us:.0f} us")


async def measure_watch() -> None:
    """Print the cost of each kind of message."""
    for kind in ("load and blocks", "blocks", "load"):
        ours, theirs = multiprocessing.Pipe()
        sender = multiprocessing.get_context("spawn").Process(target=send, args=(kind, theirs), daemon=True)
        sender.start()
        await measure_messages(kind, ours.recv())
        sender.terminate()
        sender.join()


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def measure_index(num_workers: int) -> None:
    """Print the memory of an index filled by a fleet of this size."""
    rng = random.Random(1)
    index = PrefixIndex(2 * NUM_ENTRIES, 1000, 30.0)
    workers = [f"10.0.{number >> 8}.{number & 255}:50061" for number in range(num_workers)]
    for worker in workers:
        index.add_worker(worker)
    before = resident_bytes()
    while len(index) < NUM_ENTRIES:
        seed = rng.getrandbits(64)
        for worker in rng.sample(workers, rng.randint(1, 4)):
            # Each worker tells of the chain itself, so equal hashes are not the same objects.
            chain = random.Random(seed)
            hashes = [chain.getrandbits(64) for _ in range(rng.randint(1, CHAIN_BLOCKS))]
            for start in range(0, len(hashes), REPORTED_BLOCKS):
                index.store(worker, hashes[start : start + REPORTED_BLOCKS])
    num_bytes = (resident_bytes() - before) / len(index)
    print(f"{num_workers:5d} workers: {len(index)} entries of the index, {num_bytes:.0f} bytes each")


def main() -> None:
    """Parse the flags and run each size in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--only", choices=["time", "memory", "watch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only == "time":
        asyncio.run(measure(args.workers[0]))
    elif args.only == "memory":
        measure_index(args.workers[0])
    elif args.only == "watch":
        asyncio.run(measure_watch())
    else:
        for num_workers in args.workers:
            for what in ("time", "memory"):
                command = [sys.executable, "-m", "benchmarks.router.fleet", "--workers", str(num_workers)]
                subprocess.run([*command, "--only", what], check=True)
        asyncio.run(measure_watch())


if __name__ == "__main__":
    main()
