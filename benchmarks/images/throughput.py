"""Chats with images: headrace over HTTP, and openvino-genai's ContinuousBatchingPipeline in its own process.

    python -m benchmarks.images.throughput MODEL_DIR [--pairs 3] [--case closed turns] [--requests 1 8 32] [--output 64]
        [--size 644x476] [--turns 5]

Both processes run all the time and take turns. Each run has new pictures, so nothing is cached from an earlier one. The
peer gets decoded pixels; headrace gets JPEG files as data URLs, and does all of the rest.

    closed  N chats at once, each with its own picture and a question      output tokens/s, p95 TTFT
    turns   one chat of several turns over one picture; each repeats all that was said before, as clients do     seconds

Both cases also report the CPU seconds of a side's processes, which depend less on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.engine import throughput
from benchmarks.engine.sides import JobTimes
from benchmarks.engine.throughput import Pair, p95_ttft, rate, report
from benchmarks.gateway.http_load import CHAT, closed_loop
from benchmarks.gateway.http_throughput import Serving
from benchmarks.images.words import WORDS
from headrace.bench.process_tree import descendants

# Blocks of 32 tokens: room for 32 chats of 1,500 tokens.
_NUM_BLOCKS = 1600


@dataclass(frozen=True, slots=True)
class Chat:
    """A picture `[height, width, 3]`, the texts of the user's turns up to now, and how many tokens to answer."""

    pixels: npt.NDArray[np.uint8]
    questions: Sequence[str]
    answers: Sequence[str]
    output: int


@dataclass(frozen=True, slots=True)
class Run:
    """What chats took: seconds and the times of each, and the CPU seconds of all processes of the side."""

    timed: throughput.Run
    cpu_s: float


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all that it started."""
    return sum(process.cpu_s for process in descendants(pid))


def picture(rng: np.random.Generator, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Smooth colours, as photographs have: a small random picture, enlarged."""
    small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def question(rng: np.random.Generator, length: int = 20) -> str:
    """Random words."""
    return " ".join(rng.choice(WORDS, length))


def jpeg_url(pixels: npt.NDArray[np.uint8]) -> str:
    """The picture as a data URL."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=92)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


class Ours:
    """`headrace serve` with all its processes. No chat is refused because it waits long for others."""

    def __init__(self, model_dir: Path, arguments: list[str]) -> None:
        self._serving = Serving(model_dir, ["--max-ttft", "3600", *arguments])

    def run(self, chats: Sequence[Chat]) -> Run:
        """Send all chats at once."""
        bodies = [self._body(chat) for chat in chats]
        start, start_cpu_s = time.perf_counter(), cpu_seconds(self._serving.pid)
        host, port = self._serving.host, self._serving.port
        answers = asyncio.run(closed_loop(host, port, bodies, len(bodies), CHAT))
        seconds = time.perf_counter() - start
        times = [JobTimes(answer.ttft_s, answer.total_s, answer.num_tokens) for answer in answers]
        return Run((seconds, times), cpu_seconds(self._serving.pid) - start_cpu_s)

    def _body(self, chat: Chat) -> dict[str, object]:
        image = {"type": "image_url", "image_url": {"url": jpeg_url(chat.pixels)}}
        messages: list[dict[str, object]] = []
        for number, text in enumerate(chat.questions):
            content = [*([image] if number == 0 else []), {"type": "text", "text": text}]
            messages.append({"role": "user", "content": content})
            if number < len(chat.answers):
                messages.append({"role": "assistant", "content": chat.answers[number]})
        return {"messages": messages, "max_tokens": chat.output, "temperature": 0, "ignore_eos": True}

    def close(self) -> None:
        """End the processes."""
        self._serving.stop()


class Theirs:
    """The peer's pipeline, driven step by step in a process of its own."""

    def __init__(self, model_dir: Path, budget: int) -> None:
        context = get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(target=_serve_peer, args=(other_end, model_dir, budget), daemon=True)
        self._process.start()
        assert self._pipe.recv() == "ready"

    def run(self, chats: Sequence[Chat]) -> Run:
        """Add all chats at once, and step until they have ended."""
        pid = self._process.pid
        assert pid is not None
        start_cpu_s = cpu_seconds(pid)
        self._pipe.send(chats)
        timed: throughput.Run = self._pipe.recv()
        return Run(timed, cpu_seconds(pid) - start_cpu_s)

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)


