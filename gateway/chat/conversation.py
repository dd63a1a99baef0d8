"""The messages of a chat, in the shape that the model's template takes (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.gateway.chat.billing import without_billing
from headrace.gateway.chat.output_parsers.output import CUSTOM_INPUT
from headrace.gateway.chat.plain_tools import as_text, takes_tools, with_block
from headrace.gateway.chat.prompts import Conversation
from headrace.gateway.chat.request import Chat, ChatMessage, Tokenization
from headrace.gateway.chat.tools import ToolUse, tool_use_of
from headrace.gateway.checks import MAX_ECHO_CHARS, invalid, json_of, optional_text_in, unsupported
from headrace.gateway.hints import ignored
from headrace.gateway.images.given import IMAGE, GivenImage
from headrace.gateway.images.refusal import ImageRefusal, Why, remedy_for
from headrace.gateway.text.chat_template import Arguments, ChatTemplate, RawArguments
from headrace.gateway.text.content import Content, ImagePlace, content_of, images_in
from headrace.protos.status import Reason, StatusError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Variables that turn reasoning on and off in templates without an effort.
_SWITCHES = ("enable_thinking", "thinking")
# The types of parts of text, in chats and in the Responses API, whose parts some clients send to both.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Parts of reasoning in turns of the assistant, and their text.
_THOUGHTS = {"thinking": "thinking", "reasoning": "text", "reasoning_text": "text"}
_IMAGE_BEHIND = "[image: in the next message]"
# Templates with this token write the id of a call in place of its name.
_KIMI = "<|tool_call_argument_begin|>"


@dataclass(frozen=True, slots=True)
class Reader:
    """The inputs other than text that a model reads."""

    placeholder: str = ""
    """What its template writes for an image; empty if it reads no images."""
    why_no_images: str = "the model reads text only"
    """The refusal of an image, with a remedy."""


def conversation_of(
    request: Chat | Tokenization,
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]] = (),
    reasons: bool = False,
    reader: Reader | None = None,
) -> Conversation:
    """The conversation of a request, in the shape that this template takes. Raises `StatusError`.

    `reasons`: whether the model's format of reasoning is known. `reader`: inputs other than text that the model reads;
    by default none.
    """
    reader = reader or Reader()
    if not request.messages:
        raise invalid("messages", "messages must not be empty")
    goes_on = bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    variables = dict(request.chat_template_kwargs or {})
    _check_documents(variables.get("documents"))
    template = template.chosen(tools=bool(tools), documents=bool(variables.get("documents")))
    if isinstance(request, Chat) and request.reasoning_effort is not None:
        variables = {**_effort(request.reasoning_effort, template, reasons), **variables}
    if isinstance(request, Chat) and request.verbosity is not None and template.uses("verbosity"):
        variables = {"verbosity": request.verbosity, **variables}
    images: list[tuple[str, GivenImage]] = []
    messages = [_template_message(i, message, template, reader, images) for i, message in enumerate(request.messages)]
    messages = without_billing(messages)
    _pair_results(messages)
    if template.mentions(_KIMI):
        _number_calls(messages)
    lists_tools = takes_tools(template)
    if not template.mentions("tool_calls") or (tools and not lists_tools):
        messages = as_text(messages)
    if tools and not lists_tools:
        messages, tools = with_block(messages, tools, template), ()
    elif tools and not template.uses("tools"):
        messages = _with_tools(messages, tools)
    if images and not template.places_images("tool", reader.placeholder):
        messages = _with_images_of_tools_behind(messages)
    return Conversation(
        messages=messages,
        tools=tools,
        add_generation_prompt=not goes_on and request.add_generation_prompt is not False,
        continue_final_message=goes_on,
        variables=variables,
        add_special_tokens=template.takes_one_text
        if request.add_special_tokens is None
        else request.add_special_tokens,
        template=template,
        images=images,
    )


def conversation_with_tools(
    request: Chat, template: ChatTemplate, reasons: bool, reader: Reader
) -> tuple[Conversation, ToolUse]:
    """The conversation of a chat, and its tools. A model whose template takes one call at a time gets no parallel
    calls. `reasons` and `reader` are as for `conversation_of`. Raises `StatusError`."""
    use = tool_use_of(request)
    if use.listed and template.chosen(tools=True).takes_one_call:
        use = replace(use, parallel=False)
    return conversation_of(request, template, use.listed, reasons, reader), use


def _check_documents(documents: object) -> None:
    """Raise `StatusError` for documents that no template could read."""
    if documents is None or (isinstance(documents, list) and all(isinstance(one, dict) for one in documents)):
        return
    raise invalid("chat_template_kwargs", "chat_template_kwargs.documents must be a list of objects")


def can_switch_reasoning(template: ChatTemplate) -> bool:
    """Whether a template reads any variable for the effort of reasoning."""
    return any(template.uses(name) for name in ("reasoning_effort", *_SWITCHES))


def _effort(effort: str, template: ChatTemplate, reasons: bool) -> dict[str, Any]:
    """The template's variables for an effort. One that changes nothing is a hint."""
    if effort not in EFFORTS:
        raise invalid("reasoning_effort", f"reasoning_effort must be one of {', '.join(sorted(EFFORTS))}")
    if template.uses("reasoning_effort"):
        return {"reasoning_effort": effort}
    for switch in _SWITCHES:
        if template.uses(switch):
            return {switch: effort != "none"}
    if effort == "none":
        if reasons:
            problem = "reasoning_effort is not supported: the model always reasons; leave it out"
            raise unsupported("reasoning_effort", problem)
    else:
        why = "reasons in one way only" if reasons else "does not reason"
        ignored("reasoning_effort", f"the model {why}")
    return {}


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools in the system message, where templates such as that of Phi 4 mini expect them."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**messages[0], "tools": functions}, *messages[1:]]


