"""Sampling as a step does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.protos.status import StatusError
from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.request import Request
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler


class Taken(NamedTuple):
    """The results of a request in a step."""

    token_id: int
    error: StatusError
    logprobs: TokenLogprobs | None


def sample(sampler: BatchSampler, requests: Sequence[Request], logits: Logits) -> list[Taken]:
    """The next token of each request, with log-probabilities if requested."""
    sampled = sampler.sample(requests, logits)
    logprobs = sampler.logprobs(requests, logits, sampled)
    return [Taken(one.token_id, one.error, entry) for one, entry in zip(sampled, logprobs, strict=True)]
