"""The layers of one stage after the first, and the call in which it computes them.

the stage before                         this process
the worker's settings         -------->  asks the stages after it, measures itself
                              <--------  how fast it and these are
which layers                  -------->  compiles its layers
                              <--------  compiled
how many KV blocks            -------->  allocates them
                              <--------  allocated
                              <--------  until the end of the warm-up, several times: it does not stand still
a step, hidden states         -------->  computes it
                                         the stage after, or the result to the stage before
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
import numpy as np

from headrace.common.model_files.networks import weights_in
from headrace.common.tasks import end_tasks
from headrace.common.threads import in_thread
from headrace.common.transport.channels import Transport
from headrace.protos import stage_pb2, stage_pb2_grpc
from headrace.protos.stage_pb2 import ComputeRequest, ComputeResponse, GetStageStateRequest, GetStageStateResponse
from headrace.protos.status import Reason, StatusError, abort
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.host.binding import rank_message
from headrace.worker.host.mapped_files import give_back
from headrace.worker.host.precision import mode_has_bfloat16
from headrace.worker.host.progress import Progress
from headrace.worker.kv.memory import budget_for
from headrace.worker.model.batch import Batch, HiddenStates
from headrace.worker.model.fingerprint import fingerprint_of
from headrace.worker.model.runner import Layers, OpenVINOModelRunner
from headrace.worker.pipeline.joining import Taken
from headrace.worker.pipeline.link import RETRY_S, failure_of, lost_stage, said_nothing, waiting_for_stage
from headrace.worker.pipeline.messages import batch_of, pieces_of
from headrace.worker.pipeline.speed import bytes_per_s
from headrace.worker.weights.file_memory import give_back_files

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[ComputeRequest, ComputeResponse]
    StateContext = grpc.aio.ServicerContext[GetStageStateRequest, GetStageStateResponse]
    LaterCall = grpc.aio.StreamStreamCall[ComputeRequest, ComputeResponse]

log = logging.getLogger("headrace.worker.pipeline")

_TOKEN_BYTES = np.dtype(np.int64).itemsize
_Result = TypeVar("_Result")


class MakeRunner(Protocol):
    """Makes the runner that computes a stage."""

    def __call__(
        self, setup: stage_pb2.StageSetup, layers: Layers, on_lost: Callable[[str], None], /
    ) -> OpenVINOModelRunner:
        """Compile these layers with the worker's settings. If the runner fails later, it calls `on_lost` with the
        reason, in any thread. ConfigurationError if the layers cannot be compiled."""
        ...


class StageService(stage_pb2_grpc.StageServicer):
    """Computes for one worker at a time, with the runner from `make_runner`. When a worker calls, `taken` records it.
    When its call has ended, `ended` is set; the process should then free what it has loaded."""

    def __init__(self, config: WorkerConfig, transport: Transport, threads: int, make_runner: MakeRunner) -> None:
        self.taken = Taken()
        self.ended = asyncio.Event()
        self._config, self._transport, self._threads = config, transport, threads
        self._make_runner = make_runner
        self._call: StageCall | None = None

    async def GetStageState(self, _request: GetStageStateRequest, _context: StateContext) -> GetStageStateResponse:
        """See GetStageState in the proto."""
        if self._call is None:
            return GetStageStateResponse(state=stage_pb2.STAGE_STATE_WAITING)
        return self._call.state(self.taken.worker)

    async def Compute(self, requests: AsyncIterator[ComputeRequest], context: Context) -> None:
        """See Compute in the proto."""
        if self._call is not None:
            name = f" ({self.taken.worker})" if self.taken.worker else ""
            problem = f"it is a stage of another worker{name}, and free when that has ended"
            await abort(context, StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0))
        asked = (self._config, self._transport, self._threads, self._make_runner)
        call = self._call = StageCall(*asked, requests, context.write, self.taken.by)
        try:
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
    """One call from the stage before: `requests` come from it, and `write` sends responses to it. `on_setup` gets the
    name of the worker."""

    def __init__(
        self,
        config: WorkerConfig,
        transport: Transport,
        threads: int,
        make_runner: MakeRunner,
        requests: AsyncIterator[ComputeRequest],
        write: Callable[[ComputeResponse], Awaitable[None]],
        on_setup: Callable[[str], None],
    ) -> None:
        self._config, self._transport, self._threads = config, transport, threads
        self._make_runner = make_runner
        self._requests, self._write_one = requests, write
        self._writing = asyncio.Lock()
        self._on_setup = on_setup
        self._executor = ThreadPoolExecutor(1, "stage")
        self._later: LaterCall | None = None
        self._later_address = ""
        self._busy_s = 0.0
        # Its layers: the first, and the end.
        self._layers = (0, 0)
        # What it does until it is loaded, and whether it gets on; neither while it waits for others.
        self._doing = ""
        self._progress = Progress(os.getpid(), math.inf)
        self._is_loaded = self._is_ready = False
        self._loop = asyncio.get_running_loop()
        # Why what computes cannot go on.
        self._lost: asyncio.Future[str] = self._loop.create_future()

    def state(self, worker: str) -> GetStageStateResponse:
        """The state of this stage, for GetStageState. `worker` is the name of the worker whose stage it is."""
        first, end = self._layers
        state = stage_pb2.STAGE_STATE_READY if self._is_ready else stage_pb2.STAGE_STATE_LOADING
        return GetStageStateResponse(
            state=state, worker=worker, first_layer=first, num_layers=end - first, compute_seconds=self._busy_s
        )

    async def run(self) -> None:
        """Load, and compute until the stage before has ended. Raises StatusError if that is not possible, or if loading
        makes no progress."""
        serving = asyncio.create_task(self._serve())
        ends: set[asyncio.Future[Any]] = {serving, self._lost}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise StatusError(Reason.WORKER_LOST, self._lost.result())
            serving.result()
        finally:
            await end_tasks(serving)

    def _lose(self, why: str) -> None:
        """Mark the stage as lost. Any thread may call it, also while the process ends."""

        def tell() -> None:
            if not self._lost.done():
                self._lost.set_result(why)

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(tell)

    async def _serve(self) -> None:
        setup = (await self._next("setup")).setup
        self._on_setup(setup.worker)
        log.info("the settings of the worker %s have come", setup.worker)
        self._progress = Progress(os.getpid(), setup.hangs_after_seconds or math.inf)
        telling = asyncio.create_task(self._tell_progress())
        try:
            await self._load_and_compute(setup)
        finally:
            await end_tasks(telling)

    async def _tell_progress(self) -> None:
        """While the model is loaded, report progress to the stage before. If loading makes no progress, mark the stage
        as lost."""
        progress = self._progress
        while math.isfinite(progress.bound_s) and not self._is_loaded:
            await asyncio.sleep(progress.every_s)
            if self._doing and progress.is_lost():
                self._lose(f"it hangs while it loads, {self._doing}: {progress}")
                return
            if not self._is_loaded:
                await self._write(ComputeResponse(progress=stage_pb2.StageProgress()))

    async def _load_and_compute(self, setup: stage_pb2.StageSetup) -> None:
        hashing = in_thread("fingerprint", partial(fingerprint_of, self._config.model_dir, self._threads))
        speed = await self._in_thread("measuring its speed", bytes_per_s, self._threads)
        num_ranks = self._config.tensor_parallel
        bfloat16 = await self._in_thread("finding its precision", mode_has_bfloat16, setup.execution_mode)
        own = stage_pb2.StageHost(
            address=self._config.advertise,
            threads=self._threads,
            speed=num_ranks * speed,
            num_ranks=num_ranks,
            bfloat16=bfloat16,
        )
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
                first = await self._response_of(call)
            except grpc.RpcError as error:
                waiting.tell(failure_of(error))
            except StatusError as error:
                call.cancel()
                waiting.tell(error)
            else:
                self._later = call
                return first.offer
            await asyncio.sleep(RETRY_S)

    async def _compile(self, setup: stage_pb2.StageSetup) -> OpenVINOModelRunner | None:
        """Compile the layers. Returns None if that is not possible."""
        asked = (await self._next("layers")).layers
        first, *rest = asked.first_layers
        self._layers = first, rest[0]
        of_later = stage_pb2.StageLayers(first_layers=rest, bfloat16_states=asked.bfloat16_states)
        await self._tell_later(ComputeRequest(layers=of_later))
        compiled = stage_pb2.StageCompiled()
        runner = None
        try:
            layers = Layers(first, rest[0] if self._later is not None else None, asked.bfloat16_states)
            runner = await self._in_thread("compiling its layers", self._make_runner, setup, layers, self._lose)
        except ConfigurationError as error:
            compiled.problem = f"{self._config.listen}: {error}"
        else:
            compiled.exact_rows, compiled.block_size = runner.exact_rows, runner.block_size
            compiled.most_blocks = most_blocks(self._config, runner)
            compiled.numerics.append(runner.numerics)
        if self._later is not None:
            others = (await self._read(self._later)).compiled
            compiled.problem = compiled.problem or others.problem
            compiled.exact_rows = min(compiled.exact_rows, others.exact_rows)
            compiled.most_blocks = min(compiled.most_blocks, others.most_blocks)
            compiled.numerics.extend(others.numerics)
        await self._write(ComputeResponse(compiled=compiled))
        return None if compiled.problem else runner

    async def _allocate(self, runner: OpenVINOModelRunner, hashing: Future[str]) -> bool:
        """Make the KV cache. Returns whether that was possible."""
        request = await self._next("allocate")
        await self._tell_later(request)
        allocated = stage_pb2.StageAllocated()
        try:
            await self._in_thread("making its KV cache", self._make_cache, runner, request.allocate.num_blocks)
        except ConfigurationError as error:
            allocated.problem = f"{self._config.listen}: {error}"
        with self._busy("reading the files of the model"):
            allocated.fingerprints.append(await asyncio.wrap_future(hashing))
        if self._later is not None:
            others = (await self._read(self._later)).allocated
            allocated.problem = allocated.problem or others.problem
            allocated.fingerprints.extend(others.fingerprints)
        await self._write(ComputeResponse(allocated=allocated))
        return not allocated.problem

    def _make_cache(self, runner: OpenVINOModelRunner, num_blocks: int) -> None:
        runner.allocate(num_blocks, huge_pages=self._config.huge_pages)
        runner.touch()

    async def _compute(self, runner: OpenVINOModelRunner) -> None:
        """Compute each step, until the stage before has ended. Raises StatusError when the stage after has: at once,
        because the stage before may wait for a result and send nothing more."""
        log.info("ready to compute")
        self._is_ready = True
        jobs = [asyncio.create_task(self._compute_steps(runner))]
        if self._later is not None:
            jobs.append(asyncio.create_task(self._relay(runner, self._later)))
        try:
            ended, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in ended:
                job.result()
        finally:
            await end_tasks(*jobs)

    async def _compute_steps(self, runner: OpenVINOModelRunner) -> None:
        async for request in self._requests:
            if request.HasField("end_warm_up"):
                self._is_loaded = True
                await self._tell_later(request)
                await self._in_thread("giving memory back", self._give_back, runner)
            else:
                await self._step(runner, request)

    async def _step(self, runner: OpenVINOModelRunner, request: ComputeRequest) -> None:
        step = request.step
        pieces: list[bytes] = []
        dtype = runner.hidden_dtype
        missing = len(step.input_ids) // _TOKEN_BYTES * runner.hidden_width * dtype.itemsize
        while missing > 0:
            pieces.append((await self._next("states")).states)
            missing -= len(pieces[-1])
        start_s = time.perf_counter()
        # Copied, because the next step overwrites them.
        found = [*pieces_of(await self._in_thread("computing", compute, runner, batch_of(step, pieces, dtype)))]
        self._busy_s += time.perf_counter() - start_s
        if self._later is not None:
            await self._tell_later(ComputeRequest(step=step))
            for piece in found:
                await self._tell_later(ComputeRequest(states=piece))
            return
        for piece in found[:-1]:
            await self._write(ComputeResponse(result=stage_pb2.StageResult(states=piece)))
        last = stage_pb2.StageResult(states=b"".join(found[-1:]), is_last=True)
        last.busy_s.append(self._busy_s)
        last.stages.append(ranks_of(runner))
        await self._write(ComputeResponse(result=last))

    async def _relay(self, runner: OpenVINOModelRunner, later: LaterCall) -> None:
        """Pass the results of the later stages on to the stage before."""
        while True:
            response = await self._read(later)
            if response.result.is_last:
                response.result.busy_s.insert(0, self._busy_s)
                response.result.stages.insert(0, ranks_of(runner))
            await self._write(response)

    def _give_back(self, runner: OpenVINOModelRunner) -> None:
        runner.end_warm_up()
        given_back = sum(map(give_back, weights_in(self._config.model_dir))) + give_back_files()
        log.info("%.2f GiB of weights in files were given back", given_back / (1 << 30))

    async def _next(self, kind: str) -> ComputeRequest:
        """The next request, which must be of this kind. Raises StatusError."""
        request = await anext(self._requests, None)
        if request is not None and request.WhichOneof("kind") == kind:
            return request
        raise StatusError(Reason.INVALID_FIELD, f"the call has no {kind} where it should have", field="kind")

    async def _write(self, response: ComputeResponse) -> None:
        """Send a response to the stage before, one at a time, because gRPC allows no more."""
        async with self._writing:
            await self._write_one(response)

    async def _read(self, later: LaterCall) -> ComputeResponse:
        """The next response of the stage after this one. Raises StatusError if that stage has ended or makes no
        progress."""
        try:
            return await self._response_of(later)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except StatusError as error:
            raise StatusError(error.reason, lost_stage(self._later_address, error.message)) from error

    async def _response_of(self, later: LaterCall) -> ComputeResponse:
        """The next response of a later stage, other than a progress report. Raises RpcError, or StatusError if the call
        is over or if the stage is silent for too long while it loads."""
        while True:
            response = await (later.read() if self._is_loaded else self._read_in_time(later))
            if response is grpc.aio.EOF:
                raise StatusError(Reason.WORKER_LOST, "its call is over")
            assert isinstance(response, ComputeResponse)
            if not response.HasField("progress"):
                return response

    async def _read_in_time(self, later: LaterCall) -> object:
        """The next response, or the end of the call. StatusError if nothing arrives within the bound while the stage
        loads."""
        reading: asyncio.Task[object] = asyncio.ensure_future(later.read())
        bound_s = self._progress.bound_s
        try:
            # A stage that is loaded says no more that it gets on.
            while not self._is_loaded and not reading.done():
                await asyncio.wait({reading}, timeout=bound_s if math.isfinite(bound_s) else None)
                if not reading.done() and not self._is_loaded:
                    raise StatusError(Reason.WORKER_LOST, said_nothing(bound_s))
            return await reading
        finally:
            await end_tasks(reading)

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
        """The error for a failed call to the stage after this one."""
        failure = failure_of(error)
        if failure.reason is not Reason.WORKER_LOST:
            return failure
        return StatusError(Reason.WORKER_LOST, lost_stage(self._later_address, failure.message))

    async def _in_thread(self, doing: str, function: Callable[..., _Result], *args: object) -> _Result:
        """Call a function in the thread that computes. `doing` says what it does."""
        with self._busy(doing):
            return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    @contextlib.contextmanager
    def _busy(self, doing: str) -> Iterator[None]:
        """Context manager: this stage has work, and must make progress while it loads."""
        if self._is_loaded:
            yield
            return
        self._progress.begin()
        self._doing = doing
        try:
            yield
        finally:
            self._doing = ""


def compute(runner: OpenVINOModelRunner, batch: Batch) -> HiddenStates:
    """Compute the layers of a stage. Returns the hidden states for the next stage, as a view that the next step
    overwrites: `[tokens or rows, numbers]`."""
    runner.bind(batch, keeps_logits=False)
    return runner.run().values


def ranks_of(runner: OpenVINOModelRunner) -> stage_pb2.StageRanks:
    """The ranks of a stage as a message."""
    return stage_pb2.StageRanks(ranks=map(rank_message, runner.ranks()))


def most_blocks(config: WorkerConfig, runner: OpenVINOModelRunner) -> int:
    """The number of KV blocks for which a stage has room, besides one for padding."""
    found = budget_for(config) // runner.block_bytes
    on_nodes = runner.most_blocks(config.kv_cache_node_share)
    if on_nodes is not None and config.kv_cache_bytes is None:
        found = min(found, on_nodes)
    return max(0, found - 1)
