"""The binding of memory to nodes, on recorded directory trees and on this machine."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.common.kernel_files import format_list, parse_list
from headrace.worker.config import ConfigurationError
from headrace.worker.host import numa
from headrace.worker.host.numa import bind_memory, memory_node_of, memory_nodes

TWO_SOCKETS = {0: ("0-3,8-11", "10 21"), 1: ("4-7,12-15", "21 10")}
# Node 1 has cores and no memory; node 2 is nearer to it than node 0.
ONE_WITHOUT_MEMORY = {0: ("0-3", "10 31 31"), 1: ("4-5", "31 10 12"), 2: ("6-7", "31 12 10")}


def tree(root: Path, nodes: dict[int, tuple[str, str]], with_memory: str, policy: str = "default") -> Path:
    for number, (cpus, distances) in nodes.items():
        place = root / f"sys/devices/system/node/node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpus}\n")
        (place / "distance").write_text(f"{distances}\n")
    (root / "sys/devices/system/node/has_memory").write_text(f"{with_memory}\n")
    (root / "proc/self").mkdir(parents=True)
    mappings = [
        f"55d0 {policy} file=/bin/python mapped=4 mapmax=3 N0=2 N1=2 kernelpagesize_kB=4",
        f"55e0 {policy} heap anon=7 dirty=7 N0=7 kernelpagesize_kB=4",
    ]
    (root / "proc/self/numa_maps").write_text("".join(f"{mapping}\n" for mapping in mappings))
    return root


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The nodes passed to the kernel as preferred. What was allocated before is moved only if it is elsewhere: it is on
    node 0."""
    asked: list[int] = []
    moved_to: list[int] = []
    monkeypatch.setattr(numa, "_prefer", asked.append)
    monkeypatch.setattr(numa, "_move_allocated", lambda: moved_to.append(asked[-1]))
    yield asked
    assert moved_to == [node for node in asked if node != 0]


