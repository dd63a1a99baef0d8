"""Log-probabilities of a model and of its divided form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import ModelRunner
from headrace.worker.kv.groups.recurrent import StateBudget
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import step_limits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from tests.worker.conftest import CHEAP_STEPS
from tests.worker.ranks.group import Group

ASKED: dict[str, Any] = {"kv_precision": "f32", "execution_mode": "accuracy"}
FAST: dict[str, Any] = {"kv_precision": "u8", "execution_mode": "performance"}
TOLERANCE = 1e-4
# Of float32, for models whose log-probabilities reach hundreds.
_PRECISION = 1e-6
NUM_BLOCKS = 160
STATES = StateBudget(num_slots=24, interval=64)
"""The slots of models with recurrent layers."""


class Prompt(NamedTuple):
    """A prompt, and the slot of its adapter; -1 without one."""

    tokens: Sequence[int]
    adapter_slot: int = -1


class Computed:
    """A compiled model, whole or divided. `block_bytes` of a whole one are those of a KV block. With `has_states`, it
    has recurrent layers, with the slots of STATES."""

    def __init__(self, runner: ModelRunner, exact_rows: int, block_bytes: int = 0, *, has_states: bool = False) -> None:
        self.block_bytes = block_bytes
        self._groups = [STATES] if has_states else []
        self._runner = runner
        self._exact_rows = exact_rows

    def log_probabilities(self, tokens: Sequence[int], *, budget: int = 512) -> npt.NDArray[np.float64]:
        """Of each token of a prompt but the first, and of 4 greedy tokens behind it. Steps have `budget` tokens at
        most."""
        return self.together([Prompt(tokens)], budget=budget)[0]

    def together(self, prompts: Sequence[Prompt], *, budget: int = 512) -> list[npt.NDArray[np.float64]]:
        """The same of each of several prompts, which share steps."""
        limits = step_limits(8, budget, budget, exact_rows=self._exact_rows)
        engine = build_engine(
            self._runner, BatchSampler(), NUM_BLOCKS, limits, step_costs=CHEAP_STEPS, groups=self._groups
        )
        sampling = SamplingParams(max_tokens=4, seed=0, temperature=0.0, num_prompt_logprobs=0, num_logprobs=0)
        requests = [
            Request(str(number), tokens, sampling, 2 + slot, adapter_slot=slot)
            for number, (tokens, slot) in enumerate(prompts)
        ]
        for request in requests:
            engine.scheduler.add(request)
        found: dict[str, list[float]] = {request.request_id: [] for request in requests}
        while engine.scheduler.has_requests:
            for output in engine.step():
                found[output.request.request_id] += [entry.logprob for entry in output.logprobs]
        assert all(len(request.prompt_logprobs) == request.num_prompt_tokens - 1 for request in requests)
        return [
            np.array([*(entry.logprob for entry in request.prompt_logprobs), *found[request.request_id]])
            for request in requests
        ]


def whole(directory: Path, precisions: Mapping[str, Any] = ASKED) -> Computed:
    """The undivided model, in accuracy mode unless `precisions` say otherwise."""
    runner = OpenVINOModelRunner(directory, threads=1, **precisions)
    if runner.state_bytes:
        runner.allocate_states(STATES.num_slots)
    runner.allocate(NUM_BLOCKS)
    return Computed(runner, runner.exact_rows, runner.block_bytes, has_states=runner.state_bytes > 0)


def divided(directory: Path, num_ranks: int) -> tuple[Computed, Group]:
    """The model divided among ranks, in accuracy mode."""
    group = Group(directory, num_ranks, **ASKED)
    group.allocate(NUM_BLOCKS, STATES.num_slots)
    return Computed(group, group.exact_rows, has_states=group.state_bytes > 0), group


def assert_exact(of_whole: Computed, of_group: Computed, prompts: Sequence[Sequence[int]]) -> None:
    """The divided model has the same log-probabilities, and for each prompt the same bits in any chunks."""
    for prompt in prompts:
        found = of_group.log_probabilities(prompt)
        np.testing.assert_allclose(found, of_whole.log_probabilities(prompt), rtol=_PRECISION, atol=TOLERANCE)
        in_chunks = of_group.log_probabilities(prompt, budget=72)
        assert in_chunks[: len(prompt) - 1].tobytes() == found[: len(prompt) - 1].tobytes()
