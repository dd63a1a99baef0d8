"""The format in which each model writes, and the special tokens that are markup of that format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from headrace.common.parser_names import AUTO, NONE
from headrace.gateway.chat import plain_tools
from headrace.gateway.chat.output_parsers.families import TOOL_FORMATS, OutputFormat, detect
from headrace.gateway.chat.plain_tools import takes_tools
from headrace.gateway.text.chat_template import ChatTemplate
from headrace.gateway.text.models import Model, TextSide

_MAX_CACHED = 64


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The format of one model."""

    output: OutputFormat
    marker_ids: Mapping[str, int]
    """Special tokens that are markup of the format, by their text. Only a parser reads them as text."""

    @property
    def reasons(self) -> bool:
        """Whether the model's format of reasoning is known."""
        return self.output.reasoning is not None or self.output.is_harmony


class Formats:
    """Finds the format of a model. The operator's flags override what the chat template shows, and what the host says
    of one model overrides the flags."""

    def __init__(
        self, tool_parsers: Mapping[str, str] | None = None, reasoning_parsers: Mapping[str, str] | None = None
    ) -> None:
        """Names of formats by model; under the empty name, for all models that are not named."""
        self._tool_parsers = tool_parsers or {}
        self._reasoning_parsers = reasoning_parsers or {}
        self._cached: dict[tuple[str, str, str, str, str], ModelFormat] = {}

    def of(self, model: Model, template: ChatTemplate | None = None) -> ModelFormat:
        """The format of a model that chats; with another chat template than its own, if one is given."""
        template = template or model.text.template
        source = "" if template is None else template.source
        parsers = self._tool_parser(model), self._reasoning_parser(model)
        key = model.name, model.card.tokenizer_sha256, *parsers, source
        found = self._cached.get(key)
        if found is None:
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            found = self._cached[key] = self._told(model, template)
        return found

    def plain(self, model: Model, template: ChatTemplate | None = None) -> ModelFormat | None:
        """The format for calls that a grammar enforces, for any model family; None if the operator has turned parsing
        off."""
        if self._tool_parser(model) == NONE:
            return None
        return _with_plain_tools(self.of(model, template), model.text)

    def _tool_parser(self, model: Model) -> str:
        return model.rules.tool_parser or _said(self._tool_parsers, model.name)

    def _reasoning_parser(self, model: Model) -> str:
        return model.rules.reasoning_parser or _said(self._reasoning_parsers, model.name)

    def _told(self, model: Model, template: ChatTemplate | None) -> ModelFormat:
        tool_parser = self._tool_parser(model)
        template = None if template is None else template.chosen(tools=True)
        source = "" if template is None else template.source
        special = _special_texts(model.text) if template is not None and takes_tools(template) else ()
        output = detect(source, tool_parser, self._reasoning_parser(model), special)
        form = ModelFormat(output, _marker_ids(output, model.text))
        if tool_parser == AUTO and template is not None and not takes_tools(template):
            return _with_plain_tools(form, model.text)
        return form


def _with_plain_tools(form: ModelFormat, text: TextSide) -> ModelFormat:
    output = replace(form.output, tools=TOOL_FORMATS[plain_tools.PARSER])
    return ModelFormat(output, _marker_ids(output, text))


def _said(parsers: Mapping[str, str], name: str) -> str:
    return parsers.get(name, parsers.get("", AUTO))


def _special_texts(text: TextSide) -> dict[str, int]:
    """The ids of the special tokens that are characters, by their text."""
    table = text.tokenizer.token_bytes
    special = (token_id for token_id in text.tokenizer.special_ids if token_id < len(table))
    return {table[token_id].decode("utf-8", "replace"): token_id for token_id in special}


def _marker_ids(output: OutputFormat, text: TextSide) -> dict[str, int]:
    wanted = {marker for one in (output.tools, output.reasoning) if one for marker in one.markers}
    return {found: token_id for found, token_id in _special_texts(text).items() if found in wanted}


def parse_parsers(values: Iterable[str], named: Callable[[str], str]) -> dict[str, str]:
    """The values of a flag, each NAME or MODEL=NAME, as a mapping. `named` gives the format of a name. Raises
    `ValueError` with a sentence."""
    found: dict[str, str] = {}
    for value in values:
        model, _, name = value.rpartition("=")
        found[model] = named(name)
    return found
