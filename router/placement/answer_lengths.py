"""The mean length of answers for each model, learned from the answers that ended here.

The mean is exponentially weighted: the weight of an answer halves with every `_HALF_LIFE` answers that end after it.
The prior counts like an initial number of answers. An answer that its caller cancelled counts with its tokens so far,
because it held its place in a batch for that long.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from headrace.router.placement.rates import Priors

_HALF_LIFE = 256.0
_KEEP = 0.5 ** (1 / _HALF_LIFE)
# The prior counts as this many answers.
_PRIOR_WEIGHT = 16.0
# Models that are remembered; the least recently used one is forgotten.
MAX_MODELS = 256


class _Mean:
    __slots__ = ("priors", "total", "weight")

    def __init__(self, priors: Priors) -> None:
        self.priors = priors
        self.weight = _PRIOR_WEIGHT
        self.total = _PRIOR_WEIGHT * priors.answer_tokens


class AnswerLengths:
    """Mean lengths of answers by model. The prior applies to models without an ended answer."""

    def __init__(self) -> None:
        self._prior = Priors()
        self._means: OrderedDict[str, _Mean] = OrderedDict()

    def __len__(self) -> int:
        """Number of models with a learned length."""
        return len(self._means)

    def ended(self, model: str, num_tokens: int) -> None:
        """Record an answer that ended after `num_tokens` tokens."""
        mean = self._means.get(model)
        if mean is None:
            mean = self._means[model] = _Mean(self._prior)
        self._means.move_to_end(model)
        mean.weight = mean.weight * _KEEP + 1
        mean.total = mean.total * _KEEP + num_tokens
        answer = max(1, round(mean.total / mean.weight))
        if answer != mean.priors.answer_tokens:
            mean.priors = msgspec.structs.replace(mean.priors, answer_tokens=answer)
        if len(self._means) > MAX_MODELS:
            self._means.popitem(last=False)

    def priors(self, model: str) -> Priors:
        """The assumptions for a request of this model."""
        mean = self._means.get(model)
        return self._prior if mean is None else mean.priors
