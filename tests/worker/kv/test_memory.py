"""The available memory, read from recorded directory trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.common.host_memory import GIB, available_bytes
from headrace.worker.config import ConfigurationError
from headrace.worker.kv.memory import available_on_node, kv_cache_budget


def tree(root: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {20 * GIB // 1024} kB\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def cgroup2(path: str, limit: object, used: int = 0, inactive: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{used}\n",
        f"{base}/memory.stat": f"anon 1\ninactive_file {inactive}\n",
    }


def test_without_cgroups_the_kernel_decides(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, {})) == 20 * GIB


def test_a_cgroup_v2_limit_is_respected_less_what_is_used_and_cannot_be_reclaimed(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", **cgroup2("a/b", 4 * GIB, used=2 * GIB, inactive=GIB)}
    assert available_bytes(tree(tmp_path, files)) == 3 * GIB


def test_the_tightest_limit_up_the_tree_wins(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", **cgroup2("a/b", "max"), **cgroup2("a", 2 * GIB, used=GIB)}
    assert available_bytes(tree(tmp_path, files)) == GIB


def test_in_a_container_that_names_the_path_of_its_host_the_root_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/abc\n", **cgroup2("", 5 * GIB)}
    assert available_bytes(tree(tmp_path, files)) == 5 * GIB


def test_a_cgroup_v1_limit_is_respected_and_none_is_a_huge_number(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {"proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n"}
    for place, limit in (("", 9223372036854771712), ("/job", 6 * GIB)):
        files |= {
            f"{base}{place}/memory.limit_in_bytes": str(limit),
            f"{base}{place}/memory.usage_in_bytes": str(GIB),
            f"{base}{place}/memory.stat": "total_inactive_file 0\n",
        }
    assert available_bytes(tree(tmp_path, files)) == 5 * GIB


def test_this_machine_has_memory() -> None:
    assert available_bytes() > 0


def test_the_budget_is_what_is_asked_or_a_share() -> None:
    assert kv_cache_budget(3 * GIB, 0.5, 4 * GIB) == 3 * GIB
    assert kv_cache_budget(None, 0.5, 4 * GIB) == 2 * GIB
    with pytest.raises(ConfigurationError, match=r"asks for 5\.0 GiB, but only 4\.0 GiB"):
        kv_cache_budget(5 * GIB, 0.5, 4 * GIB)


def test_the_budget_is_no_more_than_the_node_has_for_it() -> None:
    assert kv_cache_budget(None, 0.2, 80 * GIB, most=6 * GIB) == 6 * GIB
    assert kv_cache_budget(None, 0.2, 80 * GIB, most=25 * GIB) == 16 * GIB
    assert kv_cache_budget(30 * GIB, 0.2, 80 * GIB, most=6 * GIB) == 30 * GIB


def test_what_a_node_has_is_its_free_memory_and_what_files_hold_of_it(tmp_path: Path) -> None:
    text = """\
Node 1 MemTotal:       16000000 kB
Node 1 MemFree:         1000 kB
Node 1 Active(file):      30 kB
Node 1 Inactive(file):     4 kB
Node 1 SReclaimable:       5 kB
Node 1 AnonPages:        700 kB
Node 1 HugePages_Total:     0
"""
    root = tree(tmp_path, {"sys/devices/system/node/node1/meminfo": text})
    assert available_on_node(1, root) == 1039 * 1024
    assert available_on_node(0, root) is None
