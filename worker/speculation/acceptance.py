"""Accepts the draft tokens that would have been sampled without a draft.

A step samples a token after each token of a draft. A row is valid if all draft tokens before it equal the sampled
tokens. Each random draw depends only on seed and position, so the answer is the same as without speculation.

    draft           a  b  c
    rows        r0  r1 r2 r3
    sampled     a   b  x  y      a, b and x are the next tokens; y is dropped, because c is not x

A draft may have branches: other tokens from some place on. Their rows come after those of the draft. So the proposed
tokens form a tree, and the sampled ones lead through it.

Rows that depend only on the model's logits are sampled together. If penalties, a grammar or bad words also depend on
earlier tokens, a row is sampled after the rows before it, and only if they were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headrace.worker.model.batch import Batch
from headrace.worker.request.request import Request, TokenPath, row_after
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
        paths = request.paths if end - row > 1 else []
        while (place := _row_after(paths, entries)) is not None:
            entry = sampled[row + place]
            if entry.token_id < 0:
                break
            entries.append(entry)
            rows[row + place] = entry
    _verify_later(batch, found, rows, sample_later)
    tokens = [
        entries[0]._replace(more=tuple(entry.token_id for entry in entries[1:])) if len(entries) > 1 else entries[0]
        for entries in found.values()
    ]
    return Verified(tokens, rows)


def _row_after(paths: Sequence[TokenPath], entries: Sequence[Sampled]) -> int | None:
    """The row after these sampled tokens, counted from the request's first; None if they are not proposed."""
    return row_after(paths, [entry.token_id for entry in entries])


def _verify_later(
    batch: Batch, found: dict[Request, list[Sampled]], rows: list[Sampled], sample_later: SampleLater
) -> None:
    """Sample the rows of `later`, all requests' first draft tokens, then all second ones. Meanwhile requests have their
    accepted tokens."""
    row_of: dict[Request, int] = {}
    for row, request in enumerate(batch.later, len(batch.sampled)):
        row_of.setdefault(request, row)
    num_tokens = {request: request.num_tokens for request in row_of}
    active = list(row_of)
    try:
        while places := _next_rows(active, found, row_of):
            active = list(places)
            for request in active:
                request.token_ids.append(found[request][-1].token_id)
            sampled = sample_later(active, list(places.values()))
            for (request, row), entry in zip(places.items(), sampled, strict=True):
                if entry.token_id >= 0:
                    found[request].append(entry)
                    rows[row] = entry
            active = [request for request in active if rows[places[request]].token_id >= 0]
    finally:
        for request, count in num_tokens.items():
            del request.token_ids[count:]


def _next_rows(
    requests: Sequence[Request], found: Mapping[Request, Sequence[Sampled]], row_of: Mapping[Request, int]
) -> dict[Request, int]:
    """For each request that has a row after the tokens found so far: that row. `row_of` has the first row of each
    request."""
    places = {}
    for request in requests:
        place = _row_after(request.paths, found[request])
        if place is not None and found[request][-1].token_id not in request.sampling.stop_token_ids:
            places[request] = row_of[request] + place - 1
    return places
