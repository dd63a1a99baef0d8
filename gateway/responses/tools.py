"""The tools of a response, as the tools of a chat (pure).

    function, custom                    ->  the same of a chat
    namespace of these                  ->  each with the name NAMESPACE__NAME; their calls have both names again
    mcp                                 ->  the tools of the server, each with the name LABEL__NAME (`mcp_tools`)
    hosted tools, such as web_search    ->  left out and named as hints, if the model has others

Tools that the conversation brings later (`additional_tools`, `tool_search_output`) follow those of the request, so that
the prompt before them stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.gateway.checks import MAX_ECHO_CHARS, invalid, text_in, unsupported
from headrace.gateway.hints import ignored
from headrace.gateway.mcp.values import McpTool

HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
)
"""Types of tools that the provider's servers run, or whose calls only its models are trained for. Their versions have a
suffix, such as `web_search_2025_08_26`."""
MCP = "mcp"
_KINDS = ("function", "custom")
_KNOWN = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description"),
}
_BRINGS_TOOLS = ("additional_tools", "tool_search_output")


@dataclass(frozen=True, slots=True)
class CallName:
    """The name of a tool as the caller wrote it."""

    namespace: str | None
    name: str

    @property
    def known(self) -> str:
        """The name that the model knows."""
        if self.namespace is None:
            return self.name
        return f"{self.namespace.removesuffix('__')}__{self.name}"


@dataclass(slots=True)
class Offer:
    """The tools of a response."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    """As a chat has them."""
    places: list[str] = field(default_factory=list)
    """Where the caller wrote each of them."""
    choice: str | dict[str, Any] | None = None
    """As a chat has it."""
    names: dict[str, CallName] = field(default_factory=dict)
    """By the names that the model knows, and may guess."""

    @property
    def after_a_call(self) -> Offer:
        """The same offer after the model has made a required call: from now on it may answer."""
        choice = self.choice
        if isinstance(choice, dict) and choice["type"] == "allowed_tools":
            choice = {**choice, "allowed_tools": {**choice["allowed_tools"], "mode": "auto"}}
        elif choice != "none":
            choice = None
        return replace(self, choice=choice)

    def without(self, names: Collection[CallName]) -> Offer:
        """The same offer without tools that must not be called any more, and without a tool choice."""
        kept = [i for i, tool in enumerate(self.tools) if self.names[_name_of(tool)] not in names]
        return Offer([self.tools[i] for i in kept], [self.places[i] for i in kept], names=self.names)


def offer_of(
    tools: Sequence[Mapping[str, Any]],
    items: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    listed: Mapping[str, Sequence[McpTool]] | None = None,
) -> Offer:
    """The tools of a request and of the items of its conversation. `listed` are those of MCP servers, by label. Raises
    `StatusError` for a tool that nobody has, for a choice that needs a hosted tool, and if there are only hosted
    ones."""
    offer = Offer()
    left_out: list[tuple[str, str]] = []  # places of types, and types
    for position, tool in enumerate(tools):
        if tool.get("type") == MCP:
            _add_listed(offer, f"tools[{position}]", tool, listed or {})
        else:
            _add(offer, left_out, f"tools[{position}]", tool)
    for position, item in enumerate(items):
        brought = item.get("tools") if item["type"] in _BRINGS_TOOLS else None
        for number, tool in enumerate(brought if isinstance(brought, list) else ()):
            if isinstance(tool, dict):
                _add(offer, left_out, f"input[{position}].tools[{number}]", tool, skips_known=True)
    if left_out and not offer.tools and choice != "none":
        where, kind = left_out[0]
        raise unsupported(where, f"{where}: there is no built-in '{kind}' here; offer a function for it")
    for _, kind in left_out:
        why = "the server runs no hosted tools, so that the model does not get this one"
        ignored(f"tools.{kind}", why, is_known=False)
    for name in [*offer.names.values()]:
        # Models may leave out the namespace.
        if name.namespace is not None:
            offer.names.setdefault(name.name, name)
    offer.choice = _choice(choice, offer)
    return offer


def _add_listed(offer: Offer, where: str, server: Mapping[str, Any], listed: Mapping[str, Sequence[McpTool]]) -> None:
    """Add the tools of an MCP server. The first one also gets the caller's description of the server."""
    label = str(server.get("server_label"))
    about = server.get("server_description")
    for position, tool in enumerate(listed.get(label, ())):
        description = tool.description
        if position == 0 and isinstance(about, str) and about:
            description = f"{label}: {about}" + (f"\n\n{description}" if description else "")
        own = {"type": "function", "name": tool.name, "description": description, "parameters": tool.input_schema}
        _add_own(offer, where, CallName(label, tool.name), own, skips_known=False)


def _add(
    offer: Offer, left_out: list[tuple[str, str]], where: str, tool: Mapping[str, Any], *, skips_known: bool = False
) -> None:
    kind = tool.get("type")
    if kind == "namespace":
        for place, name, own in _in_namespace(where, tool):
            _add_own(offer, place, CallName(name, str(own.get("name"))), own, skips_known)
    elif kind in _KINDS:
        _add_own(offer, where, CallName(None, str(tool.get("name"))), tool, skips_known)
    elif isinstance(kind, str) and (kind == MCP or is_hosted(kind)):
        left_out.append((f"{where}.type", kind[:MAX_ECHO_CHARS]))
    elif isinstance(kind, str):
        known = ", ".join((*_KINDS, "namespace", MCP, *HOSTED))
        raise invalid(f"{where}.type", f"{where}.type must be one of {known}")
    else:
        raise invalid(f"{where}.type", f"{where}.type must be a text")


