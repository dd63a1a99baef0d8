"""A small calibration for tests, with round numbers."""

from __future__ import annotations

from headrace.bench.calibration import VERSION, Calibration, Front, Host, Layout, Model
from headrace.sim.step_cost import StepCost, StepCostPair


def calibration(
    *, speed: float = 1.0, workers: int = 1, kv_tokens: int = 64_000, model: str = "small", window: int = 0
) -> Calibration:
    """A host that decodes in 10 ms and 0.5 ms for each stream, and computes 2,500 tokens of prompts in a second; steps
    are `speed` times as fast. With a `window`, four of five layers keep only so many tokens."""
    decode = StepCost((1, 2), (10.5 / speed, 11.0 / speed), 0.0, 0.0, 0.0005 / speed, 0.0, 0.0, model, "a host")
    prompts = StepCost((8, 1024), (13.2 / speed, 419.6 / speed), 0.0, 0.0, 0.0005 / speed, 0.0, 0.0, model, "a host")
    return Calibration(
        version=VERSION,
        headrace="0.1.0",
        made="2026-11-26T12:00:00Z",
        source="measured",
        seconds=300.0,
        num_steps=1000,
        host=Host("a host", 2, 2, 1, 16 << 30),
        model=Model(model, "0123", 8192, 32, 12_960.0, "u8", window, 10_368.0 if window else 0.0),
        layout=Layout(workers, 2 // workers or 1, kv_tokens, 128, 1024, 1024, 1),
        steps=StepCostPair(prompts, decode),
        slowdown=0.0,
        front=Front(0.002, 0.002, 0.004, 0.0002),
    )
