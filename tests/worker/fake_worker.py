"""A whole worker process over the fake runner: `python -m tests.worker.fake_worker HANGS_WHILE ...flags of a worker`.

Its engine's scheduler raises when a request has the token `SPOILS_SCHEDULER`, and its kernels do not return while the
file HANGS_WHILE exists.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from headrace.common.transport.channels import PLAIN, Transport
from headrace.protos import worker_pb2
from headrace.worker import serving
from headrace.worker.__main__ import main
from headrace.worker.config import WorkerConfig
from headrace.worker.engine.scheduler import SchedulerOutput
from headrace.worker.host.binding import Region
from headrace.worker.kv.host_memory import HostMemory
from headrace.worker.loading import LoadedModel
from headrace.worker.sampling.logits import Logits
from tests.worker.conftest import BLOCK_SIZE, VOCAB_SIZE, make_engine
from tests.worker.fake_runner import FakeRunner

SPOILS_SCHEDULER = 666
NUM_BLOCKS = 512
MAX_NUM_SEQS = 8
STEP_S = 0.005
_BUNDLE = b"no tokenizer"


class HangingRunner(FakeRunner):
    """Takes a while for each step, and hangs in one while a file exists."""

    hangs_while = Path()

    def run(self) -> Logits:
        """The logits of the last bound batch."""
        time.sleep(STEP_S)
        while self.hangs_while.exists():
            time.sleep(STEP_S)
        return super().run()


def load_model(
    config: WorkerConfig, memory: HostMemory | None = None, transport: Transport = PLAIN, offers: object = None
) -> LoadedModel:
    """An engine over the fake runner, in the place of a model."""
    under_test = make_engine(num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=256)
    under_test.engine.runner = HangingRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
    scheduler = under_test.scheduler
    schedule = scheduler.schedule

    def spoiled(*args: Any) -> SchedulerOutput:
        if any(SPOILS_SCHEDULER in request.token_ids for request in scheduler.waiting):
            raise ZeroDivisionError("a spoiled scheduler")
        return schedule(*args)

    type(scheduler).schedule = lambda _, *args: spoiled(*args)  # type: ignore[method-assign]
    card = worker_pb2.ModelCard(
        name="fake",
        fingerprint="f" * 64,
        tokenizer_sha256=hashlib.sha256(_BUNDLE).hexdigest(),
        max_context_tokens=NUM_BLOCKS * BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        eos_token_ids=[VOCAB_SIZE - 1],
    )
    return LoadedModel(under_test.engine, card, _BUNDLE, Region(0, 0), MAX_NUM_SEQS)


if __name__ == "__main__":
    HangingRunner.hangs_while = Path(sys.argv.pop(1))
    serving.load_model = load_model
    main()
