"""Decides which workers a request may go to if some are reserved for long prompts (docs/decisions/0068). Pure."""

from __future__ import annotations

import numpy as np

from headrace.router.placement.candidates import BLOCK_SIZE, Candidates, Places
from headrace.router.placement.rates import Priors, believed_rates

# A prompt is long if computing its uncached part is expected to take more milliseconds than this.
LONG_PROMPT_MS = 1000.0


def is_long(
    num_prompt_tokens: int, cached_blocks: Places, candidates: Candidates, priors: Priors, long_prompt_ms: float
) -> bool:
    """Whether a prompt is long even at the candidate that has most of it cached, or could fetch most of it.
    `cached_blocks` has, for each candidate, the number of blocks from the start of the prompt that are found there."""
    num_cached = (cached_blocks * candidates.values[BLOCK_SIZE]).max()
    tokens_per_s = np.median(believed_rates(candidates.values, priors)[0])
    return bool((num_prompt_tokens - num_cached) * 1000.0 > long_prompt_ms * tokens_per_s)
