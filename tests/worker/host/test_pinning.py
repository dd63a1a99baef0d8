"""The warning of a worker that shares its CPUs, from files as kernels and kubelets write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.worker.host import pinning
from headrace.worker.host.numa import num_threads_for
from headrace.worker.host.pinning import warn_if_not_pinned, why_not_pinned

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def machine(root: Path, *, quota: str = "max 100000", num_nodes: int = 2) -> Path:
    """Two nodes with four cores of two threads each: core n has CPUs n and n + 8."""
    files = {
        "proc/self/cgroup": "0::/pod",
        "sys/fs/cgroup/pod/cpu.max": quota,
        "sys/devices/system/cpu/online": "0-15",
        "sys/devices/system/node/has_memory": "0-1" if num_nodes == 2 else "0",
    }
    lists = ["0-3,8-11", "4-7,12-15"] if num_nodes == 2 else ["0-15"]
    for node, cpus in enumerate(lists):
        files[f"sys/devices/system/node/node{node}/cpulist"] = cpus
        files[f"sys/devices/system/node/node{node}/distance"] = "10 20"
    for cpu in range(16):
        siblings = f"{cpu % 8},{cpu % 8 + 8}"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("quota", "cpus", "said"),
    [
        ("400000 100000", [0, 1, 8, 9], None),  # static policy: as many CPUs as the quota, whole cores of one node
        ("400000 100000", list(range(16)), "a quota of 4 CPUs on 16 CPUs (0-15)"),
        ("150000 100000", [0, 8], "a quota of 1.5 CPUs on 2 CPUs (0,8)"),
        ("max 100000", list(range(16)), "no CPU limit, and all 16 CPUs"),
        ("max 100000", [0, 1, 8, 9], None),  # newer kubelets take the quota from pods with CPUs of their own
        ("400000 100000", [0, 4, 8, 12], "(0,4,8,12) are on several NUMA nodes"),
        ("200000 100000", [0, 1], "the CPUs 0-1 share their cores"),
    ],
)
def test_the_reason_is_named(tmp_path: Path, quota: str, cpus: list[int], said: str | None) -> None:
    found = why_not_pinned(cpus, machine(tmp_path, quota=quota), POD)
    assert (found is None) == (said is None), found
    assert said is None or said in (found or "")


def test_outside_of_containers_nothing_is_said(tmp_path: Path) -> None:
    assert why_not_pinned([0, 4], machine(tmp_path), {}) is None
    assert why_not_pinned([0, 4], machine(tmp_path, quota="100000 100000"), {}) is not None


def test_a_divided_model_may_have_cpus_of_several_nodes(tmp_path: Path) -> None:
    root = machine(tmp_path, quota="400000 100000")
    assert why_not_pinned([0, 4, 8, 12], root, POD, num_ranks=2) is None
    assert "share their cores" in (why_not_pinned([0, 1, 4, 5], root, POD, num_ranks=2) or "")


def test_the_warning_has_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "usable_cpus", lambda: frozenset(range(16)))
    warn_if_not_pinned(1, machine(tmp_path, quota="400000 100000"))
    (record,) = caplog.records
    assert "not pinned" in record.getMessage()
    assert "deploy/kubernetes/kubelet.yaml" in record.getMessage()


def test_a_worker_computes_with_no_more_threads_than_its_quota_has_cpus(tmp_path: Path) -> None:
    num_cpus = len(os.sched_getaffinity(0))
    assert num_threads_for(None, machine(tmp_path / "a", quota="100000 100000")) == 1
    assert num_threads_for(None, machine(tmp_path / "b", quota="50000 100000")) == 1
    assert num_threads_for(None, machine(tmp_path / "c", quota="9900000 100000")) == num_cpus
    assert num_threads_for(None, machine(tmp_path / "d")) == num_cpus
