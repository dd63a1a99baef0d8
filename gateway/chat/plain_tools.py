"""Tools for models whose chat template does not support them: tools, calls and results become text of ordinary turns
(pure).

    tools                     ->  a block at the end of the system message that lists them and says how to call
    calls of the assistant    ->  <tool_call>{"name": ..., "arguments": {...}}</tool_call> after its content
    results                   ->  <tool_response>...</tool_response> in a turn of the user

The model's calls are read back in the same format, which is that of the family `hermes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.gateway.chat.output_parsers.json_tags import HERMES
from headrace.gateway.text.chat_template import ChatTemplate
from headrace.gateway.text.content import Content, joined

PARSER = "hermes"
"""Name of the format in which such calls are written."""

_TOOLS_IN_MESSAGE = re.compile(r"""['"]tools['"] in \w+""")
_BLOCK = """\
You can call these functions:
{functions}

To call a function, write nothing but its name and arguments as JSON, like this:
{opening}
{{"name": "function_name", "arguments": {{"argument_name": "value"}}}}
{closing}
If no function helps, answer in words."""


def takes_tools(template: ChatTemplate) -> bool:
    """Whether a template lists tools itself, from its variable `tools` or from a message."""
    return template.uses("tools") or looks_for_tools_in_messages(template)


def looks_for_tools_in_messages(template: ChatTemplate) -> bool:
    """Whether a template lists tools that are in the system message, like that of Phi 4 mini."""
    return _TOOLS_IN_MESSAGE.search(template.source) is not None


def with_block(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> list[dict[str, Any]]:
    """The messages with the block in the system message, or before the first turn if the template shows none."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    block = _BLOCK.format(functions=functions, opening=HERMES.opening, closing=HERMES.closing)
    first, *rest = messages
    if first["role"] == "system":
        return [{**first, "content": joined([first["content"], block], "\n\n")}, *map(dict, rest)]
    if template.shows_system or first["role"] != "user":
        return [{"role": "system", "content": block}, *map(dict, messages)]
    return [{**first, "content": joined([block, first["content"]], "\n\n")}, *map(dict, rest)]


def as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls and results as text. A user's turn after results is merged with them."""
    found: list[dict[str, Any]] = []
    contents: list[list[Content]] = []  # of the merged turns, joined only once, because there may be very many
    behind_result = False
    for message in messages:
        turn = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        is_result = turn["role"] == "tool"
        if is_result:
            content = joined(["<tool_response>\n", turn["content"], "\n</tool_response>"], "")
            turn = {"role": "user", "content": content}
        texts = [turn["content"]]
        for call in message.get("tool_calls") or ():
            function = call["function"]
            name = json.dumps(function["name"], ensure_ascii=False)
            _append(
                texts, f'{HERMES.opening}\n{{"name": {name}, "arguments": {function["arguments"]}}}\n{HERMES.closing}'
            )
        if behind_result and turn["role"] == "user":
            for text in texts:
                _append(contents[-1], text)
        else:
            found.append(turn)
            contents.append(texts)
        behind_result = is_result or (behind_result and turn["role"] == "user")
    for turn, texts in zip(found, contents, strict=True):
        turn["content"] = texts[0] if len(texts) == 1 else joined(texts, "\n")
    return found


def _append(texts: list[Content], text: Content) -> None:
    """Add a content to those to join. It replaces an empty one."""
    if texts[0]:
        texts.append(text)
    else:
        texts[0] = text
