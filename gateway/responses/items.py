"""Turns items of the Responses API into the turns of a chat (pure).

    reasoning, message, calls  ->  one turn of the assistant
    outputs of calls           ->  one turn of the tool for each

Items of tools that the provider hosts are calls with their outputs, as far as they have texts.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.chat.conversation import note_of
from headrace.gateway.chat.request import ChatMessage
from headrace.gateway.checks import MAX_ECHO_CHARS, invalid, optional_text_in, text_in, unsupported
from headrace.gateway.hints import ignored
from headrace.gateway.images.given import IMAGE, GivenImage, detail_of, image_of_url, part_of, refuse_file
from headrace.gateway.images.refusal import remedy_for
from headrace.gateway.responses.tools import CallName
from headrace.gateway.text.seals import COMPACTION, REASONING
from headrace.protos.status import StatusError

MAX_ITEMS = 10_000
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
IMAGE_PART = "input_image"
_PLACE = "input.content"
APPROVAL = "mcp_approval_response"
DENIED = "The user did not approve this call."
"""The result of a call that was not approved, for the model."""
TRIGGER = "compaction_trigger"
"""The last item of an input whose response is a summary."""
SUMMARY = "Summary of the conversation up to here:\n\n"
"""It precedes the summary of a compaction in its turn."""
_COMPACTIONS = ("compaction", "compaction_summary")

# Items without a text for the model -> why they are left out.
_LEFT_OUT = {
    "web_search_call": "what was found is in the message behind it",
    "mcp_list_tools": "",
    "mcp_approval_request": "",
    TRIGGER: "it has its effect only at the end of the input",
    "context_compaction": "only the server that made it can read it",
    "ghost_snapshot": "it is for the client alone",
    "additional_tools": "",
}
"""An empty reason: it has its effect elsewhere."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the chat, and where the caller wrote it."""

    message: ChatMessage
    place: str


def new_id(kind: str) -> str:
    """A fresh id, such as `msg_…` for the kind `msg`."""
    return f"{kind}_{secrets.token_hex(24)}"


def input_items(value: str | Sequence[Mapping[str, Any]], field: str = "input") -> list[dict[str, Any]]:
    """The input, or the items of another field, as items that can be stored and listed: all with an id, a type, and
    content in parts.

    Raises `StatusError` for an item that a chat cannot have.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not value:
        raise invalid(field, f"{field} must not be empty")
    if len(value) > MAX_ITEMS:
        raise invalid(field, f"{field} takes at most {MAX_ITEMS} items")
    return [_item(f"{field}[{position}]", item) for position, item in enumerate(value)]


def turns_of(
    earlier: Sequence[Mapping[str, Any]],
    items: Sequence[Mapping[str, Any]],
    earlier_field: str = "previous_response_id",
) -> list[Turn]:
    """The conversation of earlier items, which the caller named in `earlier_field`, and the input.

    A compaction stands for the items before it, except for messages of the user, system and developer.
    """
    turns: list[Turn] = []
    thoughts: dict[int, list[str]] = {}  # of turns, by their numbers
    requests: dict[str, Mapping[str, Any]] = {}  # for approval, by their ids
    places = [*(earlier_field for _ in earlier), *(f"input[{i}]" for i in range(len(items)))]
    whole = [*earlier, *items]
    summaries = {i: text for i, item in enumerate(whole) if (text := _summary(places[i], item)) is not None}
    last_summary = max(summaries, default=-1)
    for position, (place, item) in enumerate(zip(places, whole, strict=True)):
        kind = item["type"]
        if kind == "mcp_approval_request":
            requests[item["id"]] = item
        if position < last_summary and not is_kept(item):
            continue
        if kind == "compaction":
            if position in summaries:
                turns.append(Turn(ChatMessage(role="user", content=SUMMARY + summaries[position]), place))
        elif kind in _LEFT_OUT:
            if why := _LEFT_OUT[kind]:
                ignored(f"input.{kind}", why)
        elif kind == APPROVAL:
            # A call that was approved is an item of its own.
            request = requests.get(item["approval_request_id"])
            if request is not None and not item["approve"]:
                last = _last_of_assistant(turns, place, joins=lambda last: True)
                last.tool_calls = [*(last.tool_calls or ()), _mcp_call(request)]
                reason = item.get("reason")
                denied = DENIED + (f" {reason}" if isinstance(reason, str) else "")
                turns.append(Turn(ChatMessage(role="tool", content=denied, tool_call_id=request["id"]), place))
        elif kind == "message" and item["role"] != "assistant":
            content = _content(f"{place}.content", item["content"])
            turns.append(Turn(ChatMessage(role=item["role"], content=content), place))
        elif kind == "message":
            last = _last_of_assistant(turns, place, joins=lambda last: last.content is None and not last.tool_calls)
            last.content = _content(f"{place}.content", item["content"])
        elif kind == "reasoning":
            texts = [part["text"] for part in item["content"] or item["summary"]]
            if texts:
                _last_of_assistant(turns, place, joins=lambda last: last.content is None and not last.tool_calls)
                thoughts.setdefault(len(turns) - 1, []).append("\n".join(texts))
        else:
            if kind in _CALLS:
                last = _last_of_assistant(turns, place, joins=lambda last: True)
                last.tool_calls = [*(last.tool_calls or ()), _CALLS[kind](item)]
            output = _OUTPUTS[kind](f"{place}.output", item) if kind in _OUTPUTS else None
            if output is not None:
                call_id = item.get("call_id") or (item["id"] if kind in _CALLS else None)
                turns.append(Turn(ChatMessage(role="tool", content=output, tool_call_id=call_id), place))
    for number, texts in thoughts.items():
        turns[number].message.reasoning_content = "".join(texts)
    return turns


def is_kept(item: Mapping[str, Any]) -> bool:
    """Whether the item still has an effect before a compaction."""
    return bool(item["type"] == "message" and item["role"] != "assistant")


def _summary(place: str, item: Mapping[str, Any]) -> str | None:
    """The summary of a compaction; None for other items, and if another server made it."""
    if item["type"] != "compaction":
        return None
    try:
        return COMPACTION.unsealed(f"{place}.encrypted_content", item["encrypted_content"])
    except StatusError:
        ignored("input.compaction", "only the server that made it can read it")
        return None


def _last_of_assistant(turns: list[Turn], place: str, joins: Callable[[ChatMessage], bool]) -> ChatMessage:
    """The assistant's turn at the end if the next item joins it, else a new one."""
    if turns and turns[-1].message.role == "assistant" and joins(turns[-1].message):
        return turns[-1].message
    message = ChatMessage(role="assistant")
    turns.append(Turn(message, place))
    return message


