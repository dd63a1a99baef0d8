"""The kernel's reports on threads and memory: recorded texts, and this process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.registry import CollectorRegistry

from headrace.protos import worker_pb2
from headrace.worker.host.binding import Binding, RankReport, Region, StageReport, keep_binding_known, read_binding
from headrace.worker.kv.arena import KVArena
from headrace.worker.kv.host_memory import HostMemory
from headrace.worker.kv.huge_pages import HugePages
from headrace.worker.server.metrics import LoadCollector
from headrace.worker.server.watch import WatchHub, binding_message
from tests.patience import patience

ARENA = Region(0x7F0000200000, 0x400000)
NUMA_MAPS = """\
55d000000000 prefer:1 file=/usr/bin/python3 mapped=5 N0=5 kernelpagesize_kB=4
7efff0000000 prefer:1 anon=10 dirty=10 N1=10 kernelpagesize_kB=4
7f0000200000 prefer:1 anon=700 dirty=700 N0=100 N1=600 kernelpagesize_kB=4
7f0000500000 prefer:1 anon=8 dirty=8 N1=8 kernelpagesize_kB=4
7f0000600000 bind:0 anon=3 dirty=3 N0=3 kernelpagesize_kB=4
7f0000800000 default file=/anon_hugepage huge dirty=2 N1=2 kernelpagesize_kB=2048
7fff00000000 default stack
"""
SMAPS = """\
7efff0000000-7efff0100000 rw-p 00000000 00:00 0
AnonHugePages:      4096 kB
7f0000200000-7f0000500000 rw-p 00000000 00:00 0
Rss:                2800 kB
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me dd hg
7f0000600000-7f0000700000 rw-p 00000000 00:00 0                          [anon: name]
AnonHugePages:      2048 kB
"""


def tree(root: Path, masks: tuple[str, ...] = ("4-5", "5")) -> Path:
    for number, mask in enumerate(masks):
        thread = root / f"proc/self/task/{number}"
        thread.mkdir(parents=True)
        (thread / "status").write_text(f"Name:\tx\nCpus_allowed:\t30\nCpus_allowed_list:\t{mask}\n")
    (root / "proc/self/numa_maps").write_text(NUMA_MAPS)
    (root / "proc/self/smaps").write_text(SMAPS)
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (root / f"sys/devices/system/node/node{node}/cpulist").write_text(cpus)
    (root / "sys/devices/system/node/has_memory").write_text("0-1\n")
    return root


def test_threads_policy_pages_and_huge_pages_are_read(tmp_path: Path) -> None:
    kib = 1024
    assert read_binding(ARENA, tree(tmp_path)) == Binding(
        numa_node=1,
        cpus=(4, 5),
        num_threads=2,
        memory_policy="prefer:1",
        resident_bytes={0: 108 * 4 * kib, 1: 618 * 4 * kib + 4096 * kib},
        anonymous_bytes={0: 103 * 4 * kib, 1: 618 * 4 * kib},
        kv_bytes={0: 100 * 4 * kib, 1: 608 * 4 * kib},
        kv_huge_bytes=2048 * kib,
    )


def test_one_thread_elsewhere_means_bound_to_no_node(tmp_path: Path) -> None:
    binding = read_binding(ARENA, tree(tmp_path, ("4-5", "0-7")))
    assert (binding.numa_node, binding.cpus) == (None, tuple(range(8)))


def test_a_kernel_that_tells_nothing_leaves_it_empty(tmp_path: Path) -> None:
    assert read_binding(ARENA, tmp_path) == Binding(numa_node=None, cpus=(), num_threads=0, memory_policy="")


def test_the_message_lists_nodes_in_order(tmp_path: Path) -> None:
    message = binding_message(read_binding(ARENA, tree(tmp_path)))
    assert (message.cpus_allowed, message.memory_policy, message.kv_huge_bytes) == ("4-5", "prefer:1", 2 << 20)
    assert [(memory.node, memory.kv_bytes) for memory in message.memory] == [(0, 409600), (1, 2490368)]
    assert [memory.anonymous_bytes for memory in message.memory] == [421888, 2531328]


def test_the_load_tells_the_binding_once_it_was_read(tmp_path: Path) -> None:
    hub = WatchHub(1, 8, 4)
    assert not hub.load().HasField("binding")
    assert not hub.load().HasField("numa_node")
    hub.bind(read_binding(ARENA, tree(tmp_path)))
    assert hub.load().binding == binding_message(read_binding(ARENA, tmp_path))
    assert hub.load().numa_node == 1
    hub.bind(Binding(numa_node=None, cpus=(0, 1), num_threads=2, memory_policy=""))
    assert not hub.load().HasField("numa_node")
    assert hub.load().binding == worker_pb2.Binding(cpus_allowed="0-1")


def test_the_load_has_the_ranks_of_a_divided_model() -> None:
    ranks = [RankReport(frozenset({5, 4}), 1, 2.5, 0.5), RankReport(frozenset({6}), None, 2.0, 0.0)]
    first, second = WatchHub(1, 8, 4, ranks=lambda: ranks).load().ranks
    assert first == worker_pb2.Rank(numa_node=1, cpus="4-5", step_seconds=2.5, wait_seconds=0.5)
    assert second == worker_pb2.Rank(cpus="6", step_seconds=2.0)
    assert not WatchHub(1, 8, 4).load().ranks


def test_the_load_has_the_stages_of_a_pipeline() -> None:
    stages = [StageReport("", 0, 2, 2.5, 0.5), StageReport("b:1", 2, 1, 2.0, 1.0)]
    first, second = WatchHub(1, 8, 4, stages=lambda: stages).load().stages
    assert first == worker_pb2.PipelineStage(num_layers=2, compute_seconds=2.5, wait_seconds=0.5)
    assert second == worker_pb2.PipelineStage(
        address="b:1", first_layer=2, num_layers=1, compute_seconds=2.0, wait_seconds=1.0
    )
    assert not WatchHub(1, 8, 4).load().stages


def test_the_metrics_say_the_same(tmp_path: Path) -> None:
    hub = WatchHub(1, 8, 4)
    assert not [metric.name for metric in LoadCollector(hub).collect() if "binding" in metric.name]
    hub.bind(read_binding(ARENA, tree(tmp_path)))
    registry = CollectorRegistry()
    registry.register(LoadCollector(hub))
    labels = {"numa_node": "1", "cpus_allowed": "4-5", "memory_policy": "prefer:1"}
    assert registry.get_sample_value("headrace_worker_binding_info", labels) == 1
    assert registry.get_sample_value("headrace_worker_kv_resident_bytes", {"node": "1"}) == 608 * 4096
    assert registry.get_sample_value("headrace_worker_kv_huge_bytes") == 2 << 20


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel has no NUMA")
@pytest.mark.parametrize("huge_pages", [False, True])
def test_the_kernel_shows_exactly_the_pages_of_the_arena_that_were_touched(huge_pages: bool) -> None:
    arena = KVArena(6 << 20, 2, huge_pages=huge_pages)
    check_pages(arena, huge_pages=huge_pages)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel has no NUMA")
def test_the_kernel_shows_the_pages_of_an_arena_that_outlives_the_worker() -> None:
    memory = HostMemory(os.memfd_create("test"))
    memory.resize(16 << 20)
    check_pages(KVArena(6 << 20, 2, huge_pages=False, memory=memory.map(), offset=2 << 20), huge_pages=False)


def test_huge_pages_come_for_blocks_that_are_about_to_be_used() -> None:
    memory = HostMemory(os.memfd_create("test"))
    memory.resize(64 << 20)
    arena = KVArena(60 << 20, 2, huge_pages=True, memory=memory.map())
    caches = [arena.take(30 << 20), arena.take(30 << 20)]
    num_blocks = 30 << 5
    caches[0][:5000] = 7
    pages = HugePages(caches, num_blocks)
    assert pages.reach(3) == 3 + 64
    pages.wait()
    if not (huge := read_binding(Region(arena.address, arena.size_bytes)).kv_huge_bytes):
        pytest.skip("this kernel cannot collapse pages of files in memory")
    # 131 blocks of 32 KiB in each cache, as whole pages.
    assert huge == 2 * 3 * (2 << 20)
    assert memory.resident_bytes == huge
    assert caches[0][:5000].all()
    assert not caches[0][5000:].any()
    assert pages.reach(num_blocks - 1) == num_blocks
    pages.wait()
    assert read_binding(Region(arena.address, arena.size_bytes)).kv_huge_bytes == 60 << 20


def check_pages(arena: KVArena, *, huge_pages: bool) -> None:
    region = Region(arena.address, arena.size_bytes)
    first, second = arena.take(4 << 20), arena.take(2 << 20)
    assert sum(read_binding(region).kv_bytes.values()) == 0
    first[: 1 << 20] = 1
    touched = sum(read_binding(region).kv_bytes.values())
    assert touched in ((1 << 20, 2 << 20) if huge_pages else (1 << 20,))
    second[:] = 2
    binding = read_binding(region)
    assert sum(binding.kv_bytes.values()) >= touched + (2 << 20)
    assert set(binding.cpus) == os.sched_getaffinity(0)
    assert np.count_nonzero(first) == 1 << 20, "pieces must not overlap"


def test_pieces_are_zeros_aligned_and_no_more_than_were_asked_for() -> None:
    arena = KVArena(3000, 3, huge_pages=False)
    pieces = [arena.take(1000) for _ in range(3)]
    for number, piece in enumerate(pieces, 1):
        assert not piece.any()
        assert piece.ctypes.data % 64 == 0
        piece[:] = number
    assert [set(piece.tolist()) for piece in pieces] == [{1}, {2}, {3}]
    with pytest.raises(AssertionError, match="no room left"):
        arena.take(arena.size_bytes)


def test_more_than_there_is_is_no_arena() -> None:
    with pytest.raises((OSError, OverflowError)):
        KVArena(1 << 62, 1, huge_pages=True)


async def test_the_binding_is_told_after_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.worker.host.binding.MIN_INTERVAL_S", 0.01)
    monkeypatch.setattr("headrace.worker.host.binding._SHARE_OF_TIME", 1.0)
    told: asyncio.Queue[Binding] = asyncio.Queue()
    task = asyncio.create_task(keep_binding_known(Region(0, 0), told.put_nowait))
    async with asyncio.timeout(patience(10)):
        await told.get()
        binding = await told.get()
    task.cancel()
    assert set(binding.cpus) == os.sched_getaffinity(0)
