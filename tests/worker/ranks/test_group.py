"""Divided models whose ranks are processes."""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from headrace.worker.config import ConfigurationError
from headrace.worker.kv.host_memory import HostMemory
from headrace.worker.kv.kept_cache import CacheFormat, KeptCache
from headrace.worker.model.batch import Batch, build_batch
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.ranks.group import GroupRunner
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import Scheduled
from headrace.worker.sampling.reduction import reduce_with_numpy
from tests.gguf_models import TinyModel
from tests.patience import until
from tests.worker.adapters.files import random_adapter
from tests.worker.ranks.exactness import ASKED, NUM_BLOCKS, TOLERANCE, Computed, Prompt, assert_exact, whole

# A vocabulary of 288 tokens has runs of 32.
MODEL = TinyModel("qwen2", Kind.Q4_1, heads=6, kv_heads=3, spare_tokens=25)
NUM_SLOTS = 3


class Started:
    """A group of processes on the first CPU, and what it said of lost ranks. Its KV cache is in `memory` if given, as
    one that outlives the group."""

    def __init__(self, directory: Path, num_ranks: int, memory: HostMemory | None = None) -> None:
        self.lost: list[str] = []
        cpu = min(os.sched_getaffinity(0))
        self.runner = GroupRunner(
            directory,
            [[cpu]] * num_ranks,
            threads=1,
            max_context_tokens=4096,
            speculates=False,
            max_adapters=NUM_SLOTS,
            most_tokens=1024,
            hangs_after_s=60,
            on_lost=self.lost.append,
            **ASKED,
        )
        if memory is None:
            self.runner.allocate(NUM_BLOCKS)
        else:
            runner, kept = self.runner, KeptCache(memory, 1)
            wanted = CacheFormat(runner.numerics, "", NUM_BLOCKS + 1, runner.block_size, runner.block_shapes)
            self.is_kept = kept.format == wanted
            runner.allocate(NUM_BLOCKS, make_arena=lambda: kept.adopt(wanted))

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self.runner._members]


@pytest.fixture(scope="module")
def of_two(directory: Path) -> Iterator[Started]:
    started = Started(directory, 2)
    yield started
    started.runner.close()
    assert not started.lost


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(0, 256, length).tolist() for length in lengths]


def test_a_group_has_the_log_probabilities_of_the_whole(directory: Path, of_two: Started) -> None:
    of_group = Computed(of_two.runner, of_two.runner.exact_rows)
    assert_exact(whole(directory), of_group, prompts(20, 300))
    ranks = of_two.runner.ranks()
    assert len(ranks) == 2
    assert all(rank.step_s > rank.waited_s >= 0 for rank in ranks)


def test_adapters_change_answers_as_in_the_whole_model(directory: Path, of_two: Started) -> None:
    """Prompts with different adapters and without any share steps, while adapters come, go, and need more memory."""
    runner = of_two.runner
    undivided = OpenVINOModelRunner(directory, threads=1, max_adapters=NUM_SLOTS, **ASKED)
    undivided.allocate(NUM_BLOCKS)
    assert runner.linears == undivided.linears
    assert runner.num_kv_heads == undivided.num_kv_heads
    computed = [Computed(each, each.exact_rows) for each in (undivided, runner)]
    long, short = prompts(150, 33)
    asked = [Prompt(long), Prompt(long, 0), Prompt(short, 1), Prompt(short, 0)]
    without = None
    # Adapters in both slots; another one in the place of the first; one of a higher rank beside it.
    for slot, lora_rank, seed in ((0, 4, 1), (1, 8, 2), (0, 3, 3), (1, 20, 4)):
        for each in (undivided, runner):
            memory = each.adapters
            assert memory is not None
            if lora_rank > memory.rank:
                memory = each.adapters = memory.with_rank(lora_rank, [0])
            memory.write(slot, random_adapter(undivided.linears, lora_rank, seed))
        expected, found = (each.together(asked) for each in computed)
        for wanted, mine in zip(expected, found, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=TOLERANCE)
        assert np.abs(found[0] - found[1]).max() > 0.1
        without = found[0] if without is None else without
        np.testing.assert_allclose(found[0], without, rtol=0, atol=TOLERANCE)


