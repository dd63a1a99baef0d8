"""One model on one core, on two stages with a core each, and in one process with both cores.

    python -m benchmarks.engine.pipeline MODEL_DIR [--rounds 15] [--step 'decode 1']

Each side is a process that loads the model once, or two; an idle one takes no CPU time. The sides compute the same
steps in turns. It prints the milliseconds of each, and the median and quartiles of the ratios of the stages to the
other two. Two steps of decode, with half of the streams each, are on their way at a time, as in the engine. A prompt is
computed in steps of 256 tokens.

Nothing else should run on the machine. The stages are joined by a socket of this host, which costs less than a network.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.engine.divided import CONTEXT, NUM_BLOCKS, REPEATS, Make, arguments, running
from benchmarks.engine.step_cost import requests_of
from benchmarks.machine import describe
from headrace.common.launch import with_parent
from headrace.common.transport.channels import Transport
from headrace.worker.model.batch import Batch, build_batch
from headrace.worker.model.fingerprint import fingerprint_of
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.pipeline.link import NamedStages, StageLink
from headrace.worker.pipeline.runner import PipelineRunner
from headrace.worker.request.request import Request
from headrace.worker.request.step import Scheduled

CHUNK = 256
DECODE = (1, 8, 32)
PROMPTS = (64, 256, 512, 1024)
NAMES = (*(f"decode {size}" for size in DECODE), *(f"prompt {tokens}" for tokens in PROMPTS))


def lost(reason: str) -> None:
    """End the process, because of what it prints."""
    print(reason, flush=True)
    os._exit(70)


def two_stages(model_dir: Path, cpus: list[int]) -> OpenVINOModelRunner:
    """The first stage on the first CPU, and the second in a process on the second."""
    address = f"unix:{tempfile.mkdtemp()}/stage.sock"
    command = [sys.executable, "-m", "headrace.worker", "--serve-stage", "--model", str(model_dir), "--threads", "1"]
    subprocess.Popen(with_parent([*command, "--listen", address], str(cpus[1])))
    os.sched_setaffinity(0, cpus[:1])
    fingerprint: Future[str] = Future()
    fingerprint.set_result(fingerprint_of(model_dir, 1))
    return PipelineRunner(
        model_dir,
        2,
        StageLink(NamedStages([address]), Transport(), lost, hangs_after_s=60.0),
        threads=1,
        kv_precision="u8",
        execution_mode="performance",
        max_context_tokens=NUM_BLOCKS,
        speculates=False,
        fingerprint=fingerprint,
        on_lost=lost,
    )


def steps_of(name: str, runner: OpenVINOModelRunner) -> list[Batch]:
    """The steps of a name: those of so many streams, of which each has a part where several are on their way at a time,
    or those of a prompt."""
    rng, size = random.Random(1), runner.block_size
    kind, number = name.split()
    if kind == "decode":
        streams = requests_of(((CONTEXT, 1),) * int(number), rng, size)
        groups = [streams[first :: runner.num_stages] for first in range(runner.num_stages)]
        return [build_batch(group, size) for group in groups if group]
    ((request, total),) = requests_of(((0, int(number)),), rng, size)
    return [build_batch([step], size) for step in chunks_of(request, total)]


def chunks_of(request: Request, total: int) -> list[Scheduled]:
    """The steps of a prompt. Only the last samples."""
    found = []
    for first in range(0, total, CHUNK):
        request.num_computed_tokens = first
        found.append(Scheduled(request, min(CHUNK, total - first)))
    return found


def compute(make: Make, model_dir: Path, cpus: list[int], link: Connection) -> None:
    """Load, and compute what is asked for until None comes."""
    runner = make(model_dir, cpus)
    runner.allocate(NUM_BLOCKS)
    runner.touch()
    link.send(os.getpid())
    batches = {name: steps_of(name, runner) for name in NAMES}
    while (name := link.recv()) is not None:
        link.send(timed(runner, name, batches[name]))


def timed(runner: OpenVINOModelRunner, name: str, batches: list[Batch]) -> float:
    """The mean milliseconds of all steps, over the repeats but the first."""
    at_once = len(batches) if name.startswith("decode") else 1
    compute_all(runner, batches, at_once)
    start_s = time.perf_counter()
    compute_all(runner, batches * (REPEATS - 1), at_once)
    return 1000 * (time.perf_counter() - start_s) / (REPEATS - 1)


def compute_all(runner: OpenVINOModelRunner, batches: list[Batch], at_once: int) -> None:
    """Compute steps in order, of which so many are on their way at a time."""
    for number, batch in enumerate(batches):
        runner.bind(batch, keeps_logits=False)
        if number >= at_once - 1:
            runner.run()
    for _ in range(at_once - 1):
        runner.run()


def main() -> None:
    """Compare all steps."""
    args = arguments(__doc__, NAMES)
    print(describe())
    with running(args.model_dir, "two stages", two_stages, compute) as sides:
        for step in args.step:
            print(sides.describe(step, np.array(sides.measure(step, args.rounds))), flush=True)


if __name__ == "__main__":
    main()
