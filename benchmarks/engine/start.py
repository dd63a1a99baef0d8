"""Seconds until a model is ready, and the memory that it takes:
`python -m benchmarks.engine.start MODEL_DIR [--rounds 2]`.

Each start is a process of its own, ours and openvino-genai's in turn: ours loads the model as a worker does, with its
fingerprint and its warm-up; the peer makes a pipeline with as large a KV cache, and answers one prompt of 16 tokens,
because OpenVINO brings weights into the order of its kernels in the first step. In a cold start the page cache has
nothing of the weights' file.

Memory is that after a prompt of 256 tokens more: private (anonymous pages, which only this process has) and of mapped
files (which the kernel can drop). Both are also given as parts of the weights' file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.memory import memory_of
from headrace.common.host_memory import GIB
from headrace.common.model_files.networks import weights_in

PROMPT, FIRST_PROMPT, OUTPUT = 256, 16, 4


class Figures(NamedTuple):
    """Of a start."""

    ready_s: float
    private: int
    mapped: int


def start_ours(model_dir: Path, kv_gib: float) -> Callable[[int], None]:
    """A worker's model. Returns what answers a prompt of so many tokens."""
    from headrace.worker.__main__ import config_of_arguments
    from headrace.worker.loading import load_model
    from headrace.worker.request.params import SamplingParams
    from headrace.worker.request.request import Request

    arguments = ["--model", str(model_dir), "--name", "model", "--kv-cache-gb", str(kv_gib)]
    engine = load_model(config_of_arguments(arguments)).engine

    def answer(num_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=OUTPUT, seed=0, temperature=0.0)
        engine.scheduler.add(Request("1", prompt_of(num_tokens), sampling, 0, arrival_s=time.monotonic()))
        ended: list[bool] = []
        while not any(ended):
            engine.advance(lambda outputs: ended.extend(output.is_last for output in outputs))

    return answer


def start_theirs(model_dir: Path, kv_gib: float) -> Callable[[int], None]:
    """The same of openvino-genai."""
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    # Whole GiB only.
    scheduler.cache_size = max(1, round(kv_gib))
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(str(model_dir), scheduler, "CPU", {}, {})

    def answer(num_tokens: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = OUTPUT, True, False
        handle = pipeline.add_request(num_tokens, ov.Tensor(np.asarray([prompt_of(num_tokens)], np.int64)), config)
        while handle.get_status() == genai.GenerationStatus.RUNNING:
            pipeline.step()
        handle.read_all()

    answer(FIRST_PROMPT)
    return answer


SIDES = {"headrace": start_ours, "openvino-genai": start_theirs}


def prompt_of(num_tokens: int) -> list[int]:
    """Random tokens."""
    tokens: list[int] = np.random.default_rng(num_tokens).integers(100, 30_000, num_tokens).tolist()
    return tokens


def started(name: str, model_dir: Path, kv_gib: float, start_s: float, pipe: Connection) -> None:
    """Start a side in this process and send its figures."""
    answer = SIDES[name](model_dir, kv_gib)
    ready_s = time.monotonic() - start_s
    answer(PROMPT)
    memory = memory_of(os.getpid())
    pipe.send(Figures(ready_s, memory.private, memory.of_files))


def start(name: str, model_dir: Path, kv_gib: float, *, is_cold: bool) -> Figures:
    """Start a side in a new process."""
    with weights_in(model_dir)[0].open("rb") as file:
        if is_cold:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while file.read(1 << 24):
                pass
    context = get_context("spawn")
    pipe, other_end = context.Pipe()
    # Both clocks are the machine's.
    process = context.Process(target=started, args=(name, model_dir, kv_gib, time.monotonic(), other_end))
    process.start()
    other_end.close()
    try:
        figures: Figures = pipe.recv()
    except EOFError:
        raise SystemExit(f"{name} did not start") from None
    process.join()
    return figures


def main() -> None:
    """Start both sides in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-gib", type=float, default=1.0, help="of both KV caches")
    parser.add_argument("--starts", nargs="+", choices=("cold", "warm"), default=["cold", "warm"])
    args = parser.parse_args()
    weights = weights_in(args.model_dir)[0].stat().st_size
    print(f"weights {weights / GIB:.2f} GiB, KV cache {args.kv_gib:.2f} GiB", flush=True)
    for kind in args.starts:
        found: dict[str, list[Figures]] = {name: [] for name in SIDES}
        for number in range(args.rounds):
            for name in list(SIDES)[:: -1 if number % 2 else 1]:
                found[name].append(start(name, args.model_dir, args.kv_gib, is_cold=kind == "cold"))
        for name, starts in found.items():
            ready_s = [figures.ready_s for figures in starts]
            private, mapped = (statistics.median(figures[index] for figures in starts) for index in (1, 2))
            print(
                f"{kind}, {name}: ready after {statistics.median(ready_s):.1f} s ({min(ready_s):.1f} to "
                f"{max(ready_s):.1f}); private {private / GIB:.2f} GiB ({private / weights:.2f}), mapped files "
                f"{mapped / GIB:.2f} GiB, both {(private + mapped) / weights:.2f} of the weights",
                flush=True,
            )


if __name__ == "__main__":
    main()
