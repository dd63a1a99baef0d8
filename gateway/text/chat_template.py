"""Formats a conversation as text with the model's Jinja template, compatible with Hugging Face's chat templates.

Templates run in an immutable sandbox with `trim_blocks` and `lstrip_blocks`, loop controls, `{% generation %}` blocks,
`raise_exception(text)`, `strftime_now(format)` and a `tojson` that does not escape HTML. Their variables are
`messages`, `tools`, `documents` (none), `add_generation_prompt`, the texts of the special tokens, and the variables
that the caller passes. (https://huggingface.co/docs/transformers/chat_templating)
"""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.gateway.upstream.bundle import BundleError
from headrace.protos.status import Reason, StatusError

MAX_TEXT_CHARS = 16 * 1024 * 1024
MAX_RENDER_S = 5.0
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})


class Arguments(dict[str, Any]):
    """Arguments of a call in a conversation: an object, which becomes JSON text where a template adds it to a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class RawArguments(Arguments):
    """Arguments that are no JSON object, such as those of an answer that was cut off.

    As a text they are what the model wrote. For templates that read an object they are its only value.
    """

    def __init__(self, text: str) -> None:
        super().__init__({"arguments": text})
        self._raw = text

    def __str__(self) -> str:
        return self._raw


class ChatTemplate:
    """The template of one model, compiled."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile the source named `default`, or the only one. Raises `BundleError` if that cannot be done."""
        if "default" in sources:
            self._source = sources["default"]
        elif len(sources) == 1:
            (self._source,) = sources.values()
        else:
            raise BundleError(f"none of the {len(sources)} chat templates is named 'default'")
        environment = _environment()
        try:
            self._template = environment.from_string(self._source)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(self._source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise BundleError(f"the chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

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
        return self._shows(_in_parts(messages) if self.takes_parts else messages, marker)

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
    ) -> str:
        """The text of the conversation.

        `add_generation_prompt` ends it with the beginning of an answer. `continue_final_message` leaves the last
        message open, so that the model continues it. Raises `StatusError` if the template refuses the conversation or
        takes too long, or if its text is too large.
        """
        clash = _RESERVED.intersection(variables or ())
        if clash:
            name = min(clash)
            raise StatusError(
                Reason.INVALID_FIELD,
                f"chat_template_kwargs must not set '{name}': the gateway sets it itself",
                field="chat_template_kwargs",
            )
        marker = ""
        if continue_final_message:
            messages, marker = _marked(messages)
        if self.takes_parts:
            messages = _in_parts(messages)
        text = self._text_of(messages, variables or {}, tools, add_generation_prompt=add_generation_prompt)
        if continue_final_message:
            end = text.rfind(marker)
            if end < 0:
                raise _refusal("it omits the end of the final message, which therefore cannot be continued")
            text = text[:end]
        return text

    def _text_of(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
    ) -> str:
        return self._run(
            {
                **self._special_tokens,
                **variables,
                "messages": messages,
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _run(self, variables: dict[str, Any]) -> str:
        deadline = time.monotonic() + MAX_RENDER_S
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_TEXT_CHARS:
                    raise _refusal(f"its text is longer than {MAX_TEXT_CHARS} characters")
                if time.monotonic() > deadline:
                    raise _refusal(f"it takes longer than {MAX_RENDER_S:g} s")
        except StatusError:
            raise
        except jinja2.TemplateError as error:
            raise _refusal(str(error)) from error
        except Exception as error:  # a template's expressions can raise anything Python can
            raise _refusal(f"{type(error).__name__}: {error}") from error
        return "".join(pieces)


def _refusal(why: str) -> StatusError:
    message = f"the model's chat template does not accept this conversation: {why}"
    return StatusError(Reason.INVALID_FIELD, message, field="messages")


def _marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The messages with a marker at the end of the last one, and the marker. The text is cut at the marker."""
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise StatusError(
            Reason.INVALID_FIELD,
            "continue_final_message needs a final message with text content",
            field="continue_final_message",
        )
    marker = f"[end-{secrets.token_hex(8)}]"
    return [*messages[:-1], {**messages[-1], "content": content + marker}], marker


def _in_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with each text as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str)
        else message
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
