"""The call from a worker to the second stage of its pipeline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, Protocol

import grpc

from headrace.common.transport.channels import Transport
from headrace.protos import stage_pb2, stage_pb2_grpc
from headrace.protos.stage_pb2 import ComputeRequest, ComputeResponse
from headrace.protos.status import Reason, StatusError, error_of, is_peer_lost
from headrace.worker.config import ConfigurationError
from headrace.worker.model.batch import HiddenStates
from headrace.worker.pipeline.messages import pieces_of

log = logging.getLogger("headrace.worker.pipeline")

# Between two attempts to reach a process, and between two lines of the log about it.
RETRY_S = 1.0
TELL_EVERY_S = 30.0
# A process that is not there yet, that ends or has failed, or that has not noticed yet that the one before this one has
# ended.
_WAITS_FOR = (Reason.WORKER_LOST, Reason.QUEUE_FULL, Reason.INTERNAL)


class StageLostError(Exception):
    """A stage has ended, or is silent, so the pipeline cannot continue."""


def failure_of(error: grpc.RpcError) -> StatusError:
    """The error for a failed call to a stage. gRPC reports the loss of a process or connection during a call with
    several statuses; all of them become WORKER_LOST."""
    found = error_of(error)
    return StatusError(Reason.WORKER_LOST, found.message) if is_peer_lost(error) else found


def lost_stage(address: str, why: object) -> str:
    """The error message for a stage that has ended or is silent."""
    return f"the stage at {address} has ended or is silent: {why}"


def said_nothing(bound_s: float) -> str:
    """The error message for a stage that has reported no progress for `bound_s` seconds while it loads."""
    return f"it hangs while it loads: it has said nothing for {bound_s:g} s"


class Waiting:
    """Logs from time to time that this process waits for another one, and why. `what` names the other process, and
    `flag` is the flag that does."""

    def __init__(self, what: str, flag: str) -> None:
        self._what, self._flag = what, flag
        self._told_s = -TELL_EVERY_S

    def tell(self, error: StatusError) -> None:
        """Note a failed attempt: log it, unless a message was logged recently. ConfigurationError if later attempts
        would fail too."""
        if error.reason not in _WAITS_FOR:
            raise ConfigurationError(f"{self._flag}: {error.message}")
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning("waiting for %s: %s", self._what, error.message)


def waiting_for_stage(address: str) -> Waiting:
    """A `Waiting` for the stage at this address."""
    return Waiting(f"the stage at {address}", f"--stage {address}")


class Others(Protocol):
    """The other stages of a worker's pipeline."""

    def addresses(self) -> Sequence[str]:
        """The addresses of the stages, in order. Waits until all are known."""
        ...

    def present(self, on_leave: Callable[[str], object], /) -> AbstractContextManager[None]:
        """Context manager: while it is open, calls `on_leave`, in any thread, when a stage of the latest `addresses` is
        known to be lost. The argument is a sentence that says so."""
        ...