def _template_message(
    position: int,
    message: ChatMessage,
    template: ChatTemplate,
    reader: Reader,
    images: list[tuple[str, GivenImage]],
) -> dict[str, Any]:
    """A message as templates expect it. Earlier turns are history, not a request, so their parts that cannot be shown
    are left out and named as hints. The message's images are added to `images`."""
    where = f"messages[{position}]"
    role = message.role
    if role not in ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(sorted(ROLES))}")
    if role == "developer" and not template.mentions("developer"):
        role = "system"
    elif role == "function":
        role = "tool"
    calls = [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        calls.append(_tool_call(f"{where}.function_call", {"function": message.function_call}))
    if message.audio is not None:
        ignored("messages.audio", "the model hears no audio, so that only the text of the turn is in the prompt")
    content, thoughts = _content_of(where, role, message.content, reader, images)
    if not content and message.refusal:
        content = message.refusal
    values: dict[str, Any] = {"role": role, "content": content}
    if message.content is None and calls and not content and template.mentions("is not none"):
        values["content"] = None
    given = (message.reasoning_content, message.reasoning, message.thinking, thoughts)
    reasoning = next((text for text in given if isinstance(text, str)), None)
    others = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    values |= {name: value for name, value in others.items() if value is not None}
    if reasoning and not template.mentions("reasoning_content") and template.mentions(".thinking"):
        values["thinking"] = reasoning
    if calls:
        values["tool_calls"] = calls
    return values


def _pair_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give calls without an id one, and results without one that of the call that they belong to: the first open call
    of their name, else the first one."""
    open_calls: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        if message["role"] != "tool":
            open_calls = message.get("tool_calls", [])[:]
            for number, call in enumerate(open_calls):
                # Nine letters and digits are an id for the templates of all families.
                if call.get("id") is None:
                    call["id"] = f"c{position % 10**5:05d}{number % 10**3:03d}"
            continue
        call_id, name = message.get("tool_call_id"), message.get("name")
        found = next((call for call in open_calls if call["id"] == call_id), None)
        if found is None and call_id is None and open_calls:
            of_name = (call for call in open_calls if call["function"]["name"] == name)
            found = next(of_name, open_calls[0])
            message["tool_call_id"] = found["id"]
        if found is not None:
            open_calls.remove(found)


def _number_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Give all calls the ids that Kimi's models write themselves, `functions.NAME:0` and so on through the
    conversation, and results those of their calls. With other ids, such as this server's, the model would not read
    which function was called."""
    number = 0
    ids: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            ids[call["id"]] = call["id"] = f"functions.{call['function']['name']}:{number}"
            number += 1
        if message.get("tool_call_id") in ids:
            message["tool_call_id"] = ids[message["tool_call_id"]]


def _content_of(
    where: str,
    role: str,
    content: str | list[dict[str, Any]] | None,
    reader: Reader,
    images: list[tuple[str, GivenImage]],
) -> tuple[Content, str | None]:
    """The content of a message, and its reasoning if there are such parts: neighbouring parts of text are joined by
    line breaks."""
    if content is None or isinstance(content, str):
        return content or "", None
    pieces: list[str | ImagePlace] = []
    thoughts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type")
        name = f"{where}.content[{i}]"
        if isinstance(kind, str) and kind in _TEXTS:
            pieces.append(optional_text_in(name, part, _TEXTS[kind]) or "")
        elif role == "assistant" and isinstance(kind, str):
            thought = part.get(_THOUGHTS.get(kind, ""))
            if isinstance(thought, str):
                thoughts.append(thought)
            else:
                why = "the model cannot read such a part of its own earlier turns"
                ignored(f"messages.content.{kind}", why, is_known=False)
        elif isinstance(image := part.get(IMAGE), GivenImage) and reader.placeholder:
            pieces.append(ImagePlace(len(images)))
            images.append((name, image))
        elif role == "tool" and isinstance(kind, str):
            pieces.append(note_of(kind))
        elif isinstance(image, GivenImage):
            raise ImageRefusal(Why.TEXT_MODEL, name, f"{name}: {reader.why_no_images}", Reason.UNSUPPORTED)
        else:
            problem = "only parts of type text and image_url are supported"
            if isinstance(kind, str) and (remedy := remedy_for(kind)):
                problem = f"a part of type {kind[:MAX_ECHO_CHARS]} is not supported: {remedy}"
            raise unsupported(f"{name}.type", f"{name}: {problem}")
    return content_of(pieces, "\n"), "\n".join(thoughts) if thoughts else None


def note_of(kind: str, place: str = "messages.content") -> str:
    """The note that replaces a part of a tool's result that the model cannot read, such as `input_audio`."""
    ignored(f"{place}.{kind}", "the model cannot read it, and finds a note in place of it", is_known=False)
    what = kind.removeprefix("input_").removesuffix("_url")[:MAX_ECHO_CHARS]
    return f"[{what}: omitted, because this model cannot read it]"


def _with_images_of_tools_behind(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the images of tool results moved to a user turn after the results, for templates that have no
    place for images in a result."""
    found: list[dict[str, Any]] = []
    waiting: list[ImagePlace] = []
    for message in messages:
        if waiting and message["role"] != "tool":
            found.append({"role": "user", "content": waiting})
            waiting = []
        held = images_in(message["content"]) if message["role"] == "tool" else ()
        if not held:
            found.append(dict(message))
            continue
        waiting = [*waiting, *held]
        words = [piece if isinstance(piece, str) else _IMAGE_BEHIND for piece in message["content"]]
        found.append({**message, "content": "\n".join(words)})
    return [*found, {"role": "user", "content": waiting}] if waiting else found


def _tool_call(where: str, call: dict[str, Any]) -> dict[str, Any]:
    """A tool call as templates expect it: a function, with the arguments as an object, not as JSON text."""
    kind = call.get("type") or "function"
    if kind not in ("function", "custom"):
        raise unsupported(f"{where}.type", f"{where}.type may only be function or custom")
    function = call.get(kind)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}.{kind}", f"{where}.{kind} needs a name and arguments")
    call_id = optional_text_in(where, call, "id")
    if kind == "custom":
        function = {"name": function["name"], "arguments": Arguments({CUSTOM_INPUT: function.get("input") or ""})}
        return {"id": call_id, "type": "function", "function": function}
    return {**call, "type": "function", "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(value: Any) -> Arguments:
    """The arguments of an earlier tool call, for the chat template. A model may have written text that is not a JSON
    object; such text becomes `RawArguments`."""
    if isinstance(value, dict):
        return Arguments(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not text.strip():
        return Arguments()
    try:
        read = json_of("arguments", text)
    except StatusError:
        return RawArguments.of(text)
    if read is None:
        return Arguments()
    return Arguments(read) if isinstance(read, dict) else RawArguments.of(text)