def _content(where: str, content: Any) -> str | list[dict[str, Any]]:
    """The content of a turn from checked parts: a text, or a list of parts if there are images. Those of outputs that
    are neither are notes. Raises `StatusError` for an image that cannot be one."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(content):
        kind = part["type"]
        if kind in _TEXTS:
            parts.append({"type": "text", "text": part[_TEXTS[kind]]})
        elif kind == IMAGE_PART:
            parts.append(part_of(image_of(f"{where}[{position}]", part), kind))
        else:
            parts.append({"type": "text", "text": note_of(kind, _PLACE)})
    if any(IMAGE in part for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


# --- calls and their outputs ----------------------------------------------------------------------------------------


def _function_call(item: Mapping[str, Any]) -> dict[str, Any]:
    return _call(item, CallName(item.get("namespace"), item["name"]).known, item["arguments"])


def _custom_call(item: Mapping[str, Any]) -> dict[str, Any]:
    custom = {"name": CallName(item.get("namespace"), item["name"]).known, "input": item["input"]}
    return {"id": item["call_id"], "type": "custom", "custom": custom}


def _hosted_call(name: str, *parts: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A call of a hosted tool. Its arguments are the object in its only part, or those of its parts that it has."""

    def call(item: Mapping[str, Any]) -> dict[str, Any]:
        if len(parts) == 1 and isinstance(item.get(parts[0]), dict):
            return _call(item, name, item[parts[0]])
        return _call(item, name, {part: item[part] for part in parts if item.get(part) is not None})

    return call


def _mcp_call(item: Mapping[str, Any]) -> dict[str, Any]:
    label = item.get("server_label")
    name = CallName(label if isinstance(label, str) else None, str(item.get("name"))).known
    return _call(item, name, item.get("arguments"))


def _call(item: Mapping[str, Any], name: str, arguments: Any) -> dict[str, Any]:
    call_id = item.get("call_id") or item["id"]
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_CALLS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _hosted_call("local_shell", "action"),
    "shell_call": _hosted_call("shell", "action"),
    "apply_patch_call": _hosted_call("apply_patch", "operation"),
    "tool_search_call": _hosted_call("tool_search", "arguments"),
    "computer_call": _hosted_call("computer", "action", "actions"),
    "code_interpreter_call": _hosted_call("code_interpreter", "code"),
    "file_search_call": _hosted_call("file_search", "queries"),
    "image_generation_call": _hosted_call("image_generation", "revised_prompt"),
    "program": _hosted_call("program", "code"),
    "mcp_call": _mcp_call,
}
"""Type of an item -> the call of a chat that it is."""


