"""The processes of one actor: kept running by a supervisor, stopped in order, and never left behind.

A process that dies is started again at once, where its cached prefixes are. If that does not help, the actor says that
it is unhealthy, and Ray makes another one, maybe elsewhere. The kernel kills the processes of an actor that dies. An
actor whose raylet has died ends by itself, because Ray cannot end it, and has already started another one.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, BinaryIO, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.plan import ProcessSpec
from headrace.cli.serving.supervisor import StopRule, SupervisedProcess, Supervisor
from headrace.common.transport.channels import Transport

log = logging.getLogger("ray.serve")

_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 2.0
# So many starts of a process within this time are too many.
_MOST_RESTARTS = 3
_RESTARTS_WITHIN_S = 60.0
# What remains of a limit for the processes that stop last, and for their end.
_LAST_PHASE_S = 6.0
_KILL_S = 2.0
# Ray sets it for actors, and numerical libraries would take it for their number of threads.
_OF_RAY = ("OMP_NUM_THREADS",)


# Ray's variable for the niceness of its workers, of which actors are some.
NICENESS = "RAY_worker_niceness"


class ProcessesError(RuntimeError):
    """A process does not run, or refused its arguments. The message is a sentence."""


class Processes:
    """The processes of `specs`, for one event loop. `drain_s` is how long the slowest may take to stop."""

    def __init__(self, specs: Sequence[ProcessSpec], drain_s: float) -> None:
        rule = StopRule(drain_s + _KILL_S, drain_s + _LAST_PHASE_S + _KILL_S)
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RAY}
        sink = LogSink(cast("BinaryIO", _ReplicaLog()))
        self._supervisor = Supervisor(
            specs, sink, stop_rule=rule, environment=environment, on_change=self._note_restarts
        )
        self._restarts_s: list[float] = []
        self._num_restarts = 0
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start all processes. They inherit the niceness of the actor, which is 15 unless Ray is told otherwise."""
        if (niceness := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
            log.warning(
                "niceness is %d, so other programs of this host get the CPUs first; start Ray with %s=0",
                niceness,
                NICENESS,
            )
        self._running = asyncio.create_task(self._supervisor.run(), name="supervisor")

    @property
    def first(self) -> SupervisedProcess:
        """The first one."""
        return self._supervisor.processes[0]

    def check(self) -> None:
        """Raise ProcessesError if a process refused its arguments or dies again and again."""
        if self._supervisor.failure is not None:
            raise ProcessesError(self._supervisor.failure)
        recent = [at_s for at_s in self._restarts_s if time.monotonic() - at_s < _RESTARTS_WITHIN_S]
        if len(recent) >= _MOST_RESTARTS:
            endings = ", ".join(f"{one.spec.name} {one.last_ending}" for one in self._supervisor.processes)
            raise ProcessesError(f"{len(recent)} restarts within {_RESTARTS_WITHIN_S:.0f} s: {endings}")

    async def until(self, serves: Callable[[], Awaitable[bool]]) -> None:
        """Call `serves` repeatedly, until it returns True. Raises ProcessesError if the processes end before."""
        while not await serves():
            self.check()
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Stop all processes in order. Those that take too long are killed."""
        if self._running is not None:
            self._supervisor.stop()
            await self._running

    def _note_restarts(self) -> None:
        now = sum(process.num_restarts for process in self._supervisor.processes)
        self._restarts_s += [time.monotonic()] * (now - self._num_restarts)
        self._num_restarts = now


async def end_without_raylet(end: Callable[[], Awaitable[None]], period_s: float = 0.5) -> None:
    """Wait until the raylet that started this process is gone, then `end` in order and end the process."""
    raylet = os.getppid()
    while os.getppid() == raylet:  # noqa: ASYNC110 -- the kernel tells only the process as a whole, by a signal
        await asyncio.sleep(period_s)
    log.error("the raylet of this actor is gone; stopping its processes, and ending")
    try:
        await end()
    finally:
        os._exit(1)


async def grpc_serves(address: str, transport: Transport) -> bool:
    """Whether a router or worker reports that it serves."""
    channel = transport.channel(address)
    try:
        check: Any = health_pb2_grpc.HealthStub(channel)
        answer = await check.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
    except grpc.RpcError:
        return False
    finally:
        await channel.close()
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class _ReplicaLog(io.RawIOBase):
    """Passes lines to the log of the replica, which the dashboard shows."""

    def write(self, line: bytes) -> int:  # type: ignore[override]
        """Log a line."""
        log.info("%s", line.decode(errors="replace").rstrip("\n"))
        return len(line)
