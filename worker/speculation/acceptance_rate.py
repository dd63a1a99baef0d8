"""How likely draft tokens are to be accepted: learned for each source and level, and for each request. Pure."""

from __future__ import annotations

from headrace.worker.speculation.history import LEVELS
from headrace.worker.speculation.proposer import Draft, Source
from headrace.worker.speculation.tree import LEVEL_PRIORS

# The share of accepted tokens before anything is known.
_PRIORS = {
    Source.NGRAM: (0.1, 0.1, 0.15, 0.2, 0.35, 0.5, 0.65, 0.85),
    Source.PREDICTION: (0.7, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9),
    Source.GRAMMAR: (0.9,) * (len(LEVELS) + 1),
    Source.DRAFT: (0.6,),
    # Those after the first are of tokens of trees.
    Source.EAGLE3: (0.6, *LEVEL_PRIORS),
    Source.MTP: (0.7, *LEVEL_PRIORS),
    # The second is that of a branch's first token if the draft's is wrong.
    Source.MEDUSA: (0.5, 0.2),
}
# A prior counts as this many observed tokens.
_PRIOR_TOKENS = 8.0
# Weight of an earlier observation after another: half after 140 tokens for all requests, and 34 for one.
_KEPT = 0.995
_KEPT_OF_REQUEST = 0.98
# The same after a step that could have had a draft but had none. So a source that was not worth verifying is tried
# again.
_KEPT_UNUSED = 0.99


class AcceptanceRate:
    """Shares of accepted draft tokens, among those whose predecessors were accepted. Recent tokens count more."""

    __slots__ = ("_kept", "_shares", "_weights")

    def __init__(self, kept: float = _KEPT) -> None:
        self._kept = kept
        self._shares: dict[tuple[Source, int], float] = {}
        self._weights: dict[tuple[Source, int], float] = {}

    @classmethod
    def of_request(cls) -> AcceptanceRate:
        """A new rate for the drafts of one request. It follows its observations faster than that of a worker."""
        return cls(_KEPT_OF_REQUEST)

    def observe(self, draft: Draft, num_verified: int, num_accepted: int) -> None:
        """Learn from a draft. Tokens after the first rejected one give no information."""
        key = draft.source, draft.level
        outcomes = [1.0] * num_accepted + [0.0] * (num_verified > num_accepted)
        weight, share = self._weights.get(key, 0.0), self._shares.get(key, 0.0)
        for outcome in outcomes:
            weight = self._kept * weight + 1.0
            share += (outcome - share) / weight
        self._weights[key], self._shares[key] = weight, share

    def age(self, source: Source) -> None:
        """Trust the rates of a source a little less, because a step used no draft of it."""
        for key in self._weights:
            if key[0] is source:
                self._weights[key] *= _KEPT_UNUSED

    def chance(self, draft: Draft, of_request: AcceptanceRate | None) -> float:
        """The probability that a token of the draft is accepted if those before it are. `of_request` is the rate of the
        same request."""
        key = draft.source, draft.level
        common = self._with_prior(key, _PRIORS[draft.source][draft.level])
        return common if of_request is None else of_request._with_prior(key, common)

    def _with_prior(self, key: tuple[Source, int], prior: float) -> float:
        weight = self._weights.get(key, 0.0)
        return (weight * self._shares.get(key, 0.0) + _PRIOR_TOKENS * prior) / (weight + _PRIOR_TOKENS)
