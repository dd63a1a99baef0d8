"""Beam search over the answers of one request (pure).

A search has up to `width` beams, continuations of the prompt of the same length. Each step gives the most probable next
tokens of every beam. Of all these candidates, by the sum of their log-probabilities,

    the best `width` that do not end    are the beams of the next step
    those that end, among the best `width` of all    become hypotheses, of which the best `width` are kept

A candidate ends with a stop token, or where its text is complete. Any number of tokens may complete a text, so twice
`width` tokens of each beam are looked at, as transformers does. If fewer than `width` of them go on, so do fewer beams.

Hypotheses are compared by their scores: the sum divided by the number of tokens to the power of the length penalty. The
rules, with those of early stopping, are those of `generate(num_beams=...)` of Hugging Face transformers.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.params import BeamParams, EarlyStopping, SamplingParams
from headrace.worker.request.stop_texts import StopTexts


class Candidates(NamedTuple):
    """The most probable next tokens of a beam with their log-probabilities, best first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


_Opinions: TypeAlias = "tuple[_Opinions, TokenLogprobs] | None"
"""The log-probabilities of a beam's tokens, the last first, shared with the beams that begin alike."""


class Beam(NamedTuple):
    """A continuation of the prompt, and the sum of the log-probabilities of its tokens."""

    token_ids: array[int]
    logprob: float
    opinions: _Opinions = None
    text_end: bytes = b""
    """As much of the end of its text as may begin a stop text."""


class Hypothesis(NamedTuple):
    """An answer. `stop_token_id` is its last token if that ended it; None if `max_tokens` or a stop text did."""

    token_ids: Sequence[int]
    score: float
    stop_token_id: int | None
    logprobs: Sequence[TokenLogprobs] = ()
    """One for each token, if the request wants them."""


class _Candidate(NamedTuple):
    parent: int
    place: int
    """Among the candidates of its beam."""
    token_id: int
    logprob: float
    """The sum over the whole beam."""
    text_end: bytes | None
    """As of a beam; None if this is an end."""


_ROOT = Beam(array("I"), 0.0)


class BeamSearch:
    """The search of one request. The scheduler advances it after each step that computed the last token of its
    beams."""

    __slots__ = ("_best", "_params", "_sampling", "_stop_texts", "beams", "has_ended", "parents")

    def __init__(self, params: BeamParams, sampling: SamplingParams) -> None:
        self._params = params
        self._sampling = sampling
        self._stop_texts: StopTexts | None = None
        self.begin()

    def end_at(self, stop_texts: StopTexts) -> None:
        """Also end hypotheses at these texts. Call it before the first step."""
        assert self.is_at_prompt, "it has begun"
        self._stop_texts = stop_texts

    def begin(self) -> None:
        """Start from the prompt."""
        self.beams: list[Beam] = [_ROOT]
        """At first one without tokens. Best first, all of the same length."""
        self.parents: Sequence[int] | None = None
        """Of each beam, the one that it continues, by its place before the last step; None once the cache knows."""
        self.has_ended = False
        self._best: list[Hypothesis] = []

    @property
    def width(self) -> int:
        """The largest number of beams."""
        return self._params.width

    @property
    def is_at_prompt(self) -> bool:
        """Whether no token has been chosen."""
        return not self.beams[0].token_ids

    @property
    def num_candidates(self) -> int:
        """How many of the most probable tokens of each beam are needed: with all stop tokens among them, there are
        enough to continue with."""
        width = 2 * self.width if self._params.stop else self.width
        return max(width + len(self._sampling.stop_token_ids), self._sampling.num_logprobs or 0)

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """The best of those that were found, best first."""
        return self._best

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Take a step. `candidates` has those of each beam."""
        length = len(self.beams[0].token_ids) + 1
        ranked = list(self._ranked(candidates, may_stop=length > self._sampling.min_tokens))
        is_last = length >= self._sampling.max_tokens
        for candidate in ranked[: self.width]:
            if is_last or candidate.text_end is None:
                self._finish(candidate, candidates)
        going = [] if is_last else [one for one in ranked if one.text_end is not None][: self.width]
        if not going:
            self.has_ended = True
            return
        self.beams = [self._beam(candidate, candidates) for candidate in going]
        self.parents = [candidate.parent for candidate in going]
        self.has_ended = len(self._best) == self.width and not self._may_improve(length)

    def _ranked(self, candidates: Sequence[Candidates], *, may_stop: bool) -> Iterator[_Candidate]:
        """As many of the best candidates of all beams as a step may need."""
        stops = self._sampling.stop_token_ids

        def of_beam(parent: int) -> Iterator[_Candidate]:
            beam = self.beams[parent]
            for place, (token_id, own) in enumerate(zip(*candidates[parent], strict=True)):
                if not own > float("-inf") or (token_id in stops and not may_stop):
                    continue
                text_end = None if token_id in stops else self._text_end(beam, token_id)
                yield _Candidate(parent, place, token_id, beam.logprob + own, text_end)

        merged = heapq.merge(*map(of_beam, range(len(self.beams))), key=lambda one: -one.logprob)
        num_going = 0
        for number, candidate in enumerate(merged):
            if num_going == self.width and number >= self.width:
                return
            num_going += candidate.text_end is not None
            yield candidate

    def _text_end(self, beam: Beam, token_id: int) -> bytes | None:
        return b"" if self._stop_texts is None else self._stop_texts.after(beam.text_end, token_id)

    def _beam(self, candidate: _Candidate, candidates: Sequence[Candidates]) -> Beam:
        parent = self.beams[candidate.parent]
        opinions = parent.opinions
        num_top = self._sampling.num_logprobs
        if num_top is not None:
            token_ids, logprobs = candidates[candidate.parent]
            place = candidate.place
            opinions = (
                opinions,
                TokenLogprobs(logprobs[place], place + 1, tuple(token_ids[:num_top]), tuple(logprobs[:num_top])),
            )
        token_ids = parent.token_ids + array("I", (candidate.token_id,))
        return Beam(token_ids, candidate.logprob, opinions, candidate.text_end or b"")

    def _finish(self, candidate: _Candidate, candidates: Sequence[Candidates]) -> None:
        """Add a hypothesis, and keep the best."""
        beam = self._beam(candidate, candidates)
        score = beam.logprob / len(beam.token_ids) ** self._params.length_penalty
        stop = candidate.token_id if candidate.token_id in self._sampling.stop_token_ids else None
        self._best.append(Hypothesis(beam.token_ids, score, stop, _listed(beam.opinions)))
        self._best.sort(key=lambda one: -one.score)
        del self._best[self.width :]

    def _may_improve(self, length: int) -> bool:
        """Whether a beam may become a hypothesis that is kept. All beams have `length` tokens."""
        stopping = self._params.early_stopping
        if stopping is EarlyStopping.ALWAYS:
            return False
        if stopping is EarlyStopping.NEVER and self._params.length_penalty > 0.0:
            length = self._sampling.max_tokens
        best: float = self.beams[0].logprob / length**self._params.length_penalty
        return best > self._best[-1].score


def _listed(opinions: _Opinions) -> Sequence[TokenLogprobs]:
    """The log-probabilities as a sequence, in the order of the tokens."""
    found = []
    while opinions is not None:
        opinions, last = opinions
        found.append(last)
    return tuple(reversed(found))
