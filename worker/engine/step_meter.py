"""The size of each step, padding included, and its cost: predicted before the step, learned from it afterwards.

A step with a prompt is padded to MIN_PROMPT_STEP tokens (docs/decisions/exactness.md). In accuracy mode and with
speculation, a decode step is padded to two (docs/decisions/speculation.md#verification).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple, TextIO

from headrace.worker.engine.scheduler import Scheduler, SchedulerOutput
from headrace.worker.engine.step_cost import StepCosts, StepRates, StepShape
from headrace.worker.model.batch import Graph
from headrace.worker.model.step_limits import MIN_PROMPT_STEP

# The longest recent step is expected to happen again. It counts 0.1 % less with each step.
_FORGETTING = 0.999


class StepSize(NamedTuple):
    """The size of a step. `shape` includes `num_padding` tokens that only fill it up; `graph` is the graph that
    computes it."""

    shape: StepShape
    num_padding: int
    graph: Graph


class StepMeter:
    """Measures the steps that a scheduler decides. The scheduler uses the learned costs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.longest_expected_step_s = 0.0
        """How long the current step may take: its predicted time, or that of the longest recent step."""
        self._longest_step_s = 0.0
        self._seen: set[tuple[Graph, int]] = set()
        # Tokens of the last step of each graph.
        self._num_tokens: dict[Graph, int] = {}

    @property
    def costs(self) -> StepCosts:
        """The learned costs of steps."""
        return self._scheduler.step_costs

    def size(self, output: SchedulerOutput, graph: Graph = Graph.MAIN, *, least: int = 1) -> StepSize:
        """Decide the padding of the next step and predict its time. Each graph has its own run of steps. Decode steps
        have at least `least` tokens."""
        num_padding = max(0, (least if output.is_decode else MIN_PROMPT_STEP) - output.num_tokens)
        num_tokens = output.num_tokens + num_padding
        changed = num_tokens != self._num_tokens.get(graph, 0)
        self._num_tokens[graph] = num_tokens
        num_shared = self._scheduler.kv_cache.num_shared_tokens
        shape = StepShape.of(output.sequences, padding=num_padding, changed=changed, shared=num_shared)
        model = self.costs.of(is_decode=shape.prompt_tokens == 0)
        predicted_s = model.predict_ms(shape) / 1000 if model.num_steps else 0.0
        self.longest_expected_step_s = max(self._longest_step_s, predicted_s)
        return StepSize(shape, num_padding, graph)

    def passed(self, num_tokens: int, graph: Graph = Graph.MAIN) -> None:
        """Record that the latest step had this many tokens, for steps for which `size` was not called."""
        self._num_tokens[graph] = num_tokens

    def observe(self, size: StepSize, step_s: float, tokens_per_stream: float = 1.0, draft_s: float = 0.0) -> None:
        """Learn from a step that took `step_s` seconds and gave each stream this many tokens on average. Before it, a
        smaller model took `draft_s` to propose them."""
        # Kernels are built in the first step of each size.
        key = (size.graph, size.shape.tokens)
        is_first = key not in self._seen
        self._seen.add(key)
        longest_s = math.inf if is_first else self.costs.most_ms(size.shape) / 1000
        self._longest_step_s = max(min(step_s + draft_s, longest_s), _FORGETTING * self._longest_step_s)
        speculation = self._scheduler.speculation
        if speculation is not None:
            is_known = size.shape.prompt_tokens == 0 and self.costs.decode.is_learned and not is_first
            ratio = 1000 * step_s / self.costs.decode.predict_ms(size.shape) if is_known else None
            speculation.observe_step(size.shape.tokens, ratio)
            if size.shape.prompt_tokens == 0:
                self.costs.rates.observe_drafts(tokens_per_stream, 1000 * draft_s)
        self.costs.observe(size.shape, 1000 * step_s, is_first=is_first)

    def end_warm_up(self) -> None:
        """Forget everything that depends on the steps so far, except the cost of steps and which kernels are built."""
        self.costs.rates = StepRates()
        self.longest_expected_step_s = self._longest_step_s = 0.0


class StepLog:
    """Writes one JSON line for each step, for measurements of the machine. Appends to a file, which several workers may
    share. OSError if the file cannot be written."""

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
