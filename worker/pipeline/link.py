"""The call from a worker to the second stage of its pipeline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import grpc

from headrace.common.transport.channels import CHANNEL_OPTIONS, SILENCE_OPTIONS, Transport
from headrace.protos import stage_pb2, stage_pb2_grpc
from headrace.protos.stage_pb2 import ComputeRequest, ComputeResponse
from headrace.protos.status import Reason, StatusError, error_of, is_peer_lost
from headrace.worker.config import ConfigurationError
from headrace.worker.pipeline.messages import pieces_of
from headrace.worker.sampling.reduction import FloatArray

log = logging.getLogger("headrace.worker.pipeline")

# Of channels to stages. A stage that does not answer, as on a host that is cut off, is lost after a while.
STAGE_OPTIONS = (*CHANNEL_OPTIONS, *SILENCE_OPTIONS)
# Between two attempts to reach a stage, and between two lines of the log about it.
RETRY_S = 1.0
TELL_EVERY_S = 30.0
# A stage that is not there yet, or that has not noticed yet that the worker before this one has ended.
_WAITS_FOR = (Reason.WORKER_LOST, Reason.QUEUE_FULL)


class StageLostError(Exception):
    """A stage has ended, or is silent. The pipeline cannot go on."""


def failure_of(error: grpc.RpcError) -> StatusError:
    """Why a call to a stage has failed. gRPC has several statuses for a process or connection that is lost during a
    call; all of them are WORKER_LOST."""
    found = error_of(error)
    return StatusError(Reason.WORKER_LOST, found.message) if is_peer_lost(error) else found


def lost_stage(address: str, why: object) -> str:
    """What is said of a stage that has ended or is silent."""
    return f"the stage at {address} has ended or is silent: {why}"


class Waiting:
    """Tells now and then that a stage is waited for, and for how long."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._told_s = -TELL_EVERY_S

    def tell(self, error: StatusError) -> None:
        """Note an attempt that has failed. ConfigurationError if later ones would fail too."""
        if error.reason not in _WAITS_FOR:
            raise ConfigurationError(f"--stage {self._address}: {error.message}")
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning("waiting for the stage at %s: %s", self._address, error.message)


class StageLink:
    """The call to the stage at `address`, which `open` begins. If the stage ends before `close`, `on_lost` is called
    with the reason, in any thread."""

    def __init__(self, address: str, transport: Transport, on_lost: Callable[[str], None]) -> None:
        self._address = address
        self._on_lost = on_lost
        self._channel = transport.blocking_channel(address, STAGE_OPTIONS)
        self._requests: SimpleQueue[ComputeRequest | None] = SimpleQueue()
        self._call: Any
        self._is_closed = False

    def open(self, setup: stage_pb2.StageSetup) -> stage_pb2.StageOffer:
        """Begin the call, as soon as the stage answers. ConfigurationError if it is none, or refuses this process."""
        waiting = Waiting(self._address)
        stub = stage_pb2_grpc.StageStub(self._channel)
        while True:
            self._requests = SimpleQueue()
            self.send(ComputeRequest(setup=setup))
            call: Any = stub.Compute(iter(self._requests.get, None))
            try:
                first: ComputeResponse = next(call)
            except StopIteration:
                waiting.tell(StatusError(Reason.WORKER_LOST, "it has ended"))
            except grpc.RpcError as error:
                waiting.tell(failure_of(error))
            else:
                self._call = call
                if not call.add_callback(self._ended):
                    self._ended()
                return first.offer
            self._requests.put(None)
            time.sleep(RETRY_S)

    def send(self, request: ComputeRequest) -> None:
        """Send a message."""
        self._requests.put(request)

    def send_step(self, step: stage_pb2.StageStep, states: FloatArray) -> None:
        """Send a step and the hidden states of its tokens, which are copied."""
        self.send(ComputeRequest(step=step))
        for piece in pieces_of(states):
            self.send(ComputeRequest(states=piece))

    def receive(self) -> ComputeResponse:
        """Wait for a message. StageLostError."""
        try:
            found: ComputeResponse = next(self._call)
            return found
        except (grpc.RpcError, StopIteration) as error:
            raise StageLostError(self._why()) from error

    def close(self) -> None:
        """End the call. The stage then starts again."""
        self._is_closed = True
        self._requests.put(None)
        self._channel.close()

    def _ended(self) -> None:
        if not self._is_closed:
            self._on_lost(self._why())

    def _why(self) -> str:
        return lost_stage(self._address, self._call.details() or self._call.code())
