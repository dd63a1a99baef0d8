"""How fast a worker is, as it tells routers: averages of what its steps did, not predictions for its present state.

A router compares workers by these numbers, so they must say what the host can do. A prediction for whatever happens to
be running would differ between equal hosts by the length of their contexts, and draw requests to where contexts are
short, away from where their prefixes are.
"""

from __future__ import annotations

from dataclasses import dataclass

# Weight of a prefill step n such steps ago is _KEPT ** n: half after 3,500 steps, which is minutes of prefill.
# A shorter memory says how long the latest prompts were.
_KEPT = 0.9998
# Weight of the newest decode step: the present batch counts.
_DECODE_WEIGHT = 0.05
# A step counts as prefill when it computes this many times as many prompt tokens as it generates.
_MOSTLY_PROMPTS = 4


@dataclass(slots=True)
class StepRates:
    """Averages over steps, fed with the engine's totals after each. 0 while unknown."""

    decode_step_ms: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _seen_prompt_tokens: int = 0
    _seen_generated: int = 0
    _seen_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of steps that are mostly prompts."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def observe(self, num_prompt_tokens: int, num_generated: int, seconds: float) -> None:
        """Learn from what a step added to the totals of prompt tokens computed, tokens generated, and seconds."""
        prompt_tokens = num_prompt_tokens - self._seen_prompt_tokens
        generated = num_generated - self._seen_generated
        step_s = seconds - self._seen_s
        self._seen_prompt_tokens, self._seen_generated, self._seen_s = num_prompt_tokens, num_generated, seconds
        if step_s <= 0.0:
            return
        if prompt_tokens > _MOSTLY_PROMPTS * generated:
            self._tokens = self._tokens * _KEPT + prompt_tokens
            self._seconds = self._seconds * _KEPT + step_s
        elif prompt_tokens == 0 and generated:
            step_ms = 1000 * step_s
            old = self.decode_step_ms or step_ms
            self.decode_step_ms = old + _DECODE_WEIGHT * (step_ms - old)
