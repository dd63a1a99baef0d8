"""Which CPUs each rank gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.ranks.places import places_of


def machine(root: Path, nodes: Mapping[int, str], with_memory: str) -> Path:
    """The kernel's files of a machine whose nodes have these CPUs."""
    directory = root / "sys/devices/system/node"
    for number, cpus in nodes.items():
        (directory / f"node{number}").mkdir(parents=True)
        (directory / f"node{number}/cpulist").write_text(cpus)
        distances = " ".join("10" if other == number else "20" for other in nodes)
        (directory / f"node{number}/distance").write_text(distances)
    (directory / "has_memory").write_text(with_memory)
    return root


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "expected"),
    [
        (range(8), 2, [(0, 1), (2, 3, 4, 5, 6, 7)]),
        (range(8), 4, [(0,), (1,), (2, 3, 4), (5, 6, 7)]),
        ([2, 3, 4, 5], 2, [(2, 3), (4, 5)]),
        ([0, 5], 2, [(0,), (5,)]),
    ],
)
def test_each_rank_has_a_node_or_a_part_of_one(
    cpus: Sequence[int], num_ranks: int, expected: Sequence[tuple[int, ...]], tmp_path: Path
) -> None:
    root = machine(tmp_path, {0: "0-1", 1: "2-7"}, "0-1")
    assert list(places_of(cpus, num_ranks, root)) == expected


def test_a_rank_may_have_several_nodes(tmp_path: Path) -> None:
    root = machine(tmp_path, {node: f"{2 * node}-{2 * node + 1}" for node in range(4)}, "0-3")
    assert places_of(range(8), 2, root) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_cpus_of_a_node_without_memory_go_to_one_that_has_some(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-1", 1: "2-3"}, "0")
    assert places_of(range(4), 2, root) == ((0, 1), (2, 3))


def test_a_machine_without_nodes_is_one(tmp_path: Path) -> None:
    assert places_of([4, 6], 2, tmp_path) == ((4,), (6,))


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "problem"), [(range(8), 3, "CPUs of 2 NUMA nodes"), ([1], 2, "a CPU for each rank")]
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    cpus: Sequence[int], num_ranks: int, problem: str, tmp_path: Path
) -> None:
    root = machine(tmp_path, {0: "0-1", 1: "2-7"}, "0-1")
    with pytest.raises(ConfigurationError, match=problem):
        places_of(cpus, num_ranks, root)
