"""Checks of the answers: a fast server that answers wrongly is not fast. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.bench.record import Record

_REASONS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "eos_token"})
_MIN_FOR_SAME = 5
_TRUNCATED = 0.9
"""A server that counts less than this share of a prompt has not read all of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with answers: how many have it, of how many that were looked at, and what it means."""

    kind: str
    count: int
    of: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The results of the checks."""

    finish_reasons: dict[str, int]
    errors: dict[str, int]
    """Failed requests by kind."""
    error_examples: dict[str, str]
    """One message of each kind."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        """Whether some answers are wrong. Failed requests are counted separately."""
        return bool(self.findings)


def check(records: Sequence[Record], *, ignores_eos: bool, prompts_are_exact: bool, has_marked_end: bool) -> Checked:
    """Check every answer.

    `ignores_eos`: every answer must have the requested length. `prompts_are_exact`: the length of each prompt in tokens
    is known, so the server's count must equal it. `has_marked_end`: the API marks the end of a stream.
    """
    good = [record for record in records if record.succeeded]
    failed = [record for record in records if not record.succeeded]
    findings = []

    def find(kind: str, wrong: int, sentence: str, of: int = len(good)) -> None:
        if wrong:
            findings.append(Finding(kind, wrong, of, sentence))

    find("empty", sum(not r.text and not _says_something_else(r) for r in good), "answers without any text")
    reasons = [r.finish_reason for r in good]
    if has_marked_end:
        find("no_finish_reason", reasons.count(""), "answers without a finish reason")
    strange = sum(bool(reason) and reason not in _REASONS for reason in reasons)
    find("strange_finish_reason", strange, "answers with a finish reason that the API does not have")
    counted = [r for r in good if r.usage_completion_tokens is not None]
    too_long = sum(r.output_tokens > r.max_tokens for r in counted)
    find("too_long", too_long, "answers longer than their limit", len(counted))
    if ignores_eos:
        short = sum(r.output_tokens < r.max_tokens for r in counted)
        ended = sum(r.finish_reason == "stop" and r.output_tokens >= r.max_tokens for r in counted)
        find(
            "wrong_finish_reason",
            ended,
            "answers that reached their limit and say 'stop' instead of 'length'",
            len(counted),
        )
        find(
            "too_short",
            short,
            "answers shorter than asked for, although the end of the answer was to be ignored",
            len(counted),
        )
    else:
        early = sum(r.finish_reason == "length" and r.output_tokens < r.max_tokens for r in counted)
        find("cut_early", early, "answers that end at their limit ('length') before they reach it", len(counted))
    few = sum(len(r.times) > (r.usage_completion_tokens or 0) + 1 for r in counted)
    find("usage_too_small", few, "answers in more pieces than the server counts tokens", len(counted))
    if prompts_are_exact:
        with_prompt = [r for r in good if r.usage_prompt_tokens is not None]
        cut = sum((r.usage_prompt_tokens or 0) < _TRUNCATED * r.prompt_tokens for r in with_prompt)
        find("prompt_truncated", cut, "prompts of which the server read less than 90 %", len(with_prompt))
    if has_marked_end:
        find("no_end_mark", sum(not r.is_finished for r in good), "streams without the mark of their end")
    texts = Counter(r.text for r in good if r.text.strip())
    text, most = texts.most_common(1)[0] if texts else ("", 0)
    prompts = {r.prompt_id for r in good if r.text == text}
    if len(prompts) >= _MIN_FOR_SAME and most > len(good) / 2:
        find("same_answer", most, "different prompts that got the very same answer")
    return Checked(
        dict(Counter(reason or "none" for reason in reasons).most_common()),
        dict(Counter(r.error_kind for r in failed).most_common()),
        {r.error_kind: r.error for r in reversed(failed)},
        findings,
    )


def _says_something_else(record: Record) -> bool:
    """Whether an answer has content without text, such as a tool call."""
    return record.finish_reason in ("tool_calls", "function_call")