def is_hosted(kind: str) -> bool:
    """Whether this type of tools is hosted by the provider, in any version."""
    return any(kind == hosted or kind.startswith(f"{hosted}_") for hosted in HOSTED)


def _in_namespace(where: str, namespace: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The tools of a namespace, with their places and its name. The first one has its description."""
    name = text_in(where, namespace, "name")
    tools = namespace.get("tools")
    if not isinstance(tools, list):
        raise invalid(f"{where}.tools", f"{where}.tools must be a list")
    description = namespace.get("description")
    for position, tool in enumerate(tools):
        place = f"{where}.tools[{position}]"
        if not isinstance(tool, dict) or tool.get("type") not in _KINDS:
            raise invalid(f"{place}.type", f"{place}.type must be function or custom")
        if position == 0 and isinstance(description, str) and description:
            own = tool.get("description")
            tool = {**tool, "description": f"{name}: {description}" + (f"\n\n{own}" if own else "")}
        yield place, name, tool


def _add_own(offer: Offer, place: str, name: CallName, tool: Mapping[str, Any], skips_known: bool) -> None:
    if skips_known and name.known in offer.names:
        return
    text_in(place, tool, "name")
    if tool.get("defer_loading"):
        ignored("tools.defer_loading", "there is no hosted search for tools, so that all tools are in the prompt")
    kind = tool["type"]
    value = {part: tool[part] for part in _KNOWN[kind] if tool.get(part) is not None}
    value["name"] = name.known
    form = tool.get("format")
    if kind == "custom" and form is not None:
        value["format"] = _format(f"{place}.format", form)
    offer.tools.append({"type": kind, kind: value})
    offer.places.append(place)
    offer.names[name.known] = name


def _format(where: str, form: Any) -> dict[str, Any]:
    if not isinstance(form, dict):
        raise invalid(where, f"{where} must be an object")
    if form.get("type") != "grammar":
        return form
    return {"type": "grammar", "grammar": {part: form[part] for part in ("syntax", "definition") if part in form}}


# --- the choice -----------------------------------------------------------------------------------------------------


def _choice(choice: str | Mapping[str, Any] | None, offer: Offer) -> str | dict[str, Any] | None:
    """The tool choice of the chat."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(choice, offer)
    if kind in _KINDS:
        return _named("tool_choice", choice, offer)
    if kind == MCP:
        tools = _of_server("tool_choice", choice, offer)
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    if isinstance(kind, str) and is_hosted(kind):
        echo = kind[:MAX_ECHO_CHARS]
        raise unsupported("tool_choice", f"tool_choice: there is no built-in '{echo}' here; offer a function for it")
    raise invalid("tool_choice", "tool_choice must be none, auto, required, allowed_tools, or name a tool")


def _named(where: str, choice: Mapping[str, Any], offer: Offer) -> dict[str, Any]:
    name = choice.get("name")
    namespace = choice.get("namespace")
    if not isinstance(name, str):
        raise invalid(f"{where}.name", f'{where} must be like {{"type": "function", "name": ...}}')
    known = CallName(namespace if isinstance(namespace, str) else None, name).known
    if known in offer.names:
        known = offer.names[known].known
    return {"type": choice["type"], choice["type"]: {"name": known}}


def _allowed(choice: Mapping[str, Any], offer: Offer) -> dict[str, Any]:
    where = "tool_choice.tools"
    tools = choice.get("tools")
    if not isinstance(tools, list):
        raise invalid(where, f"{where} must be a list of tools")
    allowed = []
    for position, tool in enumerate(tools):
        place = f"{where}[{position}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise invalid(place, f"{place} must name one of the tools")
        if kind in _KINDS:
            allowed.append(_named(place, tool, offer))
        elif kind == "namespace":
            of_it = [one for one in offer.tools if offer.names[_name_of(one)].namespace == tool.get("name")]
            allowed += [{"type": one["type"], one["type"]: {"name": _name_of(one)}} for one in of_it]
        elif kind == MCP:
            allowed += _of_server(place, tool, offer)
        elif not is_hosted(kind):
            raise invalid(place, f"{place} must name one of the tools")
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": allowed}}


def _of_server(where: str, choice: Mapping[str, Any], offer: Offer) -> list[dict[str, Any]]:
    """The tool of an MCP server that a choice names, or all of the server."""
    label, name = choice.get("server_label"), choice.get("name")
    of_it = [
        own
        for own in map(_name_of, offer.tools)
        if offer.names[own].namespace == label and name in (None, offer.names[own].name)
    ]
    if not of_it:
        raise invalid(
            where, f"{where} must name a server_label of an MCP server in tools, and a name only of its tools"
        )
    return [{"type": "function", "function": {"name": own}} for own in of_it]


def _name_of(tool: Mapping[str, Any]) -> str:
    return str(tool[tool["type"]]["name"])
