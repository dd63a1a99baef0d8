"""The grammar of a required call allows only text that the family's parser reads as a call."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.gateway.chat.formats import ModelFormat
from headrace.gateway.chat.output_parsers.families import REASONING_FORMATS, TOOL_FORMATS, OutputFormat, OutputParser
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta
from headrace.gateway.chat.tool_grammar import tool_structure
from headrace.gateway.chat.tools import ToolUse
from headrace.gateway.structure.fields import Structure
from headrace.protos.inference_pb2 import Choices, Constraint, JsonObject
from headrace.protos.status import Reason, StatusError
from headrace.worker.grammar.json_schema import prepared_within
from tests.gateway.chat.written_calls import call as written_call

EOS = 256
SCHEMAS: dict[str, dict[str, Any]] = {
    "turn": {
        "type": "object",
        "properties": {"by": {"enum": ["left", "right", 'a "b"\\']}, "fast": {"type": "boolean"}},
        "required": ["by"],
    },
    "stop": {"properties": {}},
}
ENFORCED = ["deepseek", "gpt-oss", "hermes", "llama3", "mistral", "phi4"]
ENFORCED += ["cohere", "granite", "jamba", "kimi-k2", "minimax-m1", "nemotron"]
OPTIONAL = ["deepseek-v3.2", "deepseek-v4", "functiongemma", "gemma4", "glm", "minicpm5", "minimax-m2", "olmo3"]
OPTIONAL += ["pythonic", "qwen3-coder", "seed-oss", "step3"]
assert sorted(ENFORCED + OPTIONAL) == sorted(TOOL_FORMATS)
"""Families whose grammar takes some schemas only, and is not for required calls."""


class Bytes:
    """A vocabulary of single bytes, an end of sequence, and some special tokens."""

    def __init__(self, special: Sequence[str]) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b"<eos>"] + [text.encode() for text in special]
        self.special_token_ids = list(range(EOS, len(self.tokens)))
        self.eos_token_id = EOS
        self.bos_token_id = None

    def __call__(self, raw: bytes) -> list[int]:
        return list(raw)


class Model:
    """A family with this markup as special tokens, and the matcher of a request's grammar."""

    def __init__(self, family: str, special: Sequence[str] = (), reasoning: str = "none", **options: Any) -> None:
        self.special = {text: EOS + 1 + i for i, text in enumerate(special)}
        output = OutputFormat(TOOL_FORMATS[family], REASONING_FORMATS.get(reasoning), options.pop("is_fenced", False))
        ending, inside = options.pop("ending", ""), options.pop("inside", False)
        content = options.pop("content", None)
        use = ToolUse(schemas=SCHEMAS, **{"required": True, **options})
        structure = tool_structure(ModelFormat(output, self.special), use, ending, inside, content)
        assert structure is not None
        assert structure.field == ("tool_choice" if use.required else "tools" if content is None else content.field)
        self.vocabulary = Bytes(special)
        self.matcher = LLMatcher(LLTokenizer(TokenizerWrapper(self.vocabulary)), structure.constraint.grammar)
        assert not self.matcher.get_error()
        assert not self.matcher.get_grammar_warnings()
        self.parser = OutputParser(output, SCHEMAS, inside_reasoning=inside)

    def tokens_of(self, text: str) -> list[int]:
        tokens: list[int] = []
        while text:
            found = next((one for one in self.special if text.startswith(one)), None)
            if found is not None:
                tokens.append(self.special[found])
                text = text[len(found) :]
            else:
                tokens += text[0].encode()
                text = text[1:]
        return tokens

    def accepts(self, text: str) -> bool:
        tokens = self.tokens_of(text)
        taken = self.matcher.try_consume_tokens(tokens)
        return bool(taken == len(tokens) and self.matcher.is_accepting())

    def walk(self, seed: int) -> str:
        """A random answer."""
        draw = random.Random(seed)
        raw = b""
        for _ in range(2000):
            mask = self.matcher.compute_bitmask()
            allowed = [i for i in range(len(self.vocabulary.tokens)) if mask[i >> 3] >> (i & 7) & 1]
            token = draw.choice(allowed)
            if token == EOS or self.matcher.is_stopped():
                return raw.decode()
            self.matcher.consume_token(token)
            raw += self.vocabulary.tokens[token]
            if self.matcher.is_stopped():
                return raw.decode()
        raise AssertionError("the walk does not end")

    def read(self, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
        """Content, reasoning and calls of an answer."""
        content = reasoning = ""
        calls: list[list[str]] = []
        for delta in self.parser.push(text) + self.parser.finish():
            match delta:
                case ContentDelta(more):
                    content += more
                case ReasoningDelta(more):
                    reasoning += more
                case CallDelta(_, name):
                    calls.append([name, ""])
                case ArgumentsDelta(index, more):
                    calls[index][1] += more
        return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


def check_call(call: tuple[str, Any]) -> None:
    name, arguments = call
    assert name in SCHEMAS
    if name == "turn":
        assert arguments["by"] in SCHEMAS["turn"]["properties"]["by"]["enum"]
        assert isinstance(arguments.get("fast", True), bool)
    assert set(arguments) <= set(SCHEMAS[name]["properties"])


@pytest.mark.parametrize("family", [family for family in ENFORCED if family != "gpt-oss"])
@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("is_fenced", [True, False])
def test_any_answer_is_a_call_that_is_read_back(family: str, as_tokens: bool, is_fenced: bool) -> None:
    special = TOOL_FORMATS[family].markers if as_tokens else ()
    for seed in range(8):
        model = Model(family, special, is_fenced=is_fenced, parallel=False)
        text = model.walk(seed)
        content, reasoning, calls = model.read(text)
        assert (content, reasoning) == ("", ""), text
        assert len(calls) == 1, text
        check_call(calls[0])


@pytest.mark.parametrize("family", [family for family in ENFORCED if family != "gpt-oss"])
def test_parallel_calls_are_read_back(family: str) -> None:
    lengths = set()
    for seed in range(12):
        model = Model(family, TOOL_FORMATS[family].markers)
        content, _, calls = model.read(model.walk(seed))
        assert content == ""
        for call in calls:
            check_call(call)
        lengths.add(len(calls))
    assert 0 not in lengths
    assert max(lengths) > 1


@pytest.mark.parametrize("as_tokens", [True, False])
def test_gpt_oss_may_reason_and_then_calls(as_tokens: bool) -> None:
    special = TOOL_FORMATS["gpt-oss"].markers if as_tokens else ()
    call = '<|channel|>commentary to=functions.turn <|constrain|>json<|message|>{"by": "left"}'
    text = "<|channel|>analysis<|message|>Which way? é<|end|><|start|>assistant" + call
    for answer, reasoning in ((call, ""), (text, "Which way? é")):
        model = Model("gpt-oss", special, "gpt-oss")
        assert model.accepts(answer)
        assert model.read(answer) == ("", reasoning, [("turn", {"by": "left"})])
    assert not Model("gpt-oss", special, "gpt-oss").accepts("<|channel|>final<|message|>No.")


@pytest.mark.parametrize("as_tokens", [True, False])
def test_reasoning_may_come_first_where_the_model_reasons(as_tokens: bool) -> None:
    special = ("<tool_call>", "</tool_call>", "<think>", "</think>") if as_tokens else ()
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    expected = ("", "Hm.", [("stop", {})])
    model = Model("hermes", special, "think")
    assert model.accepts(f"<think>Hm.</think>\n\n{call}")
    assert model.read(f"<think>Hm.</think>\n\n{call}") == expected
    assert Model("hermes", special, "think").accepts(call)
    opened = {"inside": True, "ending": "<think>\n"}
    model = Model("hermes", special, "think", **opened)
    assert model.accepts(f"Hm.</think>\n\n{call}")
    assert model.read(f"Hm.</think>\n\n{call}") == expected
    assert not Model("hermes", special, "think", **opened).accepts(call)
    closed = {"ending": "<think>\n\n</think>\n\n"}
    assert Model("hermes", special, "think", **closed).accepts(call)
    assert not Model("hermes", special, "think", **closed).accepts(f"<think>Hm.</think>\n\n{call}")


def test_mistral_calls_by_name_where_the_vocabulary_has_the_tag() -> None:
    call = '[TOOL_CALLS]turn[ARGS]{"by": "left"}'
    assert Model("mistral", ["[TOOL_CALLS]", "[ARGS]"]).accepts(call)
    assert not Model("mistral", ["[TOOL_CALLS]"]).accepts(call)


STRICT = {"required": False, "strict": True}
# a call of the family, whose arguments stand for {}
CALLS = {
    "hermes": '<tool_call>\n{"name": "turn", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "turn", "parameters": {}}',
    "phi4": 'functools[{"name": "turn", "arguments": {}}]',
    "mistral": '[TOOL_CALLS] [{"name": "turn", "arguments": {}}]',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>turn<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "gpt-oss": "<|channel|>commentary to=functions.turn <|constrain|>json<|message|>{}",
    "granite": '<|tool_call|>[{"name": "turn", "arguments": {}}]',
    "nemotron": '<TOOLCALL>[{"name": "turn", "arguments": {}}]</TOOLCALL>',
    "jamba": '<tool_calls>[{"name": "turn", "arguments": {}}]</tool_calls>',
    "minimax-m1": '<tool_calls>\n{"name": "turn", "arguments": {}}\n</tool_calls>',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "turn", "parameters": {}}]<|END_ACTION|>',
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.turn:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
}


