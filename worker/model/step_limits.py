"""The maximum size of steps and batches: as set by flags, or as suits this CPU. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SEQS = 128
DEFAULT_TOKENS = 1024
# Prompt tokens in a step with a full batch of streams, unless flags leave less room.
ROOM_FOR_PROMPTS = 8
# The fewest tokens of a step with a prompt, and the fewest rows of logits if it has any. On some CPUs products of fewer
# rows use other kernels, which give other bits (docs/decisions/exactness.md). On CPUs with AMX that is four rows or
# fewer.
MIN_PROMPT_STEP = 8
# The logits of a step for log-probabilities of prompts, and those for draft tokens. OpenVINO keeps the memory of the
# largest step, twice in each graph, and the KV cache takes most of the rest.
MAX_LOGITS_BYTES = 128 << 20
# If exact steps would have to be smaller than this, they would cost too much, so prompts are not exact by default.
_LEAST_EXACT_STEP = 64


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of a worker's steps. Prompts are exact if their keys, values and logits do not depend on how they are
    divided into chunks or on what else is in their steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    is_exact: bool


def step_limits(
    max_num_seqs: int | None, max_num_batched_tokens: int | None, max_num_mixed_tokens: int | None, *, exact_rows: int
) -> StepLimits:
    """The given limits, with defaults for None. `exact_rows` is the size of the largest step that is exact on this CPU.
    Defaults stay within it, unless another given limit exceeds it."""
    seqs = max_num_seqs
    tokens = max_num_batched_tokens
    mixed = max_num_mixed_tokens
    if tokens is None:
        needed = max((seqs or 0) + ROOM_FOR_PROMPTS, mixed or 0)
        is_enough = needed <= exact_rows >= _LEAST_EXACT_STEP
        tokens = min(exact_rows, DEFAULT_TOKENS) if is_enough else DEFAULT_TOKENS
    if seqs is None:
        seqs = min(DEFAULT_SEQS, max(1, min(tokens, mixed or tokens) - ROOM_FOR_PROMPTS))
    return StepLimits(seqs, tokens, tokens if mixed is None else mixed, is_exact=tokens <= exact_rows)


def max_logits_rows(vocab_size: int) -> int:
    """Rows of logits in `MAX_LOGITS_BYTES`, as float32. At least as many as a step with a prompt computes anyway."""
    return max(MIN_PROMPT_STEP, MAX_LOGITS_BYTES // (4 * vocab_size))
