"""Connects stages to the worker that runs the first stage: each stage offers itself to the worker.

stage B: headrace serve --join A    -- its name, address and model -->    worker A: --pipeline 3 --await-stages
stage C: headrace serve --join A    -->
                                    <--  which stages have joined --      when both are there, in the order of names:
                                                                          the call to B, and B's call to C (link.py)

An offer holds as long as its call. So the worker knows at once when a stage that it waits for is gone, and a stage when
the worker is. A stage that computes offers itself to nobody.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import Transport
from headrace.protos import stage_pb2_grpc
from headrace.protos.stage_pb2 import JoinRequest, JoinResponse
from headrace.protos.status import Reason, StatusError, abort
from headrace.worker.pipeline.link import RETRY_S, TELL_EVERY_S, Waiting, failure_of

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[JoinRequest, JoinResponse]
    JoinCall = grpc.aio.UnaryStreamCall[JoinRequest, JoinResponse]

log = logging.getLogger("headrace.worker.pipeline")


class StageOffers:
    """The stages that have offered themselves to a worker; see `Others`. It needs `num_stages` of them, with the model
    `model`, whose files have the hash `outline`. `worker` is the worker's name, and `listen` the address at which
    stages offer themselves.

    `join`, `leave` and `changes` are for one event loop, the others for one other thread.
    """

    def __init__(self, worker: str, num_stages: int, model: str, outline: str, listen: str) -> None:
        self._worker, self._num_stages = worker, num_stages
        self._model, self._outline, self._listen = model, outline, listen
        self._changed = threading.Condition()
        # Names and addresses.
        self._offers: dict[str, str] = {}
        self._taken: dict[str, str] = {}
        self._on_leave: Callable[[str], object] | None = None
        self._watchers: set[asyncio.Event] = set()

    def join(self, request: JoinRequest) -> None:
        """Accept a stage's offer, until `leave`. StatusError if the stage does not fit the pipeline, or cannot join
        now."""
        if request.outline != self._outline:
            raise StatusError(
                Reason.INVALID_FIELD,
                f"the stage {request.name} has other files of a model ({request.model}) than the worker "
                f"{self._worker} ({self._model}); give both the same model",
                field="outline",
            )
        if request.name in self._offers:
            raise StatusError(
                Reason.QUEUE_FULL,
                f"a stage of the name {request.name} has joined already, at {self._offers[request.name]}; if that is "
                "another one, give each its own --worker-id",
                retry_after_s=RETRY_S,
            )
        if len(self._offers) >= self._num_stages:
            names = ", ".join(sorted(self._offers))
            raise StatusError(
                Reason.QUEUE_FULL,
                f"the pipeline of {self._worker} has its {1 + self._num_stages} stages already, with {names}. Until "
                f"one of them is gone, {request.name} is a spare; for more stages, start the worker with a larger "
                "--pipeline",
                retry_after_s=RETRY_S,
            )
        with self._changed:
            self._offers[request.name] = request.address
            self._changed.notify_all()
        log.info("the stage %s at %s has joined", request.name, request.address)
        self._tell()

    def leave(self, name: str) -> None:
        """Forget an offer that `join` has taken."""
        with self._changed:
            address = self._offers.pop(name)
            on_leave = self._on_leave if self._taken.get(name) == address else None
        log.info("the stage %s at %s has left", name, address)
        if on_leave is not None:
            on_leave(_has_left(name))
        self._tell()

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def changes(self) -> AsyncIterator[JoinResponse]:
        """The stages that have joined: the present list, then the new list after each change."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                yield JoinResponse(worker=self._worker, num_stages=self._num_stages, joined=sorted(self._offers))
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def addresses(self) -> Sequence[str]:
        """The addresses of the stages, in the order of their names. Waits until all stages have joined, and logs that
        it waits."""
        with self._changed:
            while (missing := self._num_stages - len(self._offers)) > 0:
                here = f" ({', '.join(sorted(self._offers))} joined)" if self._offers else ""
                log.info(
                    "waiting at %s for %d of %d other stages%s: run headrace serve --join on another host",
                    *(self._listen, missing, self._num_stages, here),
                )
                self._changed.wait(TELL_EVERY_S)
            self._taken = dict(sorted(self._offers.items()))
        log.info("the stages are this worker, %s", ", ".join(f"{name} at {at}" for name, at in self._taken.items()))
        return tuple(self._taken.values())

    @contextmanager
    def present(self, on_leave: Callable[[str], object]) -> Iterator[None]:
        """See `Others`."""
        with self._changed:
            self._on_leave = on_leave
            gone = [name for name, address in self._taken.items() if self._offers.get(name) != address]
        if gone:
            on_leave(_has_left(gone[0]))
        try:
            yield
        finally:
            with self._changed:
                self._on_leave = None


