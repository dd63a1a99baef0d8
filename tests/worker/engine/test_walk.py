"""The plan of a step touches few files: a trace of one call of the scheduler."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import headrace.worker
from headrace.worker.engine.scheduler import Scheduler
from tests.worker.conftest import make_engine

WORKER = str(Path(headrace.worker.__file__).parent.resolve())


def test_a_step_with_a_prompt_is_planned_in_eight_files() -> None:
    """Scheduler, budget and costs of steps, the request, and the KV cache with its blocks, pool and hashes."""
    engine = make_engine()
    engine.request(list(range(9)), 3)
    engine.run()
    found: set[str] = set()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(WORKER):
            return
        back: FrameType | None = frame
        while back is not None and back.f_code is not Scheduler.schedule.__code__:
            back = back.f_back
        if back is not None:
            found.add(Path(path).relative_to(WORKER).as_posix())

    request = engine.request(list(range(50, 59)), 3)
    sys.setprofile(trace)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    assert request.num_computed_tokens
    assert {"engine/scheduler.py", "kv/cache.py"} < found
    assert len(found) <= 8, sorted(found)
