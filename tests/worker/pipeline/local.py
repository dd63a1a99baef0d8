"""The stages of a pipeline in one process, without messages over a network."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from pathlib import Path

from headrace.protos import stage_pb2
from headrace.protos.stage_pb2 import ComputeRequest, ComputeResponse
from headrace.worker.config import ConfigurationError
from headrace.worker.model.directory import context_of, read_config
from headrace.worker.pipeline.messages import batch_of
from headrace.worker.pipeline.runner import PipelineRunner
from headrace.worker.pipeline.stage import StageRunner
from headrace.worker.sampling.reduction import FloatArray
from tests.worker.ranks.exactness import ASKED, NUM_BLOCKS, Computed

FINGERPRINT = "0" * 64


class LocalStages:
    """The later stages. Their layers are divided as if all stages were equally fast."""

    def __init__(self, directory: Path, num_stages: int) -> None:
        self._directory = directory
        self._num_later = num_stages - 1
        self.addresses = [f"stage-{number}" for number in range(1, num_stages)]
        self._answers: deque[ComputeResponse] = deque()
        self.runners: list[StageRunner] = []

    def open(self, setup: stage_pb2.StageSetup) -> stage_pb2.StageOffer:
        """See `StageLink`."""
        self._setup = setup
        return stage_pb2.StageOffer(stages=[stage_pb2.StageHost(speed=10e9)] * self._num_later)

    def send(self, request: ComputeRequest) -> None:
        """See `StageLink`."""
        if request.HasField("layers"):
            self._answers.append(ComputeResponse(compiled=self._compiled(list(request.layers.first_layers))))
        elif request.HasField("allocate"):
            for runner in self.runners:
                runner.allocate(request.allocate.num_blocks)
            fingerprints = [FINGERPRINT] * self._num_later
            self._answers.append(ComputeResponse(allocated=stage_pb2.StageAllocated(fingerprints=fingerprints)))

    def _compiled(self, first_layers: list[int]) -> stage_pb2.StageCompiled:
        ends = [*first_layers[1 : self._num_later], None]
        try:
            self.runners = [
                StageRunner(
                    self._directory,
                    first,
                    end,
                    threads=1,
                    max_context_tokens=self._setup.max_context_tokens,
                    speculates=self._setup.speculates,
                    **ASKED,
                )
                for first, end in zip(first_layers, ends, strict=False)
            ]
        except ConfigurationError as error:
            return stage_pb2.StageCompiled(problem=str(error))
        return stage_pb2.StageCompiled(
            exact_rows=min(runner.exact_rows for runner in self.runners),
            most_blocks=NUM_BLOCKS,
            block_size=self.runners[0].block_size,
        )

    def send_step(self, step: stage_pb2.StageStep, states: FloatArray) -> None:
        """See `StageLink`. Computes the step."""
        for runner in self.runners:
            states = runner.compute(batch_of(step), states, step.least_rows).copy()
        result = stage_pb2.StageResult(states=states.tobytes(), is_last=True, busy_s=[1.0] * self._num_later)
        self._answers.append(ComputeResponse(result=result))

    def receive(self) -> ComputeResponse:
        """See `StageLink`."""
        return self._answers.popleft()

    def close(self) -> None:
        """See `StageLink`."""


def staged(directory: Path, num_stages: int, *, fingerprint: str = FINGERPRINT) -> tuple[Computed, PipelineRunner]:
    """The model divided among stages, in accuracy mode. The files of the first have this fingerprint."""
    hashed: Future[str] = Future()
    hashed.set_result(fingerprint)
    runner = PipelineRunner(
        directory,
        num_stages,
        LocalStages(directory, num_stages),
        threads=1,
        max_context_tokens=context_of(read_config(directory), directory),
        speculates=False,
        fingerprint=hashed,
        on_lost=lambda _: None,
        **ASKED,
    )
    runner.allocate(NUM_BLOCKS)
    return Computed(runner, runner.exact_rows), runner
