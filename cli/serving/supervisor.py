"""Keeps the processes of one host running, and stops them in order.

    start all -> one dies: restart it, first at once, then with growing delays
              -> one exits with status 2: it refuses its flags; stop all, or only this one if it is not essential.
                 One that has run for long is started again: something beside the flags is wrong
              -> add(), remove(): processes that come and go while the others run
              -> stop(): SIGTERM phase by phase, SIGKILL after a time limit

No process outlives the supervisor, even if that is killed, because launch.py starts each one.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.plan import ProcessSpec
from headrace.common import launch
from headrace.common.commands import EXIT_FAILED, EXIT_REFUSED, CommandError

_MAX_LINE_BYTES = 1 << 16
_LAST_WORDS_TIMEOUT_S = 0.5


class ProcessState(enum.Enum):
    """The state of a process. It does not say whether the process answers requests."""

    STARTING = "starting"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RestartRule:
    """When to restart a process that died: first at once, then after delays that double. Times are in seconds."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 10.0
    calm_s: float = 30.0

    def delay_s(self, num_deaths: int) -> float:
        """The delay after the `num_deaths`-th death in a row, from 1. A run of at least `calm_s` ends the row."""
        if num_deaths <= 1:
            return 0.0
        # The bound of the exponent avoids an overflow. The delay reaches its maximum long before.
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(num_deaths - 2, 30))


@dataclass(frozen=True, slots=True)
class StopRule:
    """Time limits of an orderly stop, in seconds from its start: for all phases except the last, and for the whole."""

    last_phase_from_s: float = 3.2
    kill_from_s: float = 4.0


@dataclass(slots=True)
class SupervisedProcess:
    """A process and its history, which only the Supervisor changes. `started_s` is Unix time, `last_ending` is how it
    ended last, and `leaving` is set when it must not be started again."""

    spec: ProcessSpec
    state: ProcessState = ProcessState.STARTING
    pid: int | None = None
    started_s: float = 0.0
    num_restarts: int = 0
    last_error: str | None = None
    last_ending: str = ""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Supervisor:
    """Owns the processes of `specs`. Use it on one event loop, and call `run` once."""

    specs: Sequence[ProcessSpec]
    log: LogSink
    restart_rule: RestartRule = field(default_factory=RestartRule)
    stop_rule: StopRule = field(default_factory=StopRule)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    on_change: Callable[[], None] = lambda: None
    processes: list[SupervisedProcess] = field(init=False)
    failure: str | None = field(init=False, default=None)
    _stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _keepers: dict[str, asyncio.Task[None]] = field(init=False, default_factory=dict)
    _memories: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.processes = [SupervisedProcess(spec) for spec in self.specs]

    async def run(self) -> None:
        """Start all processes and return when all have ended.

        `failure` is then the error of the process that refused its flags, or None after an orderly stop.
        """
        for process in self.processes:
            self._start(process)
        await self._stopping.wait()
        await self._stop_in_order()
        await asyncio.gather(*self._keepers.values())
        while self._memories:
            os.close(self._memories.popitem()[1])

    def stop(self) -> None:
        """Start an orderly stop."""
        self._stopping.set()
        for process in self.processes:
            process.leaving.set()

    def kill(self) -> None:
        """Kill all processes at once."""
        self.stop()
        for process in self.processes:
            self._signal(process, signal.SIGKILL)

    def add(self, specs: Sequence[ProcessSpec]) -> list[SupervisedProcess]:
        """Start more processes. `run` must be running; after `stop`, nothing is started."""
        added = [SupervisedProcess(spec) for spec in specs if not self._stopping.is_set()]
        for process in added:
            assert process.spec.name not in self._keepers, f"{process.spec.name} is running"
            self.processes.append(process)
            self._start(process)
        return added

    async def remove(self, processes: Sequence[SupervisedProcess]) -> None:
        """Stop processes in an orderly way, kill those that take too long, and forget them."""
        for process in processes:
            process.leaving.set()
            if process.pid is not None:
                self._change(process, ProcessState.STOPPING)
                self._signal(process, signal.SIGTERM)
        keepers = [self._keepers[process.spec.name] for process in processes]
        if keepers:
            await asyncio.wait(keepers, timeout=self.stop_rule.kill_from_s)
        self._kill_late(processes)
        await asyncio.gather(*keepers)
        for process in processes:
            self.processes.remove(process)
            del self._keepers[process.spec.name]
            if (memory := self._memories.pop(process.spec.name, None)) is not None:
                os.close(memory)
        self.on_change()

    def _start(self, process: SupervisedProcess) -> None:
        self._keepers[process.spec.name] = asyncio.create_task(self._keep(process))

    async def _keep(self, process: SupervisedProcess) -> None:
        num_deaths, has_served = 0, False
        while not process.leaving.is_set():
            started_s = time.monotonic()
            status = await self._run_once(process)
            process.pid, process.last_ending = None, _ending(status)
            if process.leaving.is_set():
                break
            if status == EXIT_REFUSED and not has_served:
                self._give_up(process)
                return
            was_calm = status != EXIT_REFUSED and time.monotonic() - started_s >= self.restart_rule.calm_s
            has_served |= was_calm
            num_deaths = 1 if was_calm else num_deaths + 1
            await self._wait_to_restart(process, self.restart_rule.delay_s(num_deaths))
        self._change(process, ProcessState.STOPPED)

    async def _wait_to_restart(self, process: SupervisedProcess, delay_s: float) -> None:
        when = f"in {delay_s:g} s" if delay_s else "at once"
        self.log.line("serve", f"{process.spec.name} {process.last_ending}; restarting it {when}")
        process.num_restarts += 1
        self._change(process, ProcessState.RESTARTING)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await process.leaving.wait()

    def _give_up(self, process: SupervisedProcess) -> None:
        process.last_error = process.last_error or f"{process.spec.name} refused to start; its log above says why"
        self._change(process, ProcessState.FAILED)
        if process.spec.is_essential:
            self.failure = process.last_error
            self.stop()
        else:
            self.log.line("serve", f"{process.spec.name} refused to start and is not started again")

    async def _run_once(self, process: SupervisedProcess) -> int | None:
        """Start the process and wait until it ends. Returns its exit status, as Popen.returncode; None if it could not
        be started."""
        _remove_stale_socket(process.spec.address)
        process.last_error = None
        try:
            child = self._spawn(process.spec)
        except OSError as error:
            self.log.line("serve", f"{process.spec.name} could not be started: {error}")
            return None
        process.pid, process.started_s = child.pid, time.time()
        self._change(process, ProcessState.STARTING)
        lines = _Lines(lambda line: self._relay(process, line))
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: lines, child.stdout)
        status = await _wait_for_exit(child)
        # A grandchild may hold the pipe open, but all output of the child itself has arrived by now.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_TIMEOUT_S):
                await lines.closed.wait()
        transport.close()
        return status

    def _spawn(self, spec: ProcessSpec) -> subprocess.Popen[bytes]:
        mask = ",".join(map(str, spec.cpus))
        argv = [*spec.argv]
        descriptors = []
        if spec.memory_flag is not None:
            descriptors.append(self._memory_of(spec))
            argv += [spec.memory_flag, f"fd:{descriptors[0]}"]
        return subprocess.Popen(
            launch.with_parent(argv, mask),
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**self.environment, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"},
        )

    def _memory_of(self, spec: ProcessSpec) -> int:
        """The in-memory file that each process of a spec inherits in turn. The kernel frees it when the last of them
        and this process have ended."""
        if spec.name not in self._memories:
            self._memories[spec.name] = os.memfd_create(f"headrace-{spec.name}", os.MFD_CLOEXEC)
        return self._memories[spec.name]

    def _relay(self, process: SupervisedProcess, line: bytes) -> None:
        if line.startswith(b"error: "):
            process.last_error = line.removeprefix(b"error: ").decode(errors="replace")
        self.log.line(process.spec.name, line)

    async def _stop_in_order(self) -> None:
        begun_s = time.monotonic()
        phases = sorted({process.spec.stop_phase for process in self.processes})
        for phase in phases:
            members = [process for process in self.processes if process.spec.stop_phase == phase]
            for process in members:
                if process.pid is not None:
                    self._change(process, ProcessState.STOPPING)
                    self._signal(process, signal.SIGTERM)
            last = phase == phases[-1]
            bound_s = self.stop_rule.kill_from_s if last else self.stop_rule.last_phase_from_s
            keepers = [self._keepers[process.spec.name] for process in members]
            await asyncio.wait(keepers, timeout=max(0.0, begun_s + bound_s - time.monotonic()))
        self._kill_late(self.processes)

    def _kill_late(self, processes: Sequence[SupervisedProcess]) -> None:
        for process in processes:
            if process.pid is not None:
                self.log.line("serve", f"{process.spec.name} did not stop in time; killing it")
                self._signal(process, signal.SIGKILL)

    def _signal(self, process: SupervisedProcess, number: signal.Signals) -> None:
        if process.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)

    def _change(self, process: SupervisedProcess, state: ProcessState) -> None:
        process.state = state
        self.on_change()


