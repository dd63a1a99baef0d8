"""The models of a host, with tiny programs in place of workers and a fleet that the test makes up."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import cast

import pytest

from headrace.cli.hosting.created import CreatedFiles, CreatedRecord
from headrace.cli.hosting.planner import Rules, State, WorkerView
from headrace.cli.serving.host import CannotLoadError, ModelHost, NoSuchModelError, OperatorsOwnError
from headrace.cli.serving.host_calls import answering
from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.placement import WorkerPlace
from headrace.cli.serving.plan import ModelPlan, ProcessSpec
from headrace.cli.serving.supervisor import ProcessState, RestartRule, Supervisor
from headrace.common.commands import CommandError
from headrace.common.transport.channels import PLAIN
from headrace.gateway.upstream.model_host import ModelHost as GatewaysHost
from headrace.protos.status import Reason, StatusError
from tests.patience import patience

BOUND_S = 20.0
GOOD = "import signal; signal.pause()"
REFUSING = 'import sys; print("error: the weights are damaged", file=sys.stderr); sys.exit(2)'
DYING = "import sys; sys.exit(7)"
PLACE = WorkerPlace(0, (0,), 1)


class FakeFleet:
    """A fleet whose ready and busy workers the test names. Draining a worker takes until it is not busy."""

    def __init__(self) -> None:
        self.ready: frozenset[str] | None = frozenset()
        self.busy: frozenset[str] = frozenset()
        self.num_requests: dict[str, int] = {}
        self.drained: list[str] = []
        self.num_asked = 0

    async def workers(self) -> dict[str, WorkerView] | None:
        self.num_asked += 1
        if self.ready is None:
            return None
        return {name: WorkerView(True, name in self.busy, self.num_requests.get(name, 0)) for name in self.ready}

    async def drain(self, addresses: Sequence[str]) -> None:
        names = {address.rpartition("/")[2] for address in addresses}
        self.drained += sorted(names)
        while names & self.busy:
            await asyncio.sleep(0.005)


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
        async with asyncio.timeout(patience(BOUND_S)):
            while not condition():
                await asyncio.sleep(0.005)

    def state(self, name: str) -> State:
        return self.host.models[name].state

    async def until_state(self, name: str, state: State) -> None:
        await self.until(lambda: self.state(name) is state)


@asynccontextmanager
async def hosting(
    *,
    on_demand: bool = False,
    budget: int | None = None,
    idle_s: float | None = None,
    calm_s: float = 30.0,
    later: Sequence[str] = (),
    **programs: str | tuple[str, ...],
) -> AsyncIterator[System]:
    """A host with a model of size 1 for each name, whose worker runs the program. Several programs are of several
    workers. The host does not have the models of `later` at first."""
    stream = io.BytesIO()
    log = LogSink(stream)
    codes = {name: (code,) if isinstance(code, str) else code for name, code in programs.items()}
    firsts = accumulate(map(len, codes.values()), initial=0)
    plans = [
        ModelPlan(
            name, Path("/"), (PLACE,) * len(codes[name]), first, is_pinned=not on_demand, idle_s=idle_s, num_bytes=1
        )
        for name, first in zip(codes, firsts, strict=False)
        if name not in later
    ]

    def specs_of(plan: ModelPlan) -> list[ProcessSpec]:
        names = [f"worker-{plan.first_worker + index}" for index in range(len(plan.places))]
        return [
            ProcessSpec(name, "worker", (sys.executable, "-c", code), f"unix:/nowhere/{name}", is_essential=False)
            for name, code in zip(names, codes[plan.name], strict=True)
        ]

    rule = RestartRule(0.01, 0.02, calm_s=calm_s)
    supervisor = Supervisor((), log, restart_rule=rule, on_change=lambda: host.wake())
    host = ModelHost(
        plans,
        supervisor,
        specs_of,
        lambda line: log.line("serve", line),
        budget_bytes=budget,
        rules=Rules(stay_s=0.1, patience_s=0.5, turn_s=0.2),
        measure=lambda pids: 0,
    )
    fleet = FakeFleet()
    tasks = [asyncio.create_task(supervisor.run()), asyncio.create_task(host.run())]
    try:
        with host.asking(fleet):
            yield System(host, fleet, stream)
    finally:
        tasks[1].cancel()
        supervisor.stop()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), patience(BOUND_S))
        log.close(patience(BOUND_S))


async def test_a_model_is_loaded_when_the_router_has_its_worker() -> None:
    async with hosting(a=GOOD, b=GOOD) as system:
        await system.until_state("a", State.LOADING)
        waiting = asyncio.create_task(system.host.load("b"))
        system.fleet.ready = frozenset({"worker-1"})
        assert (await asyncio.wait_for(waiting, patience(BOUND_S))).state is State.LOADED
        assert system.state("a") is State.LOADING
        assert not system.host.is_settled
        system.fleet.ready = frozenset({"worker-0", "worker-1"})
        await system.until(lambda: system.host.is_settled)
        await system.until(lambda: any("a is loaded after" in line for line in system.lines))


async def test_a_model_that_its_worker_refuses_says_why_and_the_others_go_on() -> None:
    async with hosting(a=GOOD, b=REFUSING) as system:
        system.fleet.ready = frozenset({"worker-0"})
        with pytest.raises(CannotLoadError, match="the weights are damaged"):
            await asyncio.wait_for(system.host.load("b"), patience(BOUND_S))
        await system.until_state("a", State.LOADED)
        assert system.state("b") is State.FAILED
        await system.until(lambda: len(system.host.supervisor.processes) == 1)
        with pytest.raises(CannotLoadError, match="the weights are damaged"):
            await system.host.load("b")
    assert "serve | b cannot be loaded: the weights are damaged" in system.lines


async def test_a_worker_that_is_refused_after_it_has_served_leaves_its_model_loaded(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    once = f"import os\nif os.path.exists({str(flag)!r}): raise SystemExit(2)\nopen({str(flag)!r}, 'w').close()\n{GOOD}"
    async with hosting(calm_s=0.2, a=(GOOD, once), b=GOOD) as system:
        system.fleet.ready = ALL
        await system.until_state("a", State.LOADED)
        healthy, killed = system.host.models["a"].processes
        await system.until(lambda: killed.pid is not None and time.time() - killed.started_s > 0.3 and flag.exists())
        pid = healthy.pid
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        await system.until(lambda: killed.num_restarts >= 4)
        assert (system.state("a"), healthy.pid) == (State.LOADED, pid)
        assert system.fleet.drained == []
        flag.unlink()
        await system.until(flag.exists)


async def test_a_loaded_model_keeps_the_workers_that_serve_when_another_one_refuses(tmp_path: Path) -> None:
    go = tmp_path / "go"
    late = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.005)\n{REFUSING}"
    async with hosting(a=(GOOD, late)) as system:
        system.fleet.ready = frozenset({"worker-0"})
        await system.until_state("a", State.LOADED)
        healthy, refusing = system.host.models["a"].processes
        go.touch()
        await system.until(lambda: refusing.state is ProcessState.FAILED)
        num_asked = system.fleet.num_asked
        system.host.wake()
        await system.until(lambda: system.fleet.num_asked > num_asked)
        assert (system.state("a"), len(system.host.models["a"].processes)) == (State.LOADED, 2)
        assert healthy.pid is not None
    assert "serve | worker-1 refused to start and is not started again" in system.lines


async def test_a_model_fails_when_the_last_of_its_workers_refuses(tmp_path: Path) -> None:
    program = f"import os, sys\nos.path.exists({str(tmp_path / 'flag')!r}) and sys.exit(2)\nsys.exit(7)"
    async with hosting(a=program) as system:
        await system.until_state("a", State.FAILED)
        assert system.host.models["a"].processes, "a pinned model that only dies is tried again and again"
        (tmp_path / "flag").touch()
        await system.until(lambda: not system.host.models["a"].processes)
        assert system.host.models["a"].problem == "worker-0 refused to start; its log above says why"
        with pytest.raises(CannotLoadError, match="refused to start"):
            await asyncio.wait_for(system.host.load("a", by_operator=True), patience(BOUND_S))


async def test_a_model_whose_worker_keeps_dying_fails_until_a_worker_comes_up() -> None:
    async with hosting(a=DYING) as system:
        with pytest.raises(CannotLoadError, match="ended 3 times while it loaded the model; it ended with status 7"):
            await asyncio.wait_for(system.host.load("a"), patience(BOUND_S))
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
        await asyncio.wait_for(waiting, patience(BOUND_S))


async def test_a_router_that_does_not_answer_changes_nothing() -> None:
    async with hosting(a=GOOD) as system:
        system.fleet.ready = None
        await system.until_state("a", State.LOADING)
        num_asked = system.fleet.num_asked
        await system.until(lambda: system.fleet.num_asked >= num_asked + 3)
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
        async with asyncio.timeout(patience(BOUND_S)):
            async for models in system.host.changes():
                seen.append(models["a"].state)
                system.fleet.ready = frozenset({"worker-0"})
                if seen[-1] is State.LOADED:
                    break
        assert seen[-2:] == [State.LOADING, State.LOADED]


ALL = frozenset({"worker-0", "worker-1", "worker-2"})


async def test_a_model_on_demand_is_loaded_for_a_request_and_for_nothing_else() -> None:
    async with hosting(on_demand=True, a=GOOD, b=GOOD) as system:
        system.fleet.ready = ALL
        assert system.host.is_settled
        await asyncio.wait_for(system.host.load("b"), patience(BOUND_S))
        assert (system.state("a"), system.state("b")) == (State.UNLOADED, State.LOADED)


async def test_the_least_recently_used_model_is_unloaded_for_another() -> None:
    async with hosting(on_demand=True, budget=2, a=GOOD, b=GOOD, c=GOOD) as system:
        system.fleet.ready = ALL
        for name in ("a", "b"):
            await asyncio.wait_for(system.host.load(name), patience(BOUND_S))
        system.fleet.num_requests = {"worker-0": 1}
        used_s = system.host.models["a"].last_used_s
        await system.until(lambda: system.host.models["a"].last_used_s > used_s)
        await asyncio.wait_for(system.host.load("c"), patience(BOUND_S))
        assert [system.state(name) for name in "abc"] == [State.LOADED, State.UNLOADED, State.LOADED]
        assert system.fleet.drained == ["worker-1"]
        assert "serve | b is unloaded: it makes room for c" in system.lines


async def test_a_busy_model_ends_its_requests_before_it_gives_way() -> None:
    async with hosting(on_demand=True, budget=1, a=GOOD, b=GOOD) as system:
        system.fleet.ready = ALL
        system.fleet.busy = frozenset({"worker-0"})
        await asyncio.wait_for(system.host.load("a"), patience(BOUND_S))
        await system.until(lambda: system.host.models["a"].is_busy)
        waiting = asyncio.create_task(system.host.load("b"))
        await system.until_state("a", State.UNLOADING)
        again = asyncio.create_task(system.host.load("a"))
        await asyncio.sleep(0.2)
        assert len(system.host.supervisor.processes) == 1, "its requests are running"
        system.fleet.busy = frozenset()
        await asyncio.wait_for(waiting, patience(BOUND_S))
        await asyncio.wait_for(again, patience(BOUND_S))
        assert [system.state(name) for name in "ab"] == [State.LOADED, State.UNLOADED]


async def test_an_idle_model_is_unloaded_after_its_time() -> None:
    async with hosting(on_demand=True, idle_s=0.3, a=GOOD) as system:
        system.fleet.ready = ALL
        await asyncio.wait_for(system.host.load("a"), patience(BOUND_S))
        await system.until_state("a", State.UNLOADED)
        assert system.host.supervisor.processes == []
        await asyncio.wait_for(system.host.load("a"), patience(BOUND_S))


async def test_a_model_that_somebody_uses_without_a_request_is_not_idle() -> None:
    async with hosting(on_demand=True, idle_s=0.0, a=GOOD) as system:
        system.fleet.ready = ALL
        with system.host.using("a"):
            await asyncio.wait_for(system.host.load("a"), patience(BOUND_S))
            for _ in range(3):
                num_asked = system.fleet.num_asked
                system.host.wake()
                await system.until(lambda: system.fleet.num_asked > num_asked)  # noqa: B023
            assert system.state("a") is State.LOADED
        await system.until_state("a", State.UNLOADED)
        with pytest.raises(NoSuchModelError), system.host.using("b"):
            pass


async def test_a_model_on_demand_that_fails_frees_its_memory_and_is_not_tried_at_once() -> None:
    async with hosting(on_demand=True, budget=1, a=DYING, b=GOOD) as system:
        with pytest.raises(CannotLoadError, match="ended 3 times"):
            await asyncio.wait_for(system.host.load("a"), patience(BOUND_S))
        await system.until(lambda: not system.host.supervisor.processes)
        with pytest.raises(CannotLoadError, match="ended 3 times") as refused:
            await asyncio.wait_for(system.host.load("a"), 0.5)
        assert 5 < (refused.value.retry_after_s or 0) <= 10
        system.fleet.ready = frozenset({"worker-1"})
        await asyncio.wait_for(system.host.load("b"), patience(BOUND_S))


async def test_a_model_that_can_never_fit_is_refused() -> None:
    async with hosting(on_demand=True, budget=0, a=GOOD) as system:
        with pytest.raises(CannotLoadError, match="and the budget is"):
            await asyncio.wait_for(system.host.load("a"), patience(BOUND_S))


async def test_an_operator_unloads_and_loads_a_pinned_model() -> None:
    async with hosting(a=GOOD, b=GOOD) as system:
        system.fleet.ready = ALL
        await system.until(lambda: system.host.is_settled)
        await asyncio.wait_for(system.host.unload("a"), patience(BOUND_S))
        assert system.state("a") is State.UNLOADED
        assert [process.spec.name for process in system.host.supervisor.processes] == ["worker-1"]
        with pytest.raises(CannotLoadError, match="its operator has unloaded it"):
            await system.host.load("a")
        await asyncio.wait_for(system.host.load("a", by_operator=True), patience(BOUND_S))
        assert system.state("a") is State.LOADED


async def test_what_an_operator_unloads_stays_unloaded_although_a_request_waits_for_it() -> None:
    async with hosting(a=GOOD, b=GOOD) as system:
        await system.until_state("a", State.LOADING)
        waiting = asyncio.create_task(system.host.load("a"))
        await asyncio.sleep(0)
        await asyncio.wait_for(system.host.unload("a"), patience(BOUND_S))
        with pytest.raises(CannotLoadError, match="its operator has unloaded it"):
            await asyncio.wait_for(waiting, patience(BOUND_S))
        system.fleet.ready = ALL
        await system.until_state("b", State.LOADED)
        assert system.state("a") is State.UNLOADED
        assert system.host.is_settled


async def test_a_failed_model_is_tried_again_when_its_operator_wants_it() -> None:
    async with hosting(a=REFUSING, b=GOOD) as system:
        with pytest.raises(CannotLoadError):
            await asyncio.wait_for(system.host.load("a"), patience(BOUND_S))
        with pytest.raises(CannotLoadError, match="the weights are damaged"):
            await asyncio.wait_for(system.host.load("a", by_operator=True), patience(BOUND_S))
        assert system.host.models["a"].num_failures == 2
        await asyncio.wait_for(system.host.unload("a"), patience(BOUND_S))
        assert (system.state("a"), system.host.models["a"].problem) == (State.UNLOADED, "")


async def test_an_operator_adds_a_model() -> None:
    async with hosting(a=GOOD) as system:
        system.fleet.ready = ALL
        await system.until_state("a", State.LOADED)
        (process,) = system.host.models["a"].processes
        process.spec = replace(process.spec, is_essential=True)
        system.host.specs_of = lambda plan: [
            ProcessSpec(f"worker-{plan.first_worker}", "worker", (sys.executable, "-c", GOOD), "unix:/nowhere/x")
        ]
        system.host.plan_named = lambda name, model, first: ModelPlan(
            name, Path(model), (PLACE,), first, is_essential=False, is_pinned=False
        )
        await asyncio.gather(system.host.add_named("new", "/m"), system.host.add_named("new", "/m"))
        await asyncio.wait_for(system.host.load("new", by_operator=True), patience(BOUND_S))
        assert system.host.models["new"].plan.first_worker == 1
        assert not system.host.models["a"].plan.is_essential
        assert not any(process.spec.is_essential for process in system.host.models["a"].processes)
        await asyncio.wait_for(system.host.unload("new"), patience(BOUND_S))
        await asyncio.wait_for(system.host.load("new"), patience(BOUND_S))


class FakeFiles:
    """The files of a created model. `others` says that another host has them too."""

    def __init__(self, gguf: str) -> None:
        self.gguf, self.is_held, self.is_removed, self.others = gguf, False, False, False

    @property
    def name(self) -> str:
        return Path(self.gguf).stem

    def hold(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False

    def remove(self) -> bool:
        self.release()
        self.is_removed = not self.others
        return self.is_removed


@asynccontextmanager
async def creating() -> AsyncIterator[tuple[System, list[FakeFiles]]]:
    """A host with a model of its operator, which knows how to run those that clients create, and their files."""
    made: list[FakeFiles] = []

    def files_of(gguf: str) -> CreatedFiles:
        made.append(FakeFiles(gguf))
        return cast("CreatedFiles", made[-1])

    def plan_named(name: str, model: str, first: int) -> ModelPlan:
        if name == "damaged":
            raise CommandError("it cannot be converted")
        return ModelPlan(name, Path(model), (PLACE,), first, is_essential=False, is_pinned=False)

    def specs_of(plan: ModelPlan) -> list[ProcessSpec]:
        name = f"worker-{plan.first_worker}"
        command = (sys.executable, "-c", REFUSING if plan.name == "refused" else GOOD)
        return [ProcessSpec(name, "worker", command, f"unix:/nowhere/{name}", is_essential=False)]

    async with hosting(on_demand=True, a=GOOD) as system:
        system.host.plan_named, system.host.files_of, system.host.specs_of = plan_named, files_of, specs_of
        system.fleet.ready = ALL
        yield system, made


async def test_a_created_model_is_removed_after_its_requests_and_refuses_others_by_name() -> None:
    async with creating() as (system, _), asyncio.timeout(patience(BOUND_S)):
        host = system.host
        await host.create("new", "/m.gguf")
        await host.load("new")
        system.fleet.busy = frozenset({"worker-1"})
        asked = [asyncio.create_task(host.remove_created("new")) for _ in range(2)]
        await system.until_state("new", State.UNLOADING)
        asked[0].cancel()  # its caller has left
        for by_operator in (False, True):
            with pytest.raises(CannotLoadError, match="it is being removed"):
                await host.load("new", by_operator=by_operator)
        with pytest.raises(CommandError, match="'new' is the name of another model"):
            await host.create("new", "/m.gguf")
        with pytest.raises(ValueError, match="this host has no model 'new'; there is a"):
            host.set_alias("copied", "new", "")
        assert not asked[1].done(), "its requests are running"
        system.fleet.busy = frozenset()
        await asked[1]
        assert host.models.keys() == {"a"}
        assert host.supervisor.processes == []
        with pytest.raises(NoSuchModelError):
            await host.remove_created("new")
        await host.create("new", "/m.gguf")
        assert (await host.load("new")).state is State.LOADED


async def test_a_request_that_waits_for_a_created_model_learns_that_it_is_removed() -> None:
    async with creating() as (system, made), asyncio.timeout(patience(BOUND_S)):
        system.fleet.ready = frozenset()
        await system.host.create("new", "/m.gguf")
        waiting = asyncio.create_task(system.host.load("new"))
        await system.until_state("new", State.LOADING)
        await system.host.remove_created("new")
        with pytest.raises(CannotLoadError, match="it is being removed"):
            await waiting
        assert made[0].is_removed
        await system.until(lambda: "serve | new is removed, as a client wants" in system.lines)


async def test_files_that_others_use_stay_when_a_created_model_is_removed() -> None:
    async with creating() as (system, made), asyncio.timeout(patience(BOUND_S)):
        host = system.host
        for name in ("one", "two", "three"):
            await host.create(name, f"/{name}.gguf")
        made[1].others = True
        await host.add_named("of-operator", "/three.gguf")
        for name in ("one", "two", "three"):
            await host.remove_created(name)
        assert [files.is_removed for files in made] == [True, False, False]
        assert not any(files.is_held for files in made)
        assert host.models.keys() == {"a", "of-operator"}
        kept = "serve | two is removed, as a client wants; /two.gguf stays, because others use it"
        await system.until(lambda: kept in system.lines)


async def test_what_an_operator_has_named_is_not_removed_for_clients() -> None:
    async with creating() as (system, made), asyncio.timeout(patience(BOUND_S)):
        host = system.host
        await host.add_named("loaded", "/m")
        for name in ("a", "loaded"):
            with pytest.raises(OperatorsOwnError, match=f"'{name}' was loaded by its operator"):
                await host.remove_created(name)
        await host.create("new", "/m.gguf")
        host.set_alias("given", "a:90,new:10", "")
        host.set_alias("shadowed", "a", "new:5")
        host.set_alias("copied", "new", "", by_client=True)
        with pytest.raises(ValueError, match="'new' has other names: copied, given, shadowed; remove these first"):
            await host.remove_created("new")
        for alias, models in (("given", ""), ("given", "a"), ("shadowed", "")):
            with pytest.raises(OperatorsOwnError, match=f"the name '{alias}' was given by an operator"):
                host.set_alias(alias, models, "", by_client=True)
        host.set_alias("given", "a", "")
        host.set_alias("given", "a", "", by_client=True)  # it has this name already, and stays the operator's
        with pytest.raises(OperatorsOwnError):
            host.set_alias("given", "", "", by_client=True)
        host.set_alias("copied", "", "", by_client=True)
        host.set_alias("shadowed", "", "")
        await host.remove_created("new")
        assert host.aliases == {"given": "a"}
        assert [files.is_removed for files in made] == [True]


async def test_a_created_model_that_cannot_be_loaded_is_forgotten(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/host.sock"
    client = GatewaysHost(address)
    async with (
        asyncio.timeout(patience(BOUND_S)),
        creating() as (system, made),
        answering(system.host, address, "unix:/nowhere", PLAIN),
    ):
        for name, problem in (
            ("refused", "model 'refused' cannot be loaded: the weights are damaged"),
            ("damaged", "model: it cannot be converted"),
            ("a", "model: 'a' is the name of another model already; choose another one"),
        ):
            with pytest.raises(StatusError) as found:
                await client.create(name, f"/{name}.gguf")
            assert found.value.message == problem
        assert system.host.models.keys() == {"a"}
        assert [files.is_removed for files in made] == [True, False, False]
        assert not any(files.is_held for files in made)
        for name, reason in (("a", Reason.PERMISSION_DENIED), ("refused", Reason.MODEL_NOT_FOUND)):
            with pytest.raises(StatusError) as found:
                await client.remove(name)
            assert found.value.reason is reason
        await system.host.create("new", "/new.gguf")
        system.host.set_alias("copied", "new", "", by_client=True)
        with pytest.raises(StatusError) as found:
            await client.remove("new")
        assert (found.value.reason, found.value.field) == (Reason.INVALID_FIELD, "name")
        await client.set_alias("copied", "")
        await client.remove("new")
        assert made[-1].is_removed


async def test_what_clients_created_is_there_after_a_restart(tmp_path: Path) -> None:
    record = CreatedRecord(tmp_path / "state" / "created.json")
    async with creating() as (system, _), asyncio.timeout(patience(BOUND_S)):
        host = system.host
        host.record = record
        for name in ("one@1", "two@2", "damaged@3", "unnamed@4"):
            await host.create(name, f"/{name.replace('@', '-')}.gguf")
        for alias, model in (("one", "one@1"), ("copied", "two@2"), ("mine", "a"), ("third", "damaged@3")):
            host.set_alias(alias, model, "", by_client=True)
        host.set_alias("given", "a", "")
        host.set_alias("gone", "a", "", by_client=True)
        host.set_alias("gone", "", "", by_client=True)
    record = CreatedRecord(tmp_path / "state" / "created.json")
    async with creating() as (system, made), asyncio.timeout(patience(BOUND_S)):
        host = system.host
        host.record, plan_named = record, host.plan_named

        def with_damage(name: str, model: str, first: int) -> ModelPlan:
            assert plan_named is not None
            return plan_named("damaged" if name == "damaged@3" else name, model, first)

        host.plan_named = with_damage
        await host.restore()
        assert host.models.keys() == {"a", "one@1", "two@2"}
        assert host.aliases == {"one": "one@1", "copied": "two@2", "mine": "a"}
        assert host.models["one@1"].plan.directory == Path("one-1"), "by its name in the cache"
        assert (await host.load("one@1")).state is State.LOADED
        held = {files.gguf: files.is_held for files in made}
        assert held == {"one-1.gguf": True, "two-2.gguf": True, "damaged-3.gguf": False}
        assert not any(files.is_removed for files in made)
        await system.until(lambda: any("headrace models rm unnamed-4 removes it" in line for line in system.lines))
        host.set_alias("copied", "", "", by_client=True)
        await host.remove_created("two@2")
        with pytest.raises(OperatorsOwnError):
            await host.remove_created("a")
    # What could not be served stays for a later start.
    found = CreatedRecord(tmp_path / "state" / "created.json").read()
    assert found.models == {"one@1": "one-1", "damaged@3": "damaged-3"}
    assert found.aliases == {"one": "one@1", "mine": "a", "third": "damaged@3"}


async def test_a_damaged_record_is_said_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "created.json").write_text('{"models": 1}')
    async with creating() as (system, _):
        system.host.record = CreatedRecord(tmp_path / "created.json")
        await system.host.restore()
        await system.until(lambda: any("what clients had created is not known" in line for line in system.lines))
        assert system.host.models.keys() == {"a"}


async def test_an_alias_of_a_model_that_is_gone_keeps_no_other_from_changing() -> None:
    async with hosting(a=GOOD, b=GOOD) as system:
        host = system.host
        host.set_alias("of-b", "b", "", by_client=True)
        await host.remove("b")
        host.set_alias("mine", "a", "", by_client=True)
        with pytest.raises(ValueError, match="this host has no model 'b'; there is a"):
            host.set_alias("mine", "b", "", by_client=True)
        host.set_alias("of-b", "", "", by_client=True)
        assert host.aliases == {"mine": "a"}


async def test_aliases_are_added_changed_and_removed() -> None:
    async with hosting(a=GOOD, b=GOOD) as system:
        host = system.host
        host.set_alias("gpt", "a:90,b:10", "b:5")
        host.set_alias("other", "a", "")
        assert (host.aliases, host.shadows) == ({"gpt": "a:90,b:10", "other": "a"}, {"gpt": "b:5"})
        host.set_alias("gpt", "b", "")
        host.set_alias("other", "", "")
        assert (host.aliases, host.shadows) == ({"gpt": "b"}, {})


async def test_a_model_does_not_get_the_name_of_an_alias() -> None:
    async with hosting(on_demand=True, a=GOOD) as system:
        host, loop = system.host, asyncio.get_running_loop()
        planned: list[str] = []
        is_set_meanwhile = False

        def plan_named(name: str, model: str, first: int) -> ModelPlan:
            planned.append(name)
            if is_set_meanwhile:
                loop.call_soon_threadsafe(host.set_alias, name, "a", "")
            return ModelPlan(name, Path(model), (PLACE,), first, is_essential=False, is_pinned=False)

        host.plan_named = plan_named
        host.set_alias("gpt", "a", "")
        with pytest.raises(CommandError, match="'gpt' is an alias of a: remove it with headrace models alias gpt"):
            await host.add_named("gpt", "/m")
        assert not planned, "it may take long"
        is_set_meanwhile = True
        with pytest.raises(CommandError, match="'new' is an alias of a"):
            await host.add_named("new", "/m")
        assert host.models.keys() == {"a"}
        is_set_meanwhile = False
        host.set_alias("gpt", "", "")
        await host.add_named("gpt", "/m")
        assert host.models.keys() == {"a", "gpt"}


async def test_an_alias_with_the_name_of_a_model_can_be_removed() -> None:
    async with hosting(on_demand=True, a=GOOD, b=GOOD) as system:
        system.host.aliases["b"] = "a"
        system.host.set_alias("b", "", "")
        assert system.host.aliases == {}


@pytest.mark.parametrize(
    ("alias", "models", "shadow", "problem"),
    [
        ("a", "b", "", "'a' is the name of a model"),
        ("x", "nosuch", "", "this host has no model 'nosuch'; there is a, b"),
        ("x", "a", "nosuch:5", "this host has no model 'nosuch'"),
        ("x", "a:1,b", "", "needs a weight"),
        ("x", "a", "b", "needs a percentage"),
        ("", "a", "", "is not ALIAS=MODEL"),
    ],
)
async def test_aliases_that_make_no_sense_are_refused(alias: str, models: str, shadow: str, problem: str) -> None:
    async with hosting(a=GOOD, b=GOOD) as system:
        with pytest.raises(ValueError, match=problem):
            system.host.set_alias(alias, models, shadow)
        assert (system.host.aliases, system.host.shadows) == ({}, {})
