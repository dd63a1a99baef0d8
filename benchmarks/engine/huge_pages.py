"""Do huge pages help the KV cache? `python -m benchmarks.engine.huge_pages MODEL_DIR [--threads N]`

The same model runner with and without them, alternating, one process for each measurement, since pages once taken stay:

- the cache is filled in order, as the pool hands out blocks that were never used: every page is taken and cleared;
- then prompts go to blocks strewn over it, as after hours of use, and a batch decodes over contexts in such blocks.

Prints milliseconds a step: the median over the rounds with the smallest and the largest, and the ratio; for the filling
the slowest step too, since a huge page is cleared in one. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from headrace.worker.host.binding import Region, read_binding
from headrace.worker.model.batch import Batch, Sums
from headrace.worker.model.runner import OpenVINOModelRunner

CHUNK = 256
NUM_SEQS = 8
CONTEXT = 1024
NUM_BLOCKS = 1024
WARM_UP_STEPS = 3
MEASURED_STEPS = 30


def measure(model_dir: Path, threads: int, *, huge_pages: bool) -> dict[str, float]:
    """Milliseconds of each kind of step, and MiB of the cache."""
    runner = OpenVINOModelRunner(model_dir, threads=threads, kv_precision="u8", execution_mode="performance")
    arena = runner.allocate(NUM_BLOCKS, huge_pages=huge_pages)
    for _ in range(WARM_UP_STEPS):
        _timed(runner, _prompt(np.arange(CHUNK // runner.block_size), 0, runner.block_size))
    in_order = np.arange(NUM_BLOCKS).reshape(-1, CHUNK // runner.block_size)
    filling = [_timed(runner, _prompt(blocks, 0, runner.block_size)) for blocks in in_order[1:]]
    per_seq = (CONTEXT + MEASURED_STEPS) // runner.block_size + 1
    # A permutation without structure: neighbours in a sequence are far apart in the cache.
    strewn = np.random.default_rng(0).permutation(NUM_BLOCKS)[: NUM_SEQS * per_seq].reshape(NUM_SEQS, per_seq)
    chunks = [(seq, start) for seq in range(NUM_SEQS) for start in range(0, CONTEXT, CHUNK)]
    prompts = [_timed(runner, _prompt(strewn[seq], start, runner.block_size)) for seq, start in chunks]
    steps = [_timed(runner, _decode(strewn, CONTEXT + n, runner.block_size)) for n in range(MEASURED_STEPS)]
    binding = read_binding(Region(arena.address, arena.size_bytes))
    return {
        "prompt of the filling": statistics.median(filling),
        "slowest of the filling": max(filling),
        "all of the filling": sum(filling),
        "prompt in strewn blocks": statistics.median(prompts),
        "decode in strewn blocks": statistics.median(steps[WARM_UP_STEPS:]),
        "resident MiB": sum(binding.kv_bytes.values()) / (1 << 20),
        "huge MiB": binding.kv_huge_bytes / (1 << 20),
    }


def _timed(runner: OpenVINOModelRunner, batch: Batch) -> float:
    start = time.perf_counter()
    runner.bind(batch, keeps_logits=False)
    runner.run()
    return (time.perf_counter() - start) * 1e3


def _prompt(table: npt.NDArray[np.int64], start: int, block_size: int) -> Batch:
    """A step with the next CHUNK tokens of one sequence after its first `start` tokens."""
    num_blocks = -(-(start + CHUNK) // block_size)
    return Batch(
        input_ids=np.arange(CHUNK, dtype=np.int64),
        position_ids=np.arange(start, start + CHUNK, dtype=np.int64),
        past_lens=np.array([start], np.int32),
        subsequence_begins=np.array([0, CHUNK], np.int32),
        block_indices=table[:num_blocks].astype(np.int32),
        block_indices_begins=np.array([0, num_blocks], np.int32),
        max_context_len=np.array(start + CHUNK, np.int32),
        sampled_tokens_indices=np.array([CHUNK - 1], np.int64),
        sampled=(),
        ahead=None,
        later=(),
        beams=(),
        copies=(),
        prompts=(),
        sums=Sums.NONE,
        inverse_temperatures=np.ones(0, np.float32),
    )


def _decode(tables: npt.NDArray[np.int64], past: int, block_size: int) -> Batch:
    """A step with one more token for every sequence after `past` tokens."""
    num_seqs = len(tables)
    num_blocks = past // block_size + 1
    return Batch(
        input_ids=np.ones(num_seqs, np.int64),
        position_ids=np.full(num_seqs, past, np.int64),
        past_lens=np.full(num_seqs, past, np.int32),
        subsequence_begins=np.arange(num_seqs + 1, dtype=np.int32),
        block_indices=tables[:, :num_blocks].astype(np.int32).reshape(-1),
        block_indices_begins=np.arange(num_seqs + 1, dtype=np.int32) * num_blocks,
        max_context_len=np.array(past + 1, np.int32),
        sampled_tokens_indices=np.arange(num_seqs, dtype=np.int64),
        sampled=(),
        ahead=None,
        later=(),
        beams=(),
        copies=(),
        prompts=(),
        sums=Sums.NONE,
        inverse_temperatures=np.ones(0, np.float32),
    )


def _in_a_process(model_dir: Path, threads: int, *, huge_pages: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.engine.huge_pages", str(model_dir), "--threads", str(threads)]
    done = subprocess.run([*command, "--side", str(int(huge_pages))], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@click.command()
@click.argument("model_dir", type=click.Path(exists=True, path_type=Path))
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Pairs of measurements.")
@click.option("--side", type=click.IntRange(0, 1), help="One measurement in this process, as JSON; 1 with huge pages.")
def main(model_dir: Path, threads: int, rounds: int, side: int | None) -> None:
    """Compare decode and prompt steps with and without huge pages."""
    if side is not None:
        click.echo(json.dumps(measure(model_dir, threads, huge_pages=bool(side))))
        return
    pairs = [[_in_a_process(model_dir, threads, huge_pages=huge) for huge in (False, True)] for _ in range(rounds)]
    for what in pairs[0][0]:
        small, huge = ([pair[side][what] for pair in pairs] for side in (0, 1))
        line = f"{what}: {_spread(small)} with small pages, {_spread(huge)} with huge pages"
        if not what.endswith("MiB"):
            line += f", ratio {_spread([b / a for a, b in zip(small, huge, strict=True)])}"
        click.echo(line)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
