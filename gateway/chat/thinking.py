"""The budget of an answer's reasoning, in the tokens of its model (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.gateway.chat.output import Reading
from headrace.gateway.chat.output_parsers import harmony
from headrace.gateway.checks import check_range, invalid
from headrace.gateway.hints import ignored
from headrace.protos.inference_pb2 import ThinkingBudget, TokenSequence

FIELD = "thinking_token_budget"
ALIASES = ("reasoning_budget", "thinking_budget", "thinking_budget_tokens")
"""Names of other servers for the same."""
OF_EFFORTS: Mapping[str, int] = {"minimal": 256, "low": 1024, "medium": 8192}
"""Budgets of efforts, for models whose template has no efforts. Higher ones have none."""
_Encode = Callable[[str], Sequence[int]]


def one_budget(given: Mapping[str, Any]) -> int | None:
    """The budget that a request gives under one or more names; -1 for no limit, and None if it says nothing. Raises
    `StatusError`."""
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        check_range(name, value, -1, 2**31 - 1)
    if len(set(found.values())) > 1:
        first, second = list(found)[:2]
        raise invalid(second, f"{second} and {first} differ; leave out one of them")
    return next(iter(found.values()), None)


def budget_of(
    budget: int | None, reading: Reading, encode: _Encode, *, is_number: bool = True
) -> ThinkingBudget | None:
    """The token budget of the reasoning in answers with this `reading`; None without one. `encode` tokenizes a text and
    turns the texts of special tokens into these tokens. If the budget is a number from the caller (`is_number`) and
    cannot be applied, this is noted as a hint."""
    if budget is None or budget < 0:
        return None
    if reading.output.reasoning is None and not reading.output.is_harmony:
        if is_number:
            ignored(FIELD, "the model's format of reasoning is unknown, or it does not reason")
        return None
    if reading.output.is_harmony:
        opening = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"
        closing = harmony.END
        ends = [f"{harmony.END}{harmony.START}assistant{harmony.CHANNEL}final{harmony.MESSAGE}"]
        if reading.use.required:
            ends = [harmony.END]
        elif reading.use.schemas:  # first it may choose to call
            ends.insert(0, f"{harmony.END}{harmony.START}assistant")
    else:
        assert reading.output.reasoning is not None
        assert reading.output.reasoning.tags is not None
        opening, closing = reading.output.reasoning.tags
        ends = [closing]
    closing_ids = encode(closing)
    if len(closing_ids) != 1:
        if is_number:
            ignored(FIELD, "the end of the model's reasoning is not a token of its own")
        return None
    return ThinkingBudget(
        max_tokens=budget,
        opening=encode(opening),
        closing=closing_ids[0],
        is_open=reading.inside_reasoning,
        ends=[TokenSequence(token_ids=encode(end)) for end in ends],
    )
