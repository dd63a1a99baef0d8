"""What a request to any of OpenAI's endpoints may say of how its tokens are chosen and of how it is scheduled."""

from __future__ import annotations

import msgspec


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that chats, completions and responses share by name and meaning; None where the caller said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
