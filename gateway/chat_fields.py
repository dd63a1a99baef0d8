"""Fields of chats that other endpoints with the same models do not have (pure).

This server knows them, so a caller expects them to work. They are refused by name, unless the caller cannot notice that
they have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.gateway.fields import Refused, Row

# Every field of chats that one of the endpoints lacks -> values besides null that change nothing.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "n": (1,),
    "best_of": (1,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "prompt_cache_key": ("",),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_special_tokens": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left",),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "reasoning_effort": (),
    "reasoning": ({},),
    "enable_thinking": (),
    "thinking": (),
    "include_reasoning": (True,),
    "verbosity": (),
    "prediction": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    # These are refused by chats too.
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "diversity_penalty": (0,),
    "logits_processors": ([],),
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
}


def lacking(
    body_types: Iterable[type[msgspec.Struct]], instead: Mapping[str, str], others: Mapping[str, Row] | None = None
) -> dict[str, Row]:
    """Rows for the fields of chats that a body of these types does not have, but for those that are in `others`.
    `instead` says what to use instead of some of them."""
    own = {field.encode_name for kind in body_types for field in msgspec.structs.fields(kind)}
    return {
        name: Refused(instead.get(name, "use /v1/chat/completions"), neutral)
        for name, neutral in NEUTRAL_FIELDS.items()
        if name not in own and name not in (others or {})
    }
