"""Accepts the draft tokens that would have been sampled without a draft.

A step samples a token after each token of a draft. A row is valid if all draft tokens before it equal the sampled
tokens. Each random draw depends only on seed and position, so the answer is the same as without speculation.

    draft           a  b  c
    rows        r0  r1 r2 r3
    sampled     a   b  x  y      a, b and x are the next tokens; y is dropped, because c is not x

A draft may have a branch: other tokens from the first one on. Its rows come after those of the draft, and replace them
if the first sampled token is that of the branch.

Rows that depend only on the model's logits are sampled together. If penalties, a grammar or bad words also depend on
earlier tokens, a row is sampled after the rows before it, and only if they were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headrace.worker.model.batch import Batch
from headrace.worker.request.request import Request
from headrace.worker.request.step import Sampled

SampleLater = Callable[[Sequence[Request], Sequence[int]], Sequence[Sampled]]
_DROPPED = Sampled(-1)


class Verified(NamedTuple):
    """`tokens` has an entry for each sampled request, in batch order. `rows` has one for each row of the batch's
    `sampled` and `later`; an invalid row has no token."""

    tokens: Sequence[Sampled]
    rows: Sequence[Sampled]


def verify(batch: Batch, sampled: Sequence[Sampled], sample_later: SampleLater) -> Verified:
    """Accept tokens. `sampled` are those of the batch's `sampled` rows. `sample_later` samples the next token of
    requests from given rows of logits."""
    assert batch.ahead is not None
    rows = [_DROPPED] * (len(batch.sampled) + len(batch.later))
    found: dict[Request, list[Sampled]] = {}
    firsts = np.flatnonzero(batch.ahead == 0).tolist()
    for row, end in pairwise((*firsts, len(batch.sampled))):
        request, entries = batch.sampled[row], [sampled[row]]
        found[request], rows[row] = entries, sampled[row]
        draft, num_before = request.proposed_after(entries[0].token_id)
        for ahead in range(1, len(draft) + 1 if end - row > 1 else 0):
            entry = sampled[row + num_before + ahead]
            if not _is_accepted(entries, draft, ahead) or entry.token_id < 0:
                break
            entries.append(entry)
            rows[row + num_before + ahead] = entry
    _verify_later(batch, found, rows, sample_later)
    tokens = [
        entries[0]._replace(more=tuple(entry.token_id for entry in entries[1:])) if len(entries) > 1 else entries[0]
        for entries in found.values()
    ]
    return Verified(tokens, rows)


def _is_accepted(entries: Sequence[Sampled], draft: Sequence[int], ahead: int) -> bool:
    """Whether the first `ahead` tokens of the draft equal the sampled ones."""
    return len(entries) == ahead and entries[-1].token_id == draft[ahead - 1]


def _verify_later(
    batch: Batch, found: dict[Request, list[Sampled]], rows: list[Sampled], sample_later: SampleLater
) -> None:
    """Sample the rows of `later`, all requests' first draft tokens, then all second ones. Meanwhile requests have their
    accepted tokens."""
    row_of: dict[Request, int] = {}
    for row, request in enumerate(batch.later, len(batch.sampled)):
        row_of.setdefault(request, row)
    drafts = {request: request.proposed_after(found[request][0].token_id) for request in row_of}
    num_tokens = {request: request.num_tokens for request in row_of}
    active, ahead = list(row_of), 1
    try:
        while active := [each for each in active if _may_continue(each, drafts[each][0], found[each], ahead)]:
            for request in active:
                request.token_ids.append(found[request][-1].token_id)
            places = [row_of[request] + drafts[request][1] + ahead - 1 for request in active]
            for request, row, entry in zip(active, places, sample_later(active, places), strict=True):
                if entry.token_id >= 0:
                    found[request].append(entry)
                    rows[row] = entry
            ahead += 1
    finally:
        for request, count in num_tokens.items():
            del request.token_ids[count:]


def _may_continue(request: Request, draft: Sequence[int], entries: Sequence[Sampled], ahead: int) -> bool:
    """Whether there is a valid row after `ahead` draft tokens."""
    if ahead > len(draft) or not _is_accepted(entries, draft, ahead):
        return False
    return entries[-1].token_id not in request.sampling.stop_token_ids
