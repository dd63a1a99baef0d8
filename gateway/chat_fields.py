"""Fields of chats that other endpoints with the same models do not have (pure).

This server knows them, so a caller expects them to work. They are refused by name, unless the caller cannot notice that
they have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.gateway.fields import Applied, Refused, Row

AS_CHATS = "as for [chats](#post-v1chatcompletions)"
OF_PROVIDER = "it concerns the provider's own storage, billing and monitoring"
_BEAMS = "it belongs to beam search; leave it out"
_LAZY = "leave it out: a grammar constrains the whole answer"

REFUSED: dict[str, Refused] = {
    "use_beam_search": Refused("use n or best_of", (False,)),
    "length_penalty": Refused(_BEAMS, (1,)),
    "early_stopping": Refused(_BEAMS, (False,)),
    "diversity_penalty": Refused(_BEAMS, (0,)),
    "logits_processors": Refused("use logit_bias, allowed_token_ids or bad_words", ([],)),
    "guided_whitespace_pattern": Refused("leave it out: JSON has no white space between tokens"),
    "structural_tag": Refused("use response_format, or tools with strict"),
    "grammar_lazy": Refused(_LAZY, (False,)),
    "grammar_triggers": Refused(_LAZY, ([],)),
}
"""What chats and completions refuse, and with them all APIs of the same models."""
REFUSED_BY_CHATS: dict[str, Refused] = {
    "modalities": Refused("answers are text", (["text"],)),
    "audio": Refused("answers are text"),
    "functions": Refused("use tools"),
    "function_call": Refused("use tool_choice", ("none",)),
    "chat_template": Refused("the model's own template is used; its variables are in chat_template_kwargs"),
    "documents": Refused("send them in messages", ([],)),
    "echo": Refused("use /v1/completions", (False,)),
}
# What chats apply and another endpoint lacks -> values besides null that change nothing.
_APPLIED: Mapping[str, tuple[Any, ...]] = {
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
}
NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **_APPLIED,
    **{name: row.neutral for name, row in (REFUSED | REFUSED_BY_CHATS).items()},
}
"""Every field of chats that one of the endpoints lacks -> values besides null that change nothing."""


def as_chats(kind: type[msgspec.Struct]) -> dict[str, Row]:
    """Rows for fields that have the meaning of chats."""
    return {name: Applied(AS_CHATS) for name in kind.__struct_fields__}


def lacking(
    body_types: Iterable[type[msgspec.Struct]], instead: Mapping[str, str], others: Mapping[str, Row] | None = None
) -> dict[str, Row]:
    """Rows for the fields of chats that a body of these types does not have, but for those that are in `others`.
    `instead` says what to use instead of some of them."""
    own = {field.encode_name for kind in body_types for field in msgspec.structs.fields(kind)}
    return {
        name: REFUSED.get(name) or Refused(instead.get(name, "use /v1/chat/completions"), neutral)
        for name, neutral in NEUTRAL_FIELDS.items()
        if name not in own and name not in (others or {})
    }