class StopSignals:
    """Stops what a supervisor runs at the first SIGINT, SIGTERM or SIGHUP, and kills it at the next one."""

    def __init__(self, supervisor: Supervisor, log: LogSink) -> None:
        self._supervisor = supervisor
        self._log = log
        self.count = 0

    def listen(self) -> None:
        """Handle them from now on, in the running loop. A SIGHUP that nohup has turned off stays so."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._on_signal)

    def exit_status(self) -> int:
        """The exit status once the supervisor has ended. Raises CommandError with the message of a process that refused
        its flags."""
        if self._supervisor.failure is not None:
            raise CommandError(self._supervisor.failure)
        return EXIT_FAILED if self.count > 1 else 0

    def _on_signal(self) -> None:
        self.count += 1
        if self.count == 1:
            self._log.line("serve", "stopping; press Ctrl-C again to kill")
            self._supervisor.stop()
        else:
            self._supervisor.kill()


class _Lines(asyncio.Protocol):
    """Splits the output of a pipe into lines. Lines beyond a maximum length are cut."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self.closed = asyncio.Event()
        self._on_line = on_line
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line.rstrip(b"\r"))
        if len(self._rest) > _MAX_LINE_BYTES:
            self._on_line(self._rest)
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._on_line(self._rest)
        self.closed.set()


async def _wait_for_exit(child: subprocess.Popen[bytes]) -> int:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    pidfd = os.pidfd_open(child.pid)
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return child.wait()


def _remove_stale_socket(address: str) -> None:
    """Remove the socket that a killed process left behind."""
    if address.startswith("unix:"):
        with contextlib.suppress(OSError):
            os.unlink(address.removeprefix("unix:"))


def _ending(status: int | None) -> str:
    if status is None:
        return "could not be started"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
