"""What happens to each field of chats and completions (pure)."""

from __future__ import annotations

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
from headrace.gateway.chat_fields import OF_PROVIDER, REFUSED, REFUSED_BY_CHATS, lacking
from headrace.gateway.fields import Applied, FieldTable, Hint, Refused, Row
from headrace.gateway.openai.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from headrace.protos.sampling_fields import NUMBERS

_SAMPLING = "use temperature, top_p, top_k or min_p"
_KEY = "up to 512 characters"
_CACHE = "the prefix cache needs no such parameters"
_DRAFTS = "the server chooses by itself how much to speculate; drafts change no answer"
_CONSTRAINT = "[Structured output](http-api.md#structured-output)"
# The order of this server's filters, in llama.cpp's names.
_ORDER = ["penalties", "temperature", "top_n_sigma", "top_k", "top_p", "min_p"]

_APPLIED: dict[str, Row] = {
    "model": Applied("name", "Optional while there is only one model"),
    **{name: Applied(number.values, number.meaning) for name, number in NUMBERS.items()},
    "n": Applied(f"1 to {MAX_CHOICES}", "At most 256 answers in one request, over all its prompts"),
    "logit_bias": Applied("token id to -100 .. 100", f"At most {MAX_LOGIT_BIASES} entries"),
    "allowed_token_ids": Applied("token ids", "Only these may be chosen"),
    "max_completion_tokens": Applied("as `max_tokens`", "Overrides `max_tokens`"),
    "min_tokens": Applied("0 to `max_tokens`", "The answer ends only after this many tokens"),
    "ignore_eos": Applied("bool", "Continue after the model's end of sequence"),
    "stop": Applied(
        f"text, or up to {MAX_STOP_STRINGS} texts",
        f"At most {MAX_STOP_CHARS} characters each. Empty texts have no effect",
    ),
    "stop_token_ids": Applied(f"up to {MAX_STOP_TOKEN_IDS} token ids"),
    "bad_words": Applied(
        f"up to {MAX_BAD_WORDS} texts of at most {MAX_BAD_WORD_CHARS} characters",
        "The answer never contains the token sequence of such a text, neither as at the beginning of a text nor as"
        " after a space. Sequences that begin in the prompt are not excluded",
    ),
    "include_stop_str_in_output": Applied("bool", "Keep the stop string or token in the text"),
    "skip_special_tokens": Applied("bool, default true", "Leave special tokens out of the text"),
    "add_special_tokens": Applied(
        "bool",
        "Default: true for texts, false for the output of a chat template. True is refused for a prompt of tokens",
    ),
    "stream": Applied("bool", "Send the answer as [a stream](http-api.md#streams)"),
    "stream_options": Applied("object", "Needs `stream`"),
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
    ),
    "request_id": Applied(
        "1 to 128 printable ASCII characters without spaces", "The same as the header `x-request-id`, which wins"
    ),
    "return_token_ids": Applied(
        "bool", "Return `prompt_token_ids`, and the `token_ids` of each answer including the last token"
    ),
    "return_tokens_as_token_ids": Applied("bool", "`logprobs` shows tokens as `token_id:7`"),
    "cache_eviction": Applied(
        "false, or an object: `max_cache_size`, `start_size`, `recent_size`, `aggregation_mode` (`sum`, `norm_sum`)",
        "Which KV blocks the request gives up when it becomes long; sizes are tokens, multiples of the block size 32."
        " false: none, whatever the server does by default. Needs `--cache-eviction`. [Long"
        " answers](../explanation/prefix-cache.md#long-answers)",
    ),
    "truncate_prompt_tokens": Applied(
        "1 or more, or -1",
        "Keep only this many tokens of the prompt. -1 keeps as many as leave room for the answer",
    ),
    "truncation_side": Applied(
        "`left` (default), `right`", "Whether `truncate_prompt_tokens` drops the beginning or the end of the prompt"
    ),
    "prompt_cache_key": Applied(_KEY, "Requests with the same key go to the same worker if load allows"),
    "cache_salt": Applied(_KEY, "Prompts with different salts share no cache. Neither do prompts of different tenants"),
    "priority": Applied("32 bits", "Higher priorities go first"),
    "best_of": Applied(
        "`n` to 128",
        "Generate this many answers and return the `n` with the highest mean log-probability, best first. The usage"
        " counts all of them. Must equal `n` in streams",
    ),
    **{
        name: Applied("a constraint", _CONSTRAINT)
        for name in (
            "response_format",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "json_schema",
            "regex",
            "grammar",
            "ebnf",
        )
    },
    "guided_decoding_backend": Hint("constraints have one implementation here"),
}
_MAX_TOKENS = Applied(
    "1 or more",
    "Default: the model's `max_new_tokens`, otherwise the rest of the context. More than the context has room for is"
    " shortened to that room, and named as a hint",
)

