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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import openvino as ov

from headrace.protos import stage_pb2
from headrace.protos.stage_pb2 import ComputeRequest
from headrace.worker.config import ConfigurationError
from headrace.worker.host.binding import StageReport, rank_of
from headrace.worker.host.precision import mode_has_bfloat16
from headrace.worker.kv.arena import KVArena
from headrace.worker.kv.exclusions import IMAGES, PIPELINE, impossible
from headrace.worker.model.batch import Batch, HiddenStates
from headrace.worker.model.runner import Layers, OpenVINOModelRunner, Part
from headrace.worker.pipeline import parts
from headrace.worker.pipeline.cutting import cut_stage, divide, find_cuts
from headrace.worker.pipeline.messages import message_of, states_of
from headrace.worker.pipeline.speed import bytes_per_s
from headrace.worker.sampling.logits import Logits


@dataclass(slots=True)
class _Awaited:
    """A part whose result has not arrived yet: its number of rows, and their hidden states once they arrive."""

    num_rows: int
    states: HiddenStates | None = None


@dataclass(slots=True)
class _Begun:
    """A step that has begun and not ended: its parts, and the seconds for which this stage has computed."""

    batch: Batch
    parts: Sequence[parts.Part]
    awaited: list[_Awaited] = field(default_factory=list)
    computed_s: float = 0.0


class Times(NamedTuple):
    """Seconds since the start: during which steps were under way, and during which each stage has computed."""

    on_way_s: float
    computed_s: Sequence[float]

    def waited_s(self, stage: int) -> float:
        """The seconds for which a stage has waited for other stages or for the network. Excludes computation after the
        end of a step that samples nothing."""
        return max(0.0, self.on_way_s - self.computed_s[stage])


