"""A model divided among ranks, as the engine sees it. Rank 0 is the worker's own process.

    engine thread    bind  -- step in shared memory, bell -->  the other ranks
                     run   its part, with sums over all ranks
                           <-- their parts of the logits, counters --

Block ids mean the same on all ranks, each of which has its heads' part of every block. The engine, the scheduler and
the sampler know nothing of ranks.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov

from headrace.worker.config import ConfigurationError
from headrace.worker.host.binding import RankReport
from headrace.worker.host.numa import memory_node_of
from headrace.worker.kv.arena import KVArena
from headrace.worker.kv.block_bytes import BlockBytes, BlockShape
from headrace.worker.kv.memory import available_on_node
from headrace.worker.model.adapter_memory import AdapterMemory
from headrace.worker.model.batch import Batch
from headrace.worker.model.runner import OpenVINOModelRunner, Part, StateReader
from headrace.worker.ranks.members import Cpus, Members
from headrace.worker.ranks.memory import GroupMemory, LogitsShape, SharedLogits, give_room, make_logits
from headrace.worker.ranks.messages import (
    Allocate,
    Allocated,
    Compiled,
    MovedAdapters,
    Setup,
    StageLayers,
    send,
)
from headrace.worker.ranks.rank import Rank
from headrace.worker.ranks.shared_cache import make_file, pieces_of, shared_pieces
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.reduction import run_length

# Rows of logits for which there is room in a step, besides those for its tokens.
_SPARE_ROWS = 4096


class GroupRunner(OpenVINOModelRunner):
    """A model that is computed by one rank for each entry of `cpus`, on the CPUs of the entry. The first rank is this
    process, with `threads` threads; each other rank is a process with at most as many. `block_bytes` and `vocab_size`
    are those of all ranks together, and `exact_rows` the smallest of any rank. The group has no second graph for decode
    steps, and no eviction. Blocks are copied with the parts of all ranks, and adapters are written for all ranks. All
    ranks have the same hidden states, so `states` reads those of rank 0.

    With `divide`, the graph is reduced to a stage of a pipeline before it is divided among the ranks. All ranks have
    the hidden states with which the stage begins and ends.

    If a rank is lost, or if it fails in a step, the others cannot continue. `on_lost` is then called with the reason,
    in any thread. It should end the process. Until the end of the warm-up, a rank also counts as lost if it makes no
    progress for `hangs_after_s` seconds while rank 0 waits for it. Steps have up to `most_tokens` tokens.
    """

    def __init__(
        self,
        model_dir: Path,
        cpus: Sequence[Cpus],
        *,
        threads: int,
        kv_precision: str,
        execution_mode: str,
        max_context_tokens: int,
        speculates: bool,
        has_parts: bool = False,
        max_adapters: int = 0,
        states: StateReader | None = None,
        most_tokens: int,
        hangs_after_s: float,
        on_lost: Callable[[str], None],
        divide: Callable[[ov.Model], Part] | None = None,
    ) -> None:
        """ConfigurationError if the model cannot be divided so, RankLostError if a rank is lost meanwhile."""
        self.num_ranks = len(cpus)
        self._cpus = [frozenset(mask) for mask in cpus]
        self._nodes = [memory_node_of(mask) for mask in self._cpus]
        self._on_lost = on_lost
        self._cut_stage = divide
        memory, self._logits_file = GroupMemory.make(self.num_ranks), make_logits()
        self._files = [memory, self._logits_file]
        self._members = Members(cpus[1:], self._files, on_lost, hangs_after_s=hangs_after_s)
        self._memory = GroupMemory(memory, 0, self.num_ranks, self._members.get_on)
        for member in self._members:
            of_rank = min(threads, len(cpus[member.rank]))
            self._members.tell(
                member,
                Setup(
                    member.rank,
                    self.num_ranks,
                    str(model_dir.absolute()),
                    of_rank,
                    kv_precision,
                    execution_mode,
                    max_context_tokens,
                    speculates,
                    has_parts,
                    max_adapters,
                    is_stage=divide is not None,
                    computes_all_states=states is not None and states.computes_all_states,
                ),
            )
        others = dict(enumerate(self._nodes[1:], 1))
        self._rank = Rank(0, self.num_ranks, self._memory.sums.add, node=self._nodes[0], writes_for=others)
        # The memory of adapters that the other ranks have, and how often they were sent one.
        self._sent_adapters: AdapterMemory | None = None
        self._num_moves = 0
        # Of the parts of a block that the other ranks have; known once these have joined.
        self._shapes_of: Sequence[Sequence[BlockShape]] = ()
        self._in_slots_of: Sequence[Sequence[bool]] = ()
        self._num_state_slots = 0
        super().__init__(
            model_dir,
            threads=threads,
            kv_precision=kv_precision,
            execution_mode=execution_mode,
            max_context_tokens=max_context_tokens,
            speculates=speculates,
            has_parts=has_parts,
            max_adapters=max_adapters,
            states=states,
            divide=self._divide_among_ranks,
        )
        self._spare_rows = most_tokens + _SPARE_ROWS
        self._count = 0
        self._place = 0
        # None if no step ends with logits that are divided.
        self._logits: SharedLogits | None = None
        self._other_caches: list[npt.NDArray[np.uint8]] = []
        self._join_ranks()

    def _divide_among_ranks(self, model: ov.Model) -> Part:
        """Reduce a whole model to the part of rank 0, and tell the other ranks how it is divided."""
        if self._cut_stage is None:
            return self._rank.divide(model)
        part = self._cut_stage(model)
        assert part.layers is not None, "only stages are divided further"
        for member in self._members:
            self._members.tell(member, StageLayers(*part.layers))
        return self._rank.divide(model, part)

    def _join_ranks(self) -> None:
        """Wait for the others, and describe the whole model."""
        others = [self._members.hear(member, Compiled) for member in self._members]
        problem = next((other.problem for other in others if other.problem), "")
        if problem:
            raise ConfigurationError(problem)
        self.exact_rows = min(self.exact_rows, *(other.exact_rows for other in others))
        self._shapes_of = [[BlockShape(*shape) for shape in other.shapes] for other in others]
        self._in_slots_of = [other.in_slots for other in others]
        # The parts of a block: of rank 0, then of the others. Those of layers with a window may be in slots.
        in_parts = [
            _sums_by(shapes, in_slots)
            for shapes, in_slots in (
                (super().block_shapes, super().in_slots),
                *zip(self._shapes_of, self._in_slots_of, strict=True),
            )
        ]
        self.rank_bytes = [in_blocks for in_blocks, _ in in_parts]
        """The bytes of each rank's part of a KV block."""
        self.block_bytes = sum(self.rank_bytes)
        self.part_bytes = sum(in_slots for _, in_slots in in_parts)
        self.state_bytes += sum(other.state_bytes for other in others)
        self.layer_groups = self._group_layers()
        self.num_kv_heads = next(iter(self._rank.division.key_heads.values())).size
        if self._rank.vocabulary is not None:
            self.vocab_size = self._rank.vocabulary.size
        self.numerics += f" ranks {self.num_ranks}"

    def most_blocks(self, node_share: float, kept_bytes: int = 0) -> int | None:
        """How many KV blocks fit into this share of the free memory of the ranks' NUMA nodes; None if the nodes are not
        known. The `kept_bytes` of the previous process's blocks count as free."""
        on_nodes: dict[int, int] = {}
        for node, num_bytes in zip(self._nodes, self.rank_bytes, strict=True):
            if node is None:
                return None
            on_nodes[node] = on_nodes.get(node, 0) + num_bytes
        rooms = [(available_on_node(node), num_bytes) for node, num_bytes in on_nodes.items()]
        return min(
            (
                int((room + kept_bytes * num_bytes // self.block_bytes) * node_share) // num_bytes
                for room, num_bytes in rooms
                if room is not None
            ),
            default=None,
        )

    def allocate_states(self, num_slots: int, *, huge_pages: bool = True) -> str:
        """Make slots for the states of recurrent layers; see `OpenVINOModelRunner`. The other ranks make theirs with
        their KV caches."""
        self._num_state_slots = num_slots
        return super().allocate_states(num_slots, huge_pages=huge_pages)

    def allocate(
        self,
        num_blocks: int,
        num_slots: int = 0,
        *,
        huge_pages: bool = True,
        make_arena: Callable[[], KVArena] | None = None,
    ) -> KVArena:
        """Make the KV caches of all ranks. See `OpenVINOModelRunner.allocate`. The arena of `make_arena` has room for
        all of them and is in a file."""
        arena = super().allocate(num_blocks, num_slots, huge_pages=huge_pages, make_arena=make_arena)
        shape = None
        if self._rank.vocabulary is not None:
            num_runs = self.vocab_size // run_length(self.vocab_size) if self._rank.run else 0
            shape = LogitsShape(self._spare_rows, self.vocab_size, num_runs)
            give_room(self._logits_file, shape)
            self._logits = SharedLogits(self._logits_file, shape)
        for member, shapes, in_slots in zip(self._members, self._shapes_of, self._in_slots_of, strict=True):
            pieces = pieces_of(shapes, in_slots, num_blocks, num_slots)
            own = None if make_arena is not None else make_file(pieces)
            caches, descriptor, place = shared_pieces(own or arena, pieces)
            message = Allocate(num_blocks, num_slots, self._num_state_slots, huge_pages, place, shape)
            self._members.tell(member, message, [descriptor])
            self._other_caches += caches
            if own is not None:
                os.close(descriptor)
        problems = [self._members.hear(member, Allocated).problem for member in self._members]
        if any(problems):
            raise ConfigurationError(next(filter(None, problems)))
        return arena

    @property
    def block_shapes(self) -> tuple[BlockShape, ...]:
        """The part of a block in each cache of each rank, those of rank 0 first."""
        return (*super().block_shapes, *itertools.chain.from_iterable(self._shapes_of))

    @property
    def in_slots(self) -> tuple[bool, ...]:
        """For each of these caches, whether it has parts of blocks in slots; empty if none has."""
        return (*super().in_slots, *itertools.chain.from_iterable(self._in_slots_of))

    def _bytes_of(self, *, in_slots: bool) -> BlockBytes:
        caches = [*(view.reshape(-1) for view in self._cache_views), *self._other_caches]
        are_slots = self.in_slots or (False,) * len(caches)
        found = [
            (cache, shape)
            for cache, shape, is_slot in zip(caches, self.block_shapes, are_slots, strict=True)
            if is_slot is in_slots
        ]
        return BlockBytes([cache for cache, _ in found], [shape for _, shape in found])

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Set the inputs of the next step on all ranks. The other ranks begin to compute it."""
        if keeps_logits:
            self._place = 1 - self._place
        if batch.adapter_slots is not None:
            self._send_adapters()
        self._announce(batch)
        with self._with_others():
            super().bind(batch, keeps_logits=keeps_logits)

    def run(self) -> Logits:
        """Compute the step on all ranks. Returns the logits of all of them, as `OpenVINOModelRunner.run` does."""
        start_s = time.perf_counter()
        logits, first_token = self._logits if self.gives_logits else None, self._rank.first_token
        with self._with_others():
            own = super().run()
            if logits is not None and first_token is not None:
                logits.put(self._place, own, first_token)
            self._memory.steps.wait(range(1, self.num_ranks), self._count)
        self.infer_s = time.perf_counter() - start_s
        self._memory.note_step(self.infer_s)
        return own if logits is None else logits.whole(self._place, own)

    def end_warm_up(self) -> None:
        """Let the other ranks give back the memory of their files."""
        self._announce(None)
        self._memory.steps.wait(range(1, self.num_ranks), self._count)
        self._members.loaded()

    def ranks(self) -> Sequence[RankReport]:
        """The ranks. May be called from any thread."""
        return [
            RankReport(cpus, node, *self._memory.times_of(rank))
            for rank, (cpus, node) in enumerate(zip(self._cpus, self._nodes, strict=True))
        ]

    def close(self) -> None:
        """End the other ranks, and close the files that they shared."""
        self._members.close()
        while self._files:
            os.close(self._files.pop())

    def _send_adapters(self) -> None:
        """Send the other ranks the memory of adapters, unless they have it."""
        memory = self.adapters
        assert memory is not None
        if memory is not self._sent_adapters:
            for member, fd in zip(self._members, memory.fds[1:], strict=True):
                send(member.link, MovedAdapters(memory.rank), [fd])
            self._sent_adapters = memory
            self._num_moves += 1

    def _announce(self, batch: Batch | None) -> None:
        self._memory.write_step(batch, self._place, self._num_moves)
        self._count += 1
        self._memory.steps.set(self._count)
        self._members.ring()

    @contextmanager
    def _with_others(self) -> Iterator[None]:
        """Context manager: calls `on_lost` if this rank fails in a step that the other ranks compute, because the
        group cannot continue."""
        try:
            yield
        except BaseException as error:
            self._on_lost(f"rank 0 of the divided model failed in a step: {error!r}")
            raise


def _sums_by(shapes: Sequence[BlockShape], in_slots: Sequence[bool]) -> tuple[int, int]:
    """The bytes of a block of these shapes: in blocks, and in slots."""
    total = sum(shape.num_bytes for shape in shapes)
    of_slots = sum(shape.num_bytes for shape, is_slot in zip(shapes, in_slots, strict=False) if is_slot)
    return total - of_slots, of_slots
