"""How large steps and batches may be: what was asked for, or what suits this CPU. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SEQS, DEFAULT_TOKENS = 128, 1024
# Tokens of prompts that go on beside a full batch of streams, unless limits were asked for that leave fewer.
ROOM_FOR_PROMPTS = 8
# The fewest tokens of a step with a prompt, and the fewest rows of logits if it has any. On some CPUs products of fewer
# rows use other kernels, which give other bits (docs/decisions/0006). On CPUs with AMX that is four rows or fewer.
MIN_PROMPT_STEP = 8
# Where exact steps have to be smaller than this, each would cost too much: prompts are not exact there by default.
_LEAST_EXACT_STEP = 64


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a worker's steps, for its whole life. Prompts are exact if they have the same keys, values and logits
    however they are cut and whatever else is in their steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    is_exact: bool


def step_limits(
    max_num_seqs: int | None, max_num_batched_tokens: int | None, max_num_mixed_tokens: int | None, *, exact_rows: int
) -> StepLimits:
    """The limits that were asked for, with None replaced by defaults. `exact_rows` is the size of the largest step that
    is exact on this CPU. Defaults keep steps within it, unless another limit was asked for that does not fit."""
    seqs, tokens, mixed = max_num_seqs, max_num_batched_tokens, max_num_mixed_tokens
    if tokens is None:
        needed = max((seqs or 0) + ROOM_FOR_PROMPTS, mixed or 0)
        is_enough = needed <= exact_rows >= _LEAST_EXACT_STEP
        tokens = min(exact_rows, DEFAULT_TOKENS) if is_enough else DEFAULT_TOKENS
    if seqs is None:
        seqs = min(DEFAULT_SEQS, max(1, min(tokens, mixed or tokens) - ROOM_FOR_PROMPTS))
    return StepLimits(seqs, tokens, tokens if mixed is None else mixed, is_exact=tokens <= exact_rows)
