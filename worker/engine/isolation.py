"""Sampling in which one request's failure does not affect others.

A step samples all rows together. If that raises, each row is sampled alone: the request whose row raises ends with an
error, and all others get the same tokens as without the failure. This costs nothing unless something raises.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.protos.status import Reason, StatusError
from headrace.worker.model.batch import Ahead, BeamRows, PromptRows
from headrace.worker.request.beam_search import Candidates
from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.request import Request
from headrace.worker.request.step import NOT_A_NUMBER, Sampled, Searched
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler

log = logging.getLogger(__name__)


class IsolatedSampler:
    """Wraps a sampler that may raise."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def sample(self, requests: Sequence[Request], logits: Logits, ahead: Ahead | None = None) -> list[Sampled]:
        """The next token of each request, or the error that ends it. Does not raise."""
        try:
            return self._sampler.sample(requests, logits, ahead)
        except Exception as error:
            _note_retry("sampled", requests, error)
        return [
            self._sample_one(request, _row(logits, row), None if ahead is None else ahead[row : row + 1])
            for row, request in enumerate(requests)
        ]

    def logprobs(
        self, requests: Sequence[Request], logits: Logits, sampled: Sequence[Sampled]
    ) -> list[TokenLogprobs | StatusError | None]:
        """The log-probabilities of each request that wants them, or the error that ends it. Does not raise."""
        try:
            return list(self._sampler.logprobs(requests, logits, sampled))
        except Exception as error:
            _note_retry("given log-probabilities", requests, error)
        return [
            self._logprobs_of_one(request, _row(logits, row), entry)
            for row, (request, entry) in enumerate(zip(requests, sampled, strict=True))
        ]

    def candidates(self, beams: Sequence[BeamRows], logits: Logits) -> dict[Request, Searched]:
        """The candidates of each request that is a beam search, or the error that ends it. `logits` has their rows, one
        request after the other. Does not raise."""
        requests = [rows.request for rows in beams]
        wanted = [_num_candidates(rows.request) for rows in beams for _ in range(rows.num_rows)]
        try:
            found: list[Candidates | StatusError] = [*self._sampler.candidates(logits, wanted)]
        except Exception as error:
            _note_retry("searched", requests, error)
            found = [
                self._candidates_of_one(rows.request, _row(logits, row))
                for row, rows in enumerate(rows for rows in beams for _ in range(rows.num_rows))
            ]
        searched: dict[Request, Searched] = {}
        first = 0
        for request, num_rows in beams:
            entries = found[first : first + num_rows]
            first += num_rows
            sound = [entry for entry in entries if not isinstance(entry, StatusError)]
            failure = next((entry for entry in entries if isinstance(entry, StatusError)), None)
            if failure is None and not all(entry.token_ids for entry in sound):
                failure = NOT_A_NUMBER
            searched[request] = sound if failure is None else failure
        return searched

    def read_prompts(self, prompts: Sequence[PromptRows], logits: Logits) -> dict[Request, StatusError]:
        """Store log-probabilities of prompt tokens in their requests; each is read from the row of the token before it.
        Returns the requests for which that raised, with the error that ends them."""
        failures: dict[Request, StatusError] = {}
        first = 0
        for rows in prompts:
            try:
                self._read_prompt(rows, logits.part(slice(first, first + rows.num_rows)))
            except Exception as error:
                failures[rows.request] = _error_of(rows.request, "the log-probabilities of its prompt", error)
            first += rows.num_rows
        return failures

    def _sample_one(self, request: Request, logits: Logits, ahead: Ahead | None) -> Sampled:
        try:
            return self._sampler.sample([request], logits, ahead)[0]
        except Exception as error:
            return Sampled(-1, _error_of(request, "the choice of its next token", error))

    def _logprobs_of_one(
        self, request: Request, logits: Logits, sampled: Sampled
    ) -> TokenLogprobs | StatusError | None:
        try:
            return self._sampler.logprobs([request], logits, [sampled])[0]
        except Exception as error:
            return _error_of(request, "the log-probabilities of its token", error)

    def _candidates_of_one(self, request: Request, logits: Logits) -> Candidates | StatusError:
        try:
            return self._sampler.candidates(logits, [_num_candidates(request)])[0]
        except Exception as error:
            return _error_of(request, "its beam search", error)

    def _read_prompt(self, rows: PromptRows, logits: Logits) -> None:
        request, position, num_rows = rows
        num_top = request.sampling.num_prompt_logprobs
        assert num_top is not None
        # After a preemption the prompt is computed again from its start.
        num_known = min(max(0, len(request.prompt_logprobs) - position), num_rows)
        token_ids = request.token_ids[position + num_known + 1 : position + num_rows + 1]
        if token_ids:
            of_rows = logits.part(slice(num_known, num_rows))
            of_images = [token_id >= FIRST_PSEUDO_TOKEN for token_id in token_ids]
            known = [0 if of_image else token_id for token_id, of_image in zip(token_ids, of_images, strict=True)]
            found = self._sampler.prompt_logprobs(of_rows, known, num_top)
            # A token of an image is none of the vocabulary, so it has no probability.
            request.prompt_logprobs.extend(
                [
                    replace(entry, logprob=0.0, rank=0) if of_image else entry
                    for entry, of_image in zip(found, of_images, strict=True)
                ]
            )


def _row(logits: Logits, row: int) -> Logits:
    return logits.part(slice(row, row + 1))


def _num_candidates(request: Request) -> int:
    assert request.beams is not None, "it is no beam search"
    return request.beams.num_candidates


def _note_retry(what: str, requests: Sequence[Request], error: Exception) -> None:
    log.warning("%d requests could not be %s together; trying each alone: %r", len(requests), what, error)


def _error_of(request: Request, what: str, error: Exception) -> StatusError:
    """The error for the caller; the log has the details."""
    log.error("request %r ends: %s failed", request.request_id, what, exc_info=error)
    if isinstance(error, StatusError):
        return error
    if isinstance(error, MemoryError):
        return StatusError(Reason.NO_CAPACITY, f"the worker ran out of memory: {what} failed", retry_after_s=1.0)
    return StatusError(Reason.INTERNAL, f"the worker could not go on with this request: {what} failed")
