"""The log of steps: what a worker writes, the simulator reads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from headrace.sim.step_logs import read
from headrace.worker.config import ConfigurationError
from headrace.worker.engine.step_meter import StepLog
from headrace.worker.loading import opened_step_log
from tests.worker.configs import worker_config
from tests.worker.conftest import make_engine


def test_each_step_is_a_line_with_its_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    made = make_engine()
    made.engine.step_log = StepLog(path, "worker-3")
    made.request(list(range(9)), 3)
    made.run()
    steps = read(path.read_bytes())
    assert len(steps) == made.engine.stats.num_steps
    assert {step.worker for step in steps} == {"worker-3"}
    assert (steps[0].prompt_tokens, steps[0].sequences) == (9, 1)
    assert all(step.prompt_tokens == 0 and step.context > 9 for step in steps[1:])
    assert all(before.end_s <= after.start_s for before, after in pairwise(steps))


def test_without_a_file_there_is_no_log() -> None:
    assert opened_step_log(worker_config(step_log=None)) is None


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--step-log .*name another file"):
        opened_step_log(worker_config(step_log=tmp_path))
