"""The format in which a model writes, from its chat template or from the operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from headrace.gateway.chat.output_parsers import (
    deepseek,
    glm,
    harmony,
    hermes,
    llama3_json,
    mistral,
    phi4,
    pythonic,
    qwen3_coder,
)
from headrace.gateway.chat.output_parsers.output import Delta, Output, Tools
from headrace.gateway.chat.output_parsers.source import Source, Steps, rest
from headrace.gateway.chat.output_parsers.think import think

ToolSteps: TypeAlias = Callable[[Source, Output, Tools], Steps[None]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of a family's tool calls."""

    name: str
    steps: ToolSteps
    markers: tuple[str, ...]
    """Markup that may be special tokens of the vocabulary, which are otherwise not text."""
    signs: tuple[str, ...]
    """Any of these in a chat template identifies the family."""
    num_id_chars: int = 24
    """Length of the ids of calls that templates of the family accept."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The format of a family's reasoning: text between tags, or separate messages if there are no tags."""

    name: str
    tags: tuple[str, str] | None
    markers: tuple[str, ...]
    signs: tuple[str, ...]


_HARMONY_MARKERS = (
    harmony.START,
    harmony.CHANNEL,
    harmony.CONSTRAIN,
    harmony.MESSAGE,
    harmony.END,
    harmony.CALL,
    harmony.RETURN,
)

# The most specific signs come first, because a template may also contain the signs of later families.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat("gpt-oss", harmony.harmony, _HARMONY_MARKERS, (harmony.CHANNEL,)),
        ToolFormat(
            "deepseek",
            deepseek.deepseek,
            (
                deepseek.CALLS_BEGIN,
                deepseek.CALLS_END,
                deepseek.CALL_BEGIN,
                deepseek.CALL_END,
                deepseek.SEPARATOR,
            ),
            (deepseek.CALL_BEGIN,),
        ),
        ToolFormat(
            "mistral",
            mistral.mistral,
            (mistral.OPENING, mistral.CALL_ID, mistral.ARGUMENTS),
            (mistral.OPENING, "[AVAILABLE_TOOLS]"),
            num_id_chars=9,
        ),
        ToolFormat("phi4", phi4.phi4, (phi4.OPENING, phi4.CLOSING), ("functools", phi4.OPENING, "<|tool|>")),
        ToolFormat(
            "pythonic",
            pythonic.pythonic,
            tuple(tag for tags in pythonic.TAGS for tag in tags),
            (*(opening for opening, _ in pythonic.TAGS), "[func_name1(params_name1=", "[func1(params_name1="),
        ),
        ToolFormat(
            "llama3", llama3_json.llama3_json, (llama3_json.TAG,), (llama3_json.TAG, '"parameters": dictionary')
        ),
        ToolFormat(
            "qwen3-coder",
            qwen3_coder.qwen3_coder,
            (qwen3_coder.OPENING, qwen3_coder.CLOSING),
            (qwen3_coder.FUNCTION,),
        ),
        ToolFormat(
            "glm", glm.glm, (glm.OPENING, glm.CLOSING, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END), (glm.KEY,)
        ),
        ToolFormat("hermes", hermes.hermes, (hermes.OPENING, hermes.CLOSING), (hermes.OPENING,)),
    )
}

# Formats that are not supported although their markup contains that of a supported one.
_UNKNOWN_SIGNS = ("<|tool_calls_section_begin|>",)

_THINK = ("<think>", "</think>")
_BRACKETS = ("[THINK]", "[/THINK]")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    one.name: one
    for one in (
        ReasoningFormat("gpt-oss", None, _HARMONY_MARKERS, (harmony.CHANNEL,)),
        ReasoningFormat("mistral", _BRACKETS, _BRACKETS, _BRACKETS[:1]),
        ReasoningFormat("think", _THINK, _THINK, _THINK[1:]),
    )
}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The known parts of the format of a model's answers."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    is_fenced: bool = False
    """Whether arguments are in blocks of code, if the family has both forms."""

    @property
    def is_harmony(self) -> bool:
        """Whether answers are messages on channels. They are then always parsed, even for text alone."""
        return any(one is not None and one.name == "gpt-oss" for one in (self.tools, self.reasoning))


def detect(template: str, tools: str = "auto", reasoning: str = "auto") -> OutputFormat:
    """The format of a model, from its chat template. Names other than `auto` take precedence; `none` means none."""
    known = not any(sign in template for sign in _UNKNOWN_SIGNS)
    told = next((one for one in TOOL_FORMATS.values() if known and any(s in template for s in one.signs)), None)
    reasons = next((one for one in REASONING_FORMATS.values() if any(s in template for s in one.signs)), None)
    return OutputFormat(
        told if tools == "auto" else TOOL_FORMATS.get(tools),
        reasons if reasoning == "auto" else REASONING_FORMATS.get(reasoning),
        is_fenced="```json" in template,
    )


class OutputParser:
    """Parses one answer as its text arrives. Each piece gives the deltas that it decides."""

    def __init__(
        self,
        form: OutputFormat,
        tools: Tools,
        *,
        inside_reasoning: bool = False,
        custom: frozenset[str] = frozenset(),
    ) -> None:
        """Without `tools`, no text is parsed as a call. `inside_reasoning` means that the prompt has already opened the
        reasoning. `custom` are the names of tools that take a text."""
        self._source = Source()
        self._output = Output(custom)
        self._steps = _answer(self._source, self._output, form, tools, inside_reasoning)

    def push(self, text: str) -> list[Delta]:
        """The deltas that the next piece of text adds."""
        self._source.push(text)
        self._run()
        return self._output.take()

    def finish(self) -> list[Delta]:
        """The deltas that were held back until the end of the text. No push may follow."""
        self._source.closed = True
        self._run()
        self._output.finish()
        return self._output.take()

    @property
    def num_calls(self) -> int:
        """Calls that were shown."""
        return self._output.num_calls

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """The positions of the reasoning in the text, in characters, without markup."""
        return self._output.spans

    def _run(self) -> None:
        next(self._steps, None)


def _answer(source: Source, output: Output, form: OutputFormat, tools: Tools, inside: bool) -> Steps[None]:
    if form.is_harmony:
        yield from harmony.harmony(source, output, tools)
    else:
        if form.reasoning is not None and form.reasoning.tags is not None:
            yield from think(source, output, form.reasoning.tags, inside)
        if form.tools is not None and tools:
            yield from form.tools.steps(source, output, tools)
    yield from rest(source, output.content)
