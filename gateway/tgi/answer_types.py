"""Types of TGI's responses, for the OpenAPI document. Tests compare real responses with them."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.gateway.edge.wire import Shape


class TgiError(Shape):
    """The shape of failures in TGI's protocol."""

    error: str
    error_type: Literal["validation", "authentication", "overloaded", "generation"]


class TgiPrefillToken(Shape):
    """A token of the prompt. The first one has no log-probability."""

    id: int
    text: str
    logprob: float | None


class TgiToken(Shape):
    """A token of the answer. The texts of all tokens that are not special add up to the answer."""

    id: int
    text: str
    logprob: float
    special: bool


class _Details(Shape, kw_only=True):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPrefillToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | msgspec.UnsetType = msgspec.UNSET


class TgiSequence(_Details, kw_only=True):
    """Another answer of several."""

    generated_text: str


class TgiDetails(_Details, kw_only=True):
    """Details of the answer: its finish reason, its tokens, and the other answers of best_of."""

    best_of_sequences: list[TgiSequence] | msgspec.UnsetType = msgspec.UNSET


class TgiAnswer(Shape):
    """The answer to a prompt."""

    generated_text: str
    details: TgiDetails | msgspec.UnsetType = msgspec.UNSET


class TgiInfo(Shape):
    """The served model and the limits of requests."""

    model_id: str
    model_sha: str
    model_device_type: Literal["cpu"]
    model_pipeline_tag: Literal["text-generation"]
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    router: Literal["headrace"]
    version: str