class Link(Protocol):
    """The connection to the other stages; see `StageLink`."""

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses of the other stages, in order, once the connection is open."""
        ...

    def open(self, setup: stage_pb2.StageSetup) -> stage_pb2.StageOffer:
        """Open the connection, and wait for the answer."""
        ...

    def send(self, request: ComputeRequest) -> None:
        """Send a message."""
        ...

    def send_step(self, step: stage_pb2.StageStep, states: HiddenStates) -> None:
        """Send a step and the hidden states of its tokens."""
        ...

    def receive(self) -> stage_pb2.ComputeResponse:
        """Wait for a message."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class PipelineRunner(OpenVINOModelRunner):
    """A model of which this process has the first layers and the vocabulary's product. The processes behind `link` have
    the other layers; there are `num_stages` stages in all. `fingerprint` gives the hash of the model's files, which
    must be the same at all stages. `block_bytes` is the size of this stage's part of a block, and `exact_rows` the
    smallest of all stages. The pipeline has no second graph, adapters, eviction, or windows in slots. The base class
    computes this stage; `of_base` are further arguments for it.

    If a stage is lost, or if this one fails in a step, the others cannot continue. `on_lost` is then called with the
    reason, in any thread. It should end the process.
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
        of_base: Mapping[str, Any] = MappingProxyType({}),
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
        self._ranks_of_others: Sequence[stage_pb2.StageRanks] = [stage_pb2.StageRanks()] * (num_stages - 1)
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
        self.bfloat16_states = all(stage.bfloat16 for stage in self._offer.stages) and mode_has_bfloat16(execution_mode)
        super().__init__(
            model_dir,
            threads=threads,
            kv_precision=kv_precision,
            execution_mode=execution_mode,
            max_context_tokens=max_context_tokens,
            speculates=speculates,
            divide=self._divide,
            **of_base,
        )
        compiled = self._link.receive().compiled
        if compiled.problem:
            raise ConfigurationError(compiled.problem)
        assert compiled.block_size == self.block_size, "all stages have blocks of OpenVINO's size"
        self.exact_rows = min(self.exact_rows, compiled.exact_rows)
        self._most_blocks = compiled.most_blocks
        layers = ", ".join(map(str, self.first_layers))
        between = " with bfloat16 between them" if self.bfloat16_states else ""
        self.numerics += f" stages at {layers}{between}: {'; '.join(compiled.numerics)}"

    def _divide(self, model: ov.Model) -> Part:
        """Reduce a whole model to the layers of stage 0, and tell the other stages which layers they have."""
        if self.image_inputs is not None:
            raise impossible(PIPELINE, IMAGES, f"--pipeline {self.num_stages}")
        cuts = find_cuts(model)
        self._total_layers = cuts.num_layers
        speeds = [self.num_ranks * bytes_per_s(self._threads), *(stage.speed for stage in self._offer.stages)]
        self.first_layers = divide(cuts.costs, cuts.head_cost, speeds)
        layers = stage_pb2.StageLayers(
            first_layers=[*self.first_layers, cuts.num_layers], bfloat16_states=self.bfloat16_states
        )
        self._link.send(ComputeRequest(layers=layers))
        return cut_stage(model, cuts, Layers(0, self.first_layers[0], self.bfloat16_states))

    @property
    def ranks_of_stages(self) -> Sequence[int]:
        """The number of ranks among which each stage divides its layers."""
        return (self.num_ranks, *(max(1, stage.num_ranks) for stage in self._offer.stages))

    def most_blocks(self, node_share: float, kept_bytes: int = 0) -> int | None:
        """The number of KV blocks for which all stages have room, as far as that is known."""
        own = super().most_blocks(node_share, kept_bytes)
        return self._most_blocks if own is None else min(own, self._most_blocks)

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
        # A part of a step with prompts may be one of decode steps.
        batch = replace(batch, least_rows=self.least_rows(batch))
        step = _Begun(batch, parts.parts_of(batch, parts.num_parts(batch), self.block_size))
        with self._all_or_none():
            for part in step.parts:
                super().bind(part.batch, keeps_logits=False)
                states = super().run().values
                self._link.send_step(message_of(part.batch), states)
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
            logits = self._end(step)
        end_s = time.perf_counter()
        self.infer_s = step.computed_s + end_s - start_s
        self._times = Times(self._times.on_way_s + end_s - self._since_s, (self._own_s, *self.busy_s))
        self._since_s = end_s
        return logits

    def stages(self) -> Sequence[StageReport]:
        """The stages. May be called from any thread."""
        times, ends = self._times, [*self.first_layers, self._total_layers]
        addresses, firsts = ("", *self._link.addresses), (0, *self.first_layers)
        ranks = (self.ranks(), *(tuple(map(rank_of, stage.ranks)) for stage in self._ranks_of_others))
        return [
            StageReport(address, first, end - first, times.computed_s[stage], times.waited_s(stage), of_stage)
            for stage, (address, first, end, of_stage) in enumerate(zip(addresses, firsts, ends, ranks, strict=True))
        ]

    def _end(self, step: _Begun) -> Logits:
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
        states: Any = np.zeros((num_rows, self.hidden_width), self.hidden_dtype)
        for part, awaited in zip(step.parts, step.awaited, strict=True):
            if awaited.num_rows:
                states[part.rows] = awaited.states
        start_s = time.perf_counter()
        ended = replace(batch, hidden=states, sampled_tokens_indices=np.arange(num_rows), copies=())
        # The logits of the step before may still be read.
        super().bind(ended, keeps_logits=True)
        logits = super().run()
        self._own_s += time.perf_counter() - start_s
        return logits

    def _receive(self) -> None:
        """Wait for the next result."""
        pieces: list[bytes] = []
        while True:
            result = self._link.receive().result
            pieces.append(result.states)
            if result.is_last:
                break
        self.busy_s = result.busy_s
        self._ranks_of_others = result.stages
        awaited = self._awaited.popleft()
        awaited.states = states_of(pieces, awaited.num_rows, self.hidden_dtype)

    def end_warm_up(self) -> None:
        """Let the other stages and ranks give back the memory of their files."""
        super().end_warm_up()
        self._link.send(ComputeRequest(end_warm_up=stage_pb2.StageEndWarmUp()))

    def close(self) -> None:
        """End the call to the other stages, which then start again, and the other ranks."""
        self._link.close()
        super().close()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Context manager: if a step fails inside, call `on_lost`, because the stages no longer agree on what was
        computed."""
        try:
            yield
        except BaseException as error:
            self._on_lost(f"a step of the pipeline failed: {error!r}")
            raise
