"""Many scripted workers in one process: `python -m benchmarks.router.fake_fleet DIRECTORY FIRST COUNT`.

They listen on DIRECTORY/wN.sock. Each reports load at an interval, with new blocks in every fourth message, and answers
every request with a number of tokens, one at each tick. Both come as lines of JSON on standard input, such as
{"interval_s": 0.4, "num_tokens": 1}; each line is answered with the number of reports sent so far. The process ends
when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from benchmarks.router.fleet import CARD, load
from benchmarks.router.processes import TICK_S, scripted_messages
from headrace.common.transport.session_server import SessionServer
from headrace.protos import worker_pb2, worker_pb2_grpc

_BLOCKS = 2


class Script:
    """What all workers of the process do now."""

    def __init__(self) -> None:
        self.interval_s = 0.4
        self.num_sent = 0
        self.ticked = asyncio.Event()
        self.messages: list[bytes] = []
        self.set_tokens(1)

    def set_tokens(self, num_tokens: int) -> None:
        """Let answers have so many tokens."""
        self.messages = scripted_messages(num_tokens)

    async def tick(self) -> None:
        """Let all streams advance, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            ticked, self.ticked = self.ticked, asyncio.Event()
            ticked.set()


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Card, watch and streams of one worker."""

    def __init__(self, number: int, script: Script) -> None:
        self._number = number
        self._script = script

    async def GetModelCard(self, request: Any, context: Any) -> worker_pb2.GetModelCardResponse:
        """See worker.proto."""
        return worker_pb2.GetModelCardResponse(card=CARD, worker_id=f"w{self._number}", epoch=1)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        """See worker.proto."""
        sequence = 0
        await asyncio.sleep(random.random() * self._script.interval_s)
        while True:
            message = worker_pb2.WatchResponse(epoch=1, sequence=sequence, load=load(sequence % 8), num_watchers=2)
            message.kv_events.reset = sequence == 0
            if sequence % 4 == 0:
                first = (self._number << 40) + sequence
                message.kv_events.stored.extend(range(first, first + _BLOCKS))
            yield message
            self._script.num_sent += 1
            sequence += 1
            await asyncio.sleep(self._script.interval_s)

    async def generate(self, raw: Any, context: Any) -> None:
        """A stream."""
        first, *rest, finish = self._script.messages
        await context.write(first)
        for message in rest:
            await self._script.ticked.wait()
            await context.write(message)
        await context.write(finish)


async def serve(directory: str, first: int, count: int) -> None:
    """Serve the workers, and do what standard input says."""
    script = Script()
    servers = []
    for number in range(first, first + count):
        worker = FakeWorker(number, script)
        server = grpc.aio.server()
        session = SessionServer(worker.generate).method()
        handlers = grpc.method_handlers_generic_handler("headrace.v1.Inference", {"Session": session})
        server.add_generic_rpc_handlers((handlers,))
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
        server.add_insecure_port(f"unix:{directory}/w{number}.sock")
        await server.start()
        servers.append(server)
    print("ready", flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    ticking = asyncio.create_task(script.tick())
    while line := await reader.readline():
        order = json.loads(line)
        script.interval_s = order["interval_s"]
        script.set_tokens(order["num_tokens"])
        print(script.num_sent, flush=True)
    ticking.cancel()
    await asyncio.gather(*(server.stop(None) for server in servers))


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
