"""Hidden states between two stages of a pipeline, as float32 and as bfloat16: bytes, and the time of both CPUs.

    python -m benchmarks.engine.states [--rounds 15] [--tokens 1000] [--width 8192]

A worker sends a prompt's hidden states, in the parts in which a prompt passes through a pipeline, to a process that
takes them as a stage does and answers with those of the last token. Nothing is computed. Both types take turns. It
prints the megabytes of the messages, the milliseconds of CPU time that both processes spend on them together, and the
milliseconds until the answer. The socket is one of this host, which costs less than a network.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc
import numpy as np

from benchmarks.machine import describe
from headrace.common.transport.channels import SERVER_OPTIONS, Transport
from headrace.protos import stage_pb2, stage_pb2_grpc
from headrace.protos.stage_pb2 import ComputeRequest, ComputeResponse
from headrace.worker.model.batch import StatesType, build_batch
from headrace.worker.pipeline.link import NamedStages, StageLink
from headrace.worker.pipeline.messages import batch_of, message_of, pieces_of, states_of
from headrace.worker.pipeline.parts import Part, num_parts, parts_of
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import Scheduled

BLOCK = 32
TYPES: dict[str, StatesType] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16)}


class Measured(NamedTuple):
    """A prompt's way to a stage and back."""

    cpu_ms: float
    elapsed_ms: float


class Receiver(stage_pb2_grpc.StageServicer):
    """Takes steps as a stage does, with `width` numbers for each token, and answers with its CPU time."""

    def __init__(self, width: int) -> None:
        self._width = width

    async def Compute(self, requests: AsyncIterator[ComputeRequest], context: Any) -> None:
        """See Compute in the proto."""
        await anext(requests)  # the settings
        await context.write(ComputeResponse(offer=stage_pb2.StageOffer()))
        layers = (await anext(requests)).layers
        dtype = TYPES["bfloat16" if layers.bfloat16_states else "float32"]
        async for request in requests:
            step, pieces = request.step, list[bytes]()
            missing = len(step.input_ids) // 8 * self._width * dtype.itemsize
            while missing > 0:
                pieces.append((await anext(requests)).states)
                missing -= len(pieces[-1])
            batch = batch_of(step, pieces, dtype)
            assert batch.hidden is not None
            # The request of OpenVINO has memory of its own.
            computed = batch.hidden.copy()
            rows = b"".join(pieces_of(computed[batch.sampled_tokens_indices]))
            result = stage_pb2.StageResult(states=rows, is_last=True, busy_s=[time.process_time()])
            await context.write(ComputeResponse(result=result))


def serve(address: str, width: int, cpu: int, ready: Connection) -> None:
    """Serve on a CPU until the process is ended."""
    os.sched_setaffinity(0, {cpu})

    async def run() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        stage_pb2_grpc.add_StageServicer_to_server(Receiver(width), server)
        server.add_insecure_port(address)
        await server.start()
        ready.send(None)
        await server.wait_for_termination()

    asyncio.run(run())


def parts_of_prompt(num_tokens: int) -> list[Part]:
    """A prompt of so many tokens, of which the last is sampled."""
    request = Request("r", list(range(num_tokens)), SamplingParams(max_tokens=2, seed=0, temperature=0.0), 0)
    request.block_table = array("i", range(-(-num_tokens // BLOCK)))
    batch = build_batch([Scheduled(request, num_tokens)], BLOCK)
    return list(parts_of(batch, num_parts(batch), BLOCK))


def send(link: StageLink, parts: list[Part], width: int, dtype: StatesType) -> Measured:
    """Send a prompt, and wait for its last row."""
    states = np.zeros((sum(len(part.batch.input_ids) for part in parts), width), dtype)
    states[:] = np.random.default_rng(0).integers(1, 1000, width)
    before = busy_s(link)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    first = 0
    for part in parts:
        count = len(part.batch.input_ids)
        link.send_step(message_of(part.batch), states[first : first + count])
        first += count
    result = None
    for part in parts:
        result = link.receive().result
        row = states_of([result.states], len(part.rows), dtype)
    end_s, end_cpu_s = time.perf_counter(), time.process_time()
    assert result is not None
    assert (row == states[-1]).all()
    return Measured(1000 * (end_cpu_s - start_cpu_s + result.busy_s[0] - before), 1000 * (end_s - start_s))


def busy_s(link: StageLink) -> float:
    """The CPU time of the other process until now, which a step without tokens asks for."""
    link.send(ComputeRequest(step=stage_pb2.StageStep()))
    return float(link.receive().result.busy_s[0])


def main() -> None:
    """Compare the types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--width", type=int, default=8192, help="numbers of the hidden states of a token")
    args = parser.parse_args()
    print(describe())
    cpus = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/stage.sock"
        process = context.Process(target=serve, args=(address, args.width, cpus[-1], sender), daemon=True)
        process.start()
        receiver.recv()
        os.sched_setaffinity(0, cpus[:1])
        parts = parts_of_prompt(args.tokens)
        found: dict[str, list[Measured]] = {name: [] for name in TYPES}
        for _ in range(args.rounds + 1):
            for name, dtype in TYPES.items():
                link = StageLink(NamedStages([address]), Transport(), lambda _: None, hangs_after_s=60.0)
                link.open(stage_pb2.StageSetup())
                link.send(ComputeRequest(layers=stage_pb2.StageLayers(bfloat16_states=name == "bfloat16")))
                found[name].append(send(link, parts, args.width, dtype))
                link.close()
        process.terminate()
    for name, dtype in TYPES.items():
        # In the first round, connections and buffers are new.
        times = np.array(found[name][1:])
        (low, cpu_ms, high), elapsed_ms = np.percentile(times[:, 0], (25, 50, 75)), np.median(times[:, 1])
        megabytes = args.tokens * args.width * dtype.itemsize / 1e6
        print(
            f"{name}: {megabytes:.1f} MB, {cpu_ms:.1f} ms of CPU time ({low:.1f} to {high:.1f}), "
            f"{elapsed_ms:.1f} ms until the answer"
        )


if __name__ == "__main__":
    main()