def _serve_peer(pipe: Connection, model_dir: Path, budget: int) -> None:
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = _NUM_BLOCKS
    scheduler.max_num_batched_tokens = budget
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(str(model_dir), scheduler, "CPU", {}, {})
    pipe.send("ready")
    number = 0
    while (chats := pipe.recv()) is not None:
        start = time.perf_counter()
        first: dict[int, float] = {}
        counts: dict[int, int] = {}
        last: dict[int, float] = {}
        handles = {}
        for chat in chats:
            config = genai.GenerationConfig(max_new_tokens=chat.output, ignore_eos=True, do_sample=False)
            images = [ov.Tensor(np.ascontiguousarray(chat.pixels[None]))]
            handles[number] = pipeline.add_request(number, _text_of(chat), images, config)
            counts[number] = 0
            number += 1
        while handles:
            pipeline.step()
            now = time.perf_counter() - start
            for key, handle in list(handles.items()):
                while handle.can_read():
                    counts[key] += sum(len(output.generated_ids) for output in handle.read().values())
                    first.setdefault(key, now)
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    last[key] = now
                    del handles[key]
        seconds = time.perf_counter() - start
        pipe.send((seconds, [JobTimes(first[key], last[key], counts[key]) for key in counts]))


def _text_of(chat: Chat) -> str:
    """The prompt as the chat template of `vision_model` writes it; the peer puts the picture before it."""
    text = "[user]"
    for number, asked in enumerate(chat.questions):
        text += ("[user]" if number else "") + asked + "\n"
        if number < len(chat.answers):
            text += f"[assistant]{chat.answers[number]}\n"
    return text + "[assistant]"


def closed_chats(rng: np.random.Generator, num: int, size: tuple[int, int], output: int) -> list[Chat]:
    """Chats of one turn, each with its own picture."""
    return [Chat(picture(rng, *size), [question(rng)], [], output) for _ in range(num)]


def run_turns(side: Ours | Theirs, rng: np.random.Generator, size: tuple[int, int], output: int, turns: int) -> Run:
    """A chat of several turns over one picture."""
    pixels = picture(rng, *size)
    questions = [question(rng) for _ in range(turns)]
    answers = [question(rng, output) for _ in range(turns - 1)]
    runs = [side.run([Chat(pixels, questions[: turn + 1], answers[:turn], output)]) for turn in range(turns)]
    times = [one for run in runs for one in run.timed[1]]
    return Run((sum(run.timed[0] for run in runs), times), sum(run.cpu_s for run in runs))


def pairs_of(
    case: str, ours: Ours, theirs: Theirs, run: Callable[[Ours | Theirs, np.random.Generator], Run], num: int
) -> list[Pair[Run]]:
    """`num` pairs, in turns. The pictures are those of no other case."""
    pairs = []
    for number in range(num):
        sides: list[Ours | Theirs] = [theirs, ours] if number % 2 else [ours, theirs]
        runs = {
            side: run(side, np.random.default_rng([crc32(case.encode()), number, sides.index(side)])) for side in sides
        }
        pairs.append(Pair(runs[ours], runs[theirs]))
    return pairs


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--case", nargs="+", default=["closed", "turns"], choices=["closed", "turns"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer (default 64)")
    parser.add_argument(
        "--size", default="644x476", help="width and height; multiples of 28 keep Qwen2-VL's as they are"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--their-tokens", type=int, default=1024, help="the peer's max_num_batched_tokens")
    parser.add_argument("--serve-argument", action="append", default=[], help="passed to headrace serve")
    args = parser.parse_args()
    width, height = (int(part) for part in args.size.split("x"))
    theirs = Theirs(args.model_dir, args.their_tokens)
    ours = Ours(args.model_dir, args.serve_argument)
    size, output = (width, height), args.output
    try:
        for side in (ours, theirs):  # the first steps arrange the weights for the kernels
            side.run(closed_chats(np.random.default_rng(args.pairs), 1, size, 2))
        if "closed" in args.case:
            for num in args.requests:

                def run(side: Ours | Theirs, rng: np.random.Generator, num: int = num) -> Run:
                    return side.run(closed_chats(rng, num, size, output))

                pairs = pairs_of(f"closed {num}", ours, theirs, run, args.pairs)
                report(f"{num} chats, throughput", "output tokens/s", pairs, lambda run: rate(run.timed))
                report(f"{num} chats, p95 TTFT", "ms", pairs, lambda run: p95_ttft(run.timed))
                report(f"{num} chats, CPU", "s", pairs, lambda run: run.cpu_s)
        if "turns" in args.case:
            pairs = pairs_of(
                "turns", ours, theirs, lambda side, rng: run_turns(side, rng, size, output, args.turns), args.pairs
            )
            report(f"{args.turns} turns over one picture", "s", pairs, lambda run: run.timed[0])
            report(f"{args.turns} turns, CPU", "s", pairs, lambda run: run.cpu_s)
            ttfts = [1000 * statistics.median(times.ttft_s for times in pair.ours.timed[1][1:]) for pair in pairs]
            print(f"TTFT of later turns: headrace {statistics.median(ttfts):.0f} ms")
    finally:
        ours.close()
        theirs.close()


if __name__ == "__main__":
    main()
