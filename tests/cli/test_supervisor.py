"""The supervisor, with tiny programs in place of the roles."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.plan import ProcessSpec
from headrace.cli.serving.running import waiting_line
from headrace.cli.serving.supervisor import ProcessState, RestartRule, StopRule, SupervisedProcess, Supervisor
from tests.patience import patience

BOUND_S = 20.0
QUICK = RestartRule(first_delay_s=0.01, longest_delay_s=0.02, calm_s=30.0)

# Says "up" and waits for SIGTERM, at which it says "bye".
OBEDIENT = """
import signal, sys
def bye(*_):
    print("bye", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, bye)
print("up", flush=True)
while True: signal.pause()
"""
STUBBORN = 'import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint("up", flush=True)\nsignal.pause()'


def spec(name: str, code: str, *args: str, stop_phase: int = 0, cpus: tuple[int, ...] = ()) -> ProcessSpec:
    return ProcessSpec(name, name, (sys.executable, "-c", code, *args), f"unix:/nowhere/{name}", cpus, stop_phase)


# Says what the file holds that it was given, and adds to it.
REMEMBERING = """
import os, sys
descriptor = int(sys.argv[2].removeprefix("fd:"))
print(sys.argv[1], os.pread(descriptor, 100, 0).decode() or "nothing", flush=True)
os.pwrite(descriptor, b"x" * (os.fstat(descriptor).st_size + 1), 0)
import signal; signal.pause()
"""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in other processes, and so can only be looked at again and again."""
    async with asyncio.timeout(patience(BOUND_S)):
        while not condition():
            await asyncio.sleep(0.005)


class System:
    """A running supervisor with its log lines."""

    def __init__(self, supervisor: Supervisor, stream: io.BytesIO) -> None:
        self.supervisor = supervisor
        self._stream = stream

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().decode().splitlines()

    def process(self, name: str) -> SupervisedProcess:
        return next(process for process in self.supervisor.processes if process.spec.name == name)

    def pid_of(self, name: str) -> int:
        """The id of a process that runs. A signal to process 0 would end these tests."""
        pid = self.process(name).pid
        assert pid, f"{name} does not run"
        return pid

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition)

    async def until_logged(self, line: str, times: int = 1) -> None:
        await self.until(lambda: self.lines.count(line) >= times)


@asynccontextmanager
async def running(
    *specs: ProcessSpec, stop_rule: StopRule | None = None, restart_rule: RestartRule = QUICK
) -> AsyncIterator[System]:
    """Start; at the end, stop and wait."""
    stream = io.BytesIO()
    log = LogSink(stream)
    supervisor = Supervisor(specs, log, restart_rule=restart_rule, stop_rule=stop_rule or StopRule())
    task = asyncio.create_task(supervisor.run())
    system = System(supervisor, stream)
    try:
        yield system
    finally:
        supervisor.stop()
        await asyncio.wait_for(task, patience(BOUND_S))
        log.close(patience(BOUND_S))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_every_line_has_the_name_of_its_process_before_it() -> None:
    both = 'import sys\nprint("out")\nprint("err", file=sys.stderr)\nprint("no end", end="", flush=True)\n' + OBEDIENT
    async with running(spec("one", both), spec("two", OBEDIENT)) as system:
        await system.until_logged("two | up")
        await system.until_logged("one | no endup")
        assert "one | out" in system.lines
        assert "one | err" in system.lines


async def test_a_line_without_end_is_cut_and_not_kept_growing() -> None:
    code = 'print("x" * 200_000, end="", flush=True)\n' + OBEDIENT
    async with running(spec("one", code)) as system:
        await system.until(lambda: any(line.endswith("up") for line in system.lines))
    assert sum(line.count("x") for line in system.lines) == 200_000


async def test_a_process_that_is_killed_is_started_again() -> None:
    async with running(spec("one", OBEDIENT), spec("two", OBEDIENT)) as system:
        await system.until_logged("one | up")
        await system.until_logged("two | up")
        first, other = system.process("one").pid, system.process("two").pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await system.until_logged("one | up", times=2)
        assert system.process("one").pid not in (None, first)
        assert system.process("one").num_restarts == 1
        assert system.process("two").pid == other
        assert "serve | one was killed by SIGKILL; restarting it at once" in system.lines