@pytest.mark.parametrize("family", ENFORCED)
@pytest.mark.parametrize("as_tokens", [True, False])
def test_strict_tools_leave_text_free_and_hold_every_call_to_its_schema(family: str, as_tokens: bool) -> None:
    special = TOOL_FORMATS[family].markers if as_tokens and family != "phi4" else ()
    special = tuple(marker for marker in special if marker != "[ARGS]")
    final = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    for text in ("", 'Just < text, [1] {"name": 1}\né', "a" * 100):
        assert Model(family, special, **STRICT).accepts(final + text)
    call, before = CALLS[family], "Well, é.\n"
    if family == "gpt-oss":
        before = "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant"
    for text in [call] if family == "llama3" else [call, before + call]:
        good = text.replace("{}", '{"by": "left"}')
        model = Model(family, special, **STRICT)
        assert model.accepts(good)
        assert model.read(good)[2] == [("turn", {"by": "left"})]
        assert not Model(family, special, **STRICT).accepts(text)
        assert not Model(family, special, **STRICT).accepts(text.replace("{}", '{"by": "up"}'))
        fly = text.replace("turn", "fly")  # only the name tells a call of Llama 3 from text
        assert Model(family, special, **STRICT).accepts(fly) is (family == "llama3")


@pytest.mark.parametrize("family", OPTIONAL)
def test_required_calls_of_any_schema_are_in_another_format(family: str) -> None:
    with pytest.raises(StatusError) as caught:
        Model(family)
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "tool_choice")
    assert family in caught.value.message