# Fields of other servers and of the provider's own infrastructure, the same for chats and completions.
_OTHERS: dict[str, Row] = {
    # OpenAI
    "user": Hint(OF_PROVIDER),
    "safety_identifier": Hint(OF_PROVIDER),
    "metadata": Hint(OF_PROVIDER),
    "store": Hint("only responses are stored", (False,)),
    "service_tier": Hint(OF_PROVIDER, ("auto", "default")),
    "prompt_cache_retention": Hint(
        "the prefix cache keeps blocks as long as there is room", ("in_memory", "in-memory")
    ),
    # vLLM
    **REFUSED,
    "thinking_token_budget": Refused("use reasoning_effort", (-1,)),
    "logprob_token_ids": Refused("use top_logprobs", ([],)),
    "prompt_embeds": Refused("send the prompt as text or tokens", ([],)),
    "repetition_detection": Refused("use repetition_penalty"),
    "spaces_between_special_tokens": Hint("special tokens are joined as the tokenizer says"),
    "kv_transfer_params": Hint(_CACHE, ({},)),
    "vllm_xargs": Hint("it is for plug-ins of another server", ({},)),
    "mm_processor_kwargs": Hint("it concerns images", ({},)),
    # SGLang
    "stop_regex": Refused("use stop", ("", [])),
    "no_stop_trim": Refused("use include_stop_str_in_output", (False,)),
    "lora_path": Refused("name the adapter as the model"),
    "session_params": Refused("use prompt_cache_key", ({},)),
    "custom_logit_processor": Refused("use logit_bias"),
    "return_hidden_states": Refused("leave it out", (False,)),
    "separate_reasoning": Refused("reasoning is in reasoning_content", (True,)),
    # llama.cpp's server
    "n_predict": Refused("use max_tokens", (-1,)),
    "repeat_penalty": Refused("use repetition_penalty", (1,)),
    "typical_p": Refused(_SAMPLING, (1,)),
    "mirostat": Refused(_SAMPLING, (0,)),
    "dynatemp_range": Refused(_SAMPLING, (0,)),
    "xtc_probability": Refused(_SAMPLING, (0,)),
    "dry_multiplier": Refused("use repetition_penalty", (0,)),
    "samplers": Refused("the order of the filters is fixed", (_ORDER, _ORDER[1:])),
    "n_probs": Refused("use logprobs", (0,)),
    "lora": Refused("name the adapter as the model", ([],)),
    "reasoning_format": Refused("reasoning is in reasoning_content", ("auto", "deepseek", "parsed")),
    "cache_prompt": Hint("prefixes are always cached", (True,)),
    "id_slot": Hint("the router places requests", (-1,)),
    "timings_per_token": Hint("timings are in the metrics", (False,)),
    # OpenVINO Model Server
    "num_assistant_tokens": Hint(_DRAFTS),
    "assistant_confidence_threshold": Hint(_DRAFTS),
    "max_ngram_size": Hint(_DRAFTS),
    # others
    "max_new_tokens": Refused("use max_tokens"),
    "tfs_z": Refused(_SAMPLING, (1,)),
    "top_a": Refused(_SAMPLING, (0,)),
}

