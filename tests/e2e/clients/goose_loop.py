"""goose: a task with a call, and another question, through one of its own providers (PROVIDER MODEL BASE_URL), which
makes the requests and reads the answers. The prompts and the tool are ours."""

import asyncio
import json
import os
import sys

os.environ["GOOSE_PROVIDER_SKIP_BACKOFF"] = "true"

import goose
from goose import MessageContent, MessageRole, ProviderMessage

PROVIDER, MODEL, BASE_URL = sys.argv[1:]
SYSTEM = "You are an agent for files. Read files before you answer, and say what you found in them.\n" * 60
TOOL = goose.ProviderTool(
    name="read_file",
    description="Read a file",
    input_schema_json=json.dumps({"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}),
)
RESULT = json.dumps([{"type": "text", "text": "the number is 42\n"}])
DONE = "The number is 42."
LEAST_CACHED = 0.9


def provider() -> goose.Provider:
    """That of the settings which docs/how-to/agents/goose.md has."""
    if PROVIDER == "anthropic":
        return goose.anthropic_provider("unused", BASE_URL, [])
    if PROVIDER == "ollama":
        settings = {
            "name": "headrace",
            "engine": "ollama",
            "display_name": "headrace",
            "api_key_env": "",
            "base_url": BASE_URL,
            "models": [{"name": MODEL, "context_limit": 65536}],
            "supports_streaming": True,
            "requires_auth": False,
        }
        return goose.declarative_provider_from_json(json.dumps(settings))
    return goose.openai_provider("unused", f"{BASE_URL}/v1")


async def run() -> None:
    """The task: a question, a call, its result, an answer, and another question."""
    asked, turns = provider(), []
    config = goose.ProviderModelConfig(
        model_name=MODEL, max_tokens=4096, context_limit=65536, reasoning=True if PROVIDER == "reasoning" else None
    )
    assert any(one.name.removesuffix(":latest") == MODEL for one in await asked.list_models())
    if PROVIDER in ("openai", "reasoning"):  # of other names it knows the context itself
        assert await asked.context_limit(goose.ProviderModelConfig(model_name=MODEL)) == 65536

    async def answer(role: MessageRole, content: MessageContent) -> list[MessageContent]:
        """What it read of the answer to another turn."""
        turns.append(ProviderMessage(role=role, content=[content]))
        stream = await asked.stream(config, SYSTEM, turns, [TOOL])
        texts, calls, usage = [], [], None
        while (chunk := await stream.next_chunk()) is not None:
            if chunk.is_TEXT_CHUNK():
                texts.append(chunk.text)
            elif chunk.is_TOOL_CHUNK():
                calls.append(MessageContent.TOOL_REQUEST(chunk.id, chunk.name, chunk.arguments_json))
            else:
                assert chunk.is_END_CHUNK(), chunk
                usage = chunk.usage
        assert usage.output_tokens >= 1
        if len(turns) > 1:
            assert usage.cache_read_input_tokens >= LEAST_CACHED * usage.input_tokens, usage
        found = [*([MessageContent.TEXT("".join(texts))] if texts else []), *calls]
        turns.append(ProviderMessage(role=MessageRole.ASSISTANT, content=found))
        return found

    (call,) = await answer(MessageRole.USER, MessageContent.TEXT("Which number is in note.txt?"))
    assert (call.name, json.loads(call.arguments_json)) == ("read_file", {"path": "note.txt"})
    result = MessageContent.TOOL_RESULT(call.id, True, RESULT)
    assert await answer(MessageRole.TOOL, result) == [MessageContent.TEXT(DONE)]
    assert await answer(MessageRole.USER, MessageContent.TEXT("And what is it?")) == [MessageContent.TEXT(DONE)]
    # It shortens a conversation when it is told that it is too long, and only then.
    try:
        await asked.complete(config, SYSTEM * 50, turns, [TOOL])
    except goose.GooseError.ContextLengthExceeded:
        return
    raise AssertionError("a prompt that is too long was answered")


asyncio.run(run())
sys.stdout.flush()
os._exit(0)  # one of goose's threads may still want the interpreter, which aborts a process that ends