def _has_left(name: str) -> str:
    return f"the stage {name} has left"


class StagesService(stage_pb2_grpc.StagesServicer):
    """Takes the offers of stages."""

    def __init__(self, offers: StageOffers) -> None:
        self._offers = offers

    async def Join(self, request: JoinRequest, context: Context) -> None:
        """See Join in the proto."""
        try:
            self._offers.join(request)
        except StatusError as error:
            if error.retry_after_s is None:
                log.warning("%s", error.message)
            await abort(context, error)
        try:
            async for response in self._offers.changes():
                await context.write(response)
        finally:
            self._offers.leave(request.name)


class Taken:
    """Whether a worker has taken this process as a stage, and the worker's name, if known."""

    def __init__(self) -> None:
        self.worker = ""
        self._event = asyncio.Event()

    def by(self, worker: str) -> None:
        """Record that this worker has taken the process."""
        self.worker = worker
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait until a worker has taken the process."""
        await self._event.wait()


class Joining:
    """Offers this process, as `request` describes it, to the worker at `address`, until it is `taken`."""

    def __init__(self, address: str, request: JoinRequest, transport: Transport, taken: Taken) -> None:
        self._address, self._request = address, request
        self._transport, self._taken = transport, taken
        # Of the worker that has answered.
        self._worker = ""
        self._answered = asyncio.Event()

    async def run(self) -> None:
        """Repeat the offer until the process is taken as a stage. ConfigurationError if the worker rejects it for
        good."""
        waiting = Waiting(f"the worker at {self._address}", f"--join {self._address}")
        while not self._taken:
            version = self._transport.version
            async with self._transport.channel(self._address) as channel:
                stub = stage_pb2_grpc.StagesStub(channel)
                # A channel keeps the certificates with which it was made.
                while not self._taken and self._transport.version == version:
                    try:
                        await self._offer(stub)
                    except grpc.RpcError as error:
                        if not self._taken:
                            waiting.tell(_explained(failure_of(error)))
                    if not self._taken:
                        await asyncio.sleep(RETRY_S)

    async def _offer(self, stub: stage_pb2_grpc.StagesStub) -> None:
        """Offer the process once. The call stays open while the process is a stage of this worker, because the worker
        would otherwise consider the stage lost. Raises RpcError."""
        call: JoinCall = stub.Join(self._request)
        self._answered.clear()
        reading = asyncio.create_task(self._read(call))
        taking = asyncio.create_task(self._is_taken_by_another())
        try:
            await asyncio.wait({reading, taking}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and taking.result():
                log.info("it is a stage of %s, so the offer to %s is withdrawn", self._taken.worker, self._address)
            else:
                await reading
        finally:
            call.cancel()
            await end_tasks(reading, taking)

    async def _is_taken_by_another(self) -> bool:
        """Wait until the process is taken and the worker has answered. Returns whether another worker has taken it."""
        await self._taken.wait()
        await self._answered.wait()
        return self._taken.worker != self._worker

    async def _read(self, call: JoinCall) -> None:
        async for response in call:
            self._worker = response.worker
            self._answered.set()
            missing = response.num_stages - len(response.joined)
            log.info(
                "joined the pipeline of %s at %s, whose other stages are %s%s",
                *(response.worker, self._address, ", ".join(response.joined)),
                f"; {missing} more of {response.num_stages} have to join" if missing else "",
            )


def _explained(error: StatusError) -> StatusError:
    if error.reason is not Reason.UNSUPPORTED:
        return error
    return StatusError(
        error.reason,
        "no worker awaits stages there; name the --await-stages of a worker with --pipeline, by default port 50070",
    )