# --- formats that write each argument by itself ---------------------------------------------------------------------

WHOLE = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "any"},
        "mode": {"type": "string", "enum": ["on", "off"]},
        "name": {"type": ["string", "null"]},
        "count": {"type": "integer", "minimum": 3},
        "code": {"type": "string", "pattern": "^[a-c]+/?$"},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


def answers_of(family: str, special: Sequence[str], schema: Any, **options: Any) -> Any:
    """A function that reads an answer: its calls, None if the grammar does not allow it."""
    form = ModelFormat(OutputFormat(TOOL_FORMATS[family]), {text: EOS + 1 + i for i, text in enumerate(special)})
    use = ToolUse(schemas={"f": schema, "g": {}}, strict=True, **options)
    structure = tool_structure(form, use, "", False)
    assert structure is not None

    def read(text: str) -> Any:
        model = Model.__new__(Model)
        model.special = dict(form.marker_ids)
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes(special))), structure.constraint.grammar)
        assert not matcher.get_error()
        model.matcher = matcher
        if not model.accepts(text):
            return None
        model.parser = OutputParser(form.output, use.schemas)
        return model.read(text)[2]

    return read


def parameters(**values: str) -> str:
    return "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())


def coder_call(name: str, inner: str) -> str:
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>")])
def test_calls_of_qwen3_coder_are_held_to_their_schema(special: Sequence[str]) -> None:
    read = answers_of("qwen3-coder", special, WHOLE)
    text = 'a\n</b> "é"\n'
    whole = parameters(text=text, mode="on", name="x", count="3", code="ab/", place='{"x": 1.5}')
    expected = {"text": text, "mode": "on", "name": "x", "count": 3, "code": "ab/", "place": {"x": 1.5}}
    for before in ("", "Let me.\n", "1 < 2 "):
        assert read(before + coder_call("f", whole)) == [("f", expected)]
    both = coder_call("f", parameters(text="", name="null", count="12")) + "\n" + coder_call("g", "")
    assert read(both) == [("f", {"text": "", "name": None, "count": 12}), ("g", {})]
    for answer in ("", "Just text, <b> and < tool_call>", "a" * 200):
        assert read(answer) == []
    for values in (
        {"text": "a"},
        {"count": "3", "text": "a"},
        {"text": "a", "count": "2"},
        {"text": "a", "count": "x"},
        {"text": "a", "mode": "up", "count": "3"},
        {"text": "a", "count": "3", "code": "d"},
        {"text": "a", "count": "3", "place": "{}"},
        {"text": "a", "count": "3", "other": "1"},
    ):
        assert read(coder_call("f", parameters(**values))) is None, values
    assert read("<function=f>\n</function>") is None
    assert read(coder_call("h", "")) is None
    assert answers_of("qwen3-coder", special, WHOLE, parallel=False)(both) is None