async def test_a_process_that_keeps_dying_is_started_with_growing_delays() -> None:
    async with running(spec("one", "import sys; sys.exit(7)")) as system:
        await system.until(lambda: system.process("one").num_restarts >= 4)
    whens = [
        line.rpartition("restarting it ")[2]
        for line in system.lines
        if line.startswith("serve | one ended with status 7")
    ]
    assert whens[:4] == ["at once", "in 0.01 s", "in 0.02 s", "in 0.02 s"]


def test_who_waits_is_told_what_loads_or_what_ended() -> None:
    worker = SupervisedProcess(spec("worker-0", ""))
    assert waiting_line(15.2, ["a"], [worker]) == "not ready after 15 s: a is still loading"
    assert waiting_line(15.2, ["a", "b"], [worker]) == "not ready after 15 s: a, b are still loading"
    worker.num_restarts = 1
    assert "15 s: worker-0 ended and started again; the log above shows why" in waiting_line(15.2, ["a"], [worker])


def test_restart_delays_double_up_to_the_longest() -> None:
    rule = RestartRule()
    assert [rule.delay_s(deaths) for deaths in range(1, 9)] == [0, 0.5, 1, 2, 4, 8, 10, 10]
    assert rule.delay_s(10_000) == 10


async def test_a_refusal_stops_everything_and_is_not_tried_again() -> None:
    stream = io.BytesIO()
    log = LogSink(stream)
    refuses = 'import sys\nprint("error: no such thing; bring one", file=sys.stderr)\nsys.exit(2)'
    supervisor = Supervisor([spec("good", OBEDIENT), spec("bad", refuses)], log, restart_rule=QUICK)
    await asyncio.wait_for(supervisor.run(), patience(BOUND_S))
    log.close(patience(BOUND_S))
    good, bad = supervisor.processes
    assert supervisor.failure == "no such thing; bring one"
    assert (bad.state, bad.num_restarts) == (ProcessState.FAILED, 0)
    assert (good.state, good.pid) == (ProcessState.STOPPED, None)


@pytest.mark.parametrize("is_essential", [False, True])
async def test_a_process_that_has_served_and_is_refused_then_is_started_again(
    tmp_path: Path, is_essential: bool
) -> None:
    serves_once = f"""
import pathlib, sys, time
been = pathlib.Path({str(tmp_path / "been")!r})
if been.exists():
    sys.exit(2)
been.touch()
time.sleep(0.3)
sys.exit(1)
"""
    rule = RestartRule(first_delay_s=0.01, longest_delay_s=0.02, calm_s=0.2)
    bad = replace(spec("bad", serves_once), is_essential=is_essential)
    async with running(spec("good", OBEDIENT), bad, restart_rule=rule) as system:
        await system.until(lambda: system.process("bad").num_restarts >= 3)
        assert system.supervisor.failure is None
        assert system.process("good").pid is not None


async def test_a_refusal_of_a_process_that_is_not_essential_is_its_own() -> None:
    bad = replace(spec("bad", "import sys; sys.exit(2)"), is_essential=False)
    async with running(spec("good", OBEDIENT), bad) as system:
        await system.until(lambda: system.process("bad").state is ProcessState.FAILED)
        await system.until_logged("serve | bad refused to start and is not started again")
        assert system.supervisor.failure is None
        assert system.process("good").pid is not None


async def test_a_death_by_a_signal_without_name_is_a_death_as_well() -> None:
    async with running(spec("one", f"import os\nos.kill(os.getpid(), {signal.SIGRTMIN + 1})")) as system:
        await system.until(lambda: system.process("one").num_restarts >= 1)
    assert f"serve | one was killed by signal {signal.SIGRTMIN + 1}; restarting it at once" in system.lines


async def test_processes_stop_in_their_order() -> None:
    late, early = spec("late", OBEDIENT, stop_phase=1), spec("early", OBEDIENT)
    async with running(late, early) as system:
        await system.until_logged("late | up")
        await system.until_logged("early | up")
    assert system.lines.index("early | bye") < system.lines.index("late | bye")
    assert system.supervisor.failure is None


async def test_a_process_that_does_not_stop_is_killed_with_its_group() -> None:
    child = f'import subprocess, sys\nprint(subprocess.Popen([sys.executable, "-c", {STUBBORN!r}]).pid, flush=True)\n'
    async with running(
        spec("one", child + STUBBORN), stop_rule=StopRule(last_phase_from_s=0.1, kill_from_s=0.2)
    ) as system:
        await system.until(lambda: sum(line == "one | up" for line in system.lines) == 2)
        pids = [int(line.removeprefix("one | ")) for line in system.lines if line != "one | up"]
    assert "serve | one did not stop in time; killing it" in system.lines
    assert len(pids) == 1
    await system.until(lambda: not alive(pids[0]))


