"""A log of steps for those who measure the machine: one line of JSON for each step, with its size and time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from headrace.worker.engine.step_meter import StepSize


class StepLog:
    """Appends to a file, which several workers may share. Raises OSError if it cannot be written."""

    def __init__(self, path: Path, worker_id: str) -> None:
        self._worker_id = worker_id
        # A line is written at once, so that those of several workers do not mix.
        self._file: TextIO = path.open("a", buffering=1, encoding="utf-8")

    def note(self, size: StepSize, start_s: float, step_s: float) -> None:
        """Write a step of this size that began at `start_s`, on the clock of `time.perf_counter`, and took `step_s`."""
        line = {
            "worker": self._worker_id,
            "start_s": round(start_s, 6),
            "ms": round(1000 * step_s, 4),
            "graph": size.graph.name.lower(),
            **size.shape._asdict(),
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