GLM_TAGS = TOOL_FORMATS["glm"].markers


def pairs(line: str = "", **values: str) -> str:
    return "".join(
        f"{line}<arg_key>{name}</arg_key>{line}<arg_value>{value}</arg_value>" for name, value in values.items()
    )


def glm_call(name: str, inner: str, line: str = "") -> str:
    return f"<tool_call>{name}{inner}{line}</tool_call>"


@pytest.mark.parametrize("line", ["", "\n"])
@pytest.mark.parametrize("special", [(), GLM_TAGS])
def test_calls_of_glm_are_held_to_their_schema(special: Sequence[str], line: str) -> None:
    read = answers_of("glm", special, WHOLE)
    text = 'a\n</b> "é"\n'
    whole = pairs(line, text=text, mode="on", name="x", count="3", code="ab/", place='{"x": 1.5}')
    expected = {"text": text, "mode": "on", "name": "x", "count": 3, "code": "ab/", "place": {"x": 1.5}}
    for before in ("", "Let me.\n", "1 < 2 "):
        assert read(before + glm_call("f", whole, line)) == [("f", expected)]
    both = glm_call("f", pairs(line, text="", name="null", count="12"), line) + "\n" + glm_call("g", "", line)
    assert read(both) == [("f", {"text": "", "name": None, "count": 12}), ("g", {})]
    for answer in ("", "Just text, <b> and < tool_call>", "a" * 200):
        assert read(answer) == []
    for values in (
        {"text": "a"},
        {"count": "3", "text": "a"},
        {"text": "a", "count": "2"},
        {"text": "a", "count": "x"},
        {"text": "a", "mode": "up", "count": "3"},
        {"text": "a", "count": "3", "code": "d"},
        {"text": "a", "count": "3", "place": "{}"},
        {"text": "a", "count": "3", "other": "1"},
    ):
        assert read(glm_call("f", pairs(line, **values), line)) is None, values
    assert read(glm_call("h", "", line)) is None
    assert answers_of("glm", special, WHOLE, parallel=False)(both) is None