def test_a_block_has_the_parts_of_all_ranks(directory: Path, of_two: Started) -> None:
    """Blocks that are copied to another group, as tiers copy them, are as good as those that it has computed. If the
    memory of that group outlives it, they are there for the next group too."""
    memory = HostMemory(os.memfd_create("kept"))
    other = Started(directory, 2, memory)
    assert not other.is_kept
    pids = other.pids
    try:
        contents, others = of_two.runner.block_bytes_of, other.runner.block_bytes_of
        assert contents.num_bytes == of_two.runner.block_bytes == sum(of_two.runner.rank_bytes)
        assert of_two.runner.block_shapes == other.runner.block_shapes
        (prompt,) = prompts(100)
        size = of_two.runner.block_size
        whole_blocks = len(prompt) // size
        request = Request("1", prompt, SamplingParams(max_tokens=1, seed=0, temperature=0.0), 0)
        request.block_table = array("i", range(1, whole_blocks + 2))
        computed = step(of_two.runner, request, 0, len(prompt))
        data = np.empty(contents.num_bytes, np.uint8)
        for block in request.block_table[:whole_blocks]:
            contents.gather(block, data)
            assert np.count_nonzero(data) > len(data) // 2
            others.scatter(block, data)
            assert others.checksum(block, size) == contents.checksum(block, size)
        np.testing.assert_array_equal(step(other.runner, request, whole_blocks * size, len(prompt)), computed)
    finally:
        other.runner.close()
    assert len(pids) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "the processes end with the worker"
    assert not other.lost
    again = Started(directory, 2, memory)
    try:
        assert again.is_kept
        np.testing.assert_array_equal(step(again.runner, request, whole_blocks * size, len(prompt)), computed)
    finally:
        again.runner.close()
        os.close(memory.descriptor)


def step(runner: GroupRunner, request: Request, first: int, end: int) -> np.ndarray:
    """Compute these tokens of a prompt, and return the logits of the last."""
    request.num_computed_tokens = first
    runner.bind(build_batch([Scheduled(request, end - first)], runner.block_size), keeps_logits=False)
    return runner.run().whole(np.arange(1)).copy()


def test_the_summary_for_sampling_is_that_of_the_whole_vocabulary(directory: Path, of_two: Started) -> None:
    runner = of_two.runner
    temperatures = np.array([2.0, 0.5, 1.0], np.float32)
    for keeps_logits in (False, True, True):
        batch = step_of(3, [1 / temperature for temperature in temperatures])
        runner.bind(batch, keeps_logits=keeps_logits)
        logits = runner.run()
        assert logits.reduction is not None
        assert logits.values.shape == (3, runner.vocab_size)
        values = logits.whole(np.arange(3))
        wanted = reduce_with_numpy(values, temperatures)
        np.testing.assert_array_equal(logits.reduction.maxima, wanted.maxima)
        np.testing.assert_allclose(logits.reduction.sums, wanted.sums, rtol=1e-4)
    runner.end_warm_up()


def step_of(num_requests: int, temperatures: Sequence[float]) -> Batch:
    """The prompts of some requests."""
    scheduled = []
    for number, temperature in zip(range(num_requests), temperatures, strict=True):
        sampling = SamplingParams(max_tokens=4, seed=1, temperature=temperature)
        request = Request(f"r{number}", [number, 5, 7], sampling, 1)
        request.block_table.append(number)
        scheduled.append(Scheduled(request, 3))
    return build_batch(scheduled, 32)


def test_a_rank_that_ends_is_told(directory: Path) -> None:
    started = Started(directory, 2)
    (pid,) = started.pids
    os.kill(pid, signal.SIGKILL)
    until(lambda: bool(started.lost), "the end of a rank is told")
    assert f"rank 1 of the divided model has ended (process {pid}, status -9)" in started.lost
    started.runner.close()


def test_an_idle_group_takes_no_time_of_the_cpu(of_two: Started) -> None:
    (pid,) = of_two.pids

    def sleeps() -> bool:
        return "S" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    def switches() -> str:
        return next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "voluntary_ctxt" in line)

    until(sleeps, "the rank sleeps")
    before = switches()
    for _ in range(20):
        time.sleep(0.01)
    assert switches() == before


def test_a_model_that_cannot_be_divided_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="6 heads of attention and 3 of keys and values"):
        Started(directory, 7)
