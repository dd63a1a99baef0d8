"""Formats a conversation as text with the model's Jinja template, compatible with Hugging Face's chat templates.

Templates run in an immutable sandbox with `trim_blocks` and `lstrip_blocks`, loop controls, `{% generation %}` blocks,
`raise_exception(text)`, `strftime_now(format)` and a `tojson` that does not escape HTML. Their variables are
`messages`, `tools`, `documents`, `add_generation_prompt`, the texts of the special tokens, and the variables that the
caller passes. (https://huggingface.co/docs/transformers/chat_templating)
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.gateway.text.content import Content, ImagePlace, image_numbers, parts_of
from headrace.gateway.text.control_text import Marking
from headrace.gateway.text.turns import Shape, shapes_of, skeleton_of, traits_of
from headrace.gateway.upstream.bundle import BundleError
from headrace.protos.status import Reason, StatusError

MAX_TEXT_CHARS = 16 * 1024 * 1024
MAX_RENDER_S = 5.0
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})
_NAMED = ("tool_use", "rag")
_NAME = re.compile(r"[\w.-]{1,64}")
_MAX_SHAPES = 512
# Methods and filters whose first argument is looked for in a text.
_SEARCHES = frozenset(
    (
        *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "rindex"),
        *("count", "replace", "removeprefix", "removesuffix"),
    )
)
_CHANGES_OF_CASE = frozenset(("upper", "lower", "title", "capitalize", "swapcase", "casefold"))
_LOG = logging.getLogger(__name__)


class TemplateRefusal(StatusError):
    """A template raised an error, which may have to do with the shape of the conversation."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    images: Sequence[int]
    """The numbers of its images, in the order in which the template got them."""


