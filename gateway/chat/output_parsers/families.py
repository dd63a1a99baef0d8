"""The format in which a model writes, from its chat template or from the operator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from headrace.gateway.chat.output_parsers import (
    gemma,
    glm,
    harmony,
    json_tags,
    llama3_json,
    marked_json,
    mistral,
    phi4,
    pythonic,
    xml_calls,
)
from headrace.gateway.chat.output_parsers.output import Delta, Output, Tools
from headrace.gateway.chat.output_parsers.source import Source, Steps, rest
from headrace.gateway.chat.output_parsers.think import think

ToolSteps: TypeAlias = Callable[[Source, Output, Tools], Steps[None]]


Sign: TypeAlias = str | tuple[str, ...]
"""A text in a chat template, or several that must all be in it."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of a family's tool calls."""

    name: str
    steps: ToolSteps
    markers: tuple[str, ...]
    """Markup that may be special tokens of the vocabulary, which are otherwise not text."""
    signs: tuple[Sign, ...]
    """Any of these in a chat template identifies the family."""
    models: str
    """The models that write it, for the reference."""
    shape: str
    """A call, for the reference."""
    token: str = ""
    """The special token that identifies the family if its template, which takes tools, shows no sign of any."""
    num_id_chars: int = 24
    """Length of the ids of calls that templates of the family accept."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The format of a family's reasoning: text between tags, or separate messages if there are no tags."""

    name: str
    tags: tuple[str, str] | None
    markers: tuple[str, ...]
    signs: tuple[Sign, ...]
    models: str
    """The models that write it, for the reference."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Other tags that the models write for the same."""
    around_answer: tuple[tuple[str, str], ...] = ()
    """Tags that they may write around the answer."""
    is_open: bool = False
    """The answer begins with reasoning, even if neither the prompt nor the model opens it."""


_HARMONY_MARKERS = (
    harmony.START,
    harmony.CHANNEL,
    harmony.CONSTRAIN,
    harmony.MESSAGE,
    harmony.END,
    harmony.CALL,
    harmony.RETURN,
)


class _Description(Protocol):
    """The markup of a family, which parses a whole answer."""

    @property
    def markers(self) -> tuple[str, ...]: ...

    def __call__(self, source: Source, output: Output, tools: Tools, /) -> Steps[None]: ...


def _described(
    name: str, description: _Description, signs: tuple[Sign, ...], models: str, shape: str, token: str = ""
) -> ToolFormat:
    return ToolFormat(name, description, description.markers, signs, models, shape, token)


def _with_token(name: str, description: _Description, token: str, models: str, shape: str) -> ToolFormat:
    """The format of a family that is recognised by a special token."""
    return _described(name, description, (token,), models, shape, token)


def _tagged(name: str, tags: tuple[str, str], signs: tuple[Sign, ...], models: str) -> ReasoningFormat:
    """The format of reasoning between these tags, which may be special tokens."""
    return ReasoningFormat(name, tags, tags, signs, models)


