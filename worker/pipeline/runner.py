"""A model divided into stages, as the engine sees it. Stage 0 is the worker's own process.

    engine thread    bind  its layers of a part  -- step, hidden states -->  the other stages, one after the other
                           its layers of the next part  -->
                     run   <-- hidden states of the sampled rows --
                           logits

Block ids mean the same on all stages, each of which has its layers' part of every block. The engine, the scheduler and
the sampler know nothing of stages. Several steps may begin, with other requests each, before the first of them ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import openvino as ov

from headrace.protos import stage_pb2
from headrace.protos.stage_pb2 import ComputeRequest
from headrace.worker.config import ConfigurationError
from headrace.worker.host.binding import StageReport
from headrace.worker.kv.arena import KVArena
from headrace.worker.kv.exclusions import IMAGES, PIPELINE, impossible
from headrace.worker.model.batch import Batch, Graph
from headrace.worker.model.lm_head import GraphEnd
from headrace.worker.model.runner import OpenVINOModelRunner, Part
from headrace.worker.model.step_limits import MIN_PROMPT_STEP
from headrace.worker.pipeline import parts
from headrace.worker.pipeline.cutting import divide, find_cuts, keep_layers, take_head
from headrace.worker.pipeline.ends import FirstEnd, FirstRequest
from headrace.worker.pipeline.messages import message_of, states_of
from headrace.worker.pipeline.speed import bytes_per_s
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.reduction import FloatArray


@dataclass(slots=True)
class _Awaited:
    """A part whose result has not come: how many rows it has, and their hidden states once they are there."""

    num_rows: int
    states: FloatArray | None = None


@dataclass(slots=True)
class _Begun:
    """A step on its way: its parts, and the seconds that this stage has computed."""

    batch: Batch
    parts: Sequence[parts.Part]
    awaited: list[_Awaited] = field(default_factory=list)
    computed_s: float = 0.0


class Times(NamedTuple):
    """Seconds since the start: in which steps were on their way, and in which each stage has computed."""

    on_way_s: float
    computed_s: Sequence[float]

    def waited_s(self, stage: int) -> float:
        """In which a stage has waited for others or for the network. What it computes after the end of a step that
        samples nothing is not on the way."""
        return max(0.0, self.on_way_s - self.computed_s[stage])


class Link(Protocol):
    """The way to the other stages; see `StageLink`."""

    @property
    def addresses(self) -> Sequence[str]:
        """Where the other stages are, in order, once it is open."""
        ...

    def open(self, setup: stage_pb2.StageSetup) -> stage_pb2.StageOffer:
        """Begin, and wait for the answer."""
        ...

    def send(self, request: ComputeRequest) -> None:
        """Send a message."""
        ...

    def send_step(self, step: stage_pb2.StageStep, states: FloatArray) -> None:
        """Send a step and the hidden states of its tokens."""
        ...

    def receive(self) -> stage_pb2.ComputeResponse:
        """Wait for a message."""
        ...

    def close(self) -> None:
        """End."""
        ...


class PipelineRunner(OpenVINOModelRunner):
    """The model with its first layers, and the vocabulary's product, in this process. The others are in those to which
    `link` leads; all together are `num_stages`. `fingerprint` gives the hash of the model's files, as all stages must
    have them. Blocks of `block_bytes` bytes are this stage's parts, and `exact_rows` are the fewest of any stage. The
    pipeline has no second graph, adapters, eviction, or windows in slots.

    If a stage is lost, or if this one fails in a step, the others cannot go on: `on_lost` is called with the reason,
    which should end the process. That may be in any thread.
    """

    def __init__(
        self,
        model_dir: Path,
        num_stages: int,
        link: Link,
        *,
        threads: int,
        kv_precision: str,
        execution_mode: str,
        max_context_tokens: int,
        speculates: bool,
        fingerprint: Future[str],
        on_lost: Callable[[str], None],
    ) -> None:
        """Waits until all stages answer. ConfigurationError if the model cannot be divided so."""
        self.num_stages = num_stages
        self._fingerprint = fingerprint
        self._on_lost = on_lost
        self._threads = threads
        self._begun: deque[_Begun] = deque()
        # Of all steps on their way.
        self._awaited: deque[_Awaited] = deque()
        self.busy_s: Sequence[float] = (0.0,) * (num_stages - 1)
        """Seconds that each other stage has computed."""
        self.first_layers: Sequence[int] = ()
        """The first layer of each other stage."""
        self._total_layers = 0
        # The beginning of the time that is not in `_times` yet, while steps are on their way.
        self._since_s = 0.0
        self._own_s = 0.0
        self._times = Times(0.0, (0.0,) * num_stages)
        setup = stage_pb2.StageSetup(
            kv_precision=kv_precision,
            execution_mode=execution_mode,
            max_context_tokens=max_context_tokens,
            speculates=speculates,
        )
        self._link = link
        self._offer = link.open(setup)
        super().__init__(
            model_dir,
            threads=threads,
            kv_precision=kv_precision,
            execution_mode=execution_mode,
            max_context_tokens=max_context_tokens,
            speculates=speculates,
            divide=self._divide,
        )
        ends = [slot.head for slot in self._graphs[Graph.MAIN].slots]
        self._heads = deque(end for end in ends if isinstance(end, FirstRequest))
        compiled = self._link.receive().compiled
        if compiled.problem:
            raise ConfigurationError(compiled.problem)
        assert compiled.block_size == self.block_size, "all stages have blocks of OpenVINO's size"
        self.exact_rows = min(self.exact_rows, compiled.exact_rows)
        self._most_blocks = compiled.most_blocks
        layers = ", ".join(map(str, self.first_layers))
        self.numerics += f" stages at {layers}: {'; '.join(compiled.numerics)}"

    def _divide(self, model: ov.Model) -> Part:
        """Make a whole model that of stage 0, and tell the others which layers they have."""
        if self.image_inputs is not None:
            raise impossible(PIPELINE, IMAGES, f"--pipeline {self.num_stages}")
        cuts = find_cuts(model)
        self._total_layers = cuts.num_layers
        head = take_head(model)
        speeds = [bytes_per_s(self._threads), *(stage.speed for stage in self._offer.stages)]
        self.first_layers = divide(cuts.costs, cuts.head_cost, speeds)
        layers = stage_pb2.StageLayers(first_layers=[*self.first_layers, cuts.num_layers])
        self._link.send(ComputeRequest(layers=layers))
        keep_layers(model, cuts, 0, self.first_layers[0])

        def make_end(usual: GraphEnd) -> GraphEnd:
            return FirstEnd(head, usual)

        return Part(None, others=[head], make_end=make_end)

    def most_blocks(self, _node_share: float, _kept_bytes: int = 0) -> int | None:
        """How many KV blocks the other stages have room for."""
        return self._most_blocks

    def allocate(
        self,
        num_blocks: int,
        num_slots: int = 0,
        *,
        huge_pages: bool = True,
        make_arena: Callable[[], KVArena] | None = None,
    ) -> KVArena:
        """Make the KV caches of all stages. See `OpenVINOModelRunner.allocate`."""
        assert make_arena is None
        self._link.send(ComputeRequest(allocate=stage_pb2.StageAllocate(num_blocks=num_blocks)))
        arena = super().allocate(num_blocks, num_slots, huge_pages=huge_pages)
        allocated = self._link.receive().allocated
        if allocated.problem:
            raise ConfigurationError(allocated.problem)
        own = self._fingerprint.result()
        for address, fingerprint in zip(self._link.addresses, allocated.fingerprints, strict=True):
            if fingerprint != own:
                raise ConfigurationError(
                    f"the stage at {address} has other files of the model than this worker; give both the same --model"
                )
        return arena

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Begin the next step: compute the layers of this stage, and send it to the others. Each needs a `run`."""
        start_s = time.perf_counter()
        if not self._begun:
            self._since_s = start_s
        step = _Begun(batch, parts.parts_of(batch, parts.num_parts(batch), self.block_size))
        least = self._least_rows(batch)
        with self._all_or_none():
            for part in step.parts:
                super().bind(part.batch, keeps_logits=False)
                request = self._slot.head
                assert isinstance(request, FirstRequest)
                request.run()
                self._link.send_step(message_of(part.batch, least), request.states())
                awaited = _Awaited(len(part.rows))
                step.awaited.append(awaited)
                self._awaited.append(awaited)
        step.computed_s = time.perf_counter() - start_s
        self._own_s += step.computed_s
        self._begun.append(step)

    def run(self) -> Logits:
        """End the step that has begun first. Returns its logits as `OpenVINOModelRunner.run` does. If none are sampled,
        the other stages may still compute it."""
        start_s = time.perf_counter()
        step = self._begun.popleft()
        with self._all_or_none():
            request = self._end(step)
        end_s = time.perf_counter()
        self.infer_s = step.computed_s + end_s - start_s
        self._times = Times(self._times.on_way_s + end_s - self._since_s, (self._own_s, *self.busy_s))
        self._since_s = end_s
        return request.logits()

    def stages(self) -> Sequence[StageReport]:
        """The stages. May be called from any thread."""
        times, ends = self._times, [*self.first_layers, self._total_layers]
        return [
            StageReport(address, first, end - first, times.computed_s[stage], times.waited_s(stage))
            for stage, (address, first, end) in enumerate(
                zip(("", *self._link.addresses), (0, *self.first_layers), ends, strict=True)
            )
        ]

    def _end(self, step: _Begun) -> FirstRequest:
        """Wait for the hidden states of a step, and compute its logits."""
        batch = step.batch
        num_rows = len(batch.sampled_tokens_indices)
        if num_rows:
            while step.awaited[-1].states is None:
                self._receive()
        else:
            # Steps without rows follow one another through the stages.
            while self._awaited and step.awaited[0].states is None and self._awaited[0] is not step.awaited[0]:
                self._receive()
        # The logits of the step before may still be read.
        self._heads.rotate()
        request = self._heads[0]
        states = np.zeros((num_rows, request.width), np.float32)
        for part, awaited in zip(step.parts, step.awaited, strict=True):
            if awaited.num_rows:
                states[part.rows] = awaited.states
        start_s = time.perf_counter()
        request.compute_logits(states, batch.inverse_temperatures, batch.sums, least=self._least_rows(batch))
        self._own_s += time.perf_counter() - start_s
        return request

    def _least_rows(self, batch: Batch) -> int:
        return self.least_decode if batch.is_decode else MIN_PROMPT_STEP

    def _receive(self) -> None:
        """Wait for the next result."""
        pieces: list[bytes] = []
        while True:
            result = self._link.receive().result
            pieces.append(result.states)
            if result.is_last:
                break
        self.busy_s = result.busy_s
        awaited = self._awaited.popleft()
        awaited.states = states_of(pieces, awaited.num_rows)

    def end_warm_up(self) -> None:
        """Let the other stages give back the memory of their files."""
        self._link.send(ComputeRequest(end_warm_up=stage_pb2.StageEndWarmUp()))

    def close(self) -> None:
        """End the call to the other stages, which then start again."""
        self._link.close()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """After a failure in a step, the stages do not agree on what is computed."""
        try:
            yield
        except BaseException as error:
            self._on_lost(f"a step of the pipeline failed: {error!r}")
            raise