def _json_text(item: Mapping[str, Any], name: str) -> str:
    """The text of a part, which may be any JSON."""
    value = item.get(name)
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _output(name: str) -> Callable[[str, Mapping[str, Any]], str]:
    """The text of an output in this part."""
    return lambda where, item: _json_text(item, name)


def _screenshot(where: str, item: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """The screen that a computer tool shows, as far as the item has it."""
    shown = item.get("output")
    if not isinstance(shown, dict) or shown.get("image_url") is None:
        return note_of("computer_screenshot", _PLACE)
    return [part_of(image_of(where, {**shown, "detail": None}), "computer_screenshot")]


def _shell_output(where: str, item: Mapping[str, Any]) -> str:
    """The output of commands, and their exit statuses if they are not 0."""
    parts: list[str] = []
    outputs = item.get("output")
    if not isinstance(outputs, list):
        return _json_text(item, "output")
    for one in outputs:
        if not isinstance(one, dict):
            continue
        parts += [text for name in ("stdout", "stderr") if isinstance(text := one.get(name), str) and text]
        outcome = one.get("outcome")
        if isinstance(outcome, dict) and (outcome.get("exit_code") or outcome.get("type") != "exit"):
            parts.append(json.dumps(outcome, ensure_ascii=False))
    return "\n".join(parts)


def _patch_output(where: str, item: Mapping[str, Any]) -> str:
    return _json_text(item, "output") or _json_text(item, "status")


def _mcp_output(where: str, item: Mapping[str, Any]) -> str:
    return _json_text(item, "output") or _json_text(item, "error")


def _found_tools(where: str, item: Mapping[str, Any]) -> str:
    """The names of the tools that a search found, which are offered from then on."""
    tools = item.get("tools")
    names = [tool.get("name") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return "tools: " + ", ".join(name for name in names if isinstance(name, str))


def _logs(where: str, item: Mapping[str, Any]) -> str | None:
    """The output of code; None if the item does not have it."""
    outputs = item.get("outputs")
    if not isinstance(outputs, list):
        return None
    texts = []
    for one in outputs:
        if isinstance(one, dict):
            logs = one.get("logs")
            texts.append(logs if isinstance(logs, str) else note_of(str(one.get("type")), _PLACE))
    return "\n".join(texts)


def _found_texts(where: str, item: Mapping[str, Any]) -> str | None:
    """The texts that a search in files found; None if the item does not have them."""
    results = item.get("results")
    if not isinstance(results, list):
        return None
    return "\n\n".join(
        f"{one.get('filename') or ''}\n{one['text']}".strip()
        for one in results
        if isinstance(one, dict) and isinstance(one.get("text"), str)
    )


_OUTPUTS: Mapping[str, Callable[[str, Mapping[str, Any]], str | list[dict[str, Any]] | None]] = {
    "function_call_output": lambda where, item: _content(where, item["output"]),
    "custom_tool_call_output": lambda where, item: _content(where, item["output"]),
    "local_shell_call_output": _output("output"),
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
    "tool_search_output": _found_tools,
    "computer_call_output": _screenshot,
    "program_output": _output("result"),
    # These calls have their outputs in themselves.
    "code_interpreter_call": _logs,
    "file_search_call": _found_texts,
    "image_generation_call": lambda where, item: note_of("image", _PLACE),
    "mcp_call": _mcp_output,
}
"""Type of an item -> the text of the output that it is or has."""


# --- checking -------------------------------------------------------------------------------------------------------


def _item(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        return _message(where, item)
    if kind == "reasoning":
        return _reasoning(where, item)
    if kind in _COMPACTIONS:
        sealed = text_in(where, item, "encrypted_content")
        return {"id": _id(where, item, "cmp"), "type": "compaction", "encrypted_content": sealed}
    if kind in ("function_call", "custom_tool_call"):
        text = "arguments" if kind == "function_call" else "input"
        call = {name: text_in(where, item, name) for name in ("call_id", "name", text)}
        if isinstance(item.get("namespace"), str):
            call["namespace"] = item["namespace"]
        prefix = "fc" if kind == "function_call" else "ctc"
        return {"id": _id(where, item, prefix), "type": kind, "status": "completed", **call}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        return {
            "id": _id(where, item, "fco" if kind == "function_call_output" else "ctco"),
            "type": kind,
            "status": "completed",
            "call_id": text_in(where, item, "call_id"),
            "output": output or "" if output is None or isinstance(output, str) else _output_parts(where, output),
        }
    if kind == APPROVAL:
        text_in(where, item, "approval_request_id")
        if not isinstance(item.get("approve"), bool):
            raise invalid(f"{where}.approve", f"{where}.approve must be true or false")
        return {**item, "id": _id(where, item, "mcpa")}
    if isinstance(kind, str) and (kind in _CALLS or kind in _OUTPUTS or kind in _LEFT_OUT):
        # Of the provider's own items only texts are read, each if it is there.
        optional_text_in(where, item, "call_id")
        return {**item, "id": _id(where, item, "item"), "type": kind}
    if not isinstance(kind, str):
        raise invalid(f"{where}.type", f"{where}.type must be a text")
    raise unsupported(f"{where}.type", f"{where}.type: {kind[:MAX_ECHO_CHARS]} is not supported")


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    parts = _parts(f"{where}.content", item.get("content"), kind)
    return {
        "id": _id(where, item, "msg"),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": parts,
    }


def _parts(where: str, content: Any, kind: str) -> list[dict[str, Any]]:
    """Content in parts; a text becomes one part of this kind. In turns of the assistant, parts that a chat cannot have
    are left out."""
    if content is None:
        content = []
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise invalid(where, f"{where} must be a text or a list of parts")
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(content):
        place = f"{where}[{position}]"
        kind_of_part = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind_of_part, str):
            raise invalid(f"{place}.type", f"{place}.type must be a text")
        if kind_of_part in _TEXTS:
            parts.append(_text_part(place, part))
        elif kind_of_part == IMAGE_PART and kind != "output_text":
            image_of(place, part)
            url, detail = _url_and_detail(part)
            parts.append({**part, "image_url": url, "detail": detail or "auto"})
        elif kind == "output_text":
            why = "the model cannot read such a part of its own earlier turns"
            ignored(f"input.content.{kind_of_part}", why, is_known=False)
        else:
            found = f"{place}.type: {kind_of_part[:MAX_ECHO_CHARS]} is not supported"
            remedy = remedy_for(kind_of_part)
            known = "only input_text, input_image, output_text and refusal are"
            raise unsupported(f"{place}.type", f"{found}: {remedy}" if remedy else f"{found}; {known}")
    return parts


def image_of(place: str, part: Mapping[str, Any]) -> GivenImage:
    """The image of a part. Raises `StatusError`."""
    refuse_file(place, part)
    url, detail = _url_and_detail(part)
    return image_of_url(f"{place}.image_url", url, detail_of(f"{place}.detail", detail))


def _url_and_detail(part: Mapping[str, Any]) -> tuple[Any, Any]:
    given, detail = part.get("image_url"), part.get("detail")
    if not isinstance(given, dict):
        return given, detail
    return given.get("url"), given.get("detail") if detail is None else detail  # as chats have it


def _text_part(place: str, part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    name = _TEXTS[kind]
    text = optional_text_in(place, part, name)
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, name: text or "", **more}


def _output_parts(where: str, output: Any) -> list[dict[str, Any]]:
    """The parts of an output. Images and files are kept as they are."""
    if not isinstance(output, list):
        raise invalid(f"{where}.output", f"{where}.output must be a text or a list of parts")
    parts = []
    for position, part in enumerate(output):
        place = f"{where}.output[{position}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(f"{place}.type", f"{place}.type must be a text")
        parts.append(_text_part(place, part) if part["type"] in _TEXTS else part)
    return parts


def _reasoning(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """An item of reasoning, with its texts if this server can read them."""
    content = item.get("content")
    encrypted = item.get("encrypted_content")
    texts = _thoughts(f"{where}.content", content)
    if not texts and encrypted is not None:
        try:
            texts = [{"type": "reasoning_text", "text": REASONING.unsealed(f"{where}.encrypted_content", encrypted)}]
        except StatusError:
            ignored("input.reasoning.encrypted_content", "only the server that made it can read it")
    summary = _thoughts(f"{where}.summary", item.get("summary"))
    return {
        "id": _id(where, item, "rs"),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": part["text"]} for part in summary],
        "content": [{"type": "reasoning_text", "text": part["text"]} for part in texts],
    }


def _thoughts(where: str, value: Any) -> list[Mapping[str, Any]]:
    """The parts of a list that have text."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(where, f"{where} must be a list of parts")
    found: list[Mapping[str, Any]] = []
    for position, part in enumerate(value):
        if not isinstance(part, dict):
            raise invalid(f"{where}[{position}]", f"{where}[{position}] must be a part with a text")
        if isinstance(part.get("text"), str):
            found.append(part)
        else:
            ignored(f"input.reasoning.{part.get('type')}", "it has no text", is_known=False)
    return found


def _id(where: str, item: Mapping[str, Any], kind: str) -> str:
    value = item.get("id")
    if value is None:
        return new_id(kind)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ECHO_CHARS * 2:
        raise invalid(f"{where}.id", f"{where}.id must be a text of 1 to {MAX_ECHO_CHARS * 2} characters")
    return value
