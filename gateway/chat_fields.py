"""Fields of chats that other endpoints with the same models do not have (pure).

Unknown fields are ignored. But this server knows these, so a caller expects them to work, and they are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.gateway.checks import Refused, RefusedFields

# Fields of other servers that chats and completions refuse -> values besides null that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "diversity_penalty": (0, 0.0),
    "logits_processors": ([],),
}
# What chats refuse besides, in the same way.
UNSUPPORTED_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "in-memory"),
}
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
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "reasoning_effort": (),
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
    **UNSUPPORTED,
    **UNSUPPORTED_IN_CHATS,
}


def lacking(
    body_types: Iterable[type[msgspec.Struct]], instead: Mapping[str, str], others: Refused | None = None
) -> RefusedFields:
    """The fields of chats that a body of these types does not have, and `others`. `instead` says what to use instead of
    some of them."""
    own = {field.encode_name for kind in body_types for field in msgspec.structs.fields(kind)}
    applied = NEUTRAL_FIELDS.keys() - UNSUPPORTED.keys() - UNSUPPORTED_IN_CHATS.keys()
    found = {
        name: (neutral, instead.get(name, "use /v1/chat/completions" if name in applied else "leave it out"))
        for name, neutral in NEUTRAL_FIELDS.items()
        if name not in own
    }
    return RefusedFields({**found, **(others or {})})
