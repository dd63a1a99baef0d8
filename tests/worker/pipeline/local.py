"""The stages of a pipeline in one process, without messages over a network. Those of ranks have processes for these."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from headrace.protos import stage_pb2
from headrace.protos.stage_pb2 import ComputeRequest, ComputeResponse
from headrace.worker.config import ConfigurationError
from headrace.worker.host.precision import computes_in_bfloat16, core_for
from headrace.worker.model.batch import HiddenStates
from headrace.worker.model.directory import context_of, read_config
from headrace.worker.model.runner import Layers, OpenVINOModelRunner
from headrace.worker.pipeline.messages import batch_of
from headrace.worker.pipeline.runner import PipelineRunner
from headrace.worker.pipeline.stage import compute, ranks_of
from headrace.worker.ranks.staged import StagedGroupRunner
from headrace.worker.stage_serving import compile_stage
from tests.worker.configs import worker_config
from tests.worker.ranks.exactness import ASKED, NUM_BLOCKS, Computed

FINGERPRINT = "0" * 64


class LocalStages:
    """The later stages, each divided among so many ranks. Their layers are divided as if all stages were equally
    fast. The last says of itself only what `of_last` has."""

    def __init__(
        self, directory: Path, num_stages: int, num_ranks: int = 1, of_last: stage_pb2.StageHost | None = None
    ) -> None:
        self._config = worker_config(directory, tensor_parallel=num_ranks, rank_cpus=cpus_of(num_ranks))
        self._num_later = num_stages - 1
        self._of_last = of_last
        self.addresses = [f"stage-{number}" for number in range(1, num_stages)]
        self._answers: deque[ComputeResponse] = deque()
        self.runners: list[OpenVINOModelRunner] = []

    def open(self, setup: stage_pb2.StageSetup) -> stage_pb2.StageOffer:
        """See `StageLink`."""
        self._setup = setup
        bfloat16 = computes_in_bfloat16(core_for(setup.execution_mode))
        host = stage_pb2.StageHost(speed=10e9, num_ranks=self._config.tensor_parallel, bfloat16=bfloat16)
        return stage_pb2.StageOffer(stages=[*[host] * (self._num_later - 1), self._of_last or host])

    def send(self, request: ComputeRequest) -> None:
        """See `StageLink`."""
        if request.HasField("layers"):
            self._answers.append(ComputeResponse(compiled=self._compiled(request.layers)))
        elif request.HasField("allocate"):
            for runner in self.runners:
                runner.allocate(request.allocate.num_blocks)
            fingerprints = [FINGERPRINT] * self._num_later
            self._answers.append(ComputeResponse(allocated=stage_pb2.StageAllocated(fingerprints=fingerprints)))

    def _compiled(self, layers: stage_pb2.StageLayers) -> stage_pb2.StageCompiled:
        first_layers = list(layers.first_layers)
        ends = [*first_layers[1 : self._num_later], None]
        try:
            self.runners = [
                compile_stage(self._config, 1, self._setup, Layers(first, end, layers.bfloat16_states), pytest.fail)
                for first, end in zip(first_layers, ends, strict=False)
            ]
        except ConfigurationError as error:
            return stage_pb2.StageCompiled(problem=str(error))
        return stage_pb2.StageCompiled(
            exact_rows=min(runner.exact_rows for runner in self.runners),
            most_blocks=NUM_BLOCKS,
            block_size=self.runners[0].block_size,
        )

    def send_step(self, step: stage_pb2.StageStep, states: HiddenStates) -> None:
        """See `StageLink`. Computes the step."""
        for runner in self.runners:
            states = compute(runner, batch_of(step, [states.tobytes()], runner.hidden_dtype)).copy()
        result = stage_pb2.StageResult(states=states.tobytes(), is_last=True, busy_s=[1.0] * self._num_later)
        result.stages.extend(map(ranks_of, self.runners))
        self._answers.append(ComputeResponse(result=result))

    def receive(self) -> ComputeResponse:
        """See `StageLink`."""
        return self._answers.popleft()

    def close(self) -> None:
        """See `StageLink`."""
        for runner in self.runners:
            runner.close()


def cpus_of(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The first CPU for each rank; none for a whole model."""
    return ((min(os.sched_getaffinity(0)),),) * num_ranks if num_ranks > 1 else ()


def staged(
    directory: Path,
    num_stages: int,
    num_ranks: int = 1,
    *,
    fingerprint: str = FINGERPRINT,
    precisions: Mapping[str, Any] = ASKED,
    of_last: stage_pb2.StageHost | None = None,
) -> tuple[Computed, PipelineRunner]:
    """The model divided among stages, and each of these among ranks, in accuracy mode unless `precisions` say
    otherwise. The files of the first have this fingerprint. `of_last` is as for `LocalStages`."""
    hashed: Future[str] = Future()
    hashed.set_result(fingerprint)
    link = LocalStages(directory, num_stages, num_ranks, of_last)
    asked: dict[str, Any] = {
        "threads": 1,
        "max_context_tokens": context_of(read_config(directory), directory),
        "speculates": False,
        "fingerprint": hashed,
        "on_lost": lambda _: None,
        **precisions,
    }
    if num_ranks > 1:
        runner: PipelineRunner = StagedGroupRunner(
            directory, num_stages, link, cpus_of(num_ranks), most_tokens=1024, hangs_after_s=60, **asked
        )
    else:
        runner = PipelineRunner(directory, num_stages, link, **asked)
    runner.allocate(NUM_BLOCKS)
    return Computed(runner, runner.exact_rows), runner
