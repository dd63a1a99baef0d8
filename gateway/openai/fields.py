"""What happens to each field of chats and completions (pure)."""

from __future__ import annotations

from headrace.gateway.chat.fields import (
    APPLIED,
    OF_CHATS,
    OF_COMPLETIONS,
    OF_PROVIDER,
    REFUSED,
    REFUSED_BY_CHATS,
    lacking,
)
from headrace.gateway.fields import Applied, FieldTable, Hint, Refused, Row
from headrace.gateway.openai.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

_SAMPLING = "use temperature, top_p, top_k or min_p"
_CACHE = "the prefix cache needs no such parameters"
_DRAFTS = "the server chooses by itself how much to speculate; drafts change no answer"

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
    "n_probs": Refused("use logprobs", (0,)),
    "lora": Refused("name the adapter as the model", ([],)),
    "reasoning_format": Refused("reasoning is in reasoning_content", ("auto", "deepseek", "parsed")),
    "cache_prompt": Hint("prefixes are always cached", (True,)),
    "id_slot": Hint("the router places requests", (-1,)),
    "timings_per_token": Applied(
        "bool", "The answer has llama.cpp's [`timings`](http-api.md#llamacpps-server), and of a stream every chunk"
    ),
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
        **OF_CHATS,
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
        **APPLIED,
        **_OTHERS,
        "web_search_options": Hint("the server has no web search"),
        **REFUSED_BY_CHATS,
    },
)

COMPLETION = FieldTable(
    "POST /v1/completions",
    (CompletionRequest,),
    {
        **OF_COMPLETIONS,
        **APPLIED,
        **_OTHERS,
        **lacking((CompletionRequest,), {"top_logprobs": "use logprobs"}, _OTHERS),
    },
)

EMBEDDING = FieldTable(
    "POST /v1/embeddings",
    (EmbeddingRequest,),
    {
        "model": APPLIED["model"],
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
        "model": APPLIED["model"],
        "prompt": Applied("text", "Excludes `messages`"),
        "messages": Applied("a conversation", "Tokenized through the chat template"),
        "add_special_tokens": Applied("bool, default true", "For `prompt`"),
        "content": Applied(
            "text", "As `prompt`, for clients of llama.cpp: without special tokens around it by default"
        ),
        "add_special": Applied("bool", "As `add_special_tokens`, for `content`"),
        "with_pieces": Applied("bool", "For `content`: `tokens` are objects with `id` and `piece`"),
        "parse_special": Hint("--special-tokens-in-text decides whether the texts of special tokens become these"),
        "return_token_strs": Applied("bool", "The answer has the texts of the tokens, too"),
        "return_image_identities": Applied(
            "bool",
            "`tokens` has the pseudo tokens by which caches and routers tell images apart, as `headrace explain` needs",
        ),
        "tools": Applied("functions", "Needs `messages`"),
        "add_generation_prompt": Applied("bool, default true", "Needs `messages`"),
        "continue_final_message": Applied("bool", "Needs `messages`"),
        "chat_template_kwargs": Applied("object", "Needs `messages`"),
        "chat_template": Applied("name", "As for chats. Needs `messages`"),
    },
)
DETOKENIZE = FieldTable(
    "POST /detokenize",
    (DetokenizeRequest,),
    {"model": APPLIED["model"], "tokens": Applied("list of token ids")},
)
TABLES = (CHAT, COMPLETION, EMBEDDING, TOKENIZE, DETOKENIZE)
