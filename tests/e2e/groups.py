"""Groups of processes that compute one model together, and what happens to one of these processes under load.

A group is a worker and its other ranks, or a worker and the other stages of its pipeline. The streams of a group in
which something happens move to another group, or wait for it. No token of them may differ.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headrace.protos import router_pb2
from tests.e2e.fleet import Process
from tests.e2e.serving import MODEL, Serve, alive, held_by
from tests.e2e.small_model import small_model
from tests.e2e.streams import run_streams
from tests.patience import until
from tests.soak_tally import Tally, most_seconds

IS_SOAK = os.environ.get("HEADRACE_SOAK") == "1"
NUM_ROUNDS = int(os.environ.get("HEADRACE_SOAK_ROUNDS", "200")) if IS_SOAK else 0
"""How often something happens in a soak; 0 otherwise."""
_MARK = "HEADRACE_TEST_GROUPS"
_SHARED_MEMORY = Path("/dev/shm")
# Stops of a process that gets a third of its time for a second.
_NUM_STOPS, _STOPPED_S, _RUNNING_S = 30, 0.02, 0.01
_BACK_S = 120.0


class Keeper:
    """Starts processes, and starts each again that has ended, as a service manager does."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._is_over = threading.Event()
        # They die with the thread that starts them.
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the processes."""
        self._is_over.set()
        self._thread.join()
        for process in self._processes:
            process.end()

    def _run(self) -> None:
        while not self._is_over.wait(0.05):
            for process in self._processes:
                if not process.is_alive:
                    process.start()


@contextmanager
def kept(processes: Sequence[Process]) -> Iterator[None]:
    """Keep these processes running. Prints the end of their logs, which pytest shows if a test has failed."""
    keeper = Keeper(processes)
    try:
        yield
    finally:
        keeper.close()
        for process in processes:
            print(process.tail())


def joining_worker(system: Serve, name: str, directory: Path, *flags: str) -> Process:
    """A worker of the small model that registers with the router of `system`, not started."""
    argv = ["-m", "headrace.worker", "--model", str(small_model()), "--name", MODEL, "--worker-id", name]
    argv += ["--listen", f"unix:{directory}/{name}.sock", "--router", system.record.router_address]
    return Process(name, [*argv, *flags])


@contextmanager
def nothing_left() -> Iterator[None]:
    """Whatever is started inside has ended outside, with all that it has started, however some of it ended. There are
    no new files in the shared memory that nobody uses."""
    mark, names = uuid.uuid4().hex, set(os.listdir(_SHARED_MEMORY))
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        del os.environ[_MARK]
    until(lambda: not _marked(mark), f"no process is left: {_marked(mark)}")
    left = [path for path in _SHARED_MEMORY.iterdir() if path.is_file() and path.name not in names]
    maps = "".join(map(_maps_of, Path("/proc").glob("[0-9]*"))) if left else ""
    assert [path for path in left if path.exists() and str(path) not in maps] == []


def _maps_of(process: Path) -> str:
    """The files that a process maps."""
    try:
        return (process / "maps").read_text()
    except OSError:
        return ""


def _marked(mark: str) -> dict[int, str]:
    """The processes that were started with a mark, and their commands."""
    wanted, found = f"{_MARK}={mark}".encode(), {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def tally_of(name: str) -> Tally:
    """The rounds of a soak so far. `make test` begins anew each time."""
    return Tally.of_environment(name) if IS_SOAK else Tally(name)


@dataclass(frozen=True)
class Group:
    """A worker, and the other processes that compute with it. The functions give the numbers of the last ones that were
    started, 0 for none; the second gets the worker's."""

    worker_id: str
    worker: Callable[[], int]
    others: Callable[[int], list[int]]

    def processes(self) -> list[int]:
        """All of them, the worker's own first."""
        worker = self.worker()
        return [worker, *self.others(worker)]


def served_worker(system: Serve, name: str = "worker-0") -> int:
    """The process of a worker that `headrace serve` has started; 0 while there is none."""
    return next(process.pid for process in system.record.processes if process.name == name) or 0


