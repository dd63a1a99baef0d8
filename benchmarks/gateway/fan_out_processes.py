"""Gateway, router and worker that report how long their event loops are blocked.

    python -m benchmarks.gateway.fan_out_processes gateway|router FLAGS...
    python -m benchmarks.gateway.fan_out_processes worker --model MODEL_DIR FLAGS...

Each is the same process as `python -m headrace.ROLE`, plus a timer in its event loop that fires every millisecond. When
the timer is late, it prints a line:

    held AT_S HELD_MS CPU_MS

AT_S is the monotonic time at which the loop continued. HELD_MS is how late the timer was, which is up to a millisecond
less than the loop was blocked. CPU_MS is the CPU time of the loop's thread meanwhile. During the rest it waited for the
GIL or for a core.

The worker has no kernels: each step takes STEP_S, and all logits are 0. Everything else is real, with the vocabulary of
the model.
"""

from __future__ import annotations

import asyncio
import runpy
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import uvloop

from headrace.common.transport.channels import PLAIN, Transport
from headrace.worker import serving
from headrace.worker.__main__ import main as run_worker
from headrace.worker.config import WorkerConfig
from headrace.worker.engine.build import build_engine
from headrace.worker.host.binding import Region
from headrace.worker.kv.host_memory import HostMemory
from headrace.worker.loading import LoadedModel
from headrace.worker.model.batch import Batch
from headrace.worker.model.directory import read_model_dir
from headrace.worker.model.step_limits import step_limits
from headrace.worker.model_card import model_card
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler

STEP_S = 0.03
LONGEST_PROMPT = 40_000
_INTERVAL_S = 0.001
# What is shorter is the timer's own unevenness.
_LEAST_S = 0.002
_VOCABULARY = 49_152
_BLOCK_SIZE = 32
_NUM_BLOCKS = 4000


class NoKernels:
    """A model runner without a model."""

    vocab_size = _VOCABULARY
    block_size = _BLOCK_SIZE
    infer_s = STEP_S
    small_decode = 0

    def __init__(self) -> None:
        self._num_rows = 0

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """See ModelRunner."""
        self._num_rows = len(batch.sampled_tokens_indices)

    def run(self) -> Logits:
        """See ModelRunner."""
        time.sleep(STEP_S)
        return Logits(np.zeros((self._num_rows, self.vocab_size), np.float32))


def load_model(config: WorkerConfig, memory: HostMemory | None = None, transport: Transport = PLAIN) -> LoadedModel:
    """An engine without kernels, for the model of a directory."""
    model_dir = read_model_dir(config.model_dir)
    limits = step_limits(None, None, None, exact_rows=1024)
    engine = build_engine(NoKernels(), BatchSampler(), _NUM_BLOCKS, limits, target_step_ms=config.target_tpot_ms)
    card = model_card(
        config, engine.scheduler.kv_cache.pool, model_dir, "0" * 64, kv_precision="u8", vocab_size=_VOCABULARY
    )
    return LoadedModel(engine, card, model_dir.tokenizer_bundle, Region(0, 0), limits.max_num_seqs)


async def tell_holds() -> None:
    """Print a line whenever the loop was blocked."""
    while True:
        due_s, used_s = time.monotonic() + _INTERVAL_S, time.thread_time()
        await asyncio.sleep(_INTERVAL_S)
        now_s = time.monotonic()
        if now_s - due_s > _LEAST_S:
            held_ms, cpu_ms = 1000 * (now_s - due_s), 1000 * (time.thread_time() - used_s)
            print(f"held {now_s:.6f} {held_ms:.3f} {cpu_ms:.3f}", flush=True)


def telling(run: Callable[..., Any]) -> Callable[..., Any]:
    """`uvloop.run` with the timer."""

    def run_both(main: Coroutine[Any, Any, Any]) -> Any:
        async def both() -> Any:
            timer = asyncio.create_task(tell_holds())
            try:
                return await main
            finally:
                timer.cancel()

        return run(both())

    return run_both


def main() -> None:
    """Be one of the three processes."""
    role = sys.argv.pop(1)
    uvloop.run = telling(uvloop.run)
    if role == "worker":
        serving.load_model = load_model
        run_worker()
    else:
        runpy.run_module(f"headrace.{role}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
