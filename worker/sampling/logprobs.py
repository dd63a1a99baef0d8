"""Log-probabilities of tokens, and of the most probable tokens at the same position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.sampling.reduction import IndexArray
from headrace.worker.sampling.runs import Runs


def row_logprobs(runs: Runs, token_ids: IndexArray, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row, the log-probability and rank of its token, and of the `num_top[row]` most probable tokens, the
    lower id first among equals. `runs` has weights at temperature 1."""
    normalisers = runs.best + np.log(runs.totals)
    values = runs.at(token_ids)
    row, run = np.nonzero(runs.maxima > values[:, None])
    num_greater = np.count_nonzero(runs.gather(row, run) > values[row, None], axis=1)
    ranks = 1 + np.bincount(row, num_greater, minlength=len(values)).astype(np.int64)
    logprobs = (values - normalisers).tolist()
    top_ids: list[list[int]] = [[]] * len(values)
    top_logprobs: list[list[float]] = [[]] * len(values)
    most = min(max(num_top), runs.logits.shape[1])
    if most:
        # The best tokens lie in runs whose maximum is at least the most-th largest maximum.
        maxima = runs.maxima if most <= runs.maxima.shape[1] else runs.logits.whole(runs.rows)
        top_values, ids = runs.above(-np.partition(-maxima, most - 1, axis=1)[:, most - 1])
        order = np.argsort(-top_values, axis=1, kind="stable")[:, :most]
        top_ids = np.take_along_axis(ids, order, axis=1).tolist()
        top_logprobs = (np.take_along_axis(top_values, order, axis=1) - normalisers[:, None]).tolist()
    return [
        TokenLogprobs(logprob, rank, tuple(ids[:wanted]), tuple(top[:wanted]))
        for logprob, rank, ids, top, wanted in zip(
            logprobs, ranks.tolist(), top_ids, top_logprobs, num_top, strict=True
        )
    ]
