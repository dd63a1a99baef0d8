"""Types that all proposers of drafts share."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

# The longest draft of a smaller model, which takes a step for each token.
MAX_MODEL_DRAFT = 11


class Source(enum.Enum):
    """Where the tokens of a draft come from. Acceptance is learned for each source."""

    NGRAM = "ngram"
    """Tokens that followed the same text earlier in prompt or answer."""
    PREDICTION = "prediction"
    """The answer that the caller expects."""
    GRAMMAR = "grammar"
    """The only text that the request's grammar allows."""
    DRAFT = "draft"
    """Tokens of a smaller model."""
    EAGLE3 = "eagle3"
    """Tokens of heads that read the model's hidden states."""
    MEDUSA = "medusa"
    """Tokens of heads that read the model's last hidden state, each head for another place."""


MODELLED = frozenset({Source.DRAFT, Source.EAGLE3, Source.MEDUSA})
"""Sources whose tokens have to be computed."""


class Draft(NamedTuple):
    """Proposed tokens. `level` is a class of drafts of this source that are about equally likely to be right."""

    token_ids: Sequence[int]
    source: Source
    level: int = 0
    branch: Sequence[int] = ()
    """Other tokens than `token_ids`, from the first on, which the same step may verify."""


BRANCH_LEVEL = 1
"""The class of the first tokens of branches."""

NO_DRAFT = Draft((), Source.NGRAM)
