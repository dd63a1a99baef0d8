"""Fields that chats and completions refuse: of other servers, and for completions also those of chats (pure).

Unknown fields are ignored. But a caller who sends one of these expects it to work, so it is refused by name, with the
field to use instead.
"""

from __future__ import annotations

from typing import Any

from headrace.gateway.chat_fields import lacking
from headrace.gateway.checks import RefusedFields
from headrace.gateway.openai.types import CompletionRequest

_KV_CACHE = "the prefix cache needs no such parameters"
_SAMPLING = "use temperature, top_p, top_k or min_p"
# The order of this server's filters, in llama.cpp's names.
_ORDER = ["penalties", "temperature", "top_k", "top_p", "min_p"]
DISABLED = {"type": "disabled"}
# field -> values besides null that change nothing, and what to use instead
FOREIGN_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    # vLLM
    "truncation_side": (("left",), "truncate_prompt_tokens keeps the end of the prompt"),
    "thinking_token_budget": ((-1,), "use reasoning_effort"),
    "logprob_token_ids": (([],), "use top_logprobs"),
    "prompt_embeds": (([],), "send the prompt as text or tokens"),
    "repetition_detection": ((), "use repetition_penalty"),
    "kv_transfer_params": (({},), _KV_CACHE),
    "vllm_xargs": (({},), "leave it out"),
    "mm_processor_kwargs": (({},), "only text is supported"),
    # SGLang
    "stop_regex": (("", []), "use stop"),
    "no_stop_trim": ((False,), "use include_stop_str_in_output"),
    "lora_path": ((), "name the adapter as the model"),
    "session_params": (({},), "use prompt_cache_key"),
    "custom_logit_processor": ((), "use logit_bias"),
    "return_hidden_states": ((False,), "leave it out"),
    "separate_reasoning": ((True,), "reasoning is in reasoning_content"),
    # llama.cpp's server
    "n_predict": ((-1,), "use max_tokens"),
    "repeat_penalty": ((1,), "use repetition_penalty"),
    "typical_p": ((1,), _SAMPLING),
    "top_n_sigma": ((-1, 0), _SAMPLING),
    "mirostat": ((0,), _SAMPLING),
    "dynatemp_range": ((0,), _SAMPLING),
    "xtc_probability": ((0,), _SAMPLING),
    "dry_multiplier": ((0,), "use repetition_penalty"),
    "samplers": ((_ORDER, _ORDER[1:]), "the order of the filters is fixed"),
    "n_probs": ((0,), "use logprobs"),
    "lora": (([],), "name the adapter as the model"),
    "reasoning_format": (("auto", "deepseek", "parsed"), "reasoning is in reasoning_content"),
    # others
    "max_new_tokens": ((), "use max_tokens"),
    "tfs_z": ((1,), _SAMPLING),
    "top_a": ((0,), _SAMPLING),
    "reasoning": (({},), "use reasoning_effort"),
    "thinking": ((DISABLED,), "use reasoning_effort"),
}
OF_CHATS = RefusedFields(FOREIGN_FIELDS)
OF_COMPLETIONS = lacking((CompletionRequest,), {"top_logprobs": "use logprobs"}, FOREIGN_FIELDS)
