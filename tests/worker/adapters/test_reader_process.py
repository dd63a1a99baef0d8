"""Adapters that another process reads and writes into this one's memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.worker.adapters.files import AdapterError
from headrace.worker.adapters.peft import read_peft
from headrace.worker.adapters.reader import FilesChangedError
from headrace.worker.adapters.reader_process import ReaderProcess
from headrace.worker.model.adapter_memory import AdaptedGroup, AdapterMemory, AdapterPart, Cut
from tests.patience import patience
from tests.worker.adapters.files import LAYERS, LINEARS, write_adapter

GROUPS = [AdaptedGroup([linear], f"a{i}", [f"b{i}"]) for i, linear in enumerate(LINEARS)]
# Of two ranks: the queries are divided by outputs, down by inputs.
PARTS = [
    AdapterPart({"q": Cut(outputs=np.array(outputs)), "down": Cut(inputs=np.array(inputs))})
    for outputs, inputs in ((range(0, 20, 2), range(13)), (range(1, 20, 2), range(13, 30)))
]


@pytest.fixture
def memory() -> AdapterMemory:
    return AdapterMemory(GROUPS, 3, 8, is_bfloat16=True)


@pytest.fixture
def reader(memory: AdapterMemory) -> Iterator[ReaderProcess]:
    reader = ReaderProcess(LAYERS, memory)
    yield reader
    reader.close()


def contents(memory: AdapterMemory, slot: int) -> list[bytes]:
    tensors = memory.tensors(slot + 1)
    return [
        np.array(tensors[name].data[slot]).tobytes() for group in GROUPS for name in (group.input_a, *group.inputs_b)
    ]


def expected(path: Path, rank: int = 8) -> list[bytes]:
    """What the slot has if this process writes it."""
    memory = AdapterMemory(GROUPS, 1, rank, is_bfloat16=True)
    memory.write(0, read_peft(path, LINEARS).weights)
    return contents(memory, 0)


def test_the_other_process_writes_slots_of_this_ones_memory(
    reader: ReaderProcess, memory: AdapterMemory, tmp_path: Path
) -> None:
    paths = [write_adapter(tmp_path / str(seed), seed=seed) for seed in range(2)]
    found = [reader.read(path) for path in paths]
    assert found[0].sha256 == read_peft(paths[0], LINEARS).sha256
    assert found[0].rank == 4
    reader.write(2, paths[0], found[0].sha256)
    reader.write(0, paths[1], found[1].sha256)
    assert contents(memory, 2) == expected(paths[0])
    assert contents(memory, 0) == expected(paths[1])
    assert not any(map(any, contents(memory, 1)))
    # The lowest, or as much lower than this process as can be.
    lowest = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 19)
    assert os.getpriority(os.PRIO_PROCESS, reader.pid) == lowest, "streams wait for it"


def test_more_ranks_need_new_memory_which_keeps_the_slots_in_use(
    reader: ReaderProcess, memory: AdapterMemory, tmp_path: Path
) -> None:
    low, high = write_adapter(tmp_path / "low"), write_adapter(tmp_path / "high", rank=20, seed=1)
    reader.write(1, low, reader.read(low).sha256)
    larger = AdapterMemory(GROUPS, 3, 20, is_bfloat16=True)
    reader.move(larger, [1])
    reader.write(0, high, reader.read(high).sha256)
    assert contents(larger, 1) == expected(low, larger.rank)
    assert contents(larger, 0) == expected(high, larger.rank)


def test_each_rank_of_a_divided_model_gets_its_part(tmp_path: Path) -> None:
    low, high = write_adapter(tmp_path / "low"), write_adapter(tmp_path / "high", rank=20, seed=1)
    memory = AdapterMemory(GROUPS, 2, 8, is_bfloat16=False, parts=PARTS)
    assert memory.slot_bytes == 4 * 8 * (2 * 12 + 20 + 30 + 2 * 12)
    reader = ReaderProcess(LAYERS, memory)
    try:
        reader.write(1, low, reader.read(low).sha256)
        larger = memory.with_rank(20, [])
        reader.move(larger, [1])
        reader.write(0, high, reader.read(high).sha256)
    finally:
        reader.close()
    for slot, path in ((1, low), (0, high)):
        (of_q, of_down) = (read_peft(path, LINEARS).weights[linear.name] for linear in LINEARS)
        rank = len(of_q.a)
        for number, part in enumerate(PARTS):
            # As the process of a rank maps it, which has its own part only.
            own = AdapterMemory(GROUPS, 2, 24, is_bfloat16=False, parts=[part], fds=[os.dup(larger.fds[number])])
            found = {name: tensor.data[slot] for name, tensor in own.tensors(2).items()}
            for name, wanted in {
                "a0": of_q.a.T,
                "b0": of_q.b[part.cuts["q"].outputs],
                "a1": of_down.a.T[part.cuts["down"].inputs],
                "b1": of_down.b,
            }.items():
                np.testing.assert_array_equal(found[name][:, :rank], wanted)
                assert not found[name][:, rank:].any()


def test_refusals_are_those_of_the_reader(reader: ReaderProcess, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"there is no .*adapter_config\.json"):
        reader.read(tmp_path)
    path = write_adapter(tmp_path / "a")
    found = reader.read(path)
    write_adapter(path, seed=1)
    reader.read(path)
    with pytest.raises(FilesChangedError):
        reader.write(0, path, found.sha256)


def test_files_of_an_unknown_kind_do_not_end_the_process(reader: ReaderProcess, tmp_path: Path) -> None:
    pid, path = reader.pid, write_adapter(tmp_path / "a")
    config = path / "adapter_config.json"
    config.write_bytes(
        config.read_bytes().replace(b'"r": 4', b'"r": 4, "alpha_pattern": {"q_proj": 1' + b"0" * 400 + b"}")
    )
    with pytest.raises(AdapterError, match="its files are damaged or unknown .OverflowError"):
        reader.read(path)
    assert reader.pid == pid


def test_a_reader_that_was_killed_is_started_again(
    reader: ReaderProcess, memory: AdapterMemory, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a")
    found = reader.read(path)
    os.kill(reader.pid, signal.SIGKILL)
    reader.write(1, path, found.sha256)
    assert contents(memory, 1) == expected(path)
    os.kill(reader.pid, signal.SIGTERM)  # a whole group gets it when a worker is stopped
    assert reader.read(path) == found


def test_it_ends_with_its_worker(tmp_path: Path) -> None:
    """Even if the worker is killed."""
    program = (
        "import time; from tests.worker.adapters.test_reader_process import *;"
        "print(ReaderProcess(LAYERS, AdapterMemory(GROUPS, 1, 8, is_bfloat16=True)).pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline_s = time.monotonic() + patience(20)
    while time.monotonic() < deadline_s and is_running(pid):
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
