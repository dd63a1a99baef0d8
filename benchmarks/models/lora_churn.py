"""More LoRA adapters than fit into memory: `python -m benchmarks.models.lora_churn [MODEL_DIR] [--adapters 1000]`.

One worker, asked over its socket, with room for 16 adapters (--in-memory), and 1,000 on the disk, of rank 16 on every
linear layer, with weights of their own. Some streams without an adapter run all the time. Meanwhile

    quiet    nothing else happens
    loading  each adapter is loaded once, one after another; each drives out another one
    churn    callers ask for adapters at random, most of which have to be read again

Printed are the milliseconds of LoadAdapter and to a caller's first token, the gaps between the tokens of the streams,
and how many answers are those that the same adapter gives when nothing else runs; the others in full. What is not
known here goes to the worker: with --execution-mode=accuracy, an answer does not depend on what else is in its batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import openvino as ov
import uvloop

from benchmarks.cache.restart import BOUND_S, Worker
from benchmarks.machine import describe
from headrace.cli.models.catalogue import DEFAULT_MODEL
from headrace.cli.models.model_cache import model_directory
from headrace.common.transport.channels import CHANNEL_OPTIONS
from headrace.protos import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.worker.model.adapted_linears import find_linears
from headrace.worker.model.adapter_memory import Linear, bfloat16_of
from headrace.worker.model.paging import read_paged

RANK = 16
NUM_STREAMS = 4
STREAM_TOKENS = 512
QUIET_S = 10.0
PROMPT = range(100, 132)
ANSWER_TOKENS = 8


class Weights:
    """Random bfloat16 numbers. Adapters are parts of them that begin at different places."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears
        self._num = sum(RANK * (linear.num_inputs + linear.num_outputs) for linear in linears)
        numbers = np.random.default_rng(1).standard_normal(2 * self._num).astype(np.float32)
        # Large enough that each adapter gives another answer.
        self._of_a, self._of_b = bfloat16_of(numbers / 32), bfloat16_of(numbers / 4)

    def write(self, directory: Path, number: int) -> Path:
        """Adapter `number`, as PEFT writes it."""
        directory.mkdir()
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        place = (number * 7919) % self._num
        header: dict[str, object] = {}
        pieces: list[bytes] = []
        at = 0
        for linear in self._linears:
            for side, source, rows, columns in (
                ("A", self._of_a, RANK, linear.num_inputs),
                ("B", self._of_b, linear.num_outputs, RANK),
            ):
                values = source[place : place + rows * columns]
                place += rows * columns
                name = f"base_model.model.model.{linear.name}.lora_{side}.weight"
                offsets = [at, at + values.nbytes]
                header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": offsets}
                at += values.nbytes
                pieces.append(values.tobytes())
        text = json.dumps(header).encode()
        with (directory / "adapter_model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.writelines(pieces)
        return directory


class Client:
    """Asks one worker, and notes the gaps of its streams by phase."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._inference = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        self.worker = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        self.gaps_ms: dict[str, list[float]] = defaultdict(list)
        self.phase = ""

    def _ask(self, prompt: Sequence[int], num_tokens: int, **fields: str) -> grpc.aio.UnaryStreamCall:
        request = inference_pb2.GenerateRequest(token_ids=prompt, **fields)
        request.sampling.max_tokens = num_tokens
        request.sampling.temperature = 0.0
        request.sampling.ignore_eos = True
        return self._inference.Generate(request, timeout=BOUND_S)

    async def answer(self, adapter: str, cache_salt: str) -> tuple[float, tuple[int, ...]]:
        """Milliseconds to the first token of an adapter's answer, and the answer."""
        start_s, first_s = time.perf_counter(), 0.0
        tokens: list[int] = []
        async for message in self._ask(PROMPT, ANSWER_TOKENS, adapter=adapter, cache_salt=cache_salt):
            first_s = first_s or time.perf_counter()
            tokens += message.token_ids
        return 1000 * (first_s - start_s), tuple(tokens)

    async def _stream(self, rng: random.Random) -> None:
        while True:
            before_s, phase = 0.0, self.phase
            async for _ in self._ask([rng.randrange(100, 1000) for _ in range(8)], STREAM_TOKENS):
                now_s = time.perf_counter()
                if before_s and phase == self.phase:
                    self.gaps_ms[phase].append(1000 * (now_s - before_s))
                before_s, phase = now_s, self.phase

    @asynccontextmanager
    async def streams(self, phase: str) -> AsyncIterator[None]:
        """Streams without an adapter that run meanwhile."""
        self.phase = phase
        tasks = [asyncio.create_task(self._stream(random.Random(seed))) for seed in range(NUM_STREAMS)]
        try:
            await asyncio.sleep(1.0)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def summary(values: Sequence[float]) -> str:
    """Median, 99th percentile and largest."""
    return f"{statistics.median(values):.0f} ms, p99 {np.percentile(values, 99):.0f}, at most {max(values):.0f}"


async def play(client: Client, paths: Sequence[Path], args: argparse.Namespace) -> None:
    """All phases."""
    rng = random.Random(2)
    async with client.streams("quiet"):
        await asyncio.sleep(QUIET_S)
    took: list[float] = []
    async with client.streams("loading"):
        for path in paths:
            start_s = time.perf_counter()
            await client.worker.LoadAdapter(worker_pb2.LoadAdapterRequest(name=path.name, path=str(path)))
            took.append(1000 * (time.perf_counter() - start_s))
    print(f"LoadAdapter of {len(took)}: {summary(took)}", flush=True)
    asked = [rng.choice(paths).name for _ in range(args.asks)]
    waiting = iter(asked)
    got: list[tuple[str, float, tuple[int, ...]]] = []

    async def caller() -> None:
        for name in waiting:
            took_ms, answer = await client.answer(name, "churn")
            got.append((name, took_ms, answer))

    async with client.streams("churn"):
        await asyncio.gather(*(caller() for _ in range(args.callers)))
    print(f"first token of {len(got)} answers, {args.callers} at a time: {summary([ms for _, ms, _ in got])}")
    for phase, gaps_ms in client.gaps_ms.items():
        print(f"gaps of {NUM_STREAMS} streams, {phase}: {summary(gaps_ms)} ({len(gaps_ms)} gaps)", flush=True)
    alone = {name: (await client.answer(name, "alone"))[1] for name in sorted(set(asked))}
    wrong = [(name, answer) for name, _, answer in got if answer != alone[name]]
    num_mixed_up = sum(answer in alone.values() for _, answer in wrong)
    print(f"answers as without others: {len(got) - len(wrong)} of {len(got)}; {len(set(alone.values()))} different "
          f"answers of {len(alone)} adapters; {num_mixed_up} are those of other adapters", flush=True)  # fmt: skip
    for name, answer in wrong:
        print(f"  {name}: {answer} instead of {alone[name]}", flush=True)


async def measure(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Write the adapters, start the worker, play."""
    model = read_paged(ov.Core(), args.model, None).graph
    weights = Weights(find_linears(model))
    with tempfile.TemporaryDirectory(dir=args.directory) as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        directory = Path(name)
        paths = [weights.write(directory / f"adapter-{number}", number) for number in range(args.adapters)]
        num_bytes = (paths[0] / "adapter_model.safetensors").stat().st_size
        print(f"{len(paths)} adapters of {num_bytes / 1e6:.1f} MB, {args.in_memory} in memory", flush=True)
        options = ["--kv-cache-gb", "1", "--max-adapters", str(args.in_memory), *flags]
        worker = Worker(args.model, directory, Path(memory), options)
        await worker.start()
        try:
            async with grpc.aio.insecure_channel(worker.address, options=CHANNEL_OPTIONS) as channel:
                await play(Client(channel), paths, args)
        finally:
            worker.kill()


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=model_directory(DEFAULT_MODEL))
    for name, default in (("adapters", 1000), ("in-memory", 16), ("asks", 1000), ("callers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--directory", type=Path, help="where the adapters are written; temporary files by default")
    args, flags = parser.parse_known_args()
    print(describe())
    uvloop.run(measure(args, flags))


if __name__ == "__main__":
    main()
