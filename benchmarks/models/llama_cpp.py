"""One stream against llama.cpp: the same weights as an OpenVINO model and as a GGUF file.

    python -m benchmarks.models.llama_cpp MODEL_DIR FILE.gguf LIBRARIES [--cpu haswell] [--pairs 5] [--prompt 128]
        [--output 64]

LIBRARIES is the folder of libllama and libggml, as in the npm package @node-llama-cpp/linux-x64 3.22.1 (in
bins/linux-x64). --cpu is the variant of its kernels: haswell has AVX2 only. To compare with us on such a CPU, run this
by `python -m tests.infra.lesser_cpu avx2 python -m benchmarks.models.llama_cpp ...`. `python -m
benchmarks.random_model SHAPE MODEL_DIR --keep-file` makes a model of both kinds.

Each side is a process of its own and both stay up. They take turns, and each pair gives ratios, ours over theirs:
of tokens/s after the first token, and of the time to it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.engine.sides import SIDES, EngineSettings, Event, Job, JobTimes, side_process
from benchmarks.engine.throughput import prompt_of
from tests.llama_library import silent_llama

NAMES = ("headrace", "llama.cpp")
_CONTEXT, _BLOCKS = 2048, 400


@dataclass(frozen=True, slots=True)
class LlamaSettings(EngineSettings):
    """Settings of llama.cpp: its libraries, the variant of its kernels, and the file of `model_dir`'s model."""

    libraries: Path = Path()
    gguf: Path = Path()
    cpu: str = "haswell"


class LlamaCppSide:
    """llama.cpp by its C interface, one job after another, with greedy sampling."""

    def __init__(self, settings: EngineSettings) -> None:
        assert isinstance(settings, LlamaSettings)
        llama = self._llama = _open_library(settings)
        parameters = llama.llama_model_default_params()
        model = llama.llama_model_load_from_file(os.fsencode(settings.gguf), parameters)
        assert model, f"llama.cpp cannot read {settings.gguf}"
        of_context = llama.llama_context_default_params()
        of_context.n_ctx = _CONTEXT
        self._context = llama.llama_init_from_model(model, of_context)
        assert self._context, "llama.cpp made no context"
        threads = len(os.sched_getaffinity(0))
        llama.llama_set_n_threads(self._context, threads, threads)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._waiting: list[tuple[int, Job]] = []
        self._made = 0
        self._next: list[int] = []

    def add(self, index: int, job: Job) -> None:
        """See Side."""
        self._waiting.append((index, job))

    def step(self) -> tuple[float, list[Event]]:
        """See Side."""
        index, job = self._waiting[0]
        if not self._made:
            self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
            self._next = list(job.prompt)
        self._next = [self._decode(self._next)]
        self._made += 1
        is_last = self._made == job.output
        if is_last:
            self._made = 0
            del self._waiting[0]
        return time.perf_counter(), [(index, 1, is_last)]

    def _decode(self, tokens: list[int]) -> int:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        failed = self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(array, len(tokens)))
        assert not failed, f"llama_decode: {failed}"
        logits = self._llama.llama_get_logits_ith(self._context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocabulary,))))


def _open_library(settings: LlamaSettings) -> ctypes.CDLL:
    """libllama with one variant of the kernels for CPUs, and no messages."""

    def opened(pattern: str) -> ctypes.CDLL:
        found = sorted(settings.libraries.glob(pattern))
        assert found, f"no {pattern} in {settings.libraries}"
        return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

    opened("libggml-base*.so*")
    ggml, llama = opened("libggml.*so*"), opened("libllama.*so*")
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    assert ggml.ggml_backend_load(os.fsencode(settings.libraries / f"libggml-cpu-{settings.cpu}.so")), "no such variant"
    return silent_llama(llama)


SIDES["llama.cpp"] = LlamaCppSide


def decode_ms(times: JobTimes) -> float:
    """Milliseconds of a token after the first."""
    return 1000 * (times.total_s - times.ttft_s) / (times.num_tokens - 1)


def report(name: str, unit: str, runs: list[tuple[float, float]]) -> None:
    """Print the medians of both, and the median of the ratios with its spread."""
    ours, theirs = (statistics.median(side) for side in zip(*runs, strict=True))
    ratios = sorted(mine / other for mine, other in runs)
    print(
        f"{name}: headrace {ours:.2f}, llama.cpp {theirs:.2f} {unit}, ratio {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(runs)} pairs)",
        flush=True,
    )


def main() -> None:
    """Parse, take turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("libraries", type=Path)
    parser.add_argument("--cpu", default="haswell", help="the variant of llama.cpp's kernels")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    args = parser.parse_args()
    ours = EngineSettings(args.model_dir, _BLOCKS)
    theirs = LlamaSettings(args.model_dir, _BLOCKS, libraries=args.libraries, gguf=args.gguf, cpu=args.cpu)
    context, pipes = get_context("spawn"), {}
    for name, settings in zip(NAMES, (ours, theirs), strict=True):
        pipes[name], other_end = context.Pipe()
        context.Process(target=side_process, args=(name, settings, other_end), daemon=True).start()
        assert pipes[name].recv() == "ready"
    runs = []
    for number in range(args.pairs + 1):
        times: dict[str, JobTimes] = {}
        for position, name in enumerate(NAMES if number % 2 else NAMES[::-1]):
            rng = np.random.default_rng([number, position])
            pipes[name].send([Job(0.0, prompt_of(rng, args.prompt), args.output)])
            times[name] = pipes[name].recv()[1][0]
        if number:
            runs.append((times["headrace"], times["llama.cpp"]))
    report("answer", "tokens/s", [(1000 / decode_ms(mine), 1000 / decode_ms(other)) for mine, other in runs])
    report("time of a token", "ms", [(decode_ms(mine), decode_ms(other)) for mine, other in runs])
    report("time of a prompt", "ms", [(1000 * mine.ttft_s, 1000 * other.ttft_s) for mine, other in runs])
    for pipe in pipes.values():
        pipe.send(None)


if __name__ == "__main__":
    main()
