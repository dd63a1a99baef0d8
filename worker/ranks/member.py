"""A rank other than the first, as a separate process: `python -m headrace.worker.ranks.member LINK MEMORY LOGITS BELL`,
descriptors that it inherits.

    rank 0                                   this process
    which rank, which model   ----------->   reads its part, compiles it
    (which layers of it)
                              <-----------   compiled
    KV blocks, their file     ----------->   maps them
                              <-----------   allocated
    a step in memory, bell    ----------->   computes it, together with all others
                              <-----------   its part of the logits in memory, a counter
    a file for adapters       ----------->   maps it, before the step that needs it

It runs on the CPUs with which it was started, with memory of their NUMA node. It ends with its worker.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.common.model_files.networks import weights_in
from headrace.worker.config import ConfigurationError
from headrace.worker.host.mapped_files import give_back
from headrace.worker.host.numa import bind_memory, memory_node_of, usable_cpus
from headrace.worker.weights.file_memory import give_back_files

if TYPE_CHECKING:
    import openvino as ov

    from headrace.worker.model.runner import OpenVINOModelRunner
    from headrace.worker.ranks.memory import GroupMemory, SharedLogits
    from headrace.worker.ranks.rank import Rank

log = logging.getLogger("headrace.worker.ranks")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# It looks for the next step so long before it sleeps until the bell rings.
_SPIN_S = 100e-6


def serve(link: socket.socket, memory_fd: int, logits_fd: int, bell: int) -> None:
    """Compile, allocate, and compute steps until the worker ends."""
    # Imported late: OpenVINO reads the affinity and this process's memory policy when it is imported.
    from headrace.worker.draft_heads.features import AllStates
    from headrace.worker.model.runner import WHOLE, Layers, OpenVINOModelRunner, Part
    from headrace.worker.pipeline.cutting import cut_stage, find_cuts
    from headrace.worker.ranks.memory import GroupMemory, SharedLogits
    from headrace.worker.ranks.messages import (
        Allocate,
        Allocated,
        Compiled,
        MovedAdapters,
        Setup,
        StageLayers,
        receive,
        receive_with_files,
        send,
    )
    from headrace.worker.ranks.rank import Rank
    from headrace.worker.ranks.shared_cache import arena_at

    setup = receive(link, Setup)
    parent = os.getppid()
    memory = GroupMemory(memory_fd, setup.rank, setup.num_ranks, lambda: os.getppid() == parent)
    rank = Rank(setup.rank, setup.num_ranks, memory.sums.add)
    model_dir = Path(setup.model_dir)

    def divide(model: ov.Model) -> Part:
        part = WHOLE
        if setup.is_stage:
            cuts, layers = find_cuts(model), receive(link, StageLayers)
            part = cut_stage(model, cuts, Layers(layers.first, layers.end, layers.bfloat16_states))
        return rank.divide(model, part)

    try:
        runner = OpenVINOModelRunner(
            model_dir,
            threads=setup.threads,
            kv_precision=setup.kv_precision,
            execution_mode=setup.execution_mode,
            max_context_tokens=setup.max_context_tokens,
            speculates=setup.speculates,
            has_parts=setup.has_parts,
            max_adapters=setup.max_adapters,
            states=AllStates() if setup.computes_all_states else None,
            divide=divide,
        )
    except ConfigurationError as error:
        send(link, Compiled(problem=str(error)))
        link.recv(1)  # until the worker has ended
        return
    send(link, Compiled(runner.exact_rows, runner.block_shapes, runner.in_slots, runner.state_bytes))
    # The file stays open: if it has a name, the next worker cannot lock it before all ranks have ended.
    wanted, (cache,) = receive_with_files(link, Allocate, 1)
    node = memory_node_of(usable_cpus())
    try:
        if runner.state_bytes:
            runner.allocate_states(wanted.num_state_slots, huge_pages=wanted.huge_pages)
        runner.allocate(
            wanted.num_blocks,
            wanted.num_slots,
            make_arena=lambda: arena_at(cache, wanted.place, huge_pages=wanted.huge_pages, node=node),
        )
        runner.touch()
    except ConfigurationError as error:
        send(link, Allocated(str(error)))
        link.recv(1)
        return
    logits = None if wanted.logits is None else SharedLogits(logits_fd, wanted.logits)
    send(link, Allocated())

    def move_adapters() -> None:
        assert runner.adapters is not None
        moved, files = receive_with_files(link, MovedAdapters, 1)
        runner.adapters = runner.adapters.in_files(moved.lora_rank, files)

    compute_steps(rank, runner, memory, logits, bell, model_dir, move_adapters)


def compute_steps(
    rank: Rank,
    runner: OpenVINOModelRunner,
    memory: GroupMemory,
    logits: SharedLogits | None,
    bell: int,
    model_dir: Path,
    move_adapters: Callable[[], None],
) -> None:
    """Compute each step that rank 0 announces. `move_adapters` takes the next file for adapters that rank 0 sent."""
    count = num_moves = 0
    while True:
        count += 1
        _wait_for(count, memory, bell)
        start_s = time.perf_counter()
        step = memory.read_step()
        if step is None:
            given_back = sum(map(give_back, weights_in(model_dir))) + give_back_files()
            log.info("rank %d: %.2f GiB of weights in files were given back", rank.number, given_back / (1 << 30))
        else:
            while num_moves < step.num_moves:
                move_adapters()
                num_moves += 1
            runner.bind(step.batch, keeps_logits=False)
            part = runner.run()
            if logits is not None and rank.first_token is not None and runner.gives_logits:
                logits.put(step.place, part, rank.first_token)
            memory.note_step(time.perf_counter() - start_s)
        memory.steps.set(count)


def _wait_for(count: int, memory: GroupMemory, bell: int) -> None:
    """Wait until rank 0 has announced step number `count`."""
    end_s = time.perf_counter() + _SPIN_S
    while memory.steps.of(0) < count:
        if time.perf_counter() > end_s:
            os.eventfd_read(bell)
    memory.steps.wait((0,), count)


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(format=_LOG_FORMAT, level=logging.INFO, stream=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link, memory, logits, bell = map(int, sys.argv[1:])
    bind_memory(None, is_inherited=True)
    try:
        serve(socket.socket(fileno=link), memory, logits, bell)
    except OSError as error:
        log.error("the worker has ended: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
