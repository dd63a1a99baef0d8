"""Sampling parameters and stop conditions of a request."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.worker.grammar.constraint import Constraint

# A higher value would only separate logits that float32 can hardly distinguish.
_MAX_INVERSE_TEMPERATURE = 1e6


@dataclass(frozen=True, slots=True)
class DryBreakers:
    """Tokens at which DRY begins anew: single ones, and sequences by their length."""

    single: frozenset[int] = frozenset()
    sequences: tuple[tuple[int, frozenset[tuple[int, ...]]], ...] = ()
    """Shorter ones first."""

    def head_of(self, tokens: Sequence[int], place: int) -> int | None:
        """The index at which the shortest breaker begins that ends with the token at `place`; None if there is none.
        Longer breakers begin earlier."""
        if tokens[place] in self.single:
            return place
        for length, sequences in self.sequences:
            first = place + 1 - length
            if first >= 0 and tuple(tokens[first : place + 1]) in sequences:
                return first
        return None


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Fields are those of the protocol message of the same name."""

    max_tokens: int
    closing: int
    ends: tuple[tuple[int, ...], ...]
    opening: tuple[int, ...] = ()
    is_open: bool = False


class EarlyStopping(enum.Enum):
    """When a beam search ends, once it has as many hypotheses as beams. Values are those of the protocol's enum."""

    HEURISTIC = 0
    ALWAYS = 1
    NEVER = 2


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Fields are those of the protocol message `BeamSearch`."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    stop: tuple[str, ...] = ()
    shown_token_ids: frozenset[int] = frozenset()
    shows_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Fields and ranges are those of the protocol message of the same name.

    `max_tokens` is always set: the service caps it by the context. `stop_token_ids` includes the model's
    end-of-sequence tokens, unless the request ignores them and has no `constraint`.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breakers: DryBreakers = DryBreakers()
    samplers: tuple[str, ...] = ()
    """The order of the filters, by their names in `FILTERS`; empty for the order there."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    thinking_budget: ThinkingBudget | None = None
    beam_search: BeamParams | None = None
    """A search for the most probable answers; None: one token is chosen after the other."""

    inverse_temperature: float = field(init=False)
    """Factor of the logits. 1 for greedy requests, which draw nothing."""
    is_greedy: bool = field(init=False)
    """Whether the most probable token is always chosen."""
    has_penalties: bool = field(init=False)
    """Whether tokens that have occurred are penalised."""
    has_edits: bool = field(init=False)
    """Whether logits are changed other than by penalties."""
    has_dry: bool = field(init=False)
    """Whether repetitions are penalised."""
    has_xtc: bool = field(init=False)
    """Whether top choices may be left out."""
    has_chain: bool = field(init=False)
    """Whether its filters are applied one after the other; see `headrace.worker.sampling.chain`."""
    is_plain: bool = field(init=False)
    """Whether an argmax over the model's logits is enough."""

    def __post_init__(self) -> None:
        """Compute once the values that every step reads."""
        has_penalties = bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
        has_dry = bool(self.dry_multiplier and self.dry_penalty_last_n)
        has_edits = bool(
            has_dry
            or self.thinking_budget is not None
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.constraint is not None
            or (self.min_tokens and self.stop_token_ids)
        )
        has_xtc = self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5
        # In an order of its own, temperature 0 may come after filters that leave out the best token.
        may_lose_best = bool(self.samplers and not self.mirostat and (has_xtc or self.typical_p < 1.0))
        is_greedy = self.temperature == 0.0 and not self.dynatemp_range and not may_lose_best
        has_chain = not is_greedy and bool(
            self.samplers or self.mirostat or self.dynatemp_range or has_xtc or self.typical_p < 1.0
        )
        inverse = min(1.0 / self.temperature, _MAX_INVERSE_TEMPERATURE) if self.temperature and not is_greedy else 1.0
        object.__setattr__(self, "has_dry", has_dry)
        object.__setattr__(self, "has_xtc", has_xtc)
        object.__setattr__(self, "has_chain", has_chain)
        object.__setattr__(self, "inverse_temperature", inverse)
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "has_penalties", has_penalties)
        object.__setattr__(self, "has_edits", has_edits)
        is_plain = is_greedy and self.num_logprobs is None and not has_penalties and not has_edits
        object.__setattr__(self, "is_plain", is_plain)
