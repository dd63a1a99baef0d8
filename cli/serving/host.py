"""The models of this host: keeps their states, and starts and stops their processes as the planner decides.

    unloaded -> loading -> loaded -> unloading -> unloaded
                   |
                   +-> failed: a worker refused the model, or kept dying while it loaded it

It imports no gRPC, so that workers start at once. Routers and workers are asked through a `Fleet`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.cli.hosting.planner import ModelView, State, decide
from headrace.cli.serving.plan import ModelPlan, ProcessSpec
from headrace.cli.serving.supervisor import ProcessState, SupervisedProcess, Supervisor

_POLL_S = 0.1
# So many deaths of a worker while it loads are taken for a failure.
_MAX_DEATHS = 3


class NoSuchModelError(Exception):
    """The host has no model of this name."""


class CannotLoadError(Exception):
    """The model cannot be loaded. The message says why."""


class Fleet(Protocol):
    """What the host asks of its router and its workers."""

    async def ready_workers(self) -> frozenset[str] | None:
        """Names of the workers that accept requests; None if the router does not answer."""


@dataclass(slots=True, eq=False)
class HostedModel:
    """A model of the host. Only the host changes it."""

    plan: ModelPlan
    state: State = State.UNLOADED
    problem: str = ""
    processes: list[SupervisedProcess] = field(default_factory=list)
    started_s: float = 0.0
    loaded_s: float = 0.0
    num_failures: int = 0

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.plan.name


@dataclass(slots=True)
class ModelHost:
    """The models of a host. Use it on one event loop; `run` does the work.

    `specs_of` gives the processes of a model, `log` gets lines for the operator.
    """

    plans: Sequence[ModelPlan]
    supervisor: Supervisor
    specs_of: Callable[[ModelPlan], Sequence[ProcessSpec]]
    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    fleet: Fleet | None = None
    models: dict[str, HostedModel] = field(init=False)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _woken: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.models = {plan.name: HostedModel(plan) for plan in self.plans}

    # -- for callers ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look at the processes and decide again, because something has changed."""
        self._woken.set()

    @property
    def is_settled(self) -> bool:
        """Whether every model that is to be loaded is loaded or has failed."""
        return all(model.state in (State.LOADED, State.FAILED) for model in self.models.values())

    async def load(self, name: str) -> HostedModel:
        """Wait until the model accepts requests. Raises NoSuchModelError or CannotLoadError."""
        model = self._find(name)
        while True:
            if model.state is State.LOADED:
                return model
            if model.state is State.FAILED:
                raise CannotLoadError(model.problem)
            await self.next_change()

    def _find(self, name: str) -> HostedModel:
        if name not in self.models:
            raise NoSuchModelError(name)
        return self.models[name]

    async def next_change(self) -> None:
        """Return when a model has changed."""
        await self._changed.wait()

    async def changes(self) -> AsyncIterator[Mapping[str, HostedModel]]:
        """The models by name, now and after each change."""
        while True:
            changed = self._changed
            yield self.models
            await changed.wait()

    # -- the work ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load models until cancelled."""
        while True:
            self._woken.clear()
            await self._observe()
            self._act()
            moving = any(model.state is State.LOADING for model in self.models.values())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _POLL_S if moving and self.fleet is not None else None)

    def _act(self) -> None:
        decisions = decide([self._view(model) for model in self.models.values()], None, self.clock())
        for name in decisions.load:
            self._start(self.models[name])

    def _view(self, model: HostedModel) -> ModelView:
        return ModelView(
            model.name,
            model.state,
            has_processes=bool(model.processes),
            is_pinned=True,
            wanted_since_s=0.0 if model.state is State.UNLOADED else None,
        )

    def _start(self, model: HostedModel) -> None:
        model.started_s, model.problem = self.clock(), ""
        model.processes = self.supervisor.add(self.specs_of(model.plan))
        self._enter(model, State.LOADING)

    async def _observe(self) -> None:
        """Learn from processes and router which models have been loaded and which have failed."""
        for model in self.models.values():
            if model.state in (State.LOADING, State.LOADED) and (problem := _refusal(model)):
                self._fail(model, problem)
                await self.supervisor.remove(model.processes)
                model.processes = []
        waiting = [model for model in self.models.values() if model.processes and model.state is not State.LOADED]
        ready = await self.fleet.ready_workers() if waiting and self.fleet is not None else None
        for model in waiting:
            if ready is None:
                break
            if any(process.spec.name in ready for process in model.processes):
                model.loaded_s, model.problem = self.clock(), ""
                self._enter(model, State.LOADED)
                self.log(f"{model.name} is loaded after {model.loaded_s - model.started_s:.1f} s")
            elif model.state is State.LOADING and (problem := _deaths(model)):
                self._fail(model, problem)

    def _fail(self, model: HostedModel, problem: str) -> None:
        model.problem, model.num_failures = problem, model.num_failures + 1
        self._enter(model, State.FAILED)
        self.log(f"{model.name} cannot be loaded: {problem}")

    def _enter(self, model: HostedModel, state: State) -> None:
        model.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _refusal(model: HostedModel) -> str:
    """The error of a worker that has refused the model; empty if none has."""
    for process in model.processes:
        if process.state is ProcessState.FAILED:
            return process.last_error or "its worker refused to start"
    return ""


def _deaths(model: HostedModel) -> str:
    """What happened to a worker that keeps dying while it loads the model; empty if none does."""
    for process in model.processes:
        if process.num_restarts >= _MAX_DEATHS:
            why = f": {process.last_error}" if process.last_error else ""
            times = f"ended {process.num_restarts} times while it loaded the model"
            return f"{process.spec.name} {times}; it {process.last_ending}{why}"
    return ""