@pytest.mark.parametrize("tags", [("", ""), ("<|tool_call_start|>", "<|tool_call_end|>")])
def test_calls_in_a_list_are_held_to_their_schema(tags: tuple[str, str]) -> None:
    special = tags if tags[0] else ()
    read = answers_of("pythonic", special, WHOLE)

    def call(inner: str) -> str:
        return f"{tags[0]}[{inner}]{tags[1]}"

    arguments = 'text="a)\\n\\"é", mode="on", name=null, count=3, code="ab/", place={"x": 1.5}'
    expected = {"text": 'a)\n"é', "mode": "on", "name": None, "count": 3, "code": "ab/", "place": {"x": 1.5}}
    assert read(call(f"f({arguments})")) == [("f", expected)]
    both = call('f(text="", count=12), g()')
    assert read(both) == [("f", {"text": "", "count": 12}), ("g", {})]
    if special:
        assert read("Let me. " + call("g()")) == [("g", {})]
    for answer in ("", "Just text, [1, 2] and [h()] or f(1)", "a" * 200):
        assert read(answer) == []
    for inner in ('f(text="a")', 'f(count=3, text="a")', 'f(text="a", count=2)', "f(text=a, count=3)", "g(a=1)"):
        assert read(call(inner)) is None, inner
    assert answers_of("pythonic", special, WHOLE, parallel=False)(both) is None


LINES = {"glm", "pythonic", "qwen3-coder"}
"""Families with tests of their own above."""


@pytest.mark.parametrize("family", [family for family in OPTIONAL if family not in LINES])
@pytest.mark.parametrize("as_tokens", [True, False])
def test_calls_of_a_family_are_held_to_their_schema(family: str, as_tokens: bool) -> None:
    special = TOOL_FORMATS[family].markers if as_tokens else ()
    read = answers_of(family, special, WHOLE)

    def written(*calls: tuple[str, dict[str, Any]]) -> str:
        return written_call(family, *calls, python=lambda value: json.dumps(value, ensure_ascii=False))

    expected = {"text": 'a\n</b> "é"\n{,', "mode": "on", "name": "x", "count": 3, "code": "ab/", "place": {"x": 1.5}}
    if family == "minicpm5":
        cdata = "<![CDATA[a\n</param>]]>"
        text = written(("f", {"text": cdata, "count": 3}))
        assert read(text) == [("f", {"text": "a\n</param>", "count": 3})]
    for before in ("", "Let me.\n", "1 < 2 "):
        assert read(before + written(("f", expected))) == [("f", expected)]
    both = written(("f", {"text": "", "name": None, "count": 12}), ("g", {}))
    assert read(both) == [("f", {"text": "", "name": None, "count": 12}), ("g", {})]
    for answer in ("", "Just text, <b> and < tool_call>", "a" * 200):
        assert read(answer) == []
    for values in (
        {"text": "a"},
        {"count": 3, "text": "a"},
        {"text": "a", "count": 2},
        {"text": "a", "count": "x"},
        {"text": "a", "mode": "up", "count": 3},
        {"text": "a", "count": 3, "code": "d"},
        {"text": "a", "count": 3, "place": {}},
        {"text": "a", "count": 3, "other": 1},
    ):
        assert read(written(("f", values))) is None, values
    assert read(written(("h", {}))) is None
    assert answers_of(family, special, WHOLE, parallel=False)(both) is None


