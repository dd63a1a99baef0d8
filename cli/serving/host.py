"""The models of this host: keeps their states, and starts and stops their processes as the planner decides.

    unloaded -> loading -> loaded -> unloading -> unloaded
                   |
                   +-> failed: a worker refused the model, or kept dying while it loaded it

A loaded model fails only if none of its workers is left. A worker that has served is started again.

It imports no gRPC, so that workers start at once. Routers and workers are asked through a `Fleet`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from headrace.cli.hosting.created import Created, CreatedFiles, CreatedRecord
from headrace.cli.hosting.memory import private_bytes
from headrace.cli.hosting.planner import ModelView, Rules, State, WorkerView, decide
from headrace.cli.hosting.settings import ModelRules
from headrace.cli.serving.plan import ModelPlan, ProcessSpec
from headrace.cli.serving.supervisor import ProcessState, SupervisedProcess, Supervisor
from headrace.common.aliases import parse_aliases
from headrace.common.commands import CommandError

_POLL_S = 0.1
_POLL_WHEN_CALM_S = 0.5
# This many deaths of a worker while it loads count as a failure.
_MAX_DEATHS = 3
# After this time, a model that could not be loaded is tried again for requests.
_RETRY_S = 10.0
_IS_REMOVED = "it is being removed"


class NoSuchModelError(Exception):
    """The host has no model of this name."""


class OperatorsOwnError(Exception):
    """A client wants to change what an operator has named. The message says so."""


class CannotLoadError(Exception):
    """The model cannot be loaded. The message says why. `retry_after_s` is the time after which to try again."""

    def __init__(self, problem: str, retry_after_s: float | None = None) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class Fleet(Protocol):
    """The router and the workers as the host uses them."""

    async def workers(self) -> Mapping[str, WorkerView] | None:
        """The workers by name; None if the router does not answer."""

    async def drain(self, addresses: Sequence[str]) -> None:
        """Let workers end their requests and take no new ones. Returns when they have ended, or when a worker is
        gone."""


@dataclass(slots=True, eq=False)
class HostedModel:
    """A model of the host. Only the host changes it. Times are monotonic, in seconds.

    `is_stopped` means that its operator unloaded a pinned model, and `is_removed` that the host is about to forget it.
    `num_bytes` is the memory that it takes when loaded, all workers together: an estimate that is corrected when the
    model is loaded. `num_users` are the callers that use it without a request. `created` are the files of a model that
    a client created.
    """

    plan: ModelPlan
    state: State = State.UNLOADED
    problem: str = ""
    processes: list[SupervisedProcess] = field(default_factory=list)
    num_bytes: int = 0
    started_s: float = 0.0
    loaded_s: float = 0.0
    last_used_s: float = 0.0
    is_busy: bool = False
    num_requests: int = 0
    num_waiting: int = 0
    num_users: int = 0
    wanted_since_s: float | None = None
    num_failures: int = 0
    failed_s: float = 0.0
    is_stopped: bool = False
    is_removed: bool = False
    unloading: asyncio.Task[None] | None = None
    created: CreatedFiles | None = None
    removing: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.plan.name


@dataclass(slots=True)
class ModelHost:
    """The models of a host. Use it on one event loop; `run` does the work.

    `specs_of` gives the processes of a model, `log` gets lines for the operator. All loaded models together take at
    most `budget_bytes` of memory; None for no limit. `plan_named` plans a model that an operator names: its name, where
    it is, and the number of its first worker. It may take long and raise CommandError. `files_of` has the files of a
    model that a client creates of a GGUF file. `aliases` are other names of models and `shadows` the models that get
    copies of their requests, in the form that gateways read; `created_aliases` are those that clients have given.
    `record` keeps what clients create for the next start; without it, that is forgotten with the host.
    """

    plans: Sequence[ModelPlan]
    supervisor: Supervisor
    specs_of: Callable[[ModelPlan], Sequence[ProcessSpec]]
    log: Callable[[str], None]
    budget_bytes: int | None = None
    rules: Rules = field(default_factory=Rules)
    measure: Callable[[Sequence[int]], int] = private_bytes
    clock: Callable[[], float] = time.monotonic
    plan_named: Callable[[str, str, int], ModelPlan] | None = None
    files_of: Callable[[str], CreatedFiles] = CreatedFiles
    aliases: dict[str, str] = field(default_factory=dict)
    shadows: dict[str, str] = field(default_factory=dict)
    record: CreatedRecord | None = None
    created_aliases: set[str] = field(init=False, default_factory=set)
    models: dict[str, HostedModel] = field(init=False)
    _fleet: Fleet | None = field(init=False, default=None)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _woken: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _adding: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.models = {plan.name: HostedModel(plan, num_bytes=plan.num_bytes) for plan in self.plans}

    # -- for callers ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def asking(self, fleet: Fleet) -> Iterator[None]:
        """Context manager: while it is open, the host asks `fleet` which workers are ready, and lets it drain them."""
        self._fleet = fleet
        self.wake()
        try:
            yield
        finally:
            self._fleet = None

    def wake(self) -> None:
        """Look at the processes and decide again, because something has changed."""
        self._woken.set()

    @property
    def is_settled(self) -> bool:
        """Whether every pinned model is loaded or has failed."""
        pinned = [model for model in self.models.values() if model.plan.is_pinned and not model.is_stopped]
        return all(model.state in (State.LOADED, State.FAILED) for model in pinned)

    def find(self, name: str) -> HostedModel:
        """The model of this name. Raises NoSuchModelError."""
        if name not in self.models:
            raise NoSuchModelError(name)
        return self.models[name]

    async def add_named(self, name: str, model: str) -> None:
        """Add the model that an operator names, unloaded. Raises CommandError if there is no such model, or if the name
        is an alias."""
        plan_named = self.plan_named
        assert plan_named is not None, "this host has models of its own only"
        async with self._adding:
            if name not in self.models:
                await self._add(name, lambda first: plan_named(name, model, first))

    async def create(self, name: str, gguf: str) -> None:
        """Add a model that a client creates of a GGUF file, unloaded. Raises CommandError if the file cannot be
        converted, or if the name is that of another model or an alias."""
        plan_named = self.plan_named
        assert plan_named is not None, "this host has models of its own only"
        files = self.files_of(gguf)

        def planned(first: int) -> ModelPlan:
            files.hold()
            return plan_named(name, gguf, first)

        async with self._adding:
            if name in self.models:
                raise CommandError(f"{name!r} is the name of another model already; choose another one")
            try:
                await self._add(name, planned)
            except BaseException:
                files.release()
                raise
            self.models[name].created = files
            self._write_record()

    async def restore(self) -> None:
        """Add what clients had created when the record was last written. Models are not loaded. One that cannot be
        served now stays in the record; one that has no name is left out, because nobody could name it."""
        record, plan_named = self.record, self.plan_named
        if record is None:
            return
        assert plan_named is not None, "this host has models of its own only"
        try:
            found = await asyncio.to_thread(record.read)
        except (OSError, ValueError) as error:
            self.log(f"what clients had created is not known: {error}")
            return
        kept_models: dict[str, str] = {}
        for name, cached in found.models.items():
            if name not in found.aliases.values():
                remedy = f"headrace models rm {cached} removes it"
                self.log(f"{name}, which a client created, has no name any more; {remedy}")
                continue
            files = self.files_of(f"{cached}.gguf")

            def planned(first: int, name: str = name, cached: str = cached, files: CreatedFiles = files) -> ModelPlan:
                files.hold()
                return plan_named(name, cached, first)

            try:
                await self.add(name, planned)
            except CommandError as error:
                files.release()
                kept_models[name] = cached
                self.log(f"{name}, which a client created, is not served: {error.message}")
            else:
                self.models[name].created = files
        kept_aliases = self._restore_aliases(found.aliases)
        record.keep(Created(kept_models, kept_aliases))
        self._write_record()

    def _restore_aliases(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """Add these aliases. Returns those that cannot be added now."""
        left = {}
        for alias, model in aliases.items():
            try:
                self._take_alias(alias, model, "", by_client=True)
            except (ValueError, OperatorsOwnError) as error:
                self.log(f"{alias}, which a client named, is not served: {error}")
                left[alias] = model
        return left

    def _write_record(self) -> None:
        if self.record is None:
            return
        models = {name: model.created.name for name, model in self.models.items() if model.created is not None}
        try:
            self.record.write(Created(models, {alias: self.aliases[alias] for alias in self.created_aliases}))
        except OSError as error:
            self.log(f"what clients create is not kept for the next start: {error}")

    async def remove_created(self, name: str) -> None:
        """Remove a model that a client has created, after its requests have ended, and its files. It is carried out
        even if the caller is cancelled. Raises NoSuchModelError, OperatorsOwnError if the model is its operator's,
        ValueError if an alias stands for it, and OSError if its files cannot be removed."""
        model = self.find(name)
        if model.created is None:
            raise OperatorsOwnError(f"{name!r} was loaded by its operator")
        if names := self._aliases_of(name):
            raise ValueError(f"{name!r} has other names: {', '.join(names)}; remove these first")
        if model.removing is None:
            model.removing = asyncio.create_task(self._remove_created(model, model.created), name=f"remove {name}")
        await asyncio.shield(model.removing)

    async def _remove_created(self, model: HostedModel, files: CreatedFiles) -> None:
        await self.remove(model.name)
        if any(
            other.created is None and other.plan.directory == model.plan.directory for other in self.models.values()
        ):
            files.release()
            is_gone = False
        else:
            is_gone = await asyncio.to_thread(files.remove)
        self._write_record()
        left = "" if is_gone else f"; {model.plan.directory} stays, because others use it"
        self.log(f"{model.name} is removed, as a client wants{left}")

    def _aliases_of(self, name: str) -> list[str]:
        """The aliases of which a model gets requests."""
        found = []
        for alias, value in sorted(self.aliases.items()):
            shadows = [f"{alias}={self.shadows[alias]}"] if alias in self.shadows else []
            if name in parse_aliases([f"{alias}={value}"], shadows).models:
                found.append(alias)
        return found

    async def add(self, name: str, planned: Callable[[int], ModelPlan]) -> None:
        """Add a model, or replace it, after its requests have ended. `planned` makes its plan from the number of its
        first worker; it may take long. If it raises CommandError, nothing changes."""
        async with self._adding:
            await self._add(name, planned)

    async def remove(self, name: str) -> None:
        """Unload a model, after its requests have ended, and forget it. Raises NoSuchModelError."""
        model = self.find(name)
        model.is_stopped = model.is_removed = True
        self._tell()
        await self.unload(name)
        if self.models.get(name) is model:
            del self.models[name]
        self._tell()

    def set_rules(self, name: str, rules: ModelRules) -> None:
        """Change what gateways apply to the requests of a model. Raises NoSuchModelError."""
        model = self.find(name)
        model.plan = replace(model.plan, rules=rules)
        self._tell()

    async def _add(self, name: str, planned: Callable[[int], ModelPlan]) -> None:
        self._refuse_alias(name)
        first = max((one.plan.first_worker + len(one.plan.places) for one in self.models.values()), default=0)
        plan = await asyncio.to_thread(planned, first)
        self._refuse_alias(name)
        if name in self.models:
            await self.remove(name)
        for other in self.models.values():
            # From now on, a worker that refuses its model must not end the others.
            other.plan = replace(other.plan, is_essential=False)
            for process in other.processes:
                process.spec = replace(process.spec, is_essential=False)
        self.models[name] = HostedModel(plan, num_bytes=plan.num_bytes)
        self._tell()
        self.wake()

    def _refuse_alias(self, name: str) -> None:
        """Refuse a model with the name of an alias: gateways would never send it a request."""
        if name in self.aliases:
            remedy = f"remove it with headrace models alias {name}, or load the model under another name"
            raise CommandError(f"{name!r} is an alias of {self.aliases[name]}: {remedy}")

    async def load(self, name: str, *, by_operator: bool = False) -> HostedModel:
        """Load the model, and return when it accepts requests. An operator's request is carried out even if the model
        has just failed, or was unloaded by an operator. Raises NoSuchModelError or CannotLoadError."""
        model = self.find(name)
        if model.is_removed:
            raise CannotLoadError(_IS_REMOVED)
        if by_operator:
            model.is_stopped = False
        elif not model.is_stopped and model.state is State.FAILED and (left_s := self._retry_after_s(model)) > 0:
            raise CannotLoadError(model.problem, None if model.plan.is_pinned else left_s)
        num_failures = model.num_failures
        with self._wanting(model):
            while model.state is not State.LOADED:
                if model.is_removed:
                    raise CannotLoadError(_IS_REMOVED)
                if model.is_stopped:
                    raise CannotLoadError("its operator has unloaded it (headrace models load loads it again)")
                if model.num_failures != num_failures:
                    raise CannotLoadError(model.problem, None if model.plan.is_pinned else _RETRY_S)
                await self._changed.wait()
        return model

    @contextlib.contextmanager
    def _wanting(self, model: HostedModel) -> Iterator[None]:
        """Context manager: a caller waits for the model."""
        model.num_waiting += 1
        if model.wanted_since_s is None:
            model.wanted_since_s = self.clock()
        self.wake()
        try:
            yield
        finally:
            model.num_waiting -= 1
            if model.num_waiting == 0:
                model.wanted_since_s = None

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Context manager: a caller uses this model without a request. While it is loaded, it is not idle. Raises
        NoSuchModelError."""
        model = self.find(name)
        model.num_users += 1
        try:
            yield
        finally:
            model.num_users -= 1
            model.last_used_s = self.clock()

    def _retry_after_s(self, model: HostedModel) -> float:
        """Seconds until a failed model is tried again for requests. Pinned models are tried again only by an
        operator."""
        return float("inf") if model.plan.is_pinned else max(0.0, model.failed_s + _RETRY_S - self.clock())

    async def unload(self, name: str) -> HostedModel:
        """Unload the model at an operator's request. Its requests end first. Returns when its memory is free. A pinned
        model stays unloaded, others are loaded again for requests. Raises NoSuchModelError."""
        model = self.find(name)
        model.is_stopped = model.is_stopped or model.plan.is_pinned
        if model.processes and model.unloading is None:
            self._stop(model)
        while model.processes or model.state is State.UNLOADING:
            await self._changed.wait()
        if model.state is State.FAILED:
            model.problem = ""
            self._enter(model, State.UNLOADED)
        return model

    def set_alias(self, alias: str, models: str, shadow: str, *, by_client: bool = False) -> None:
        """Add or change another name of models, or remove it if `models` is empty. Raises ValueError, and
        OperatorsOwnError if a client wants to change an alias that no client has given."""
        self._take_alias(alias, models, shadow, by_client=by_client)
        self._write_record()

    def _take_alias(self, alias: str, models: str, shadow: str, *, by_client: bool) -> None:
        if by_client and alias in self.aliases and alias not in self.created_aliases:
            if (models, shadow) == (self.aliases[alias], ""):
                return
            raise OperatorsOwnError(f"the name {alias!r} was given by an operator")
        if alias in self.models and (models or alias not in self.aliases):
            raise ValueError(f"{alias!r} is the name of a model")
        aliases = {**self.aliases, alias: models}
        shadows = {**self.shadows, alias: shadow}
        parse_aliases(
            [f"{name}={value}" for name, value in aliases.items() if value],
            [f"{name}={value}" for name, value in shadows.items() if value],
        )
        # Others may stand for models that are gone.
        own = parse_aliases([f"{alias}={models}"] if models else [], [f"{alias}={shadow}"] if shadow else [])
        served = {name for name, model in self.models.items() if not model.is_removed}
        if unknown := sorted(set(own.models) - served):
            raise ValueError(f"this host has no model {unknown[0]!r}; there is {', '.join(sorted(served))}")
        self.aliases = {name: value for name, value in aliases.items() if value}
        self.shadows = {name: value for name, value in shadows.items() if value}
        self.created_aliases = (self.created_aliases | {alias} if by_client else self.created_aliases - {alias}) & {
            *self.aliases
        }
        self._tell()

    async def changes(self) -> AsyncIterator[Mapping[str, HostedModel]]:
        """The models by name, now and after each change."""
        while True:
            changed = self._changed
            yield self.models
            await changed.wait()

    # -- the work ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load and unload models until cancelled."""
        try:
            while True:
                self._woken.clear()
                await self._observe()
                self._act()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._woken.wait()
        finally:
            for model in self.models.values():
                if model.unloading is not None:
                    model.unloading.cancel()

    def _pause_s(self) -> float | None:
        """The time until the next look at the fleet; None if only a request or the end of a process can change
        anything."""
        models = self.models.values()
        if self._fleet is None:
            return None
        if any(model.state in (State.LOADING, State.UNLOADING) for model in models):
            return _POLL_S
        comes_and_goes = any(model.processes and not model.plan.is_pinned for model in models)
        is_waiting = any(model.num_waiting or (model.state is State.FAILED and model.processes) for model in models)
        return _POLL_WHEN_CALM_S if comes_and_goes or is_waiting else None

    def _act(self) -> None:
        views = [self._view(model) for model in self.models.values()]
        decisions = decide(views, self.budget_bytes, self.clock(), self.rules)
        for name in decisions.load:
            self._start(self.models[name])
        for name in decisions.unload:
            self.log(f"{name} is unloaded: {decisions.unload[name]}")
            self._stop(self.models[name])
        for name, problem in decisions.refuse.items():
            self._fail(self.models[name], problem)

    def _view(self, model: HostedModel) -> ModelView:
        plan = model.plan
        since_s = model.wanted_since_s
        if plan.is_pinned and not model.is_stopped and model.state is State.UNLOADED:
            since_s = 0.0
        return ModelView(
            model.name,
            model.state,
            model.num_bytes,
            has_processes=bool(model.processes),
            is_pinned=plan.is_pinned and not model.is_stopped,
            is_busy=model.is_busy or model.num_users > 0,
            wanted_since_s=since_s,
            loaded_s=model.loaded_s,
            last_used_s=model.last_used_s,
            idle_s=plan.idle_s,
        )

    def _start(self, model: HostedModel) -> None:
        model.started_s, model.problem = self.clock(), ""
        model.processes = self.supervisor.add(self.specs_of(model.plan))
        self._enter(model, State.LOADING)

    def _stop(self, model: HostedModel) -> None:
        was_loaded = model.state is State.LOADED
        self._enter(model, State.UNLOADING)
        model.unloading = asyncio.create_task(self._unload(model, drains=was_loaded), name=f"unload {model.name}")

    async def _unload(self, model: HostedModel, *, drains: bool, ends_as: State = State.UNLOADED) -> None:
        if drains and self._fleet is not None:
            await self._fleet.drain([process.spec.address for process in model.processes])
        await self.supervisor.remove(model.processes)
        model.processes = []
        model.unloading = None
        model.is_busy = False
        self._enter(model, ends_as)
        self.wake()

    async def _observe(self) -> None:
        """Learn from processes and router which models have been loaded, which have failed, and which are in use."""
        for model in self.models.values():
            # The workers that serve a loaded model do not depend on one that is refused.
            may_fail = model.unloading is None and (model.state is State.LOADING or _is_over(model))
            if may_fail and (problem := _refusal(model)):
                self._give_up(model, problem)
        running = [model for model in self.models.values() if model.processes and model.unloading is None]
        if self._fleet is None or not running or (workers := await self._fleet.workers()) is None:
            return
        for model in running:
            if model.unloading is not None:
                continue
            mine = [workers[process.spec.name] for process in model.processes if process.spec.name in workers]
            if model.state is not State.LOADED and any(worker.is_ready for worker in mine):
                self._note_loaded(model)
            elif model.state is State.LOADING and (problem := _deaths(model)):
                self._give_up(model, problem)
            self._note_use(model, mine)

    def _note_loaded(self, model: HostedModel) -> None:
        model.loaded_s = self.clock()
        model.problem = ""
        model.num_requests = 0
        model.last_used_s = model.loaded_s
        pids = [process.pid for process in model.processes if process.pid is not None]
        model.num_bytes = max(model.num_bytes, self.measure(pids) + model.plan.kv_cache_bytes)
        self._enter(model, State.LOADED)
        if len(self.models) > 1 or not model.plan.is_pinned:  # a single model has its own line when it is ready
            self.log(f"{model.name} is loaded after {model.loaded_s - model.started_s:.1f} s")

    def _note_use(self, model: HostedModel, workers: Sequence[WorkerView]) -> None:
        num_requests = sum(worker.num_requests for worker in workers)
        model.is_busy = any(worker.is_busy for worker in workers)
        if model.is_busy or num_requests != model.num_requests:
            model.last_used_s = self.clock()
        model.num_requests = num_requests

    def _give_up(self, model: HostedModel, problem: str) -> None:
        """Record that the model cannot be loaded. If the workers of a pinned model only die, they are restarted
        repeatedly. All other workers are stopped."""
        self._fail(model, problem)
        if not model.plan.is_pinned or _refusal(model):
            stopping = self._unload(model, drains=False, ends_as=State.FAILED)
            model.unloading = asyncio.create_task(stopping, name=f"give up {model.name}")

    def _fail(self, model: HostedModel, problem: str) -> None:
        model.problem, model.failed_s = problem, self.clock()
        model.num_failures += 1
        self._enter(model, State.FAILED)
        self.log(f"{model.name} cannot be loaded: {problem}")

    def _enter(self, model: HostedModel, state: State) -> None:
        model.state = state
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _is_over(model: HostedModel) -> bool:
    """Whether all workers of the model have ended and none will be restarted."""
    return all(process.state is ProcessState.FAILED for process in model.processes)


def _refusal(model: HostedModel) -> str:
    """The error message of a worker that has refused the model; empty if none has."""
    for process in model.processes:
        if process.state is ProcessState.FAILED:
            return process.last_error or "its worker refused to start"
    return ""


def _deaths(model: HostedModel) -> str:
    """A message about a worker that keeps dying while it loads the model; empty if there is none."""
    for process in model.processes:
        if process.num_restarts >= _MAX_DEATHS:
            why = f": {process.last_error}" if process.last_error else ""
            times = f"ended {process.num_restarts} times while it loaded the model"
            return f"{process.spec.name} {times}; it {process.last_ending}{why}"
    return ""
