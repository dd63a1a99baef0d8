"""The files of models that clients create: the last host that has them removes them."""

from __future__ import annotations

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.cli.fleet.run_state import RunState
from headrace.cli.hosting.created import CreatedFiles
from headrace.cli.models.model_cache import locks_directory, model_directory
from tests.cli.test_status import record

GGUF = "/blobs/models/own-0123.gguf"


def made_directory() -> Path:
    """The directory of the model, with a file."""
    directory = model_directory("own-0123")
    directory.mkdir(parents=True)
    (directory / "openvino_model.bin").touch()
    return directory


def test_the_last_of_several_hosts_removes_the_files_and_the_lock(cache: Path) -> None:
    directory = made_directory()
    hosts = [CreatedFiles(GGUF) for _ in range(3)]
    for host in hosts:
        host.hold()
    assert not hosts[0].remove()
    assert not hosts[1].remove()
    assert directory.is_dir()
    assert hosts[2].remove()
    assert not directory.exists()
    assert [path.name for path in locks_directory().iterdir()] == ["own-0123.lock"]


def test_a_host_waits_until_another_has_removed_the_files_and_holds_new_ones(cache: Path) -> None:
    path = locks_directory() / "own-0123.held"
    files = CreatedFiles(GGUF)
    with ThreadPoolExecutor(1) as beside, path.open("w") as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        holding = beside.submit(files.hold)
        path.unlink()
        removing.close()
        holding.result()
    assert path.exists(), "the lock that others see"
    assert not CreatedFiles(GGUF).remove()
    files.release()
    assert CreatedFiles(GGUF).remove(), "nothing is left to remove"


def test_a_hold_after_its_release_holds_nothing(cache: Path) -> None:
    directory = made_directory()
    files = CreatedFiles(GGUF)
    files.release()  # its caller was cancelled
    files.hold()
    assert CreatedFiles(GGUF).remove()
    assert not directory.exists()


def test_files_that_a_server_serves_by_their_name_stay(cache: Path) -> None:
    directory = made_directory()
    state = RunState(9)
    serving = record(models=("own-0123",))
    state.write(serving)
    assert not CreatedFiles(GGUF).remove()
    assert directory.is_dir()
    state.remove(serving)
    assert CreatedFiles(GGUF).remove()
    assert not directory.exists()
