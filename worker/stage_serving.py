"""Serves a stage of other workers' pipelines, in a process that is not a worker itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import Transport
from headrace.common.transport.introspection import add_introspection, set_serving
from headrace.protos import stage_pb2, stage_pb2_grpc
from headrace.protos.stage_pb2 import JoinRequest
from headrace.worker.config import WorkerConfig
from headrace.worker.host.numa import num_threads_for
from headrace.worker.kv.exclusions import refuse_flags
from headrace.worker.model.directory import read_model_dir
from headrace.worker.model.fingerprint import outline_of
from headrace.worker.model.step_limits import DEFAULT_TOKENS
from headrace.worker.serving import answer_probes, bound_server, stop_signal

if TYPE_CHECKING:
    import openvino as ov

    from headrace.worker.model.runner import Layers, OpenVINOModelRunner, Part
    from headrace.worker.pipeline.joining import Joining

log = logging.getLogger("headrace.worker")

STAGE = stage_pb2.DESCRIPTOR.services_by_name["Stage"].full_name


async def serve_stage(config: WorkerConfig) -> bool:
    """Serve until SIGTERM or SIGINT, or until the worker that uses this stage has ended. Returns True in the latter
    case; the process should then start again. ConfigurationError if the flags, the address or the model cannot be
    used."""
    # OpenVINO starts threads, which inherit the memory policy: the command sets that after its imports.
    from headrace.worker.pipeline.joining import Joining
    from headrace.worker.pipeline.stage import StageService

    refuse_flags(config)
    stop = stop_signal()
    transport = Transport(config.tls_dir, config.join_token_file)
    server = bound_server(config, transport)
    read_model_dir(config.model_dir)
    threads = num_threads_for(config.threads)
    service = StageService(config, transport, threads, partial(compile_stage, config, threads))
    stage_pb2_grpc.add_StageServicer_to_server(service, server)
    health = add_introspection(server, [STAGE])
    await server.start()
    probe = await answer_probes(config.probe, health)
    await set_serving(health, [STAGE], True)
    log.info("a stage is listening on %s", config.listen)
    ends: list[asyncio.Task[Any]] = [asyncio.create_task(event.wait()) for event in (stop, service.ended)]
    if config.join is not None:
        outline = await asyncio.to_thread(outline_of, config.model_dir)
        request = JoinRequest(name=config.worker_id, address=config.advertise, model=config.name, outline=outline)
        joining = Joining(config.join, request, transport, service.taken)
        ends.append(asyncio.create_task(_joined(joining, service.ended)))
    ended, running = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await end_tasks(*running)
    await asyncio.gather(server.stop(0.0), *([probe.stop(0.0)] if probe is not None else []))
    for task in ended:
        task.result()
    return not stop.is_set()


async def _joined(joining: Joining, ended: asyncio.Event) -> None:
    """Offer the stage to a worker, and wait until that worker has ended. ConfigurationError if no worker takes it."""
    await joining.run()
    await ended.wait()


def compile_stage(
    config: WorkerConfig,
    threads: int,
    setup: stage_pb2.StageSetup,
    layers: Layers,
    on_lost: Callable[[str], None],
) -> OpenVINOModelRunner:
    """Read the model and compile some of its layers, divided among ranks if the flags say so; see `MakeRunner`."""
    from headrace.worker.model.runner import OpenVINOModelRunner
    from headrace.worker.pipeline.cutting import cut_stage, find_cuts
    from headrace.worker.ranks.group import GroupRunner

    def divide(model: ov.Model) -> Part:
        return cut_stage(model, find_cuts(model), layers)

    asked: dict[str, Any] = {
        "threads": threads,
        "kv_precision": setup.kv_precision,
        "execution_mode": setup.execution_mode,
        "max_context_tokens": setup.max_context_tokens,
        "speculates": setup.speculates,
        "divide": divide,
    }
    if not config.rank_cpus:
        return OpenVINOModelRunner(config.model_dir, **asked)
    # As the worker says it, so that it is the same for all stages.
    hangs_after_s = setup.hangs_after_seconds or config.stuck_after_s
    return GroupRunner(
        config.model_dir,
        config.rank_cpus,
        most_tokens=DEFAULT_TOKENS,
        hangs_after_s=hangs_after_s,
        on_lost=on_lost,
        **asked,
    )