class NamedStages:
    """Stages at the addresses of --stage. They may come and go: the address stays."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    def addresses(self) -> Sequence[str]:
        """See `Others`."""
        return self._addresses

    @contextmanager
    def present(self, _on_leave: Callable[[str], object]) -> Iterator[None]:
        """See `Others`."""
        yield


class StageLink:
    """The call to the first of the `others`, which `open` begins. It tells the stages the worker's name. If the stage
    ends before `close`, `on_lost` is called with the reason, in any thread. Until the warm-up ends, a stage also counts
    as lost if it is silent for `hangs_after_s` seconds while this process waits for it. Later, a watchdog checks the
    steps."""

    def __init__(
        self,
        others: Others,
        transport: Transport,
        on_lost: Callable[[str], None],
        worker: str = "",
        *,
        hangs_after_s: float,
    ) -> None:
        self.addresses: Sequence[str] = ()
        """Where the stages are, in order, once the call is open."""
        self._others = others
        self._transport = transport
        self._on_lost = on_lost
        self._worker = worker
        self._hangs_after_s = hangs_after_s
        self._hung = ""
        self._is_loaded = False
        self._channel: grpc.Channel | None = None
        self._requests: SimpleQueue[ComputeRequest | None] = SimpleQueue()
        self._call: Any
        self._is_closed = False

    def open(self, setup: stage_pb2.StageSetup) -> stage_pb2.StageOffer:
        """Begin the call, as soon as all stages are known and answer. ConfigurationError if an address belongs to no
        stage, or if a stage refuses this process."""
        setup.worker, setup.hangs_after_seconds = self._worker, self._hangs_after_s
        while True:
            stub = self._stub_of(self._others.addresses())
            del setup.later_stages[:]
            setup.later_stages.extend(self.addresses[1:])
            self._requests = SimpleQueue()
            self.send(ComputeRequest(setup=setup))
            call: Any = stub.Compute(iter(self._requests.get, None))
            try:
                first = self._first_response(call)
            except StatusError as error:
                self._waiting.tell(error)
            else:
                self._call = call
                if not call.add_callback(self._ended):
                    self._ended()
                return first.offer
            self._requests.put(None)
            time.sleep(RETRY_S)

    def _stub_of(self, addresses: Sequence[str]) -> stage_pb2_grpc.StageStub:
        """Use these addresses. Returns the stub of the first; its channel is kept while the address is the same."""
        if self._channel is None or addresses[0] != self.addresses[0]:
            if self._channel is not None:
                self._channel.close()
            self._channel = self._transport.blocking_channel(addresses[0])
            self._waiting = waiting_for_stage(addresses[0])
        self.addresses = addresses
        return stage_pb2_grpc.StageStub(self._channel)

    def _first_response(self, call: Any) -> ComputeResponse:
        """Wait for the first response, which comes when all stages have answered. StatusError."""
        left: list[str] = []

        def leave(why: str) -> None:
            left.append(why)
            call.cancel()

        try:
            with self._others.present(leave):
                return self._response_of(call, leave)
        except StopIteration:
            raise StatusError(Reason.WORKER_LOST, "it has ended") from None
        except grpc.RpcError as error:
            why = StatusError(Reason.WORKER_LOST, left[0]) if left else failure_of(error)
            raise why from None

    def _response_of(self, call: Any, give_up: Callable[[str], None]) -> ComputeResponse:
        """Wait for a response other than a progress report. While stages load, call `give_up` in another thread, with
        the reason, if nothing arrives for too long. It should end the call."""
        while True:
            with nullcontext() if self._is_loaded else self._in_time(give_up):
                found: ComputeResponse = next(call)
            if not found.HasField("progress"):
                return found

    @contextmanager
    def _in_time(self, give_up: Callable[[str], None]) -> Iterator[None]:
        timer = threading.Timer(self._hangs_after_s, give_up, (said_nothing(self._hangs_after_s),))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def send(self, request: ComputeRequest) -> None:
        """Send a message."""
        self._is_loaded |= request.HasField("end_warm_up")
        self._requests.put(request)

    def send_step(self, step: stage_pb2.StageStep, states: HiddenStates) -> None:
        """Send a step and the hidden states of its tokens, which are copied."""
        self.send(ComputeRequest(step=step))
        for piece in pieces_of(states):
            self.send(ComputeRequest(states=piece))

    def receive(self) -> ComputeResponse:
        """Wait for a message. StageLostError."""
        try:
            return self._response_of(self._call, self._give_up)
        except (grpc.RpcError, StopIteration) as error:
            raise StageLostError(self._why()) from error

    def _give_up(self, why: str) -> None:
        self._hung = why
        self._call.cancel()

    def close(self) -> None:
        """End the call. The stage then starts again."""
        self._is_closed = True
        self._requests.put(None)
        if self._channel is not None:
            self._channel.close()

    def _ended(self) -> None:
        if not self._is_closed:
            self._on_lost(self._why())

    def _why(self) -> str:
        return lost_stage(self.addresses[0], self._hung or self._call.details() or self._call.code())
