"""Pinning on a machine with two NUMA nodes, told by its kernel: threads, and the pages of the KV cache.

The machine is emulated, so this takes a minute or two: `make test-numa` fetches a kernel and runs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.serving import pulled_model
from tests.infra.emulated import EMULATOR, boot, write_initramfs

KERNEL = os.environ.get("HEADRACE_NUMA_KERNEL", "")
BOUND_S = 600.0
CPUS = {0: {0, 1}, 1: {2, 3}}
PAGE_BYTES = 4096

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(BOUND_S + 120)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of `guest.py`, which documents the keys."""
    if not KERNEL:
        pytest.skip("needs a kernel to boot: make test-numa fetches one and names it in HEADRACE_NUMA_KERNEL")
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is not installed, and make test-numa could not fetch it")
    from tests.infra.few_layers import write_few_layers

    directory = tmp_path_factory.mktemp("two_nodes")
    write_few_layers(pulled_model(), directory / "model", 2)
    write_initramfs(directory / "initramfs", directory / "model", Path(__file__).parent / "guest.py")
    result: dict[str, Any] = json.loads(boot(Path(KERNEL), directory / "initramfs", directory, BOUND_S))
    console = (directory / "console").read_text(errors="replace")
    assert "error" not in result, f"{result['error']}\n{console[-4000:]}"
    print(f"ready after {result['ready_s']:.0f} s\n{console[-2000:]}")
    return result


@dataclass
class Process:
    """A process in the machine: its node, and its part of /proc."""

    node: int
    proc: dict[str, Any]

    @property
    def kv_sizes(self) -> list[int]:
        """Bytes of the mappings of a KV cache that is a file: those that are kept out of core dumps."""
        mappings = _mappings(self.proc["smaps"])
        return [mapping.num_bytes for mapping in mappings if "dd" in mapping.flags and mapping.file[:1] == "/"]

    @property
    def kv_pages(self) -> dict[int, int]:
        """Pages of the KV cache that it has touched, by node."""
        addresses = {mapping.address for mapping in _mappings(self.proc["smaps"]) if "dd" in mapping.flags}
        pages: dict[int, int] = {}
        for line in self.proc["numa_maps"].splitlines():
            if int(line.split()[0], 16) in addresses:
                for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
                    pages[int(node)] = pages.get(int(node), 0) + int(count)
        return pages

    @property
    def share_on_its_node(self) -> float:
        """The share of what it has allocated that is on its node."""
        pages = dict.fromkeys(CPUS, 0)
        for line in self.proc["numa_maps"].splitlines():
            if " anon=" in line and " file=" not in line:
                for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
                    pages[int(node)] += int(count)
        return pages[self.node] / sum(pages.values())

    def assert_threads_are_on_its_node(self) -> None:
        """Each thread may run on its node alone, and ran there."""
        threads = self.proc["threads"].values()
        assert len(threads) >= 4, "the main thread, the engine's, gRPC's and OpenVINO's"
        for thread in threads:
            allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", thread["status"], re.MULTILINE)
            assert allowed is not None
            first, _, last = allowed[1].partition("-")
            assert set(range(int(first), int(last or first) + 1)) <= CPUS[self.node], thread["status"]
            assert thread["ran_on"] in CPUS[self.node]


@dataclass
class Worker(Process):
    """A worker, with its row of `headrace status`."""

    row: dict[str, Any]


class Mapping(NamedTuple):
    """A mapping in a process's memory."""

    address: int
    num_bytes: int
    file: str
    flags: list[str]


def _mappings(smaps: str) -> Iterator[Mapping]:
    address, end, file = 0, 0, ""
    for line in smaps.splitlines():
        if where := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(.*)", line):
            address, end, file = int(where[1], 16), int(where[2], 16), where[3]
        elif line.startswith("VmFlags:"):
            yield Mapping(address, end - address, file, line.split()[1:])