def use_cpus(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr(numa, "usable_cpus", lambda: frozenset(cpus))


def test_lists_are_read_and_written_as_the_kernel_does() -> None:
    assert parse_list("0-2,8\n") == {0, 1, 2, 8}
    assert parse_list("\n") == frozenset()
    assert format_list([8, 1, 0, 2]) == "0-2,8"
    assert format_list([]) == ""


def test_memory_comes_from_the_node_of_the_cpus(tmp_path: Path) -> None:
    root = tree(tmp_path, TWO_SOCKETS, "0-1")
    assert memory_nodes(root) == (0, 1)
    assert memory_node_of(frozenset({4, 5}), root) == 1
    assert memory_node_of(frozenset({0, 9}), root) == 0
    assert memory_node_of(frozenset({0, 4}), root) is None


def test_cores_of_a_node_without_memory_belong_to_the_nearest_that_has_some(tmp_path: Path) -> None:
    root = tree(tmp_path, ONE_WITHOUT_MEMORY, "0,2")
    assert memory_node_of(frozenset({4, 5}), root) == 2
    assert memory_node_of(frozenset({4, 5, 6}), root) == 2
    assert memory_node_of(frozenset({0, 4}), root) is None


def test_a_kernel_without_nodes_has_none(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path) == ()
    assert memory_node_of(frozenset({0}), tmp_path) is None


def test_the_node_of_the_affinity_mask_is_preferred(
    tmp_path: Path, preferred: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpus(monkeypatch, 4, 5)
    assert bind_memory(None, tree(tmp_path, TWO_SOCKETS, "0-1")) == 1
    assert preferred == [1]


def test_a_node_that_was_asked_for_goes_before_the_mask(
    tmp_path: Path, preferred: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpus(monkeypatch, 4, 5)
    bind_memory(0, tree(tmp_path, TWO_SOCKETS, "0-1"))
    assert preferred == [0]


def test_one_node_is_not_bound_to(tmp_path: Path, preferred: list[int]) -> None:
    assert bind_memory(None, tree(tmp_path, {0: ("0-3", "10")}, "0")) is None
    bind_memory(0, tmp_path)
    assert preferred == []


def test_a_policy_that_somebody_set_before_stays(
    tmp_path: Path, preferred: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpus(monkeypatch, 4, 5)
    bind_memory(None, tree(tmp_path, TWO_SOCKETS, "0-1", policy="bind:0"))
    assert preferred == []


@pytest.mark.parametrize(("policy", "expected"), [("prefer:0", [1]), ("interleave:0-1", []), ("default", [1])])
def test_a_rank_replaces_the_node_that_its_worker_prefers(
    tmp_path: Path, preferred: list[int], monkeypatch: pytest.MonkeyPatch, policy: str, expected: list[int]
) -> None:
    use_cpus(monkeypatch, 4, 5)
    bind_memory(None, tree(tmp_path, TWO_SOCKETS, "0-1", policy=policy), is_inherited=True)
    assert preferred == expected


def test_a_node_without_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"node 1 was asked for \(--memory-node\) .* with memory are 0,2;"):
        bind_memory(1, tree(tmp_path, ONE_WITHOUT_MEMORY, "0,2"))


def test_cpus_of_several_nodes_are_bound_to_none_with_one_warning(
    tmp_path: Path, preferred: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_cpus(monkeypatch, 0, 4)
    assert bind_memory(None, tree(tmp_path, TWO_SOCKETS, "0-1")) is None
    assert preferred == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("machine", ["x86_64", "riscv64"])
def test_where_the_kernel_does_not_permit_it_there_is_one_warning_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, machine: str
) -> None:
    # This machine has no node 900: EINVAL, and ENOSYS where the call's number is unknown.
    monkeypatch.setattr("platform.machine", lambda: machine)
    use_cpus(monkeypatch, 4)
    assert bind_memory(None, tree(tmp_path, {0: ("0", "10 21"), 900: ("4", "21 10")}, "0,900")) == 900
    (record,) = caplog.records
    assert "memory could not be bound to node 900" in record.getMessage()


def test_where_the_kernel_does_not_move_pages_there_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(numa, "_prefer", lambda node: None)
    monkeypatch.setattr(numa, "_move_allocated", refuse)
    use_cpus(monkeypatch, 4, 5)
    assert bind_memory(None, tree(tmp_path, TWO_SOCKETS, "0-1")) == 1
    (record,) = caplog.records
    assert "what was allocated first may be on another node than 1: Operation not permitted" in record.getMessage()


_PREFER_AND_SHOW = """
import subprocess, sys, threading
from pathlib import Path
from headrace.worker.host.numa import _move_allocated, _prefer, unbind_memory
SHOW = 'from pathlib import Path; print(Path("/proc/thread-self/numa_maps").read_text().split()[1], flush=True)'
def show_both():
    thread = threading.Thread(target=exec, args=(SHOW,))
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-S", "-c", SHOW], check=True)
_prefer(0)
_move_allocated()
show_both()
unbind_memory()
show_both()
"""


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists() or os.uname().machine not in numa._SET_MEMPOLICY,
    reason="this kernel has no memory policies",
)
def test_the_kernel_takes_the_policy_and_threads_and_programs_inherit_it_until_it_is_undone() -> None:
    shown = subprocess.run([sys.executable, "-c", _PREFER_AND_SHOW], capture_output=True, text=True, check=False)
    if "Operation not permitted" in shown.stderr:
        pytest.skip("memory policies are not permitted here")
    assert shown.stdout.split() == ["prefer:0", "prefer:0", "default", "default"], shown.stderr


_IMPORT_AND_SHOW = """
import os, sys
import headrace.worker.__main__
print("openvino" in sys.modules, len(os.listdir("/proc/self/task")))
"""


def test_before_memory_is_bound_there_is_neither_openvino_nor_a_second_thread() -> None:
    shown = subprocess.run([sys.executable, "-c", _IMPORT_AND_SHOW], capture_output=True, text=True, check=True)
    assert shown.stdout == "False 1\n"