CHAT = FieldTable(
    "POST /v1/chat/completions",
    (ChatRequest,),
    {
        "messages": Applied(
            "at least one",
            "Roles `system`, `developer`, `user`, `assistant`, `tool`, `function`: [history](http-api.md#history)",
        ),
        "messages[].content": Applied(
            "text, or parts of type `text`, `refusal`",
            "Parts are joined by line breaks. None is an empty text. Other parts are refused in turns of the user, a"
            " note in results of tools, and hints in turns of the assistant",
        ),
        "messages[].name": Applied("text", "Passed to the template"),
        "messages[].tool_call_id": Applied("text", "Passed to the template"),
        "messages[].reasoning_content": Applied("text", "Passed to the template"),
        "messages[].reasoning": Applied("text", "The same as `reasoning_content`, from other servers"),
        "messages[].thinking": Applied("text", "The same as `reasoning_content`, from other servers"),
        "messages[].refusal": Applied("text", "The content, if there is no other"),
        "messages[].role": Applied("text", "See `messages`"),
        "messages[].function_call": Applied("object", "The same as one of `tool_calls`"),
        "messages[].audio": Hint("the model hears no audio, so that only the text of the turn is in the prompt"),
        "messages[].tool_calls": Applied(
            "list of `function` and `custom`",
            "Passed to the template with arguments as an object. A template without tool calls gets them as text",
        ),
        "max_tokens": _MAX_TOKENS,
        "logprobs": Applied("bool", "Log-probabilities of the answer's tokens"),
        "top_logprobs": Applied(f"0 to {MAX_LOGPROBS}", "That many alternatives at each token; needs `logprobs`"),
        "add_generation_prompt": Applied("bool, default true", "The prompt ends with the beginning of an answer"),
        "continue_final_message": Applied("bool", "The model continues the last message"),
        "chat_template_kwargs": Applied("object", "Additional variables for the template"),
        "reasoning_effort": Applied(
            "`none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `max`",
            "Sets the template's `reasoning_effort`, or its `enable_thinking` or `thinking` (false for `none`,"
            " otherwise true). If the template has none of these, the field is a hint; but `none` is refused for models"
            " that reason",
        ),
        "thinking": Applied(
            '`{"type": "disabled"}`, `{"type": "enabled"}`',
            "Disabled is the same as a `reasoning_effort` of `none`, enabled the same as `enable_thinking`",
        ),
        "enable_thinking": Applied("bool", "The same as `chat_template_kwargs.enable_thinking`, which wins"),
        "include_reasoning": Applied(
            "bool, default true",
            "False leaves `reasoning_content` out of the answer. Its tokens still count, and log-probabilities include"
            " them",
        ),
        "verbosity": Applied(
            "`low`, `medium`, `high`", "Sets the template's `verbosity` if it has one; otherwise no effect"
        ),
        "prediction": Applied(
            '`{"type": "content", "content": ...}`',
            "The expected answer, as a text or as text parts. It does not change the answer, but makes the parts that"
            " match faster",
        ),
        "reasoning": Applied(
            "object: `effort`, `enabled`, `exclude`",
            "`effort` is the same as `reasoning_effort`, `enabled` false the same as its `none`, `exclude` the same as"
            " `include_reasoning` false. `max_tokens` is refused",
        ),
        "tools": Applied(
            "`function`, `custom`",
            "With distinct names of at most 128 characters: [tools](http-api.md#tools-and-reasoning)",
        ),
        "tool_choice": Applied(
            "`none`, `auto`, `required`, a function or custom tool, `allowed_tools`", "Default `auto`"
        ),
        "parallel_tool_calls": Applied("bool, default true", "False allows at most one call in an answer"),
        **_APPLIED,
        **_OTHERS,
        "web_search_options": Hint("the server has no web search"),
        **REFUSED_BY_CHATS,
    },
)

COMPLETION = FieldTable(
    "POST /v1/completions",
    (CompletionRequest,),
    {
        "prompt": Applied("text, list of texts, list of tokens, list of lists of tokens", "At most 256 prompts"),
        "max_tokens": Applied("1 or more", "Default: 16. With `echo`, 0 returns only the prompt"),
        "logprobs": Applied(
            f"0 to {MAX_LOGPROBS}",
            "Number of most probable tokens to list at each position, in addition to the chosen one",
        ),
        "echo": Applied(
            "bool",
            "The answer begins with the prompt, and so do the lists of `logprobs`, with null for the first token",
        ),
        **_APPLIED,
        **_OTHERS,
        "suffix": Refused("the model continues a prompt and fills no gaps", ("",)),
        **lacking((CompletionRequest,), {"top_logprobs": "use logprobs"}, _OTHERS),
    },
)

EMBEDDING = FieldTable(
    "POST /v1/embeddings",
    (EmbeddingRequest,),
    {
        "model": _APPLIED["model"],
        "input": Applied("text, list of texts, list of tokens, list of lists of tokens"),
        "encoding_format": Applied("`float`, `base64`"),
        "dimensions": Applied("1 to those of the model", "Shortens the vectors, and scales them to length 1 again"),
        "truncate_prompt_tokens": Applied("1 or more, or -1", "Keep only this many tokens of each text"),
        "priority": Applied("32 bits", "Higher priorities go first"),
        "user": Hint(OF_PROVIDER),
    },
)
TOKENIZE = FieldTable(
    "POST /tokenize",
    (TokenizeRequest,),
    {
        "model": _APPLIED["model"],
        "prompt": Applied("text", "Excludes `messages`"),
        "messages": Applied("a conversation", "Tokenized through the chat template"),
        "add_special_tokens": Applied("bool, default true", "For `prompt`"),
        "return_token_strs": Applied("bool", "The answer has the texts of the tokens, too"),
        "tools": Applied("functions", "Needs `messages`"),
        "add_generation_prompt": Applied("bool, default true", "Needs `messages`"),
        "continue_final_message": Applied("bool", "Needs `messages`"),
        "chat_template_kwargs": Applied("object", "Needs `messages`"),
        "chat_template": REFUSED_BY_CHATS["chat_template"],
    },
)
DETOKENIZE = FieldTable(
    "POST /detokenize",
    (DetokenizeRequest,),
    {"model": _APPLIED["model"], "tokens": Applied("list of token ids")},
)