@pytest.fixture(scope="module", params=[0, 1])
def worker(found: dict[str, Any], request: pytest.FixtureRequest) -> Worker:
    row = next(row for row in found["status"] if row["name"] == f"worker-{request.param}")
    return Worker(request.param, found["workers"][row["name"]], row)


def test_the_plan_has_a_worker_on_each_node(found: dict[str, Any]) -> None:
    assert re.search(r"node 0 .* cores 0-1\n", found["topology"])
    assert re.search(r"node 1 .* cores 2-3\n", found["topology"])
    assert "worker-0  node 0  CPUs 0-1  computes with 2\nworker-1  node 1  CPUs 2-3" in found["topology"]
    assert all(found["answers"]), "an empty answer"


def test_every_thread_may_run_on_its_node_alone_and_ran_there(worker: Worker) -> None:
    worker.assert_threads_are_on_its_node()


def test_all_pages_of_the_kv_cache_are_on_its_node(worker: Worker) -> None:
    assert set(worker.kv_pages) == {worker.node}
    assert worker.kv_pages[worker.node] * PAGE_BYTES > 1 << 20


def test_the_node_is_preferred_for_all_that_comes(worker: Worker) -> None:
    policies = {line.split()[1] for line in worker.proc["numa_maps"].splitlines() if "heap" in line.split()}
    assert policies == {f"prefer:{worker.node}"}


def test_what_the_worker_allocated_is_on_its_node(worker: Worker) -> None:
    assert worker.share_on_its_node > 0.99


def test_status_and_metrics_tell_what_the_kernel_tells(worker: Worker, found: dict[str, Any]) -> None:
    row = worker.row
    cpus = f"{min(CPUS[worker.node])}-{max(CPUS[worker.node])}"
    assert (row["numa_node"], row["cpus_allowed"], row["memory_policy"]) == (worker.node, cpus, f"prefer:{worker.node}")
    kv_bytes = {int(node): num_bytes for node, num_bytes in row["kv_resident_bytes"].items()}
    assert kv_bytes.get(1 - worker.node, 0) == 0
    assert row["anonymous_bytes"][str(worker.node)] / sum(row["anonymous_bytes"].values()) > 0.99
    # Read some seconds before: more may have come since.
    assert 0 < kv_bytes[worker.node] <= worker.kv_pages[worker.node] * PAGE_BYTES
    labels = f'cpus_allowed="{cpus}",memory_policy="prefer:{worker.node}",numa_node="{worker.node}"'
    assert re.search(
        rf'headrace_worker_binding_info{{[^}}]*{re.escape(labels)}[^}}]*worker="{row["name"]}"', found["metrics"]
    )


@pytest.fixture(scope="module", params=[0, 1])
def rank(found: dict[str, Any], request: pytest.FixtureRequest) -> Process:
    assert len(found["ranks"]) == 2
    return Process(request.param, found["ranks"][request.param])


def test_a_rank_of_a_divided_model_has_its_threads_and_memory_on_its_node(rank: Process, found: dict[str, Any]) -> None:
    rank.assert_threads_are_on_its_node()
    # One file has the parts of both. Rank 0 touches both; the mapping of rank 1 is in two where its own part begins.
    sizes = Process(1, found["ranks"][1]).kv_sizes
    assert len(sizes) == 2
    kv_pages = rank.kv_pages
    assert set(kv_pages) == {0, 1} if rank.node == 0 else {1}
    assert all(pages * PAGE_BYTES <= sizes[node] for node, pages in kv_pages.items())
    assert rank.share_on_its_node > 0.99


def test_status_tells_where_the_ranks_are(found: dict[str, Any]) -> None:
    assert found["divided_answer"]
    ranks = found["divided"]["ranks"]
    assert [(rank["numa_node"], rank["cpus"]) for rank in ranks] == [(0, "0-1"), (1, "2-3")]
    assert all(rank["step_s"] > 0 for rank in ranks)
