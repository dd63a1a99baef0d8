"""What happens to each field of responses (pure)."""

from __future__ import annotations

from headrace.gateway.chat.fields import AS_CHATS, OF_PROVIDER, as_chats, lacking
from headrace.gateway.chat.request import SamplingFields
from headrace.gateway.chat.sampling import MAX_LOGPROBS
from headrace.gateway.fields import Applied, FieldTable, Hint, Refused, Row
from headrace.gateway.responses.types import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    MAX_METADATA_ENTRIES,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    SUMMARY_TOKENS,
    CompactRequest,
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdate,
    InputTokensRequest,
    ResponsesRequest,
)

_CACHE = "the prefix cache keeps blocks as long as there is room"

_METADATA = Applied(
    f"up to {MAX_METADATA_ENTRIES} texts",
    f"Keys of up to {MAX_METADATA_KEY_CHARS}, values of up to {MAX_METADATA_VALUE_CHARS} characters; returned",
)

_ROWS: dict[str, Row] = {
    "model": Applied("name", "Optional while there is only one model"),
    "input": Applied(
        "text, or items", "[Items](http-api.md#items-of-the-input). Optional with a `conversation` that has items"
    ),
    "instructions": Applied("text", "A first turn with role `developer`, for this response only"),
    "previous_response_id": Applied(
        "id of a stored response",
        "The input continues that response's conversation. 400 `previous_response_not_found` if it does not exist",
    ),
    "conversation": Applied(
        "id of a conversation, or an object with it",
        "The input continues the [conversation](http-api.md#conversations), which gets the input and the output at the "
        "end. 404 if it does not exist. Not with `previous_response_id`",
    ),
    "store": Applied("bool, default true", "[Keep the response](http-api.md#responses)"),
    "background": Applied("bool", "Return at once and generate in the background; needs `store`"),
    "stream": Applied("bool", "Send the answer as a stream"),
    "stream_options": Applied("object", "Needs `stream`"),
    "stream_options.include_obfuscation": Applied(
        "bool", "Delta events have `obfuscation`: random letters that hide the length of their text"
    ),
    "max_output_tokens": Applied(
        "1 or more", "As `max_tokens` of chats. With `truncation`, turns are dropped before the answer is shortened"
    ),
    **as_chats(SamplingFields),
    "chat_template": Applied(AS_CHATS),
    "chat_template_kwargs": Applied(AS_CHATS),
    "request_id": Applied(AS_CHATS),
    "text.format": Applied(
        "`text`, `json_object`, or `json_schema` with `name`, `schema`, `strict`, `description`", "As `response_format`"
    ),
    "text.verbosity": Applied("as `verbosity`", "As for chats"),
    "text": Applied("object", "The format of the text"),
    "tools": Applied(
        "`function`, `custom`, `namespace`, `mcp`, and hosted tools beside them",
        "[Tools](http-api.md#tools-of-responses)",
    ),
    "tool_choice": Applied(
        "`none`, `auto`, `required`, a function, custom or MCP tool, `allowed_tools`",
        "A hosted tool is refused",
    ),
    "parallel_tool_calls": Applied("bool, default true", "False allows at most one call in an answer"),
    "reasoning": Applied("object", "How to reason"),
    "reasoning.effort": Applied("as `reasoning_effort`", "As for chats"),
    "reasoning.max_tokens": Applied("-1 or more", "The same as `thinking_token_budget`"),
    "thinking_token_budget": Applied(AS_CHATS),
    "reasoning.summary": Hint("reasoning is shown whole, in content", ("auto",)),
    "reasoning.generate_summary": Hint("reasoning is shown whole, in content", ("auto",)),
    "reasoning.context": Hint("the template decides which earlier reasoning the model sees", ("auto",)),
    "reasoning.mode": Hint("there is one mode", ("standard",)),
    "include": Applied(f"`{LOGPROBS}`, `{ENCRYPTED_REASONING}`", "Other values are hints"),
    "top_logprobs": Applied(
        f"0 to {MAX_LOGPROBS}",
        "Also turns log-probabilities on. They cover all output from the first message on",
    ),
    "truncation": Applied(
        "`disabled`, `auto`",
        "`auto` drops the oldest turns until the prompt fits and begins with a turn of role `user`",
    ),
    "metadata": _METADATA,
    "max_tool_calls": Applied(
        "1 or more", "Maximum calls of [MCP tools](../how-to/mcp.md); the operator's is the default"
    ),
    "user": Applied("text", "Returned"),
    "safety_identifier": Applied("text", "Returned"),
    "service_tier": Hint("there is one tier, which the response names", ("auto", "default")),
    "client_metadata": Hint("it is for the provider's monitoring"),
    "context_management": Hint("only /v1/responses/compact and an item compaction_trigger compact", ([],)),
    "prompt_cache_options": Hint(_CACHE, ({"mode": "implicit"}, {})),
    "prompt_cache_retention": Hint(_CACHE, ("in_memory", "in-memory")),
    "access_programs": Hint(OF_PROVIDER),
    "timings_per_token": Hint("timings are in the metrics", (False,)),
    "prompt": Refused("send its text as instructions and input"),
    "moderation": Refused("moderate the answer in your program"),
}
FIELDS = FieldTable(
    "POST /v1/responses",
    (ResponsesRequest,),
    {
        **_ROWS,
        **lacking(
            (ResponsesRequest,),
            {
                "messages": "use input",
                "max_tokens": "use max_output_tokens",
                "max_completion_tokens": "use max_output_tokens",
                "logprobs": f"use include with {LOGPROBS}",
                "response_format": "use text.format",
                "verbosity": "use text.verbosity",
                "reasoning_effort": "use reasoning.effort",
                "enable_thinking": "use reasoning.effort",
                "reasoning_budget": "use thinking_token_budget",
                "thinking_budget": "use thinking_token_budget",
                "thinking_budget_tokens": "use thinking_token_budget",
                "thinking": "use reasoning.effort",
            },
        ),
    },
)
_NEW_ITEMS = "[Items](http-api.md#items-of-the-input) at the end of the conversation"
CONVERSATION = FieldTable(
    "POST /v1/conversations",
    (ConversationRequest,),
    {"items": Applied("items", _NEW_ITEMS), "metadata": _METADATA},
)
CONVERSATION_UPDATE = FieldTable(
    "POST /v1/conversations/{id}",
    (ConversationUpdate,),
    {"metadata": Applied(_METADATA.values, f"{_METADATA.meaning}. It replaces the older metadata; null empties it")},
)
CONVERSATION_ITEMS = FieldTable(
    "POST /v1/conversations/{id}/items", (ConversationItemsRequest,), {"items": Applied("items", _NEW_ITEMS)}
)
_AS_RESPONSES = "as for [responses](#post-v1responses)"
COMPACT = FieldTable(
    "POST /v1/responses/compact",
    (CompactRequest,),
    {
        **{name: Applied(_AS_RESPONSES) for name in CompactRequest.__struct_fields__},
        "max_output_tokens": Applied(
            "1 or more", f"The longest summary; by default {SUMMARY_TOKENS}, or a quarter of a shorter context"
        ),
        "tools": Applied(_AS_RESPONSES, "So that the prompt begins as before, and is cached. The model calls none"),
        "conversation": Refused("send its items as input"),
        "stream": Refused("a summary comes whole", (False,)),
        "prompt_cache_options": _ROWS["prompt_cache_options"],
        "prompt_cache_retention": _ROWS["prompt_cache_retention"],
        "service_tier": _ROWS["service_tier"],
        "text": Hint("the summary is a text that only the server reads"),
        "tool_choice": Hint("no tool is called", ("auto", "none")),
        "store": Hint("nothing is stored", (False,)),
        "include": Hint("the summary has no such part", ([],)),
    },
)
INPUT_TOKENS = FieldTable(
    "POST /v1/responses/input_tokens",
    (InputTokensRequest,),
    {
        **{name: Applied(_AS_RESPONSES) for name in InputTokensRequest.__struct_fields__},
        "truncation": Applied(_AS_RESPONSES, "With `auto`, only the tokens of what would be kept count"),
    },
)
TABLES = (FIELDS, COMPACT, INPUT_TOKENS, CONVERSATION, CONVERSATION_UPDATE, CONVERSATION_ITEMS)
"""All tables of the API."""
