"""What is missing is made together and once, and nobody waits for more than what is needed."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.architectures import every_run, exports
from tests.architectures.exports import Job
from tests.patience import patience

Run = Callable[[Sequence[Job], str], Iterator[Job]]


def job(root: Path, *names: str, version: str = "") -> Job:
    return Job("module", version, root, {name: root / name for name in names})


def finish(one: Job) -> Job:
    """Make its directories."""
    for directory in one.directories.values():
        directory.mkdir(exist_ok=True)
    return one


def test_each_version_of_transformers_has_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def run(jobs: Sequence[Job], version: str) -> Iterator[Job]:
        runs.append((version, [name for one in jobs for name in one.directories]))
        yield from map(finish, jobs)

    monkeypatch.setattr(exports, "_run", run)
    jobs = [job(tmp_path / "a", "x"), job(tmp_path / "b", "y", version="5.5.4"), job(tmp_path / "b", "z", "w")]
    exports.make(jobs)
    assert runs == [("", ["x", "z", "w"]), ("5.5.4", ["y"])]
    exports.make(jobs)
    assert len(runs) == 2, "all are there"


def is_held(root: Path) -> bool:
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_place_is_free_when_all_jobs_there_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(tmp_path / "a", "x"), job(tmp_path / "b", "y"), job(tmp_path / "b", "z")]
    has_paused, goes_on = [Event(), Event()], [Event(), Event()]

    def run(jobs: Sequence[Job], _version: str) -> Iterator[Job]:
        for number, one in enumerate(jobs):
            yield finish(one)
            if number < 2:
                has_paused[number].set()
                assert goes_on[number].wait(patience(30))

    monkeypatch.setattr(exports, "_run", run)
    with ThreadPoolExecutor(1) as executor:
        made = executor.submit(exports.make, jobs)
        try:
            for number in range(2):
                assert has_paused[number].wait(patience(30))
                assert [is_held(tmp_path / name) for name in "ab"] == [False, True]
                exports.make(jobs[: number + 1])
                goes_on[number].set()
        finally:
            for event in goes_on:
                event.set()
        made.result()
    assert not is_held(tmp_path / "b")


def test_what_every_run_needs_is_known_before_it_is_made() -> None:
    names = {name for one in every_run.jobs() for name in one.directories}
    assert {"llama", "minilm", "ranker", "qwen3-reranker", "gemma3", "modernbert", "gpt-oss"} <= names
