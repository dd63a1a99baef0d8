"""Sampling parameters and stop conditions of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.worker.grammar.constraint import Constraint

# A higher value would only separate logits that float32 can hardly distinguish.
_MAX_INVERSE_TEMPERATURE = 1e6


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
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None

    inverse_temperature: float = field(init=False)
    """Factor of the logits. 1 for greedy requests, which draw nothing."""
    is_greedy: bool = field(init=False)
    """Whether the most probable token is always chosen."""
    has_penalties: bool = field(init=False)
    """Whether tokens that have occurred are penalised."""
    has_edits: bool = field(init=False)
    """Whether logits are changed other than by penalties."""
    is_plain: bool = field(init=False)
    """Whether an argmax over the model's logits is enough."""

    def __post_init__(self) -> None:
        """Compute once the values that every step reads."""
        has_penalties = bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
        has_edits = bool(
            self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.constraint is not None
            or (self.min_tokens and self.stop_token_ids)
        )
        is_greedy = self.temperature == 0.0
        inverse = 1.0 if is_greedy else min(1.0 / self.temperature, _MAX_INVERSE_TEMPERATURE)
        object.__setattr__(self, "inverse_temperature", inverse)
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "has_penalties", has_penalties)
        object.__setattr__(self, "has_edits", has_edits)
        is_plain = is_greedy and self.num_logprobs is None and not has_penalties and not has_edits
        object.__setattr__(self, "is_plain", is_plain)
