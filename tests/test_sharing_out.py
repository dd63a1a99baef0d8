"""Which process runs which test file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from tests.sharing_out import ByFleets

FLEETS = [f"tests/e2e/test_{number}.py" for number in range(6)]
OTHERS = [f"tests/worker/test_{number}.py" for number in range(6)]


class Process:
    """A process of a run: the tests that it was sent and has not run, in order."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.waiting: list[int] = []

    def send_runtest_some(self, tests: Sequence[int]) -> None:
        self.waiting += tests

    def shutdown(self) -> None:
        self.shutting_down = True

    def next_test(self) -> int | None:
        """It runs a test only when it knows the one after it, or that there is none."""
        return self.waiting[0] if len(self.waiting) > (0 if self.shutting_down else 1) else None


class Run:
    """A run with several processes, in which a test takes as long as its file says: a second where it says nothing."""

    def __init__(self, files: Sequence[str], processes: int, seconds: Mapping[str, int] | None = None) -> None:
        self._seconds = seconds or {}
        self._collected = [f"{file}::test_{letter}" for file in files for letter in "abc"]
        config = SimpleNamespace(
            option=SimpleNamespace(loadscopereorder=False), getvalue=lambda name: [f"{processes}*popen"]
        )
        self._scheduling = ByFleets(config)  # type: ignore[arg-type]
        self.processes = [Process(f"gw{number}") for number in range(processes)]
        for process in self.processes:
            self._scheduling.add_node(process)  # type: ignore[arg-type]
        for process in self.processes:
            self._scheduling.add_node_collection(process, self._collected)  # type: ignore[arg-type]
        self._scheduling.schedule()
        # What each process has run, as (seconds of its end, file), in order.
        self.ran: dict[str, list[tuple[int, str]]] = {process.gateway.id: [] for process in self.processes}

    def to_the_end(self) -> None:
        """Run every test."""
        now_s, running = 0, {}
        while True:
            for process in self.processes:
                if process not in running and (test := process.next_test()) is not None:
                    file = self._collected[test].partition("::")[0]
                    running[process] = now_s + self._seconds.get(file, 1), test, file
            if not running:
                break
            process, (now_s, test, file) = min(running.items(), key=lambda item: item[1][0])
            del running[process]
            process.waiting.remove(test)
            self.ran[process.gateway.id].append((now_s, file))
            self._scheduling.mark_test_complete(process, test)  # type: ignore[arg-type]

    def files(self, name: str) -> list[str]:
        """The files that a process has run, in order."""
        return list(dict.fromkeys(file for _, file in self.ran[name]))


def test_every_test_runs_once_and_those_of_a_file_in_one_process() -> None:
    run = Run(FLEETS + OTHERS, 3)
    run.to_the_end()
    assert sum(len(tests) for tests in run.ran.values()) == 3 * (len(FLEETS) + len(OTHERS))
    assert sorted(file for name in run.ran for file in run.files(name)) == sorted(FLEETS + OTHERS)
    assert all(process.shutting_down for process in run.processes)


def test_fleets_come_first_in_two_processes_and_other_files_in_the_third() -> None:
    run = Run(FLEETS + OTHERS, 3)
    run.to_the_end()
    for name in ("gw0", "gw1"):
        with_fleets = [file in FLEETS for file in run.files(name)]
        assert with_fleets == sorted(with_fleets, reverse=True)
        assert with_fleets[0]
    assert set(run.files("gw2")) <= set(OTHERS)


def test_a_file_that_takes_long_leaves_the_others_with_fleets_to_the_second_process() -> None:
    run = Run(FLEETS + OTHERS, 3, {FLEETS[0]: 100})
    run.to_the_end()
    assert [file for file in run.files("gw0") if file in FLEETS] == [FLEETS[0]]
    assert [file for file in run.files("gw1") if file in FLEETS] == FLEETS[1:]


def test_processes_that_have_run_all_fleets_take_other_files() -> None:
    run = Run(FLEETS[:2] + OTHERS, 3, {OTHERS[0]: 100})
    run.to_the_end()
    assert run.files("gw2") == OTHERS[:1]
    assert sorted(run.files("gw0")[1:] + run.files("gw1")[1:]) == OTHERS[1:]


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_no_more_than_two_fleets_run_at_a_time(processes: int) -> None:
    run = Run(FLEETS, processes)
    run.to_the_end()
    assert {name for name in run.ran if run.files(name)} <= {"gw0", "gw1"}
    assert sum(len(tests) for tests in run.ran.values()) == 3 * len(FLEETS)
    assert all(process.shutting_down for process in run.processes)