class Arguments(dict[str, Any]):
    """Arguments of a tool call in a conversation: an object that becomes JSON if a template inserts it into text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class RawArguments(Arguments):
    """Arguments that are not a JSON object, such as those of an answer that was cut off.

    A template that inserts them as text gets the text that the model wrote. A template that reads an object finds this
    text under the key `arguments`.
    """

    @classmethod
    def of(cls, text: str) -> RawArguments:
        """The arguments in a text."""
        return cls({"arguments": text})

    def __str__(self) -> str:
        return str(next(iter(self.values())))


def read_templates(values: Iterable[str]) -> dict[str, str]:
    """The sources of templates by name, from the values NAME=FILE of a flag. Raises `ValueError` with a sentence."""
    found: dict[str, str] = {}
    for value in values:
        name, _, path = value.partition("=")
        if _NAME.fullmatch(name) is None or not path:
            raise ValueError(f"'{value[:100]}' must be NAME=FILE, with letters, digits, '.', '_' and '-' in the name")
        if name in found:
            raise ValueError(f"there are two templates named '{name}'")
        try:
            found[name] = Path(path).read_text(encoding="utf-8")
            ChatTemplate({"default": found[name]}, {})
        except (OSError, UnicodeDecodeError, BundleError) as error:
            raise ValueError(f"the chat template '{name}' cannot be used: {error}") from error
    return found


class ChatTemplate:
    """The template of one model, compiled."""

    takes_one_text = False
    """Whether the model has no template of its own; see `NoTemplate`."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile the source named `default`, or the only one. Raises `BundleError` if that cannot be done.

        Templates named `tool_use` and `rag` are for conversations with tools and with documents.
        """
        if "default" in sources:
            self._source = sources["default"]
        elif len(sources) == 1:
            (self._source,) = sources.values()
        else:
            raise BundleError(f"none of the {len(sources)} chat templates is named 'default'")
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(self._source)
            parsed = self._environment.parse(self._source)
            self._variables = jinja2.meta.find_undeclared_variables(parsed)
        except (jinja2.TemplateError, RecursionError) as error:
            raise BundleError(f"the chat template is not valid Jinja: {error}") from error
        self.looks_for = frozenset(str(constant.value) for constant in _looked_for(parsed))
        """Texts that the template looks for in what callers write."""
        self.changes_case = _changes_case(parsed)
        """Whether the template may change the case of letters."""
        self._special_tokens = dict(special_tokens)
        self._marked_templates: dict[str, jinja2.Template] = {}
        self._shapes: dict[Hashable, Shape] = {}
        self._places_images: dict[tuple[str, str], bool] = {}
        self._named: dict[str, ChatTemplate] = {}
        for name in _NAMED:
            if sources.get(name, self._source) != self._source:
                try:
                    self._named[name] = ChatTemplate({"default": sources[name]}, special_tokens)
                except BundleError as error:
                    _LOG.warning("the chat template named %s is not used: %s", name, error)

    def chosen(self, *, tools: bool = False, documents: bool = False) -> ChatTemplate:
        """The template for a conversation with these: the one named for it, if there is one."""
        for name, wanted in zip(_NAMED, (tools, documents), strict=True):
            if wanted and name in self._named:
                return self._named[name]
        return self

    @property
    def all(self) -> Sequence[ChatTemplate]:
        """This template and the named ones."""
        return [self, *self._named.values()]

    @property
    def source(self) -> str:
        """The template's source."""
        return self._source

    def uses(self, variable: str) -> bool:
        """Whether the template reads this variable."""
        return variable in self._variables

    def mentions(self, word: str) -> bool:
        """Whether the word occurs anywhere in the template's source."""
        return word in self._source

    @functools.cached_property
    def shows_system(self) -> bool:
        """Whether the text contains a system message that precedes a user's message."""
        marker = "[system-message]"
        messages = [{"role": "system", "content": marker}, {"role": "user", "content": "hi"}]
        return self._shows(self._in_form(messages), marker)

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether the content of messages must be a list of parts. Templates of some multimodal models omit texts that
        are not in a list."""
        if not self.mentions("type"):
            return False
        marker = "[content]"
        contents = (marker, [{"type": "text", "text": marker}])
        shows_text, shows_part = (self._shows([{"role": "user", "content": content}], marker) for content in contents)
        return shows_part and not shows_text

    @functools.cached_property
    def takes_one_call(self) -> bool:
        """Whether the template takes a turn with one tool call, but refuses two in one."""
        if not self.mentions("tool_calls"):
            return False
        names = [f"call{number}" for number in range(2)]
        calls = [
            {"id": f"{name:0>9}", "type": "function", "function": {"name": name, "arguments": {"a": "b"}}}
            for name in names
        ]
        results: list[dict[str, Any]] = [
            {"role": "tool", "name": name, "tool_call_id": f"{name:0>9}", "content": "c"} for name in names
        ]

        def accepts(number: int) -> bool:
            called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls[:number]}
            return self._accepts([{"role": "user", "content": "hi"}, called, *results[:number]])

        return accepts(1) and not accepts(2)

    def places_images(self, role: str, placeholder: str) -> bool:
        """Whether the template writes a placeholder for an image in a message of this role."""
        key = role, placeholder
        if key not in self._places_images:
            content: Content = ["a", ImagePlace(0)]
            messages: list[dict[str, Any]] = [{"role": role, "content": content}]
            if role == "tool":
                call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
                called = {"role": "assistant", "content": "", "tool_calls": [call]}
                messages[0] |= {"name": "f", "tool_call_id": "call00000"}
                messages = [{"role": "user", "content": "hi"}, called, *messages]
            elif role != "user":
                messages.append({"role": "user", "content": "hi"})
            try:
                text = self._text_of(self._in_form(messages), {}, (), add_generation_prompt=True)
            except StatusError:
                text = ""
            self._places_images[key] = text.count(placeholder) == 1
        return self._places_images[key]

    def _accepts(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self._text_of(self._in_form(messages), {}, (), add_generation_prompt=True)
        except StatusError:
            return False
        return True

    def _shows(self, messages: Sequence[Mapping[str, Any]], marker: str) -> bool:
        """Whether the text of a conversation contains a marker."""
        try:
            return marker in self._text_of(messages, {}, (), add_generation_prompt=True)
        except StatusError:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        marking: Marking | None = None,
    ) -> Rendered:
        """The text of the conversation.

        `add_generation_prompt` ends it with the beginning of an answer. `continue_final_message` leaves the last
        message open, so that the model continues it. A conversation that the template refuses is tried in other shapes
        (`turns`). `marking` marked the messages, the tools and the variables; the text then has its marks. Raises
        `StatusError` if the template refuses the conversation in every shape or takes too long, or if its text is too
        large.
        """
        variables = dict(variables or {})
        clash = _RESERVED.intersection(variables)
        if clash:
            name = min(clash)
            raise StatusError(
                Reason.INVALID_FIELD,
                f"chat_template_kwargs must not set '{name}': the gateway sets it itself",
                field="chat_template_kwargs",
            )
        self._check_number(messages)
        deadline = time.monotonic() + MAX_RENDER_S

        def attempt(shaped: Sequence[Mapping[str, Any]]) -> Rendered:
            text = self._attempt(
                shaped,
                variables,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                marking=marking,
                deadline=deadline,
            )
            return Rendered(text, [*image_numbers(shaped)])

        def key() -> Hashable:
            context = json.dumps(variables, sort_keys=True, default=repr)
            return traits_of(messages), context, bool(tools), add_generation_prompt, continue_final_message

        if self._shapes and (shape := self._shapes.get(key())) is not None:
            with contextlib.suppress(StatusError):
                return attempt(shape.of(messages))
        try:
            return attempt(messages)
        except TemplateRefusal as refusal:
            for shape, shaped in shapes_of(messages):
                try:
                    rendered = attempt(shaped)
                except StatusError:
                    continue
                self._remember(key(), shape, messages, attempt)
                return rendered
            raise refusal from None

    def _check_number(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise `StatusError` if the template can never take this number of messages."""

    def _remember(
        self,
        key: Hashable,
        shape: Shape,
        messages: Sequence[Mapping[str, Any]],
        attempt: Callable[[Sequence[Mapping[str, Any]]], Rendered],
    ) -> None:
        """Begin with this shape from now on, unless it is the texts of the conversation that the template refused."""
        with contextlib.suppress(TemplateRefusal):
            attempt(skeleton_of(messages))
            return
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        if not self._shapes:
            _LOG.info("the chat template refuses some conversations, which are rendered in other shapes: %s", shape)
        self._shapes[key] = shape

    def _attempt(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        marking: Marking | None,
        deadline: float,
    ) -> str:
        marker = ""
        if continue_final_message:
            messages, marker = _marked(messages)
        text = self._text_of(
            self._in_form(messages),
            variables,
            tools,
            add_generation_prompt=add_generation_prompt,
            marking=marking,
            deadline=deadline,
        )
        if continue_final_message:
            end = text.rfind(marker)
            if end < 0:
                raise _refusal("it omits the end of the final message, which therefore cannot be continued")
            text = text[:end]
        return text

    def _in_form(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages with each content as the template takes it: with images as parts, else as it prefers."""
        if self.takes_parts:
            return _in_parts(messages, str | list)
        return _in_parts(messages, list) if any(isinstance(one.get("content"), list) for one in messages) else messages

    def _text_of(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        marking: Marking | None = None,
        deadline: float | None = None,
    ) -> str:
        values = {
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        deadline = time.monotonic() + MAX_RENDER_S if deadline is None else deadline
        if marking is None:
            return self._run(self._template, values, deadline)
        try:
            text = self._run(self._marked_template(marking), values, deadline)
        except StatusError as error:
            raise type(error)(
                error.reason, error.message.replace(marking.mark, ""), field=error.field
            ) from error.__cause__
        return text.replace(json.dumps(marking.mark)[1:-1], marking.mark)  # as a template that wants ASCII wrote it

    def _marked_template(self, marking: Marking) -> jinja2.Template:
        """The template that looks for marked texts. Its own texts are unchanged."""
        found = self._marked_templates.get(marking.mark)
        if found is None:
            parsed = self._environment.parse(self._source)
            for constant in _looked_for(parsed):
                constant.value = marking.text(constant.value)
            code = self._environment.compile(parsed)
            found = jinja2.Template.from_code(self._environment, code, self._environment.make_globals(None))
            self._marked_templates[marking.mark] = found
        return found

    def _run(self, template: jinja2.Template, variables: dict[str, Any], deadline: float) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_TEXT_CHARS:
                    raise _refusal(f"its text is longer than {MAX_TEXT_CHARS} characters")
                if time.monotonic() > deadline:
                    raise _refusal(f"it takes longer than {MAX_RENDER_S:g} s")
        except StatusError:
            raise
        except jinja2.TemplateError as error:
            raise _refusal(str(error), TemplateRefusal) from error
        except Exception as error:  # a template's expressions can raise anything Python can
            raise _refusal(f"{type(error).__name__}: {error}", TemplateRefusal) from error
        return "".join(pieces)


class NoTemplate(ChatTemplate):
    """Stands for the template of a model that has none: the only message is the prompt, as with OVMS."""

    takes_one_text = True

    def __init__(self) -> None:
        super().__init__({"default": "{{ messages[0]['content'] }}"}, {})

    @property
    def shows_system(self) -> bool:
        """Always false: there is no room for a system message beside the user's."""
        return False

    def _check_number(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if len(messages) != 1:
            raise StatusError(
                Reason.INVALID_FIELD,
                f"the model has no chat template, so it takes a single message, which is its prompt, not "
                f"{len(messages)}: write all of them into one message, send the prompt to /v1/completions, or put a "
                "chat_template.jinja beside the model",
                field="messages",
            )


def _changes_case(parsed: jinja2.nodes.Template) -> bool:
    """Whether a template has a filter or calls a method that changes the case of letters."""
    if any(filtered.name in _CHANGES_OF_CASE for filtered in parsed.find_all(jinja2.nodes.Filter)):
        return True
    called = (call.node for call in parsed.find_all(jinja2.nodes.Call))
    return any(isinstance(node, jinja2.nodes.Getattr) and node.attr in _CHANGES_OF_CASE for node in called)


def _looked_for(parsed: jinja2.nodes.Template) -> Iterator[jinja2.nodes.Const]:
    """The texts with which a template compares others, or which it looks for in others."""

    def constants(nodes: Iterable[jinja2.nodes.Node]) -> Iterator[jinja2.nodes.Const]:
        for node in nodes:
            if isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str):
                yield node
            elif isinstance(node, jinja2.nodes.List | jinja2.nodes.Tuple):
                yield from constants(node.items)

    for comparison in parsed.find_all(jinja2.nodes.Compare):
        yield from constants([comparison.expr, *(operand.expr for operand in comparison.ops)])
    for call in parsed.find_all(jinja2.nodes.Call):
        if isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr in _SEARCHES:
            yield from constants(call.args[:1])
    for filtered in parsed.find_all(jinja2.nodes.Filter):
        if filtered.name in _SEARCHES:
            yield from constants(filtered.args[:1])
    for test in parsed.find_all(jinja2.nodes.Test):
        yield from constants([test.node, *test.args])


def _refusal(why: str, kind: type[StatusError] = StatusError) -> StatusError:
    message = f"the model's chat template does not accept this conversation: {why}"
    return kind(Reason.INVALID_FIELD, message, field="messages")


def _marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The messages with a marker at the end of the last one, and the marker. The text is cut at the marker."""
    content = messages[-1].get("content")
    *before, last = content if isinstance(content, list) and content else [content]
    if not isinstance(last, str):
        raise StatusError(
            Reason.INVALID_FIELD,
            "continue_final_message needs a final message with text content",
            field="continue_final_message",
        )
    marker = f"[end-{secrets.token_hex(8)}]"
    ended = [*before, last + marker] if isinstance(content, list) else last + marker
    return [*messages[:-1], {**messages[-1], "content": ended}], marker


def _in_parts(messages: Sequence[Mapping[str, Any]], kinds: Any) -> list[Mapping[str, Any]]:
    """The messages with each content of these types as a list of parts."""
    return [
        {**message, "content": parts_of(content)} if isinstance(content := message.get("content"), kinds) else message
        for message in messages
    ]


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's words for training. Here only its body matters."""

    tags = {"generation"}  # noqa: RUF012  # as the class above declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, RawArguments):
        return str(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
