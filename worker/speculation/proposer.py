"""Types that all proposers of drafts share."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from headrace.worker.request.request import TokenPath

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
    MTP = "mtp"
    """Tokens of a layer that was trained with the model to predict more than the next token."""


class TreeToken(NamedTuple):
    """A token of a tree of proposals. `parent` is the index of the token that it follows, -1 for none. `level` is its
    class among drafts of its source."""

    parent: int
    token_id: int
    level: int


MODELLED = frozenset({Source.DRAFT, Source.EAGLE3, Source.MEDUSA, Source.MTP})
"""Sources whose tokens have to be computed."""


class Draft(NamedTuple):
    """Proposed tokens. `level` is a class of drafts of this source that are about equally likely to be right."""

    token_ids: Sequence[int]
    source: Source
    level: int = 0
    branches: Sequence[TokenPath] = ()
    """Other tokens than `token_ids`, from some place on, which the same step may verify."""
    tree: Sequence[TreeToken] = ()
    """The tree of which these are the paths, parents first; empty if none was grown."""


BRANCH_LEVEL = 1
"""The class of the first tokens of branches."""

NO_DRAFT = Draft((), Source.NGRAM)