# The most specific signs come first, because a template may also contain the signs of later families.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat(
            "gpt-oss", harmony.harmony, _HARMONY_MARKERS, (harmony.CHANNEL,), "gpt-oss", "messages to `functions.f`"
        ),
        _with_token(
            "deepseek",
            marked_json.DEEPSEEK,
            marked_json.DEEPSEEK.call_begin,
            "DeepSeek V3, R1 and V3.1",
            "`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, or JSON in a block of code",
        ),
        _described(
            "deepseek-v3.2",
            xml_calls.DEEPSEEK_V32,
            (("｜DSML｜", "function_calls>"),),
            "DeepSeek V3.2",
            '`<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1...` in `<｜DSML｜function_calls>`',
        ),
        _described(
            "deepseek-v4",
            xml_calls.DEEPSEEK_V4,
            (("｜DSML｜", "tool_calls>"),),
            "DeepSeek V4",
            "the same in `<｜DSML｜tool_calls>`",
        ),
        _with_token(
            "kimi-k2",
            marked_json.KIMI_K2,
            marked_json.KIMI_K2.call_begin,
            "Kimi K2, K2 Thinking, K2.5",
            "`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`",
        ),
        _described(
            "step3",
            xml_calls.STEP3,
            (xml_calls.STEP3.call,),
            "Step 3",
            '`<steptml:invoke name="f"><steptml:parameter name="a">1...` in `<｜tool_calls_begin｜>`',
            token="<｜tool_calls_begin｜>",
        ),
        ToolFormat(
            "mistral",
            mistral.mistral,
            (mistral.OPENING, mistral.CALL_ID, mistral.ARGUMENTS),
            (mistral.OPENING, "[AVAILABLE_TOOLS]"),
            "Mistral, Ministral, Magistral, Devstral",
            "`[TOOL_CALLS]` and JSON, or `[TOOL_CALLS]f[ARGS]{...}`",
            token=mistral.OPENING,
            num_id_chars=9,
        ),
        _with_token(
            "gemma4",
            gemma.GEMMA4,
            gemma.GEMMA4.opening,
            "Gemma 4",
            '`<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>`',
        ),
        _with_token(
            "functiongemma",
            gemma.FUNCTION_GEMMA,
            gemma.FUNCTION_GEMMA.opening,
            "FunctionGemma",
            "`<start_function_call>call:f{a:1,b:<escape>text<escape>}<end_function_call>`",
        ),
        _with_token(
            "cohere",
            json_tags.COHERE,
            json_tags.COHERE.opening,
            "Command R7B, Command A",
            '`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`',
        ),
        _described(
            "granite",
            json_tags.GRANITE,
            ("available_tools<|end_of_role|>",),
            "Granite 3 (Granite 4 writes like `hermes`)",
            '`<|tool_call|>[{"name": ..., "arguments": {...}}]`',
        ),
        ToolFormat(
            "phi4",
            phi4.phi4,
            (phi4.OPENING, phi4.CLOSING),
            ("functools", phi4.OPENING, "<|tool|>"),
            "Phi 4 mini",
            "`functools[{...}]`, or within `<|tool_call|>`",
        ),
        _described(
            "nemotron",
            json_tags.NEMOTRON,
            (json_tags.NEMOTRON.opening,),
            "Nemotron Nano 2, Llama Nemotron (Nemotron 3 writes like `qwen3-coder`)",
            '`<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`',
        ),
        _with_token(
            "seed-oss",
            xml_calls.SEED_OSS,
            xml_calls.SEED_OSS.opening,
            "Seed OSS",
            "`<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>`",
        ),
        _with_token(
            "minimax-m2",
            xml_calls.MINIMAX_M2,
            xml_calls.MINIMAX_M2.opening,
            "MiniMax M2",
            '`<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>`',
        ),
        _described(
            "minicpm5",
            xml_calls.MINICPM5,
            ((xml_calls.MINICPM5.call, xml_calls.MINICPM5.parameter),),
            "MiniCPM 5",
            '`<function name="f"><param name="a">1</param></function>`',
        ),
        _with_token(
            "olmo3",
            pythonic.OLMO3,
            "<function_calls>",
            "Olmo 3",
            "`f(a=1)`, a line each, in `<function_calls>`",
        ),
        _described(
            "pythonic",
            pythonic.PYTHONIC,
            (
                *(opening for opening, _ in pythonic.PYTHONIC.tags),
                "<|tool_list_start|>",
                "[func_name1(params_name1=",
                "[func1(params_name1=",
            ),
            "Llama 3.2 and 4, LFM2, ToolACE, MiniCPM 3",
            "`[f(a=1), g()]`, each argument up to 1 MiB, of which 32 KiB outside of texts",
            token="<|tool_call_start|>",
        ),
        ToolFormat(
            "llama3",
            llama3_json.llama3_json,
            (llama3_json.TAG,),
            (llama3_json.TAG, '"parameters": dictionary'),
            "Llama 3",
            '`{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`',
        ),
        _described(
            "qwen3-coder",
            xml_calls.QWEN3_CODER,
            (xml_calls.QWEN3_CODER.call,),
            "Qwen3 Coder, Qwen 3.5, Nemotron 3, Step 3.5, MiMo",
            "`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`",
        ),
        ToolFormat(
            "glm",
            glm.glm,
            (glm.OPENING, glm.CLOSING, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END),
            (glm.KEY,),
            "GLM 4.5 and later",
            "`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`",
            token=glm.KEY,
        ),
        _described(
            "minimax-m1",
            json_tags.MINIMAX_M1,
            (("<tool_calls>", "tool_setting=tools"),),
            "MiniMax M1",
            '`<tool_calls>` and `{"name": ..., "arguments": {...}}`, a line each',
        ),
        _described(
            "jamba",
            json_tags.JAMBA,
            (json_tags.JAMBA.opening,),
            "Jamba, Hunyuan A13B",
            '`<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`',
        ),
        _described(
            "hermes",
            json_tags.HERMES,
            (json_tags.HERMES.opening,),
            "Hermes, Qwen 2.5 and 3, Granite 4, ERNIE 4.5, SmolLM3",
            '`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`',
        ),
    )
}

