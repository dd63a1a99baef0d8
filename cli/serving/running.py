"""One run of `headrace serve`: its processes, its models, its record for other commands, and its messages."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.cli.fleet.http_probe import http_status
from headrace.cli.fleet.run_state import RunState, ServeRecord, own_start_ticks
from headrace.cli.hosting.created import CreatedRecord
from headrace.cli.hosting.finding import find_model
from headrace.cli.hosting.planner import State
from headrace.cli.hosting.settings import ModelSettings
from headrace.cli.serving.configured import ConfiguredModels, ModelsFile
from headrace.cli.serving.host import ModelHost
from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.model_plans import Sizing, places_of, plan_model, with_usual_workers
from headrace.cli.serving.plan import (
    ModelPlan,
    ServeOptions,
    front_specs,
    host_address,
    router_address,
    worker_specs,
)
from headrace.cli.serving.ranks import Ranks
from headrace.cli.serving.recording import Recording, records_of
from headrace.cli.serving.supervisor import StopSignals, SupervisedProcess, Supervisor
from headrace.cli.serving.topology import read_topology
from headrace.common.model_files.task import task_of
from headrace.common.tasks import end_tasks
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK

_POLL_UNTIL_READY_S = 0.03
_POLL_WHEN_READY_S = 0.5
_PATIENCE_S = 15.0


def waiting_line(waited_s: float, loading: Sequence[str], processes: Sequence[SupervisedProcess]) -> str:
    """The message for an operator who has waited this long for the first readiness: what is still loading, or which
    processes have ended and were started again."""
    ended = [process.spec.name for process in processes if process.num_restarts]
    if ended:
        return f"not ready after {waited_s:.0f} s: {', '.join(ended)} ended and started again; the log above shows why"
    what = ", ".join(loading) or "the gateway"
    is_are = "are" if len(loading) > 1 else "is"
    return f"not ready after {waited_s:.0f} s: {what} {is_are} still loading"


@dataclass(slots=True)
class Serving:
    """One run of `headrace serve`: its supervisor, its record for other commands, and its messages."""

    options: ServeOptions
    plans: Sequence[ModelPlan]
    sizing: Sizing
    log: LogSink
    begun_s: float
    ranks: Ranks
    file: ModelsFile | None = None
    """The configuration that names the models, if it can be read again."""
    configured: ConfiguredModels | None = field(init=False, default=None)
    supervisor: Supervisor = field(init=False)
    host: ModelHost = field(init=False)
    state: RunState = field(init=False)
    stop_signals: StopSignals = field(init=False)
    _recording: Recording = field(init=False)
    _announced: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        options = self.options
        self.supervisor = Supervisor((), self.log, on_change=self._on_change)
        self.stop_signals = StopSignals(self.supervisor, self.log)
        self.host = ModelHost(
            self.plans,
            self.supervisor,
            lambda plan: worker_specs(options, plan, sys.executable),
            lambda line: self.log.line("serve", line),
            budget_bytes=self.sizing.budget_bytes,
            plan_named=self._plan_named,
            aliases=dict(text.split("=", 1) for text in options.aliases),
            shadows=dict(text.split("=", 1) for text in options.shadows),
            record=None if options.created_record is None else CreatedRecord(options.created_record),
        )
        self.state = RunState(options.port)
        self._recording = Recording(lambda: self.state.write(self._record()), lambda line: self.log.line("serve", line))
        if self.file is not None:
            self.configured = ConfiguredModels(
                self.file, self.host, self._plan_beside, lambda line: self.log.line("serve", line)
            )

    def _plan_named(self, name: str, model: str, first_worker: int) -> ModelPlan:
        """The plan of a model that an operator loads while others are served. Raises CommandError."""
        return self._plan_beside(ModelSettings(model, name=name, on_demand=True), first_worker)

    def _plan_beside(self, settings: ModelSettings, first_worker: int) -> ModelPlan:
        """The plan of a model that is added to those already served: all share the KV cache memory equally. Raises
        CommandError."""
        (places,) = places_of(read_topology(), [with_usual_workers(settings, self.options.worker)], self.ranks)
        others = [model.plan for model in self.host.models.values() if model.name != settings.name]
        share = 1.0 / (1 + sum(not plan.is_encoder for plan in others))
        found = find_model(settings.model, offline=self.ranks.offline, num_workers=len(places))
        plan = plan_model(settings, found, places, share, self.sizing, first_worker=first_worker)
        return replace(plan, is_essential=False)

    async def run(self) -> int:
        """Serve until a signal arrives. Returns the exit status. Raises CommandError with the message of a process that
        refused its flags."""
        self.stop_signals.listen()
        supervising = asyncio.create_task(self.supervisor.run())
        tasks = [asyncio.create_task(work) for work in (self._run_models(), self._watch_readiness())]
        try:
            await asyncio.wait({supervising, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in (task for task in tasks if task.done()):
                task.result()
            await supervising
        finally:
            for task in tasks:
                task.cancel()
            self.state.remove(self._record())
        return self.stop_signals.exit_status()

    async def _run_models(self) -> None:
        """Load the models, and serve the gateway's and commands' calls about them."""
        models = asyncio.create_task(self.host.run())
        await asyncio.sleep(0)  # the workers start first, because they take longest
        self.supervisor.add(front_specs(self.options, sys.executable))
        try:
            await self.host.restore()
            if self._is_one and not self.options.has_rules and not self.host.created_aliases:
                # Until a single model is ready, there are no calls. Importing gRPC earlier would only take CPU from its
                # worker.
                await self._announced.wait()
            await self._answer_while(models)
        finally:
            models.cancel()

    async def _answer_while(self, models: asyncio.Task[None]) -> None:
        # Imported here, because it imports gRPC.
        from headrace.cli.fleet.fleet_access import transport_of
        from headrace.cli.serving.host_calls import answering

        options = self.options
        transport = transport_of(options.files.tls_dir, options.files.join_token_file)
        async with answering(self.host, host_address(options), router_address(options), transport, self.configured):
            if self.configured is None or not self.configured.file.poll_s:
                await models
                return
            following = asyncio.create_task(self.configured.follow())
            try:
                await asyncio.wait({models, following}, return_when=asyncio.FIRST_COMPLETED)
                for task in (models, following):
                    if task.done():
                        task.result()
            finally:
                await end_tasks(following)

    async def _watch_readiness(self) -> None:
        """Announce the first readiness on standard output, and log later losses and recoveries."""
        host, port = self.options.host, self.options.port
        since_s = self.begun_s
        announced = False
        is_reported = False
        while self.stop_signals.count == 0:
            ready = await http_status(host, port, "/health/ready", scheme=self.options.url.partition(":")[0]) == 200
            ready = ready and (announced or self._is_one or self.host.is_settled)
            waited_s = time.monotonic() - since_s
            if ready and not announced:
                self._announce(waited_s)
                announced, is_reported = True, False
            elif ready and is_reported:
                self.log.line("serve", f"ready again after {waited_s:.1f} s")
                is_reported = False
            elif not ready and announced and not is_reported and self.stop_signals.count == 0:
                self.log.line("serve", "not ready: no model is available at the moment")
                is_reported = True
                since_s = time.monotonic()
            elif not ready and not announced and not is_reported and waited_s > _PATIENCE_S:
                loading = [name for name, model in self.host.models.items() if model.state is State.LOADING]
                self.log.line("serve", waiting_line(waited_s, loading, self.supervisor.processes))
                is_reported = True
            await asyncio.sleep(_POLL_WHEN_READY_S if ready else _POLL_UNTIL_READY_S)

    def _announce(self, waited_s: float) -> None:
        url = self.options.url
        print(f"ready: {url}/v1", flush=True)
        self._announced.set()
        usable = [plan for plan in self.plans if self.host.models[plan.name].state is not State.FAILED]
        names = ", ".join(plan.name if plan.is_pinned else f"{plan.name} (on demand)" for plan in usable)
        are = "is" if len(usable) == 1 else "are"
        needs_key = self.options.files.api_keys is not None
        key = ", with a key in HEADRACE_API_KEY" if needs_key else ""
        self.log.line("serve", f"{names} {are} ready after {waited_s:.1f} s; try{key}:")
        for command in first_requests(url, usable[0].name, usable[0].directory, needs_key=needs_key):
            self.log.line("serve", f"  {command}")
        if self.options.grpc_port:
            self.log.line("serve", f"gRPC on {self.options.host}:{self.options.grpc_port}; Ctrl-C stops")

    @property
    def _is_one(self) -> bool:
        """Whether exactly one model is loaded at the start."""
        return len(self.plans) == 1 and self.plans[0].is_pinned

    def _on_change(self) -> None:
        self._recording.update()
        self.host.wake()

    def _record(self) -> ServeRecord:
        options = self.options
        return ServeRecord(
            pid=os.getpid(),
            start_ticks=own_start_ticks(),
            url=options.url,
            tls_dir=_text(options.files.tls_dir),
            join_token_file=_text(options.files.join_token_file),
            host=options.host,
            port=options.port,
            grpc_port=options.grpc_port,
            models=tuple(self.host.models),
            router_address=router_address(options),
            host_address=host_address(options),
            socket_directory=str(options.socket_directory),
            processes=records_of(self.supervisor.processes),
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def first_requests(url: str, name: str, model_dir: Path, *, needs_key: bool = False) -> Sequence[str]:
    """Commands for a shell that suit the model's task. If a key is needed, they send the one in HEADRACE_API_KEY."""
    task = task_of(model_dir)
    if task == TASK_EMBED:
        return [_curl(f"{url}/v1/embeddings", {"model": name, "input": "Hello!"}, needs_key)]
    if task == TASK_RANK:
        body = {"model": name, "query": "A bird?", "documents": ["A robin.", "A stone."]}
        return [_curl(f"{url}/v1/rerank", body, needs_key)]
    messages = [{"role": "user", "content": "Hello!"}]
    return [
        _curl(f"{url}/v1/chat/completions", {"model": name, "messages": messages}, needs_key),
        f"headrace chat --url {url}",
    ]


def _curl(url: str, body: dict[str, Any], needs_key: bool) -> str:
    compact = shlex.quote(json.dumps(body, separators=(",", ":")))
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if needs_key else ""
    return f"curl {url} -H 'Content-Type: application/json'{key} -d {compact}"