def ranks_behind(pid: int) -> list[int]:
    """The processes of the ranks among which a worker or a stage divides its model, besides its own."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            is_rank = parent == pid and b"headrace.worker.ranks.member" in (place / "cmdline").read_bytes()
        except OSError:
            continue
        if is_rank:
            found.append(int(place.name))
    return sorted(found)


class Scene(NamedTuple):
    """A group in which something happens, and the processes that it has. Its worker has so many blocks cached."""

    system: Serve
    group: Group
    processes: list[int]
    num_cached_blocks: int
    rng: random.Random

    def info(self) -> router_pb2.WorkerInfo | None:
        """What the router knows of the worker."""
        return self.system.workers().get(self.group.worker_id)

    def any(self) -> int:
        """One of the processes."""
        return self.rng.choice(self.processes)

    def last(self) -> int:
        """The last rank or stage."""
        return self.processes[-1]

    def is_at_work(self) -> bool:
        """Whether the router counts on the group, and it has work. Without work, nobody notices that it hangs."""
        info = self.info()
        return info is not None and info.state == router_pb2.WORKER_STATE_READY and info.load.num_running > 0


class Fault(NamedTuple):
    """What may happen to a group. `replaces` says whether its worker is another process afterwards; None: it may be.
    `check` is called when the group is back."""

    name: str
    happen: Callable[[Scene], None]
    replaces: bool | None = None
    check: Callable[[Scene], None] = lambda _: None


def kill_last(scene: Scene) -> None:
    """The last process dies."""
    os.kill(scene.last(), signal.SIGKILL)


def kill_any(scene: Scene) -> None:
    """A process dies."""
    os.kill(scene.any(), signal.SIGKILL)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def hang_last(scene: Scene) -> None:
    """The last process stands still until its group is not trusted any more."""
    with stopped(scene.last()):
        until(lambda: not scene.is_at_work(), "the group is not trusted any more", 60)


def hang_any(scene: Scene) -> None:
    """A process stands still until its group is not trusted any more."""
    with stopped(scene.any()):
        until(lambda: not scene.is_at_work(), "the group is not trusted any more", 60)


def slow_down_any(scene: Scene) -> None:
    """A process gets a third of its time for a second."""
    pid = scene.any()
    for _ in range(_NUM_STOPS):
        with stopped(pid):
            time.sleep(_STOPPED_S)
        time.sleep(_RUNNING_S)


async def survive(
    system: Serve,
    groups: Sequence[Group],
    faults: Sequence[Fault],
    asked: list[dict[str, Any]],
    num_rounds: int,
    tally: Tally,
) -> None:
    """Run streams again and again, and let something happen to a group each time: each fault once, then any. All have
    the texts of an undisturbed run and one end each, the group comes back, its old processes are gone, and no process
    of another group has changed. At the end, nothing is held."""
    undisturbed = await run_streams(system.base_url, asked)
    assert all(stream.is_done for stream in undisturbed)
    for number, rng in tally.rounds(num_rounds, most_seconds() if IS_SOAK else float("inf")):
        start_s = time.monotonic()
        fault = faults[number] if number < len(faults) else rng.choice(faults)
        before = {group.worker_id: group.processes() for group in groups}
        group = rng.choice(groups)
        cached = system.workers()[group.worker_id].load.num_cached_blocks
        scene = Scene(system, group, before[group.worker_id], cached, rng)
        told = f"round {number}: {fault.name} of {group.worker_id} {scene.processes}"
        if IS_SOAK:
            print(told, flush=True)
        streams = await run_streams(
            system.base_url,
            asked,
            disturb_behind=rng.randrange(2, asked[0]["max_tokens"] - 8),
            disturb=lambda fault=fault, scene=scene: asyncio.to_thread(fault.happen, scene),  # type: ignore[misc]
        )
        assert [stream.result for stream in streams] == [stream.result for stream in undisturbed], told
        await asyncio.to_thread(_until_back, groups, scene, fault, told)
        fault.check(scene)
        after = {group.worker_id: group.processes() for group in groups}
        assert {name for name in before if before[name] != after[name]} <= {group.worker_id}, told
        assert fault.replaces is not False or after == before, told
        tally.note(fault.name, time.monotonic() - start_s)
    await asyncio.to_thread(
        until, lambda: not held_by(system.workers().values()), "all blocks are free, and nothing is booked"
    )
    if IS_SOAK:
        print(f"{tally}, of {len(asked)} streams each", flush=True)


def _until_back(groups: Sequence[Group], scene: Scene, fault: Fault, told: str) -> None:
    """Wait until all groups serve, that of the scene with a new worker if the old one has to be replaced, and until its
    old processes are gone."""
    if fault.replaces:
        until(lambda: scene.group.worker() != scene.processes[0], f"{told}: another worker is started", _BACK_S)
    until(lambda: all(_serves(scene.system, group) for group in groups), f"{told}: all serve", _BACK_S)
    gone = set(scene.processes) - set(scene.group.processes())
    until(lambda: not any(map(alive, gone)), f"{told}: {gone} are gone")


def _serves(system: Serve, group: Group) -> bool:
    """Whether the router counts on a worker, and has heard of it since its process was started."""
    info = system.workers().get(group.worker_id)
    if info is None or info.state != router_pb2.WORKER_STATE_READY:
        return False
    age_s = _age_s(group.worker())
    return age_s is not None and info.report_age_ms / 1000 < age_s


def _age_s(pid: int) -> float | None:
    """Seconds since a process was started; None if it has ended."""
    if not alive(pid):
        return None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