# Formats that are not supported although their markup contains that of a supported one.
_UNKNOWN_SIGNS = ("]<]minimax[>[",)

_THINK = ("<think>", "</think>")
_BRACKETS = ("[THINK]", "[/THINK]")
_CHANNEL = ("<|channel>thought", "<channel|>")
_COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
_COHERE_ANSWERS = (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>"))
_SEED = ("<seed:think>", "</seed:think>")
_GRANITE = ("Here is my thought process:", "Here is my response:")
_THOUGHTS = ("<|thought_start|>", "<|thought_end|>")
_KIMI = ("◁think▷", "◁/think▷")
_ANSWERS = (("<response>", "</response>"), ("<answer>", "</answer>"))
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    one.name: one
    for one in (
        ReasoningFormat("gpt-oss", None, _HARMONY_MARKERS, (harmony.CHANNEL,), "gpt-oss"),
        _tagged("mistral", _BRACKETS, _BRACKETS[:1], "Magistral, Ministral 3"),
        ReasoningFormat("gemma4", _CHANNEL, ("<|channel>", "<channel|>"), ("<|channel>",), "Gemma 4"),
        ReasoningFormat(
            "cohere",
            _COHERE,
            (*_COHERE, *(tag for pair in _COHERE_ANSWERS for tag in pair)),
            _COHERE[:1],
            "Command R7B, Command A",
            around_answer=_COHERE_ANSWERS,
        ),
        _tagged("seed-oss", _SEED, _SEED[:1], "Seed OSS"),
        ReasoningFormat(
            "granite",
            _GRANITE,
            (),
            ("Here is my thought process:",),
            "Granite 3.2",
            spellings=(("Here's my thought process:", "Here's my response:"),),
        ),
        _tagged("minicpm3", _THOUGHTS, _THOUGHTS[:1], "MiniCPM 3"),
        _tagged("kimi", _KIMI, _KIMI[1:], "Kimi VL Thinking, Kimi k1.5"),
        ReasoningFormat(
            "think-answer",
            _THINK,
            _THINK,
            (("</think>", "<response>"), ("</think>", "<answer>")),
            "Granite 3.3, ERNIE 4.5 Thinking, Hunyuan A13B",
            around_answer=_ANSWERS,
        ),
        _tagged(
            "think",
            _THINK,
            _THINK[1:],
            "DeepSeek R1 and later, Qwen 3, GLM 4.5, Kimi K2, MiniMax M2, Nemotron, Olmo 3, LFM2, SmolLM3, Step 3",
        ),
        ReasoningFormat(
            "think-open",
            _THINK,
            _THINK,
            (),
            "the same models with a template that does not open the reasoning, such as the first one of DeepSeek R1",
            is_open=True,
        ),
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


def detect(template: str, tools: str = "auto", reasoning: str = "auto", special: Collection[str] = ()) -> OutputFormat:
    """The format of a model, from its chat template. Names other than `auto` take precedence; `none` means none.

    `special` are the texts of special tokens. They decide if the template shows no sign of any format of calls.
    """
    told = None
    if not any(sign in template for sign in _UNKNOWN_SIGNS):
        told = next((one for one in TOOL_FORMATS.values() if _shows(template, one.signs)), None)
        told = told or next((one for one in TOOL_FORMATS.values() if one.token and one.token in special), None)
    reasons = next((one for one in REASONING_FORMATS.values() if _shows(template, one.signs)), None)
    return OutputFormat(
        told if tools == "auto" else TOOL_FORMATS.get(tools),
        reasons if reasoning == "auto" else REASONING_FORMATS.get(reasoning),
        is_fenced="```json" in template,
    )


def _shows(template: str, signs: tuple[Sign, ...]) -> bool:
    """Whether a template contains any of the signs."""
    return any(all(part in template for part in ((sign,) if isinstance(sign, str) else sign)) for sign in signs)


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
        self._output = Output(custom, () if form.reasoning is None else form.reasoning.around_answer)
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
            yield from think(source, output, (form.reasoning.tags, *form.reasoning.spellings), inside)
        if form.tools is not None and tools:
            yield from form.tools.steps(source, output, tools)
    yield from rest(source, output.content)
