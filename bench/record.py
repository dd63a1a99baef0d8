"""The record of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds of one clock; lengths are in tokens.

    `planned_s` is when it was due, `sent_s` when its bytes were written, `times` when each piece with content arrived,
    and `ended_s` when the last event of the answer did.
    """

    number: int
    prompt_tokens: int
    """Length of the prompt that was meant."""
    max_tokens: int
    """Length of the answer that was asked for."""
    prompt_id: int = 0
    """Equal for equal prompts."""
    planned_s: float = 0.0
    sent_s: float = 0.0
    late_s: float = 0.0
    """How much later than it could the client sent it; a wait for --max-concurrency does not count."""
    times: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""
    is_finished: bool = False
    """Whether the stream ended as its protocol says."""
    usage_prompt_tokens: int | None = None
    usage_completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that the server found in its cache, if it told them."""
    output_tokens: int = 0
    """Length of the answer, from the best source that there is."""
    error_kind: str = ""
    """A word or two; empty if the request succeeded."""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether a whole answer arrived."""
        return not self.error_kind

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.pieces)

    @property
    def input_tokens(self) -> int:
        """Length of the prompt as the server counts it, or else as it was meant."""
        return self.prompt_tokens if self.usage_prompt_tokens is None else self.usage_prompt_tokens

    @property
    def ttft_s(self) -> float:
        """Time from the request to the first content; 0 if none came."""
        return self.times[0] - self.sent_s if self.times else 0.0

    @property
    def latency_s(self) -> float:
        """Time from the request to the end of the answer."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 if there are fewer than two, or if none had content."""
        if self.output_tokens < 2 or not self.times:
            return 0.0
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces with content."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def queued_s(self) -> float:
        """Time from when it was due until it was sent."""
        return self.sent_s - self.planned_s
