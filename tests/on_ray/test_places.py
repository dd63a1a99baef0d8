"""Places of a host: none is taken twice, and a dead process has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headrace.cli.serving.placement import WorkerPlace
from headrace.ray.commands import Node, worker_id
from headrace.ray.places import claim_places

PLACES = (WorkerPlace(0, (0, 1), 2), WorkerPlace(1, (2, 3), 2), WorkerPlace(1, (4, 5), 1))


def test_a_place_is_taken_once_until_it_is_given_back(tmp_path: Path) -> None:
    first = claim_places(PLACES, 1, tmp_path)
    second = claim_places(PLACES, 2, tmp_path)
    assert first is not None
    assert second is not None
    assert (first.numbers, first.cpus, first.num_threads, first.memory_node) == ((0,), (0, 1), 2, 0)
    assert (second.numbers, second.cpus, second.num_threads, second.memory_node) == ((1, 2), (2, 3, 4, 5), 3, 1)
    assert claim_places(PLACES, 1, tmp_path) is None
    first.release()
    again = claim_places(PLACES, 1, tmp_path)
    assert again is not None
    assert again.numbers == (0,)
    again.release()
    second.release()


def test_who_does_not_get_all_places_keeps_none(tmp_path: Path) -> None:
    first = claim_places(PLACES, 1, tmp_path)
    assert first is not None
    assert claim_places(PLACES, 3, tmp_path) is None
    rest = claim_places(PLACES, 2, tmp_path)
    assert rest is not None
    rest.release()
    first.release()


def test_a_worker_over_several_nodes_has_memory_of_none(tmp_path: Path) -> None:
    claim = claim_places(PLACES, 2, tmp_path)
    assert claim is not None
    assert claim.memory_node is None
    assert worker_id(Node("id", "host-a", "10.0.0.1"), claim) == "host-a/numa-0+1"
    claim.release()


def test_the_kernel_gives_the_places_of_a_killed_process_back(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from headrace.cli.serving.placement import WorkerPlace\n"
        "from headrace.ray.places import claim_places\n"
        f"claim = claim_places([WorkerPlace(0, (0,), 1)], 1, Path({str(tmp_path)!r}))\n"
        "print(claim.numbers, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "(0,)\n"
        assert claim_places(PLACES[:1], 1, tmp_path) is None
        other.kill()
    claim = claim_places(PLACES[:1], 1, tmp_path)
    assert claim is not None
    claim.release()
