"""Topologies and plans from recorded trees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli.serving.machine import describe_machine, describe_plan
from headrace.cli.serving.machine import topology as topology_command
from headrace.cli.serving.placement import WorkerPlace, place_workers, told_of_sharing
from headrace.cli.serving.serve import serve
from headrace.cli.serving.topology import read_topology
from headrace.common.commands import CommandError
from headrace.common.kernel_files import format_list, parse_list

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def machine(
    root: Path,
    cores_of_node: dict[int, Iterable[tuple[int, ...]]],
    *,
    socket_of_node: dict[int, int] | None = None,
    memory_gib: dict[int, int] | None = None,
    cache_of: dict[int, str] | None = None,
) -> Path:
    """Write a tree: for each node its cores, each a tuple of SMT siblings."""
    numbers = sorted(cores_of_node)
    for node, cores in cores_of_node.items():
        cpus = [cpu for core in cores for cpu in core]
        write(
            root,
            {
                f"sys/devices/system/node/node{node}/cpulist": format_list(cpus),
                f"sys/devices/system/node/node{node}/distance": " ".join(
                    "10" if other == node else str(20 + abs(other - node)) for other in numbers
                ),
                f"sys/devices/system/node/node{node}/meminfo": f"Node {node} MemTotal:  "
                f"{(memory_gib or {}).get(node, 64) * GIB // 1024} kB",
            },
        )
        for core in cores:
            for cpu in core:
                base = f"sys/devices/system/cpu/cpu{cpu}"
                write(
                    root,
                    {
                        f"{base}/topology/thread_siblings_list": format_list(core),
                        f"{base}/topology/physical_package_id": (socket_of_node or {}).get(node, node),
                        f"{base}/cache/index3/level": 3,
                        f"{base}/cache/index3/shared_cpu_list": (cache_of or {}).get(cpu, format_list(cpus)),
                    },
                )
    return root


def two_sockets_with_smt(root: Path) -> Path:
    return machine(root, {0: [(i, i + 8) for i in range(4)], 1: [(i, i + 8) for i in range(4, 8)]})


@given(st.sets(st.integers(0, 200)))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert parse_list(format_list(cpus)) == set(cpus)


def test_two_sockets_of_four_cores_with_smt(tmp_path: Path) -> None:
    topology = read_topology(two_sockets_with_smt(tmp_path), range(16))
    assert [core.cpus for core in topology.cores_of(1)] == [(4, 12), (5, 13), (6, 14), (7, 15)]
    assert [core.socket for core in topology.cores] == [0] * 4 + [1] * 4
    assert topology.quota_cpus is None
    assert place_workers(topology) == (WorkerPlace(0, (0, 1, 2, 3), 4), WorkerPlace(1, (4, 5, 6, 7), 4))


def test_four_workers_on_two_nodes_get_half_a_node_each(tmp_path: Path) -> None:
    topology = read_topology(two_sockets_with_smt(tmp_path), range(16))
    assert [(place.node, place.cpus) for place in place_workers(topology, 4)] == [
        (0, (0, 1)),
        (0, (2, 3)),
        (1, (4, 5)),
        (1, (6, 7)),
    ]


def test_a_worker_of_two_ranks_has_two_nodes_or_two_halves_of_one(tmp_path: Path) -> None:
    topology = read_topology(two_sockets_with_smt(tmp_path), range(16))
    assert place_workers(topology, num_ranks=2) == (WorkerPlace(0, tuple(range(8)), 4, 2, (1,)),)
    assert place_workers(topology, 2, num_ranks=2) == (
        WorkerPlace(0, (0, 1, 2, 3), 2, 2),
        WorkerPlace(1, (4, 5, 6, 7), 2, 2),
    )
    assert place_workers(topology, 1, 1, num_ranks=4) == (WorkerPlace(0, tuple(range(8)), 1, 4, (1,)),)
    assert "node 0-1  CPUs 0-7  computes with 4 in each of 2 ranks" in describe_plan(
        place_workers(topology, num_ranks=2)
    )
    with pytest.raises(CommandError, match="--tensor-parallel 3 does not fit this machine"):
        place_workers(topology, num_ranks=3)


def test_ranks_follow_the_order_of_nodes(tmp_path: Path) -> None:
    nodes = {node: [(cpu,) for cpu in range(4 * node, 4 * node + 4)] for node in range(4)}
    topology = read_topology(machine(tmp_path, nodes, socket_of_node={0: 0, 1: 0, 2: 1, 3: 1}), range(16))
    assert [place.nodes for place in place_workers(topology, num_ranks=2)] == [(0, 1), (2, 3)]


def test_sub_numa_clusters_are_nodes_of_their_own(tmp_path: Path) -> None:
    nodes = {node: [(cpu,) for cpu in range(4 * node, 4 * node + 4)] for node in range(4)}
    root = machine(tmp_path, nodes, socket_of_node={0: 0, 1: 0, 2: 1, 3: 1})
    topology = read_topology(root, range(16))
    assert [place.node for place in place_workers(topology)] == [0, 1, 2, 3]
    assert {core.socket for core in topology.cores_of(1)} == {0}


def test_a_machine_that_knows_no_nodes_is_one(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 1000 kB"})
    topology = read_topology(tmp_path, range(3))
    assert [node.memory_bytes for node in topology.nodes] == [1_024_000]
    assert place_workers(topology) == (WorkerPlace(0, (0, 1, 2), 3),)


def test_a_cpuset_of_three_cores_is_all_there_is(tmp_path: Path) -> None:
    root = two_sockets_with_smt(tmp_path)
    write(root, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpuset.cpus.effective": "2-4"})
    topology = read_topology(root, range(16))
    assert [core.cpus for core in topology.cores] == [(2,), (3,), (4,)]
    assert place_workers(topology) == (WorkerPlace(0, (2, 3), 2), WorkerPlace(1, (4,), 1))


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_of_one_and_a_half_cpus_pays_for_one_thread(tmp_path: Path, version: int) -> None:
    root = two_sockets_with_smt(tmp_path)
    if version == 2:
        write(root, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "150000 100000"})
    else:
        base = "sys/fs/cgroup/cpu,cpuacct/job"
        write(root, {"proc/self/cgroup": "3:cpu,cpuacct:/job", f"{base}/cpu.cfs_quota_us": 150000})
        write(root, {f"{base}/cpu.cfs_period_us": 100000, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1})
    topology = read_topology(root, range(16))
    assert topology.quota_cpus == 1.5
    assert [(place.node, place.num_threads) for place in place_workers(topology)] == [(0, 1)]


def test_the_tightest_quota_up_the_tree_wins(tmp_path: Path) -> None:
    root = two_sockets_with_smt(tmp_path)
    write(root, {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"})
    write(root, {"sys/fs/cgroup/a/cpu.max": "300000 100000"})
    assert read_topology(root, range(16)).quota_cpus == 3.0


def test_a_node_without_memory_lends_its_cores_to_the_nearest_with_some(tmp_path: Path) -> None:
    nodes = {node: [(cpu,) for cpu in range(2 * node, 2 * node + 2)] for node in range(3)}
    topology = read_topology(machine(tmp_path, nodes, memory_gib={0: 64, 1: 0, 2: 64}), range(6))
    assert place_workers(topology) == (WorkerPlace(0, (0, 1, 2, 3), 4), WorkerPlace(2, (4, 5), 2))


def test_of_large_nodes_cores_are_left_free(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: [(cpu,) for cpu in range(32)], 1: [(cpu,) for cpu in range(32, 40)]})
    assert [(len(p.cpus), p.num_threads) for p in place_workers(read_topology(root, range(40)))] == [(32, 30), (8, 7)]


def test_cores_that_share_a_cache_stay_together(tmp_path: Path) -> None:
    """Two caches with interleaved CPU numbers, as on some machines."""
    caches = {cpu: "0,2,4,6" if cpu % 2 == 0 else "1,3,5,7" for cpu in range(8)}
    topology = read_topology(machine(tmp_path, {0: [(cpu,) for cpu in range(8)]}, cache_of=caches), range(8))
    assert [place.cpus for place in place_workers(topology, 2)] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_threads_that_do_not_fit_are_refused_with_the_most_that_do(tmp_path: Path) -> None:
    topology = read_topology(two_sockets_with_smt(tmp_path), range(16))
    assert {place.num_threads for place in place_workers(topology, 2, 3)} == {3}
    with pytest.raises(CommandError, match="choose --threads from 1 to 4"):
        place_workers(topology, 2, 5)


@pytest.mark.parametrize(
    ("num_workers", "quota", "usable"),
    [
        (8, None, ""),
        (9, None, "because 8 cores are usable here"),
        (100, None, "because 8 cores are usable here"),
        (2, 2, ""),
        (3, 2, "because a quota of 2 CPUs applies here"),
        (1, 0.5, ""),
    ],
)
def test_workers_that_share_cores_are_told_of_it(
    tmp_path: Path, num_workers: int, quota: float | None, usable: str
) -> None:
    topology = replace(read_topology(two_sockets_with_smt(tmp_path), range(16)), quota_cpus=quota)
    told = told_of_sharing(topology, place_workers(topology, num_workers))
    assert usable in told
    assert bool(told) is bool(usable)


@pytest.mark.parametrize("command", [topology_command, serve])
def test_commands_warn_of_workers_that_share_cores(command: click.Command, cache: Path) -> None:
    flags = ["--workers", "256", *(["--dry-run"] if command is serve else [])]
    result = CliRunner().invoke(command, flags)
    assert result.exit_code == 0, result.output
    assert "256 workers are so many that some share a core and slow one another down" in result.output
    assert "slow one another down" not in CliRunner().invoke(command, ["--workers", "1", *flags[2:]]).output


@settings(deadline=None)
@given(workers=st.integers(1, 40), cores=st.integers(1, 24), nodes=st.integers(1, 4))
def test_every_worker_has_a_core_and_none_is_given_twice_while_there_are_enough(
    workers: int, cores: int, nodes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    layout = {node: [(cpu,) for cpu in range(cores * node, cores * (node + 1))] for node in range(nodes)}
    topology = read_topology(machine(tmp_path_factory.mktemp("m"), layout), range(cores * nodes))
    places = place_workers(topology, workers)
    assert len(places) == workers
    assert all(1 <= place.num_threads <= len(place.cpus) for place in places)
    given_cpus = [cpu for place in places for cpu in place.cpus]
    if -(-workers // nodes) <= cores:
        assert len(given_cpus) == len(set(given_cpus))
    assert bool(told_of_sharing(topology, places)) is (len(given_cpus) > len(set(given_cpus)))


def test_this_machine_can_be_read() -> None:
    topology = read_topology()
    assert topology.cores
    assert place_workers(topology)[0].num_threads >= 1


def test_the_machine_and_the_plan_are_drawn(tmp_path: Path) -> None:
    root = two_sockets_with_smt(tmp_path)
    write(root, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "800000 100000"})
    topology = read_topology(root, range(16))
    assert describe_machine(topology).splitlines() == [
        "socket 0",
        "  node 0  64.0 GiB  cores 0-3  (SMT siblings 8-11)",
        "socket 1",
        "  node 1  64.0 GiB  cores 4-7  (SMT siblings 12-15)",
        "quota 8 CPUs",
    ]
    assert describe_plan(place_workers(topology)).splitlines() == [
        "worker-0  node 0  CPUs 0-3  computes with 4",
        "worker-1  node 1  CPUs 4-7  computes with 4",
    ]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("sse4_2 avx2 avx512f amx_tile", "kernels AMX: prompts are exact"),
        ("avx2 avx512f", "kernels AVX-512: prompts are exact"),
        (
            "avx2 avx_vnni",
            "kernels AVX2 with VNNI: in accuracy mode, prompts are exact in steps of up to 80 tokens, the default",
        ),
        (
            "avx2",
            "kernels AVX2: in performance mode and accuracy mode, prompts are exact in steps of up to 80 tokens, the "
            "default",
        ),
        ("sse4_2", "kernels none; the fast kernels of OpenVINO need at least AVX2"),
    ],
)
def test_it_is_told_in_which_steps_prompts_are_exact(tmp_path: Path, flags: str, text: str) -> None:
    root = machine(tmp_path, {0: [(0,)]})
    write(root, {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}"})
    assert describe_machine(read_topology(root, {0})).splitlines()[-1] == text
