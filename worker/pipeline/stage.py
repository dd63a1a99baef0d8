"""The layers of one stage after the first, and the call in which it computes them.

the stage before                         this process
the worker's settings         -------->  asks the stages after it, measures itself
                              <--------  how fast it and these are
which layers                  -------->  compiles its layers
                              <--------  compiled
how many KV blocks            -------->  allocates them
                              <--------  allocated
a step, hidden states         -------->  computes it
                                         the stage after, or the result to the stage before
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import numpy as np
import openvino as ov

from headrace.common.model_files.networks import weights_in
from headrace.common.tasks import end_tasks
from headrace.common.threads import in_thread
from headrace.common.transport.channels import Transport
from headrace.protos import stage_pb2, stage_pb2_grpc
from headrace.protos.stage_pb2 import ComputeRequest, ComputeResponse
from headrace.protos.status import Reason, StatusError, abort
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.host.mapped_files import give_back
from headrace.worker.kv.memory import budget_for
from headrace.worker.model.batch import Batch
from headrace.worker.model.fingerprint import fingerprint_of
from headrace.worker.model.runner import OpenVINOModelRunner, Part
from headrace.worker.pipeline.cutting import STATES, find_cuts, keep_layers, take_head
from headrace.worker.pipeline.ends import StatesEnd, StatesRequest
from headrace.worker.pipeline.joining import Taken
from headrace.worker.pipeline.link import RETRY_S, failure_of, lost_stage, waiting_for_stage
from headrace.worker.pipeline.messages import batch_of, pieces_of, states_of
from headrace.worker.pipeline.speed import bytes_per_s
from headrace.worker.sampling.reduction import FloatArray
from headrace.worker.weights.file_memory import give_back_files

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[ComputeRequest, ComputeResponse]
    LaterCall = grpc.aio.StreamStreamCall[ComputeRequest, ComputeResponse]

log = logging.getLogger("headrace.worker.pipeline")

_Result = TypeVar("_Result")


class StageRunner(OpenVINOModelRunner):
    """The layers of a model from `first_layer` to before `end_layer`; None for all that follow. The last stage gives
    hidden states of the sampled rows, and others those of all tokens."""

    def __init__(self, model_dir: Path, first_layer: int, end_layer: int | None, **asked: Any) -> None:
        """`asked` is as for `OpenVINOModelRunner`. ConfigurationError if the model cannot be divided so."""
        self._first_layer, self._end_layer = first_layer, end_layer
        self._is_last = end_layer is None
        super().__init__(model_dir, divide=self._divide, **asked)
        port = next(port for port in self._slot.request.model_inputs if STATES in port.get_names())
        self._shape = [1 if length.is_dynamic else length.get_length() for length in port.partial_shape]
        self.state_bytes = math.prod(self._shape[1:]) * np.dtype(np.float32).itemsize
        """The bytes of the hidden states of a token."""

    def _divide(self, model: ov.Model) -> Part:
        cuts = find_cuts(model)
        take_head(model)
        keep_layers(model, cuts, self._first_layer, self._end_layer or cuts.num_layers)
        end = StatesEnd(of_rows=self._is_last)
        return Part(None, make_end=lambda _usual: end)

    def compute(self, batch: Batch, states: FloatArray, least_rows: int) -> FloatArray:
        """Compute a step whose tokens have these hidden states. Returns the hidden states for the next stage, as a view
        that the next step overwrites: `[tokens or rows, numbers]`."""
        self.bind(batch, keeps_logits=False)
        slot, request = self._slot, self._slot.head
        assert isinstance(request, StatesRequest)
        request.bind(batch.sampled_tokens_indices, batch.inverse_temperatures, batch.sums, least=least_rows)
        slot.inputs.set(STATES, states.reshape(len(states), *self._shape[1:]))
        request.run()
        return request.states()


class StageService(stage_pb2_grpc.StageServicer):
    """Computes for one worker at a time. `taken` is told when that has called, and `ended` is set when it has ended:
    what it has loaded should then go."""

    def __init__(self, config: WorkerConfig, transport: Transport, threads: int) -> None:
        self.taken = Taken()
        self.ended = asyncio.Event()
        self._config, self._transport, self._threads = config, transport, threads
        self._is_called = False

    async def Compute(self, requests: AsyncIterator[ComputeRequest], context: Context) -> None:
        """See Compute in the proto."""
        if self._is_called:
            name = f" ({self.taken.worker})" if self.taken.worker else ""
            problem = f"it is a stage of another worker{name}, and free when that has ended"
            await abort(context, StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0))
        self._is_called = True
        try:
            call = StageCall(self._config, self._transport, self._threads, requests, context.write, self.taken.by)
            await call.run()
        except StatusError as error:
            log.error("%s", error.message)
            await abort(context, error)
        except ConfigurationError as error:
            log.error("%s", error)
            await abort(context, StatusError(Reason.INVALID_FIELD, str(error), field="later_stages"))
        except Exception as error:
            log.critical("the stage failed", exc_info=error)
            await abort(context, StatusError(Reason.INTERNAL, f"the stage failed: {type(error).__name__}"))
        finally:
            self.ended.set()


class StageCall:
    """One call of the stage before, from which `requests` come, and to which `write` answers. `on_setup` gets the name
    of the worker."""

    def __init__(
        self,
        config: WorkerConfig,
        transport: Transport,
        threads: int,
        requests: AsyncIterator[ComputeRequest],
        write: Callable[[ComputeResponse], Awaitable[None]],
        on_setup: Callable[[str], None],
    ) -> None:
        self._config, self._transport, self._threads = config, transport, threads
        self._requests, self._write = requests, write
        self._on_setup = on_setup
        self._executor = ThreadPoolExecutor(1, "stage")
        self._later: LaterCall | None = None
        self._later_address = ""
        self._busy_s = 0.0

    async def run(self) -> None:
        """Load, and compute until the stage before has ended. Raises StatusError if that is not possible."""
        setup = (await self._next("setup")).setup
        self._on_setup(setup.worker)
        log.info("the settings of the worker %s have come", setup.worker)
        hashing = in_thread("fingerprint", partial(fingerprint_of, self._config.model_dir, self._threads))
        speed = await self._in_thread(bytes_per_s, self._threads)
        own = stage_pb2.StageHost(address=self._config.advertise, threads=self._threads, speed=speed)
        later = await self._open_later(setup) if setup.later_stages else stage_pb2.StageOffer()
        await self._write(ComputeResponse(offer=stage_pb2.StageOffer(stages=[own, *later.stages])))
        runner = await self._compile(setup)
        if runner is not None and await self._allocate(runner, hashing):
            await self._compute(runner)
        # After a problem, the worker ends the call.
        async for _ in self._requests:
            pass

    async def _open_later(self, setup: stage_pb2.StageSetup) -> stage_pb2.StageOffer:
        """Begin the call to the next stage, as soon as it answers."""
        address, *rest = setup.later_stages
        of_later = stage_pb2.StageSetup()
        of_later.CopyFrom(setup)
        del of_later.later_stages[:]
        of_later.later_stages.extend(rest)
        self._later_address = address
        waiting = waiting_for_stage(address)
        stub = stage_pb2_grpc.StageStub(self._transport.channel(address))
        while True:
            call = stub.Compute()
            try:
                await call.write(ComputeRequest(setup=of_later))
                first = await call.read()
            except grpc.RpcError as error:
                waiting.tell(failure_of(error))
            else:
                if isinstance(first, ComputeResponse):
                    self._later = call
                    return first.offer
                waiting.tell(StatusError(Reason.WORKER_LOST, "it has ended"))
            await asyncio.sleep(RETRY_S)

    async def _compile(self, setup: stage_pb2.StageSetup) -> StageRunner | None:
        """Compile the layers. Returns None if that is not possible."""
        first, *rest = (await self._next("layers")).layers.first_layers
        await self._tell_later(ComputeRequest(layers=stage_pb2.StageLayers(first_layers=rest)))
        compiled = stage_pb2.StageCompiled()
        runner = None
        try:
            runner = await self._in_thread(self._load, setup, first, rest[0] if self._later is not None else None)
        except ConfigurationError as error:
            compiled.problem = f"{self._config.listen}: {error}"
        else:
            compiled.exact_rows, compiled.block_size = runner.exact_rows, runner.block_size
            compiled.most_blocks = max(0, budget_for(self._config) // runner.block_bytes - 1)
            compiled.numerics.append(runner.numerics)
        if self._later is not None:
            others = (await self._read(self._later)).compiled
            compiled.problem = compiled.problem or others.problem
            compiled.exact_rows = min(compiled.exact_rows, others.exact_rows)
            compiled.most_blocks = min(compiled.most_blocks, others.most_blocks)
            compiled.numerics.extend(others.numerics)
        await self._write(ComputeResponse(compiled=compiled))
        return None if compiled.problem else runner

    def _load(self, setup: stage_pb2.StageSetup, first_layer: int, end_layer: int | None) -> StageRunner:
        return StageRunner(
            self._config.model_dir,
            first_layer,
            end_layer,
            threads=self._threads,
            kv_precision=setup.kv_precision,
            execution_mode=setup.execution_mode,
            max_context_tokens=setup.max_context_tokens,
            speculates=setup.speculates,
        )

    async def _allocate(self, runner: StageRunner, hashing: Future[str]) -> bool:
        """Make the KV cache. Returns whether that was possible."""
        request = await self._next("allocate")
        await self._tell_later(request)
        allocated = stage_pb2.StageAllocated()
        try:
            await self._in_thread(self._make_cache, runner, request.allocate.num_blocks)
        except ConfigurationError as error:
            allocated.problem = f"{self._config.listen}: {error}"
        allocated.fingerprints.append(await asyncio.wrap_future(hashing))
        if self._later is not None:
            others = (await self._read(self._later)).allocated
            allocated.problem = allocated.problem or others.problem
            allocated.fingerprints.extend(others.fingerprints)
        await self._write(ComputeResponse(allocated=allocated))
        return not allocated.problem

    def _make_cache(self, runner: StageRunner, num_blocks: int) -> None:
        runner.allocate(num_blocks, huge_pages=self._config.huge_pages)
        runner.touch()

    async def _compute(self, runner: StageRunner) -> None:
        """Compute each step, until the stage before has ended. Raises StatusError when the stage after has: at once,
        because the stage before may wait for a result and send nothing more."""
        log.info("ready to compute")
        jobs = [asyncio.create_task(self._compute_steps(runner))]
        if self._later is not None:
            jobs.append(asyncio.create_task(self._relay(self._later)))
        try:
            ended, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in ended:
                job.result()
        finally:
            await end_tasks(*jobs)

    async def _compute_steps(self, runner: StageRunner) -> None:
        async for request in self._requests:
            if request.HasField("end_warm_up"):
                await self._tell_later(request)
                await self._in_thread(self._give_back)
            else:
                await self._step(runner, request)

    async def _step(self, runner: StageRunner, request: ComputeRequest) -> None:
        step = request.step
        batch = batch_of(step)
        pieces: list[bytes] = []
        missing = len(batch.input_ids) * runner.state_bytes
        while missing > 0:
            pieces.append((await self._next("states")).states)
            missing -= len(pieces[-1])
        start_s = time.perf_counter()
        states = states_of(pieces, len(batch.input_ids))
        # Copied, because the next step overwrites them.
        found = [*pieces_of(await self._in_thread(runner.compute, batch, states, step.least_rows))]
        self._busy_s += time.perf_counter() - start_s
        if self._later is not None:
            await self._tell_later(ComputeRequest(step=step))
            for piece in found:
                await self._tell_later(ComputeRequest(states=piece))
            return
        for piece in found[:-1]:
            await self._write(ComputeResponse(result=stage_pb2.StageResult(states=piece)))
        last = stage_pb2.StageResult(states=b"".join(found[-1:]), is_last=True, busy_s=[self._busy_s])
        await self._write(ComputeResponse(result=last))

    async def _relay(self, later: LaterCall) -> None:
        """Pass on the results of the stages after this one."""
        while True:
            response = await self._read(later)
            if response.result.is_last:
                response.result.busy_s.insert(0, self._busy_s)
            await self._write(response)

    def _give_back(self) -> None:
        given_back = sum(map(give_back, weights_in(self._config.model_dir))) + give_back_files()
        log.info("%.2f GiB of weights in files were given back", given_back / (1 << 30))

    async def _next(self, kind: str) -> ComputeRequest:
        """The next request, which must be of this kind. Raises StatusError."""
        request = await anext(self._requests, None)
        if request is not None and request.WhichOneof("kind") == kind:
            return request
        raise StatusError(Reason.INVALID_FIELD, f"the call has no {kind} where it should have", field="kind")

    async def _read(self, later: LaterCall) -> ComputeResponse:
        """The next response of the stage after this one. Raises StatusError if it has ended."""
        try:
            response = await later.read()
        except grpc.RpcError as error:
            raise self._failure(error) from error
        if response is grpc.aio.EOF:
            raise StatusError(Reason.WORKER_LOST, lost_stage(self._later_address, "its call is over"))
        assert isinstance(response, ComputeResponse)
        return response

    async def _tell_later(self, request: ComputeRequest) -> None:
        if self._later is None:
            return
        try:
            await self._later.write(request)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except asyncio.InvalidStateError as error:
            raise StatusError(Reason.WORKER_LOST, lost_stage(self._later_address, error)) from error

    def _failure(self, error: grpc.RpcError) -> StatusError:
        """Why the call to the stage after this one has failed."""
        failure = failure_of(error)
        if failure.reason is not Reason.WORKER_LOST:
            return failure
        return StatusError(Reason.WORKER_LOST, lost_stage(self._later_address, failure.message))

    async def _in_thread(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Call a function in the thread that computes."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
