"""The models of a host, with tiny programs in place of workers and a fleet that the test makes up."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.cli.hosting.planner import State
from headrace.cli.serving.host import CannotLoadError, ModelHost, NoSuchModelError
from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.placement import WorkerPlace
from headrace.cli.serving.plan import ModelPlan, ProcessSpec
from headrace.cli.serving.supervisor import RestartRule, Supervisor

BOUND_S = 20.0
GOOD = "import signal; signal.pause()"
REFUSING = 'import sys; print("error: the weights are damaged", file=sys.stderr); sys.exit(2)'
DYING = "import sys; sys.exit(7)"
PLACE = WorkerPlace(0, (0,), 1)


class FakeFleet:
    """A fleet whose ready workers the test names."""

    def __init__(self) -> None:
        self.ready: frozenset[str] | None = frozenset()

    async def ready_workers(self) -> frozenset[str] | None:
        return self.ready


class System:
    """A running host with its fleet."""

    def __init__(self, host: ModelHost, fleet: FakeFleet, stream: io.BytesIO) -> None:
        self.host = host
        self.fleet = fleet
        self._stream = stream

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().decode().splitlines()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                await asyncio.sleep(0.005)

    def state(self, name: str) -> State:
        return self.host.models[name].state

    async def until_state(self, name: str, state: State) -> None:
        await self.until(lambda: self.state(name) is state)


@asynccontextmanager
async def hosting(**programs: str) -> AsyncIterator[System]:
    """A host with a model for each name, whose worker runs the program."""
    stream = io.BytesIO()
    log = LogSink(stream)
    plans = [ModelPlan(name, Path("/"), (PLACE,), number) for number, name in enumerate(programs)]

    def specs_of(plan: ModelPlan) -> list[ProcessSpec]:
        name = f"worker-{plan.first_worker}"
        argv = (sys.executable, "-c", programs[plan.name])
        return [ProcessSpec(name, "worker", argv, f"unix:/nowhere/{name}", is_essential=False)]

    supervisor = Supervisor((), log, restart_rule=RestartRule(0.01, 0.02), on_change=lambda: host.wake())
    host = ModelHost(plans, supervisor, specs_of, lambda line: log.line("serve", line))
    fleet = FakeFleet()
    host.fleet = fleet
    tasks = [asyncio.create_task(supervisor.run()), asyncio.create_task(host.run())]
    try:
        yield System(host, fleet, stream)
    finally:
        tasks[1].cancel()
        supervisor.stop()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), BOUND_S)
        log.close(BOUND_S)


async def test_a_model_is_loaded_when_the_router_has_its_worker() -> None:
    async with hosting(a=GOOD, b=GOOD) as system:
        await system.until_state("a", State.LOADING)
        waiting = asyncio.create_task(system.host.load("b"))
        system.fleet.ready = frozenset({"worker-1"})
        assert (await asyncio.wait_for(waiting, BOUND_S)).state is State.LOADED
        assert system.state("a") is State.LOADING
        assert not system.host.is_settled
        system.fleet.ready = frozenset({"worker-0", "worker-1"})
        await system.until(lambda: system.host.is_settled)
        await system.until(lambda: any("a is loaded after" in line for line in system.lines))


async def test_a_model_that_its_worker_refuses_says_why_and_the_others_go_on() -> None:
    async with hosting(a=GOOD, b=REFUSING) as system:
        system.fleet.ready = frozenset({"worker-0"})
        with pytest.raises(CannotLoadError, match="the weights are damaged"):
            await asyncio.wait_for(system.host.load("b"), BOUND_S)
        await system.until_state("a", State.LOADED)
        assert system.state("b") is State.FAILED
        await system.until(lambda: len(system.host.supervisor.processes) == 1)
        with pytest.raises(CannotLoadError, match="the weights are damaged"):
            await system.host.load("b")
    assert "serve | b cannot be loaded: the weights are damaged" in system.lines


async def test_a_model_whose_worker_keeps_dying_fails_until_a_worker_comes_up() -> None:
    async with hosting(a=DYING) as system:
        with pytest.raises(CannotLoadError, match="ended 3 times while it loaded the model; it ended with status 7"):
            await asyncio.wait_for(system.host.load("a"), BOUND_S)
        system.fleet.ready = frozenset({"worker-0"})
        system.host.wake()
        await system.until_state("a", State.LOADED)
        assert system.host.models["a"].problem == ""


async def test_a_worker_that_is_killed_while_it_loads_is_started_again() -> None:
    async with hosting(a=GOOD) as system:
        await system.until(lambda: bool(system.host.models["a"].processes))
        (process,) = system.host.models["a"].processes
        await system.until(lambda: process.pid is not None)
        waiting = asyncio.create_task(system.host.load("a"))
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await system.until(lambda: process.pid not in (None, first))
        assert not waiting.done()
        system.fleet.ready = frozenset({"worker-0"})
        await asyncio.wait_for(waiting, BOUND_S)


async def test_a_router_that_does_not_answer_changes_nothing() -> None:
    async with hosting(a=GOOD) as system:
        system.fleet.ready = None
        await system.until_state("a", State.LOADING)
        await asyncio.sleep(0.3)
        assert system.state("a") is State.LOADING
        system.fleet.ready = frozenset({"worker-0"})
        await system.until_state("a", State.LOADED)


async def test_an_unknown_name_is_refused() -> None:
    async with hosting(a=GOOD) as system:
        with pytest.raises(NoSuchModelError):
            await system.host.load("nosuch")


async def test_changes_are_told_as_they_happen() -> None:
    async with hosting(a=GOOD) as system:
        seen = []
        async with asyncio.timeout(BOUND_S):
            async for models in system.host.changes():
                seen.append(models["a"].state)
                system.fleet.ready = frozenset({"worker-0"})
                if seen[-1] is State.LOADED:
                    break
        assert seen[-2:] == [State.LOADING, State.LOADED]
