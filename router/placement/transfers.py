"""Cached blocks that a worker could fetch from another one instead of computing them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.router.placement.candidates import TRANSFER_BYTES_PER_S, Places, Values

# The time until the first block arrives.
SETUP_MS = 5.0
# The assumed speed of workers that have not fetched yet.
DEFAULT_BYTES_PER_S = 0.5e9
# Fetching has to be cheaper than computing by this factor, as at the workers.
_WORTH = 0.8


class Transfers(NamedTuple):
    """For each candidate: the prompt tokens that are cached at the best other worker, 0 if there is none, the bytes of
    one of them, and the number of that worker in `addresses`."""

    tokens: Values
    bytes_per_token: Values
    sources: Places
    addresses: Sequence[str]


class Moved(NamedTuple):
    """For each candidate: the tokens that it should fetch, and the time for them in milliseconds."""

    tokens: Values
    ms: Values


def worth_moving(
    transfers: Transfers, values: Values, cached_tokens: Values, ms_per_computed: Values, most_tokens: int
) -> Moved:
    """What to fetch at each candidate, which has `cached_tokens` itself and computes a token in `ms_per_computed`. A
    prompt needs at most `most_tokens`. `values` are the candidates' columns."""
    tokens = np.maximum(np.minimum(transfers.tokens, most_tokens) - cached_tokens, 0.0)
    bytes_per_s = values[TRANSFER_BYTES_PER_S]
    bytes_per_ms = np.where(bytes_per_s > 0.0, bytes_per_s, DEFAULT_BYTES_PER_S) / 1000.0
    took_ms = SETUP_MS + tokens * transfers.bytes_per_token / bytes_per_ms
    is_worth = took_ms < _WORTH * tokens * ms_per_computed
    return Moved(np.where(is_worth, tokens, 0.0), np.where(is_worth, took_ms, 0.0))