@pytest.mark.parametrize("family", ["gemma4", "functiongemma"])
def test_values_of_gemma_are_in_its_own_form_at_any_depth(family: str) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["x", 1, None]}}}
    schema = {
        "properties": {"list": {"type": "array", "items": inner}, "tree": {"$ref": "#/$defs/tree"}},
        "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}},
    }
    read = answers_of(family, TOOL_FORMATS[family].markers, schema)
    tree: dict[str, Any] = {}
    for _ in range(5):
        tree = {"left": tree}
    values = {"list": [{"a": 'x, "}', "b": 1}, {"b": "x"}, {"a": "", "b": None}, {}], "tree": tree}
    assert read(written_call(family, ("f", values))) == [("f", values)]
    assert read(written_call(family, ("f", {"list": [{"b": 2}]}))) is None
    assert read(written_call(family, ("f", {"list": [1]}))) is None
    with pytest.raises(StatusError, match="an enum with a list, an object or"):
        answers_of(family, (), {"properties": {"a": {"enum": [[1]]}}})


@pytest.mark.parametrize("family", OPTIONAL)
@pytest.mark.parametrize("seed", range(6))
def test_a_random_answer_with_all_arguments_optional_is_read_back(family: str, seed: int) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}, "c": {"const": 1}}}
    structure = tool_structure(
        ModelFormat(OutputFormat(TOOL_FORMATS[family]), {}),
        ToolUse(schemas={"f": schema}, strict=True, parallel=False),
        "",
        False,
        Structure(Constraint(choice=Choices(texts=["no"])), "guided_choice"),
    )
    assert structure is not None
    model = Model.__new__(Model)
    model.vocabulary = Bytes(())
    model.matcher = LLMatcher(LLTokenizer(TokenizerWrapper(model.vocabulary)), structure.constraint.grammar)
    assert not model.matcher.get_error()
    assert not model.matcher.get_grammar_warnings()
    model.parser = OutputParser(OutputFormat(TOOL_FORMATS[family]), {"f": schema})
    content, _, calls = model.read(model.walk(seed))
    assert content == ("" if calls else "no")
    for _, arguments in calls:
        assert arguments.items() <= {*(("a", one) for one in "xy"), *(("b", one) for one in (True, False)), ("c", 1)}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties of its arguments"),
        ({"properties": {"a": {}}, "required": ["b"]}, "the required argument 'b'"),
        ({"properties": {"a b": {}}}, "'a b' is no name of an argument"),
    ],
)
def test_a_schema_that_cannot_be_held_in_a_list_is_refused_by_name(schema: Any, problem: str) -> None:
    with pytest.raises(StatusError) as caught:
        answers_of("pythonic", (), schema)
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "tools")
    assert f"for 'f' by a model that writes calls like pythonic: {problem}" in caught.value.message


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "string", "format": "date"}, "format of a text"),
        ({"type": "string", "pattern": "a|b"}, "the pattern 'a|b'"),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, "a restricted text beside other types"),
        ({"enum": ["a", 1]}, "texts and other values in one enum"),
        ({"enum": ["</parameter>"]}, "</parameter> in an enum"),
    ],
)
def test_a_value_that_cannot_be_held_as_raw_text_is_refused_by_name(schema: Any, problem: str) -> None:
    with pytest.raises(StatusError) as caught:
        answers_of("qwen3-coder", (), {"properties": {"a": schema}})
    assert f"for 'f' by a model that writes calls like qwen3-coder: {problem}" in caught.value.message


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "b+"}, "abbc", "ac"),
        ({"type": "string", "pattern": "^(?:a/|b)$"}, "a/", "ab"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "ab", "a"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"enum": ["a", None]}, "null", "b"),
        ({}, "any {", None),
    ],
)
def test_texts_of_qwen3_coder_are_held_to_what_restricts_them(schema: Any, good: str, bad: str | None) -> None:
    read = answers_of("qwen3-coder", (), {"properties": {"a": schema}})
    assert read(coder_call("f", parameters(a=good)))
    assert bad is None or read(coder_call("f", parameters(a=bad))) is None


def test_arguments_of_an_unlimited_schema_are_some_object() -> None:
    use = ToolUse(schemas={"f": {}}, required=True)
    structure = tool_structure(ModelFormat(OutputFormat(TOOL_FORMATS["hermes"]), {}), use, "", False)
    assert structure is not None
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes(()))), structure.constraint.grammar)
    text = b'<tool_call>\n{"name": "f", "arguments": {"any": [1, null]}}\n</tool_call>'
    assert matcher.try_consume_tokens(list(text)) == len(text)