async def test_kill_ends_stubborn_processes_at_once() -> None:
    async with running(spec("one", STUBBORN)) as system:
        await system.until_logged("one | up")
        system.supervisor.kill()
        await system.until(lambda: system.process("one").state == ProcessState.STOPPED)
    assert "serve | one did not stop in time; killing it" not in system.lines


async def test_a_stop_does_not_wait_for_a_restart_that_is_due() -> None:
    stream = io.BytesIO()
    log = LogSink(stream)
    rule = RestartRule(first_delay_s=3600, longest_delay_s=3600)
    supervisor = Supervisor([spec("one", "import sys; sys.exit(1)")], log, restart_rule=rule)
    task = asyncio.create_task(supervisor.run())
    system = System(supervisor, stream)
    await system.until(lambda: supervisor.processes[0].num_restarts == 2)
    supervisor.stop()
    await asyncio.wait_for(task, patience(BOUND_S))
    log.close(patience(BOUND_S))
    assert supervisor.processes[0].state == ProcessState.STOPPED


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
async def test_a_process_runs_on_its_cpus_only() -> None:
    cpu = max(os.sched_getaffinity(0))
    code = "import os\nprint(sorted(os.sched_getaffinity(0)), flush=True)\n" + OBEDIENT
    async with running(spec("one", code, cpus=(cpu,))) as system:
        await system.until_logged(f"one | [{cpu}]")
        assert len(os.sched_getaffinity(0)) > 1


async def test_the_current_directory_is_not_where_modules_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import sys\nprint('' in sys.path, flush=True)\n" + OBEDIENT
    async with running(spec("one", code)) as system:
        await system.until_logged("one | False")


async def test_a_socket_left_by_a_killed_process_is_removed_before_the_next_start(tmp_path: Path) -> None:
    socket = tmp_path / "one.sock"
    socket.touch()
    code = "import os, sys\nprint(os.path.exists(sys.argv[1]), flush=True)\n" + OBEDIENT
    left = ProcessSpec("one", "one", (sys.executable, "-c", code, str(socket)), f"unix:{socket}")
    async with running(left) as system:
        await system.until_logged("one | False")


async def test_no_process_outlives_a_supervisor_that_is_killed() -> None:
    program = f"""
import asyncio, sys
from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.plan import ProcessSpec
from headrace.cli.serving.supervisor import Supervisor
argv = (sys.executable, "-c", {STUBBORN.replace('"up"', "__import__('os').getpid()")!r})
specs = [ProcessSpec(name, name, argv, "unix:/nowhere") for name in ("one", "two")]
asyncio.run(Supervisor(specs, LogSink(sys.stdout.buffer)).run())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    pids = [int((await supervisor.stdout.readline()).split(b"| ")[1]) for _ in range(2)]
    assert all(alive(pid) for pid in pids)
    supervisor.kill()
    await supervisor.wait()
    await until(lambda: not any(alive(pid) for pid in pids))


def test_a_log_that_nobody_reads_costs_lines_and_never_time() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "wb", buffering=0) as writer:
        log = LogSink(writer)
        for _ in range(30_000):
            log.line("one", b"x" * 100)
        log.close(0.01)
        first = reader.readline()
    assert first == b"one | " + b"x" * 100 + b"\n"


def num_memories() -> int:
    """The files in memory that this process has open."""
    descriptors = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:headrace-" in name for name in descriptors)


async def test_the_next_process_gets_the_memory_of_the_one_before_and_no_other_gets_it() -> None:
    with_memory = [replace(spec(name, REMEMBERING), memory_flag="--memory") for name in ("one", "two")]
    before = num_memories()
    async with running(*with_memory) as system:
        await system.until_logged("one | --memory nothing")
        await system.until_logged("two | --memory nothing")
        os.kill(system.pid_of("one"), signal.SIGKILL)
        await system.until_logged("one | --memory x")
        os.kill(system.pid_of("one"), signal.SIGKILL)
        await system.until_logged("one | --memory xx")
        assert num_memories() == before + 2
    assert num_memories() == before, "freed with the last process"
