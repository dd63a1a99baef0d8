"""What happens to each field of messages, and of the count of their tokens (pure)."""

from __future__ import annotations

from headrace.gateway.anthropic.types import MessagesRequest, OutputConfig, PromptFields, Thinking
from headrace.gateway.chat.fields import AS_CHATS, OF_PROVIDER, as_chats, lacking
from headrace.gateway.chat.request import AnswerFields
from headrace.gateway.chat.sampling import MAX_STOP_CHARS, MAX_STOP_STRINGS
from headrace.gateway.fields import Applied, FieldTable, Hint, Refused, Row

_ANYWHERE = "the model runs where this server runs"
_HOSTED = "the server runs no hosted tools, containers or MCP clients"

_THINKING: dict[str, Row] = {"block_binding": Hint("the origin of thoughts is not checked", ({},))}
_OUTPUT_CONFIG: dict[str, Row] = {"task_budget": Hint("the model is not told of a budget")}

_PROMPT: dict[str, Row] = {
    "messages": Applied(
        "at least one",
        "Roles `user`, `assistant` and `system`. Consecutive turns of the same role are merged. If the last turn is the"
        " assistant's, the model continues it",
    ),
    "messages[].content": Applied("text, or blocks", "[Blocks](http-api.md#messages)"),
    "messages[].clear_at": Applied(
        "`never`, `next_user_message`", "A turn of the system is shown only until the next turn of the user"
    ),
    "messages[].output_config": Applied("object", "The effort of a turn of the system, for the answer to this turn"),
    "model": Applied("name", "Optional while there is only one model"),
    "system": Applied(
        "text, or blocks of text",
        "The first turn. The header `x-anthropic-billing-header:` at its head is left out, so that prompts of"
        " different sessions share their cache",
    ),
    "tools": Applied("list", "[Tools](http-api.md#messages)"),
    "tool_choice": Applied("`auto`, `any`, `tool` with `name`, `none`", "A grammar enforces `any` and `tool`"),
    "tool_choice.disable_parallel_tool_use": Applied("bool", "At most one call"),
    "thinking": Applied(
        "`enabled` with `budget_tokens`, `adaptive`, `disabled`",
        "Turns reasoning on or off; the default depends on the model. A hint for models that do not reason. If a model"
        " cannot be kept from reasoning, `disabled` leaves its thoughts out of the answer",
    ),
    "thinking.budget_tokens": Applied(
        "1024 to `max_tokens`",
        "As `thinking_token_budget`. Also selects the effort: `low` up to 4096, `medium` up to 16384, then `high`",
    ),
    "thinking.display": Applied("`summarized`, `omitted`", "Omitted: thinking blocks have no text"),
    **{f"thinking.{name}": row for name, row in _THINKING.items()},
    "output_config": Applied("object", "Effort and format"),
    "output_config.effort": Applied(
        "`low`, `medium`, `high`, `xhigh`, `max`", "As `reasoning_effort`; `max` is `xhigh`. A hint as `thinking` is"
    ),
    "output_config.format": Applied('`{"type": "json_schema", "schema"}`', "As `response_format`"),
    **{f"output_config.{name}": row for name, row in _OUTPUT_CONFIG.items()},
    "output_format": Applied("as `output_config.format`", "Its earlier name"),
    "cache_control": Applied("any, on blocks and tools too", "Every prefix is cached, with and without it"),
    "chat_template": Applied("name", "A template of the operator's list, as for chats"),
    "chat_template_kwargs": Applied("object", "Additional variables for the template"),
    "context_management": Hint(
        "the context is not edited, which the answer says in `applied_edits`",
        ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "mcp_servers": Hint(_HOSTED, ([],)),
    "speed": Hint("there is one speed", ("standard",)),
    "timings_per_token": Hint("timings are in the metrics", (False,)),
    "betas": Hint("what is served needs no header and no list of beta features", ([],)),
    "anthropic_beta": Hint("what is served needs no header and no list of beta features", ([],)),
    "anthropic_version": Hint("there is one version"),
    "billing_policy": Hint(OF_PROVIDER),
    "user_profile_id": Hint(OF_PROVIDER),
    "workspace_id": Hint(OF_PROVIDER),
}
_COMPACTION = Refused("ask for a summary in messages")

THINKING = FieldTable("thinking of POST /v1/messages", (Thinking,), _THINKING)
OUTPUT_CONFIG = FieldTable("output_config of POST /v1/messages", (OutputConfig,), _OUTPUT_CONFIG)
MESSAGES = FieldTable(
    "POST /v1/messages",
    (MessagesRequest, AnswerFields),
    {
        **_PROMPT,
        "max_tokens": Applied(
            "0 or more",
            "0 computes the prompt into the cache and answers nothing. More than the context has room for is shortened"
            " to that room and named as a hint; an answer that fills the room stops with"
            " `model_context_window_exceeded`",
        ),
        "stop_sequences": Applied(
            f"up to {MAX_STOP_STRINGS} texts",
            f"At most {MAX_STOP_CHARS} characters each. Empty texts have no effect",
        ),
        **as_chats(AnswerFields),
        "stream": Applied("bool", "Send the answer as [a stream](http-api.md#messages)"),
        "request_id": Applied(AS_CHATS),
        "metadata": Hint("tenants are those of the API keys"),
        "service_tier": Hint(OF_PROVIDER, ("auto", "standard_only")),
        "inference_geo": Hint(_ANYWHERE),
        "container": Hint(_HOSTED),
        "diagnostics": Hint(OF_PROVIDER),
        "fallbacks": Hint("no answer is declined for policy reasons", ([], "default")),
        "fallback_credit_token": Hint(OF_PROVIDER),
        "compaction": _COMPACTION,
        "thread": Refused("send all turns in messages"),
        **lacking(
            (MessagesRequest, AnswerFields),
            {
                "max_completion_tokens": "use max_tokens",
                "stop": "use stop_sequences",
                "response_format": "use output_config.format",
                "reasoning_effort": "use output_config.effort",
                "enable_thinking": "use thinking",
                "include_reasoning": "use thinking.display",
                "thinking_token_budget": "use thinking.budget_tokens",
                "reasoning_budget": "use thinking.budget_tokens",
                "thinking_budget": "use thinking.budget_tokens",
                "thinking_budget_tokens": "use thinking.budget_tokens",
                "continue_final_message": "end messages with a turn of the assistant",
                "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
                "stream_options": "leave it out",
                "prompt_cache_key": "leave it out",
            },
        ),
    },
    members={"thinking": THINKING, "output_config": OUTPUT_CONFIG},
)
COUNT_TOKENS = FieldTable(
    "POST /v1/messages/count_tokens",
    (PromptFields,),
    # Of the provider, too, this counts the conversation as it is.
    {**_PROMPT, "compaction": Hint("the count is that of messages as they are")},
    members={"thinking": THINKING, "output_config": OUTPUT_CONFIG},
)
TABLES = (MESSAGES, COUNT_TOKENS)