def test_no_choice_no_grammar() -> None:
    form = ModelFormat(OutputFormat(TOOL_FORMATS["pythonic"]), {})
    assert tool_structure(form, ToolUse(schemas=SCHEMAS), "", False) is None


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# a constraint of what is no call, texts that are as it says, and texts that are not
CONTENTS = [
    (Constraint(json_schema=json.dumps(CITY)), ['{"city":"Köln"}'], ["Köln", '{"city": "Köln"}', "{}"]),
    (Constraint(json_object=JsonObject()), ['{"a":[1,2]}', "{}", '{"name":"x"}'], ["[]", "{} {}"]),
    (Constraint(regex=r"a/b\/[/\n]c\\"), ["a/b//c\\", "a/b/\nc\\"], ["a/b", "a/b//c"]),
    (Constraint(choice=Choices(texts=['"yes"', "no\n"])), ['"yes"', "no\n"], ["yes", "no"]),
]


@pytest.mark.parametrize("family", ENFORCED)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("constraint", "good", "bad"), CONTENTS)
def test_beside_tools_an_answer_is_a_call_or_structured_content(
    family: str, strict: bool, constraint: Constraint, good: list[str], bad: list[str]
) -> None:
    options: dict[str, Any] = {"required": False, "strict": strict, "content": Structure(constraint, "response_format")}
    special = tuple(one for one in TOOL_FORMATS[family].markers if family != "phi4" and one != "[ARGS]")
    final = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    for text in good:
        model = Model(family, special, **options)
        assert model.accepts(final + text), text
        assert model.read(final + text)[::2] == (text, []), text
    for text in bad:
        assert not Model(family, special, **options).accepts(final + text), text
    call = CALLS[family].replace("{}", '{"by": "left"}')
    if family == "llama3":
        call = call.replace(" ", "")
    model = Model(family, special, **options)
    assert model.accepts(call)
    assert model.read(call) == ("", "", [("turn", {"by": "left"})])
    if family == "gpt-oss":
        return
    assert not Model(family, special, **options).accepts("Well. " + call)
    required = Model(family, special, **{**options, "required": True})
    assert not required.accepts(good[0])


def test_a_grammar_of_the_caller_is_refused_beside_tools_but_not_beside_required_ones() -> None:
    structure = Structure(Constraint(grammar="start: /a/"), "guided_grammar")
    with pytest.raises(StatusError, match="unless with tool_choice none") as caught:
        Model("hermes", required=False, content=structure)
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "guided_grammar")
    assert Model("hermes", content=structure).accepts(CALLS["hermes"].replace("{}", '{"by": "left"}'))
    for schema in ("{", '{"x-guidance": {}}', "[]"):
        with pytest.raises(StatusError) as caught:
            Model("hermes", required=False, content=Structure(Constraint(json_schema=schema), "guided_json"))
        assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, "guided_json")


def test_a_tool_with_an_id_and_references_is_enforced_beside_a_form_of_content() -> None:
    schema = {"$id": "https://a.example/turn", "$ref": "#/$defs/by", "$defs": {"by": {"required": ["by"]}}}
    use = ToolUse(schemas={"turn": schema}, required=False)
    form = ModelFormat(OutputFormat(TOOL_FORMATS["llama3"]), {})
    structure = tool_structure(form, use, "", False, Structure(Constraint(json_schema="{}"), "response_format"))
    assert structure is not None
    assert "a.example" not in prepared_within(structure.constraint.grammar)


def test_content_stays_as_it_is_asked_for_without_tools() -> None:
    form = ModelFormat(OutputFormat(TOOL_FORMATS["hermes"]), {})
    structure = Structure(Constraint(grammar="start: /a/"), "guided_grammar")
    assert tool_structure(form, ToolUse(), "", False, structure) is structure
