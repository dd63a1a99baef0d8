"""Assumptions about workers, and the rates that placement believes. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.router.placement.candidates import OWN_SHARE, Columns, Values


class Priors(msgspec.Struct, frozen=True, gc=False):
    """The assumptions about a worker or model while nothing is measured. Each field states its unit."""

    prefill_tokens_per_s: float = 1000.0
    decode_step_ms: float = 30.0
    image_tokens_per_s: float = 100.0
    # Length of an answer in tokens, for the time until other requests end.
    answer_tokens: int = 128
    # Number of answer tokens whose delay is weighed against the time to the first token, unless max_tokens is lower.
    weighed_tokens: int = 128
    # Number of prompt tokens that a worker computes for each token of a stream, while it has prompts.
    prompt_tokens_per_step: int = 128
    # At this many sequences, a decode step takes twice the time of a step with one sequence.
    batch_for_double_step: float = 32.0
    # Probability that an evicted cached block would have been used again.
    reuse_chance: float = 0.1
    # Added to this probability if the block is evicted for a copy of blocks that another worker keeps, because the
    # fleet then has fewer blocks.
    copy_chance: float = 1.0
    # A request goes to its session's worker if that costs at most this much more than the best one.
    session_slack_ms: float = 250.0
    # Costs that differ by less are equal.
    noise_ms: float = 1.0
    # A placement stays if its worker turns out to be at most this much more expensive than the best one.
    give_back_ms: float = 50.0


def believed_rates(columns: Columns[Values], priors: Priors) -> tuple[Values, Values]:
    """The assumed rates, each f64 `[candidates]`: prefill tokens per second, and milliseconds per decode step.

    Learned rates depend more on a worker's recent prompts than on its host: they differ fourfold among equal hosts. So,
    on a logarithmic scale, a worker's own rate counts one tenth and the median of all workers nine tenths. A worker
    without a learned rate gets the best one. docs/explanation/simulation.md compares the alternatives.
    """
    prefill = _drawn_to_median(columns.prefill_rate)
    if not prefill.all():
        prefill[prefill == 0.0] = prefill.max() or priors.prefill_tokens_per_s
    step_ms = _drawn_to_median(columns.step_ms)
    if not step_ms.all():
        is_known = step_ms > 0.0
        step_ms[~is_known] = step_ms[is_known].min() if is_known.any() else priors.decode_step_ms
    return prefill, step_ms


def _drawn_to_median(raised: Values) -> Values:
    """Move each rate towards the median of the known rates; 0 stays 0. The rates are already raised to OWN_SHARE."""
    ordered = np.sort(raised)
    num_unknown = int(ordered.searchsorted(0.0, side="right"))
    if num_unknown == len(ordered):
        return np.zeros_like(raised)
    part_of_median: float = ordered[(num_unknown + len(ordered)) // 2].item() ** (1.0 / OWN_SHARE - 1.0)
    drawn: Values = raised * part_of_median
    return drawn
