"""The fields of chats and completions: what they take, and what happens where another endpoint lacks them (pure).

This server knows them, so a caller of another endpoint with the same models expects them to work. There they are
refused by name, unless the caller cannot notice that they have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.gateway.chat.beams import MOST_LENGTH_PENALTY
from headrace.gateway.chat.conversation import EFFORTS
from headrace.gateway.chat.filters import MAX_BREAKERS, SAMPLERS
from headrace.gateway.chat.request import MAX_KEY_CHARS, VERBOSITIES
from headrace.gateway.chat.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from headrace.gateway.fields import Applied, Hint, Refused, Row
from headrace.protos.sampling_fields import NUMBERS

AS_CHATS = "as for [chats](#post-v1chatcompletions)"
OF_PROVIDER = "it concerns the provider's own storage, billing and monitoring"
_GROUPS = "a beam search has one group; leave it out"
_LAZY = "leave it out: a grammar constrains the whole answer"

REFUSED: dict[str, Refused] = {
    "num_beam_groups": Refused(_GROUPS, (1,)),
    "diversity_penalty": Refused(_GROUPS, (0,)),
    "logits_processors": Refused("use logit_bias, allowed_token_ids or bad_words", ([],)),
    "guided_whitespace_pattern": Refused("leave it out: JSON has no white space between tokens"),
    "grammar_lazy": Refused(_LAZY, (False,)),
    "grammar_triggers": Refused(_LAZY, ([],)),
}
"""What chats and completions refuse, and with them all APIs of the same models."""
REFUSED_BY_CHATS: dict[str, Refused] = {
    "modalities": Refused("answers are text", (["text"],)),
    "audio": Refused("answers are text"),
    "functions": Refused("use tools"),
    "function_call": Refused("use tool_choice", ("none",)),
    "documents": Refused("send them in messages", ([],)),
    "echo": Refused("use /v1/completions", (False,)),
}
_KEY = "up to 512 characters"
_CONSTRAINT = "[Structured output](http-api.md#structured-output)"

_COUNT = {"minimum": 0, "maximum": 2**31 - 1}
APPLIED: dict[str, Row] = {
    "model": Applied("name", "Optional while there is only one model"),
    **{name: Applied(number.values, number.meaning) for name, number in NUMBERS.items()},
    "samplers": Applied(
        f"list of {', '.join(f'`{name}`' for name in SAMPLERS)}; or a text of llama.cpp's letters",
        "The order of the samplers, which is this one by default. Those that are not named have no effect",
    ),
    "dry_sequence_breakers": Applied(
        f"up to {MAX_BREAKERS} texts",
        'No repetition reaches across one of them; see `dry_multiplier`. Default: line feed, `:`, `"` and `*`',
        schema={"maxItems": MAX_BREAKERS},
    ),
    "n": Applied(
        f"1 to {MAX_CHOICES}",
        "At most 256 answers in one request, over all its prompts",
        neutral=(1,),
        schema={"minimum": 1, "maximum": MAX_CHOICES},
    ),
    "logit_bias": Applied(
        "token id to -100 .. 100",
        f"At most {MAX_LOGIT_BIASES} entries",
        neutral=({},),
        schema={
            "maxProperties": MAX_LOGIT_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    ),
    "allowed_token_ids": Applied("token ids", "Only these may be chosen", neutral=([],)),
    "max_completion_tokens": Applied(
        "as `max_tokens`", "Overrides `max_tokens`", neutral=(), schema={"minimum": 1, "maximum": 2**31 - 1}
    ),
    "min_tokens": Applied(
        "0 to `max_tokens`",
        "The answer ends only after this many tokens",
        neutral=(0,),
        schema=_COUNT,
    ),
    "ignore_eos": Applied("bool", "Continue after the model's end of sequence", neutral=(False,)),
    "stop": Applied(
        f"text, or up to {MAX_STOP_STRINGS} texts",
        f"At most {MAX_STOP_CHARS} characters each. Empty texts have no effect",
        neutral=([], ""),
        schema={"minLength": 1, "maxLength": MAX_STOP_CHARS, "maxItems": MAX_STOP_STRINGS},
    ),
    "stop_token_ids": Applied(
        f"up to {MAX_STOP_TOKEN_IDS} token ids", neutral=([],), schema={"maxItems": MAX_STOP_TOKEN_IDS}
    ),
    "bad_words": Applied(
        f"up to {MAX_BAD_WORDS} texts of at most {MAX_BAD_WORD_CHARS} characters",
        "The answer never contains the token sequence of such a text, neither as at the beginning of a text nor as"
        " after a space. Sequences that begin in the prompt are not excluded",
        neutral=([],),
        schema={"maxItems": MAX_BAD_WORDS},
    ),
    "include_stop_str_in_output": Applied("bool", "Keep the stop string or token in the text", neutral=(False,)),
    "skip_special_tokens": Applied("bool, default true", "Leave special tokens out of the text", neutral=(True,)),
    "add_special_tokens": Applied(
        "bool",
        "Default: true for texts, false for the output of a chat template. True is refused for a prompt of tokens",
        neutral=(False,),
    ),
    "stream": Applied("bool", "Send the answer as [a stream](http-api.md#streams)"),
    "stream_options": Applied(
        "object", "Needs `stream`", neutral=({}, {"include_usage": True}, {"include_usage": False})
    ),
    "stream_options.include_usage": Applied("bool", "The stream ends with a chunk that has the usage"),
    "stream_options.include_obfuscation": Applied(
        "bool", "Chunks with text have `obfuscation`: random letters that hide its length"
    ),
    "stream_options.continuous_usage_stats": Applied(
        "bool", "Every chunk has the usage so far; a hint without `include_usage`"
    ),
    "prompt_logprobs": Applied(
        f"0 to {MAX_LOGPROBS}",
        "Log-probabilities of all prompt tokens except the first, each with this many alternatives. The whole prompt is"
        " computed, without the cache. Prompt length times (the number + 1) is at most 1,048,576. Not in streams",
        neutral=(),
        schema={"minimum": 0, "maximum": MAX_LOGPROBS},
    ),
    "request_id": Applied(
        "1 to 128 printable ASCII characters without spaces", "The same as the header `x-request-id`, which wins"
    ),
    "return_token_ids": Applied(
        "bool",
        "Return `prompt_token_ids`, and the `token_ids` of each answer including the last token",
        neutral=(False,),
    ),
    "return_tokens_as_token_ids": Applied("bool", "`logprobs` shows tokens as `token_id:7`", neutral=(False,)),
    "cache_eviction": Applied(
        "false, or an object: `max_cache_size`, `start_size`, `recent_size`, `aggregation_mode` (`sum`, `norm_sum`)",
        "Which KV blocks the request gives up when it becomes long; sizes are tokens, multiples of the block size 32."
        " false: none, whatever the server does by default. Needs `--cache-eviction`. [Long"
        " answers](../explanation/prefix-cache.md#long-answers)",
    ),
    "truncate_prompt_tokens": Applied(
        "1 or more, or -1",
        "Keep only this many tokens of the prompt. -1 keeps as many as leave room for the answer",
        neutral=(),
        schema={"minimum": -1, "maximum": 2**31 - 1},
    ),
    "truncation_side": Applied(
        "`left` (default), `right`",
        "Whether `truncate_prompt_tokens` drops the beginning or the end of the prompt",
        neutral=("left",),
    ),
    "prompt_cache_key": Applied(
        _KEY,
        "Requests with the same key go to the same worker if load allows",
        neutral=("",),
        schema={"maxLength": MAX_KEY_CHARS},
    ),
    "cache_salt": Applied(
        _KEY,
        "Prompts with different salts share no cache. Neither do prompts of different tenants",
        schema={"maxLength": MAX_KEY_CHARS},
    ),
    "priority": Applied("32 bits", "Higher priorities go first", schema={"minimum": -(2**31), "maximum": 2**31 - 1}),
    "best_of": Applied(
        "`n` to 128",
        "Generate this many answers and return the `n` with the highest mean log-probability, best first. The usage"
        " counts all of them. Must equal `n` in streams. Of a beam search, the number of beams",
        neutral=(1,),
        schema={"minimum": 1, "maximum": MAX_CHOICES},
    ),
    "use_beam_search": Applied(
        "bool", "Search for the most probable answers: [beam search](http-api.md#beam-search)", neutral=(False,)
    ),
    "length_penalty": Applied(
        f"-{MOST_LENGTH_PENALTY:g} to {MOST_LENGTH_PENALTY:g}, default 1",
        "Of a beam search: scores are divided by the number of tokens to the power of this",
        neutral=(1,),
        schema={"minimum": -MOST_LENGTH_PENALTY, "maximum": MOST_LENGTH_PENALTY},
    ),
    "early_stopping": Applied(
        "bool, `never`",
        "Of a beam search with as many finished answers as beams. False: it ends when the best beam, as it is, is not"
        ' better than these. True: at once. "never": when no beam can become better',
        neutral=(False,),
    ),
    "response_format": Applied("a constraint", _CONSTRAINT, neutral=({"type": "text"},)),
    **{
        name: Applied("a constraint", _CONSTRAINT)
        for name in (
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "json_schema",
            "regex",
            "grammar",
            "ebnf",
            "structural_tag",
        )
    },
    "guided_decoding_backend": Hint("constraints have one implementation here"),
}
"""What chats and completions apply."""
OF_CHATS: dict[str, Row] = {
    "messages": Applied(
        "at least one",
        "Roles `system`, `developer`, `user`, `assistant`, `tool`, `function`: [history](http-api.md#history)",
        neutral=(),
        schema={"minItems": 1},
    ),
    "max_tokens": Applied(
        "1 or more",
        "Default: the model's `max_new_tokens`, otherwise the rest of the context. More than the context has room for "
        "is shortened to that room, and named as a hint",
        neutral=(),
        schema=_COUNT,
    ),
    "logprobs": Applied("bool", "Log-probabilities of the answer's tokens", neutral=(False,)),
    "top_logprobs": Applied(
        f"0 to {MAX_LOGPROBS}",
        "That many alternatives at each token; needs `logprobs`",
        neutral=(0,),
        schema={"minimum": 0, "maximum": MAX_LOGPROBS},
    ),
    "add_generation_prompt": Applied(
        "bool, default true", "The prompt ends with the beginning of an answer", neutral=(True,)
    ),
    "continue_final_message": Applied("bool", "The model continues the last message", neutral=(False,)),
    "chat_template": Applied(
        "name",
        "A template of the operator's list (`--chat-template`), instead of the model's own. Texts are refused",
        neutral=(),
    ),
    "chat_template_kwargs": Applied("object", "Additional variables for the template", neutral=({},)),
    "reasoning_effort": Applied(
        "`none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `max`",
        "Sets the template's `reasoning_effort`, or its `enable_thinking` or `thinking` (false for `none`,"
        " otherwise true). If the template has none of these, the field is a hint; but `none` is refused for models"
        " that reason",
        neutral=(),
        schema={"enum": list(EFFORTS)},
    ),
    "thinking": Applied(
        '`{"type": "disabled"}`, `{"type": "enabled", "budget_tokens"}`',
        "Disabled is the same as a `reasoning_effort` of `none`, enabled the same as `enable_thinking`."
        " `budget_tokens` is `thinking_token_budget`",
        neutral=(),
    ),
    "thinking_token_budget": Applied(
        "-1 or more",
        "After this many tokens of reasoning, its end is forced and the answer follows. -1: no limit. Default: 256 for"
        " a `reasoning_effort` of `minimal`, 1024 for `low` and 8192 for `medium` if the model's template has no"
        " efforts of its own. A hint if the model does not reason, or the end of its reasoning is no single token",
        neutral=(-1,),
        schema={"minimum": -1, "maximum": 2**31 - 1},
    ),
    **{
        name: Applied("-1 or more", "The same as `thinking_token_budget`, from other servers", neutral=(-1,))
        for name in ("reasoning_budget", "thinking_budget", "thinking_budget_tokens")
    },
    "enable_thinking": Applied("bool", "The same as `chat_template_kwargs.enable_thinking`, which wins", neutral=()),
    "include_reasoning": Applied(
        "bool, default true",
        "False leaves `reasoning_content` out of the answer. Its tokens still count, and log-probabilities include"
        " them",
        neutral=(True,),
    ),
    "verbosity": Applied(
        "`low`, `medium`, `high`",
        "Sets the template's `verbosity` if it has one; otherwise no effect",
        neutral=(),
        schema={"enum": list(VERBOSITIES)},
    ),
    "prediction": Applied(
        '`{"type": "content", "content": ...}`',
        "The expected answer, as a text or as text parts. It does not change the answer, but makes the parts that"
        " match faster",
        neutral=(),
    ),
    "reasoning": Applied(
        "object: `effort`, `enabled`, `exclude`, `max_tokens`",
        "`effort` is the same as `reasoning_effort`, `enabled` false the same as its `none`, `exclude` the same as"
        " `include_reasoning` false, `max_tokens` the same as `thinking_token_budget`",
        neutral=({},),
    ),
    "tools": Applied(
        "`function`, `custom`",
        "With distinct names of at most 128 characters: [tools](http-api.md#tools-and-reasoning)",
        neutral=([],),
    ),
    "tool_choice": Applied(
        "`none`, `auto`, `required`, a function or custom tool, `allowed_tools`",
        "Default `auto`",
        neutral=("none", "auto"),
    ),
    "parallel_tool_calls": Applied("bool, default true", "False allows at most one call in an answer", neutral=(True,)),
}
"""What chats apply besides."""
OF_COMPLETIONS: dict[str, Row] = {
    "prompt": Applied("text, list of texts, list of tokens, list of lists of tokens", "At most 256 prompts"),
    "max_tokens": Applied("1 or more", "Default: 16. With `echo`, 0 returns only the prompt", schema=_COUNT),
    "logprobs": Applied(
        f"0 to {MAX_LOGPROBS}",
        "Number of most probable tokens to list at each position, in addition to the chosen one",
        schema={"minimum": 0, "maximum": MAX_LOGPROBS},
    ),
    "suffix": Applied(
        "text",
        "The text behind the prompt: the answer is what goes between them, in the form of models with tokens for it,"
        " such as those for code. Other models refuse it",
        neutral=("",),
    ),
    "echo": Applied(
        "bool", "The answer begins with the prompt, and so do the lists of `logprobs`, with null for the first token"
    ),
}
"""What completions apply besides."""
NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    name: row.neutral
    for name, row in {**APPLIED, **OF_CHATS, **REFUSED, **REFUSED_BY_CHATS}.items()
    if not isinstance(row, Hint) and row.neutral is not None
}
"""Every field of chats that one of the endpoints lacks -> values besides null that change nothing."""


def as_chats(kind: type[msgspec.Struct]) -> dict[str, Row]:
    """Rows for fields that have the meaning of chats."""
    return {name: Applied(AS_CHATS) for name in kind.__struct_fields__}


def lacking(
    body_types: Iterable[type[msgspec.Struct]], instead: Mapping[str, str], others: Mapping[str, Row] | None = None
) -> dict[str, Row]:
    """Rows for the fields of chats that bodies of these types lack, except those in `others`. `instead` has the
    remedies for some of them."""
    own = {field.encode_name for kind in body_types for field in msgspec.structs.fields(kind)}
    return {
        name: REFUSED.get(name) or Refused(instead.get(name, "use /v1/chat/completions"), neutral)
        for name, neutral in NEUTRAL_FIELDS.items()
        if name not in own and name not in (others or {})
    }
