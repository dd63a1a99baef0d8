"""Constraints: supported and refused ones, and answers that match them under all circumstances."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.protos.status import Reason, StatusError
from headrace.worker.grammar import compiler as grammar_compiler
from headrace.worker.grammar.compiler import Grammars, Vocabulary, VocabularyError
from headrace.worker.grammar.constraint import Constraint, ConstraintSource, Matcher
from headrace.worker.grammar.json_schema import prepared_within
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import FinishReason, Request
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.server.admission import MAX_CONSTRAINT_BYTES
from tests.patience import patience
from tests.schemas import Schema, all_schemas, validate
from tests.worker.conftest import VOCAB_SIZE, make_engine
from tests.worker.sampling_params import sample
from tests.worker.vocabulary import EOS, SPECIAL, TOKEN_BYTES, VOCABULARY, grammars, text_of

A, B, X, NEWLINE = (ord(character) for character in "abx\n")
LETTERS = ConstraintSource("regex", ("[a-z]{3,12}",))


@pytest.fixture(scope="module")
def compiler() -> Grammars:
    return grammars()


async def constraint_of(
    compiler: Grammars, source: ConstraintSource, ends: tuple[int, ...] = (EOS,), generated: tuple[int, ...] = ()
) -> Constraint:
    return await compiler.constrain(source, end_token_ids=ends, generated=generated)


def schema_source(schema: object) -> ConstraintSource:
    return ConstraintSource("json_schema", (json.dumps(schema),))


def logits_at(position: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Random logits that depend only on the position."""
    return (np.random.default_rng([seed, position]).normal(size=VOCAB_SIZE) * 3).astype(np.float32)


def answer(constraint: Constraint, generated: tuple[int, ...] = (), **fields: Any) -> list[int]:
    """Sample until a stop token or `max_tokens`. `generated` are the tokens of an earlier attempt."""
    options = {"max_tokens": 200, "seed": 5, "stop_token_ids": frozenset({EOS}), **fields}
    request = Request("r", [1, 2, 3], SamplingParams(constraint=constraint, **options), 0, resume_token_ids=generated)
    sampler = BatchSampler()
    while request.num_generated_tokens < options["max_tokens"]:
        (sampled,) = sample(sampler, [request], Logits(logits_at(request.num_generated_tokens)[None].copy()))
        assert sampled.token_id >= 0
        request.token_ids.append(sampled.token_id)
        if sampled.token_id in options["stop_token_ids"]:
            break
    return list(request.token_ids[3:])


def allowed_ids(constraint: Constraint, generated: tuple[int, ...] = ()) -> set[int]:
    few, bias = constraint.begin().allowed(generated)
    return set(few.tolist()) if few is not None else set(np.flatnonzero(bias == 0).tolist())  # type: ignore[operator]


def walk(constraint: Constraint, seed: int, longest: int = 600) -> list[int] | None:
    """Random allowed tokens until the end, with a preference for closing ones; None if there is no end in time."""
    rng = random.Random(seed)
    matcher = constraint.begin()
    generated: list[int] = []
    few, bias = matcher.allowed(generated)
    while len(generated) < longest:
        ids = few.tolist() if few is not None else np.flatnonzero(bias == 0).tolist()  # type: ignore[operator]
        assert ids, f"nothing may follow {text_of(generated)!r}"
        closing = [i for i in ids if i == EOS or VOCABULARY.token_bytes[i][:1] in (b'"', b"}", b"]")]
        token_id = rng.choice(closing if closing and rng.random() < 0.4 else ids)
        if token_id == EOS:
            return generated
        generated.append(token_id)
        matcher.advance(token_id)
        few, bias = matcher.allowed(generated)
    return None


# --- what is compiled -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(0, 200, 20))
async def test_whatever_a_grammar_lets_end_validates(compiler: Grammars, number: int) -> None:
    finished = 0
    for position, schema in enumerate(all_schemas()[number : number + 20]):
        constraint = await constraint_of(compiler, schema_source(schema))
        for seed in range(2):
            tokens = walk(constraint, number + position + 1000 * seed)
            if tokens is not None:
                finished += 1
                validate(json.loads(text_of(tokens)), schema)
    assert finished >= 30


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (ConstraintSource("regex", (r"[0-9]{3}-x+",)), r"[0-9]{3}-x+"),
        (ConstraintSource("regex", (r"^(yes|no)$",)), "yes|no"),
        (ConstraintSource("regex", ("",)), ""),
        (ConstraintSource("choice", ("yes", 'q"uo\\te', "日本\n")), 'yes|q"uo\\\\te|日本\n'),
        (ConstraintSource("grammar", ('start: "[" n ("," n)* "]"\nn: /[0-9]/',)), r"\[[0-9](,[0-9])*\]"),
        (ConstraintSource("json_object"), r"\{.*\}"),
    ],
)
async def test_each_kind_of_constraint_gives_answers_of_its_language(
    compiler: Grammars, source: ConstraintSource, wanted: str
) -> None:
    constraint = await constraint_of(compiler, source)
    found = [text_of(tokens).decode() for seed in range(20) if (tokens := walk(constraint, seed)) is not None]
    assert len(found) > 10
    for text in found:
        assert re.fullmatch(wanted, text), text


async def test_answers_have_no_white_space_between_tokens(compiler: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"const": 1}}, "required": ["a", "b"]}
    for seed in range(10):
        tokens = walk(await constraint_of(compiler, schema_source(schema)), seed)
        if tokens is not None:
            assert b" " not in text_of(tokens)


async def test_schemas_within_a_grammar_are_kept_as_exactly(compiler: Grammars) -> None:
    schema = {"type": "string", "format": "date"}
    text = f'start: "on %json " day // %json 1\nday: %json {json.dumps(schema)}'
    constraint = await constraint_of(compiler, ConstraintSource("grammar", (text,)))
    matcher = constraint.begin()
    for byte in b'on %json "2023-02-2':
        matcher.advance(byte)
    allowed = matcher.allowed(list(b'on %json "2023-02-2')).token_ids
    assert allowed is not None
    assert ord("8") in allowed
    assert ord("9") not in allowed


async def test_neither_special_tokens_nor_rows_that_are_no_token_are_ever_allowed(compiler: Grammars) -> None:
    allowed = allowed_ids(await constraint_of(compiler, ConstraintSource("regex", (r"(?s:.+)",))))
    assert allowed
    assert max(allowed) < len(TOKEN_BYTES)
    assert SPECIAL not in allowed
    assert EOS not in allowed


NAMES_REPEAT: Schema = {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}
"""A schema that cannot be kept."""
REPEATED = json.dumps(NAMES_REPEAT)


@pytest.mark.parametrize(
    "beginning",
    [
        "start: x\nx:",
        'start: x\n# it is "quoted\nx:',
        "start: x # /a\nx:",
        'start: x\n// it is "quoted\nx:',
        'start: x\ny: /a\n"/\nx:',
        'start: x\ny: <">\nx:',
        'start: x\ny: %regex {"substring_chars": "%json /"}\nx:',
        "start: %lark {\nstart: x\nx:",
    ],
)
async def test_a_schema_within_a_grammar_that_cannot_be_kept_is_refused(compiler: Grammars, beginning: str) -> None:
    ending = "\n}\n" if "%lark" in beginning else "\n"
    for schema in (f"%json {REPEATED}", f"%json\n{REPEATED}", f"%json{REPEATED}"):
        with pytest.raises(StatusError, match="minProperties 2") as caught:
            await constraint_of(compiler, ConstraintSource("grammar", (f"{beginning} {schema}{ending}",)))
        assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize(
    "content",
    [{"json_schema": NAMES_REPEAT}, {"lark_grammar": f"start: %json {REPEATED}"}, {"lark_grammar": 'start: "a"'}],
)
@pytest.mark.parametrize("space", ["", " \n", "\u00a0"])
async def test_a_grammar_is_always_in_lark(compiler: Grammars, content: dict[str, Any], space: str) -> None:
    """The compiler would read a text that begins with { as grammars in JSON, which nothing has checked."""
    text = space + json.dumps({"grammars": [content]})
    with pytest.raises(StatusError, match="expecting rule|lexer error") as caught:
        await constraint_of(compiler, ConstraintSource("grammar", (text,)))
    assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ('{"maxLength": ' + "9" * 5000 + "}", "not JSON"),
        ('{"items": ' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
        ('{"items": ' * 400 + "{}" + "}" * 400, "recursion limit"),
    ],
)
async def test_a_schema_within_a_grammar_that_cannot_be_read_is_refused(
    compiler: Grammars, schema: str, reason: str
) -> None:
    with pytest.raises(StatusError, match=reason) as caught:
        await constraint_of(compiler, ConstraintSource("grammar", (f"start: %json {schema}",)))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("unit", ['"\\', "/\\", "/a\\", "#", "<a", "%json 1 ", '"', "/\n"])
def test_a_grammar_is_read_in_linear_time(unit: str) -> None:
    """If each unit were read to the end again, these 256 kB would take minutes, and no other thread would run."""
    grammar = 'start: "a"\n' + unit * (MAX_CONSTRAINT_BYTES // len(unit))
    assert prepared_within(grammar).startswith('start: "a"\n')


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "not": {"required": ["a"]}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "string"}}, "contains"),
        ({"type": "object", "if": {}, "then": {}}, "if"),
        ({"type": "object", "propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames"),
        ({"type": "object", "properties": {"b": {}}, "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"properties": {"a": {"items": {"not": {}}}}}, "at #/properties/a/items: "),
        ({"$defs": {"x": {"type": "text"}}, "$ref": "#/$defs/x"}, "at #/$defs/x: "),
        ({"type": "integer", "minimum": -(2**70), "maximum": -(2**65)}, "maximum"),
        ({"type": "integer", "minimum": 2**63}, "minimum"),
        ({"type": "number", "exclusiveMaximum": -1e300}, "exclusiveMaximum"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}, "minProperties"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, "oneOf"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "text"}, "text"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"$ref": "#/components/schemas/D", "components": {"schemas": {"D": NAMES_REPEAT}}}, "minProperties"),
        ({"enum": []}, "empty"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
        (False, "no answer"),
        ([1], "object"),
        ({"items": {"allOf": [{"pattern": f"a.*{number}"} for number in range(26)]}}, "26 patterns and formats apply"),
        (
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    str(number): {"pattern": f"a.*{number}", "allOf": [{"$ref": f"#/$defs/{number + 1}"}]}
                    for number in range(26)
                }
                | {"26": {"format": "date"}},
            },
            "27 patterns and formats apply",
        ),
    ],
)
async def test_a_schema_that_cannot_be_kept_is_refused_with_the_reason(
    compiler: Grammars, schema: Schema, reason: str
) -> None:
    with pytest.raises(StatusError, match=re.escape(reason)) as caught:
        await constraint_of(compiler, schema_source(schema))
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, "sampling.constraint.json_schema")
    assert "\n" not in caught.value.message


async def test_the_tool_and_the_path_of_a_fault_are_named(compiler: Grammars) -> None:
    rules = ["start: args_0 | args_1", 'args_0: %json {"type": "string"}']
    rules.append(f"args_1: %json {json.dumps({'properties': {'q': {'anyOf': [{}, {'not': {}}]}}})}")
    with pytest.raises(StatusError, match=r"args_1 at #/properties/q/anyOf/1: ") as caught:
        await constraint_of(compiler, ConstraintSource("grammar", ("\n".join(rules),)))
    assert caught.value.reason is Reason.INVALID_FIELD


FLOAT, DOUBLE = 3.4028234663852886e38, 1.7976931348623157e308


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "number", "minimum": -FLOAT, "maximum": FLOAT}, ["1.5", "-7", "123456789.25"], ["1e39"]),
        ({"type": "number", "minimum": -DOUBLE, "exclusiveMaximum": DOUBLE}, ["0.001"], []),
        ({"type": "number", "minimum": 1e-300}, ["0.5"], ["0", "-1"]),
        ({"type": "number", "maximum": -1e-300}, ["-0.5"], ["0", "1"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-5", "1234567890123456789"], ["9" * 20]),
        ({"type": "integer", "exclusiveMinimum": -(10**400), "maximum": 5}, ["5", "-6"], ["6"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", "18"], ["-1"]),
        ({"type": "object", "propertyNames": {"type": "string"}}, ['{"a":1}'], ["1"]),
        ({"type": "object", "propertyNames": True, "uniqueItems": False}, ['{"a":1}'], ["1"]),
        ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, ['{"aa":1}'], ['{"b":1}']),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
            ['{"b":1}', '{"a":1,"b":2}'],
            ['{"c":1}', '{"a":"x"}'],
        ),
        ({"type": "string", "format": "int32"}, ['"anything"'], ["1"]),
        ({"type": "string", "format": "no-such", "maxLength": 2}, ['"ab"'], ['"abc"']),
    ],
)
async def test_bounds_names_and_formats_that_the_compiler_lacks_are_expressed_otherwise(
    compiler: Grammars, schema: Schema, valid: list[str], invalid: list[str]
) -> None:
    constraint = await constraint_of(compiler, schema_source(schema))

    def accepts(text: str) -> bool:
        rest, tokens = text.encode(), ()
        while rest:
            allowed = allowed_ids(constraint, tokens)
            ids = [i for i, raw in enumerate(TOKEN_BYTES) if i in allowed and raw and rest.startswith(raw)]
            if not ids:
                return False
            longest = max(ids, key=lambda i: len(TOKEN_BYTES[i]))
            rest, tokens = rest[len(TOKEN_BYTES[longest]) :], (*tokens, longest)
        return EOS in allowed_ids(constraint, tokens)

    assert [text for text in valid if not accepts(text)] == []
    assert [text for text in invalid if accepts(text)] == []
    for text in valid:
        validate(json.loads(text), schema)


DATE: Schema = {"type": "string", "format": "date"}
OF_DATE: Schema = {"type": "object", "properties": {"a": DATE}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/components/schemas/D", "components": {"schemas": {"D": DATE}}},
        {"$ref": "#/components/schemas/O/properties/a", "components": {"schemas": {"O": OF_DATE}}},
        {"$ref": "#/$defs/a~1b%25%20%C3%A9~0", "$defs": {"a/b% é~": DATE}},
        {"$ref": "#/$defs/é", "$defs": {"é": DATE}},
        {"$ref": "#/allOf/0/items/anyOf/1", "allOf": [{"items": {"anyOf": [True, DATE]}}]},
        {"$ref": "#/prefixItems/0", "prefixItems": [{"$ref": "#/definitions/D"}], "definitions": {"D": DATE}},
        {"$id": "https://example.com/s", "$ref": "#/$defs/D", "$defs": {"D": {"$id": "d", **DATE}}},
    ],
)
async def test_whatever_a_reference_names_is_narrowed(compiler: Grammars, schema: Schema) -> None:
    constraint = await constraint_of(compiler, schema_source(schema))
    before = tuple(b'"2023-02-2')
    assert ord("8") in allowed_ids(constraint, before)
    assert ord("9") not in allowed_ids(constraint, before)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/x", "x": DATE},
        {"$ref": "#/const", "const": DATE},
        {"$ref": "#/properties/const/const", "properties": {"const": {"const": DATE}}},
        {"$ref": "#/properties", "properties": {"type": DATE}},
        {"$ref": "#/components/schemas", "components": {"schemas": {"D": DATE}}},
        {"$ref": "#/$defs/x/components/schemas/D", "$defs": {"x": {"components": {"schemas": {"D": DATE}}}}},
        {"$ref": "#/prefixItems/1", "prefixItems": [DATE]},
        {"$ref": "#/prefixItems/-1", "prefixItems": [DATE]},
        {"$ref": "#/allOf/D", "allOf": {"D": DATE}},
        {"$ref": "#/$defs/x/y", "$defs": {"x": True}},
        {"$ref": "#D", "$defs": {"D": {"$anchor": "D", **DATE}}},
        {"$ref": "d", "$defs": {"D": {"$id": "d", **DATE}}},
        {"$ref": "https://example.com/s#/$defs/D", "$id": "https://example.com/s", "$defs": {"D": DATE}},
        {"properties": {"a": {"$id": "a", "items": {"$ref": "#/$defs/D"}, "$defs": {"D": True}}}, "$defs": {"D": DATE}},
    ],
)
async def test_a_reference_to_anything_but_a_schema_in_a_known_place_is_refused(
    compiler: Grammars, schema: Schema
) -> None:
    for source in (schema_source(schema), ConstraintSource("grammar", (f"start: %json {json.dumps(schema)}",))):
        with pytest.raises(StatusError, match=r"\$ref|\$id") as caught:
            await constraint_of(compiler, source)
        assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, source.field)
        assert len(caught.value.message) < 500


KEYWORDS = (
    "$defs $id $ref $schema additionalItems additionalProperties allOf anyOf components const default definitions enum "
    "exclusiveMaximum exclusiveMinimum format id items maxItems maxLength maxProperties maximum minItems minLength "
    "minProperties minimum multipleOf oneOf pattern patternProperties prefixItems properties required title type"
)
VALUES = ["null", "true", "1", "-1", "2.5", "1e400", "9" * 5000, '"a"', '"("', "[]", "[[]]", "[{}]", "[1]", "{}"]
VALUES += ['{"a": 1}', '{"a": []}', '{"(": {}}', '{"$ref": 1}', '{"schemas": 1}', '{"schemas": {"a": 1}}']


@pytest.mark.parametrize("keyword", KEYWORDS.split())
def test_a_malformed_schema_is_the_callers_error(compiler: Grammars, keyword: str) -> None:
    """Each keyword with values of wrong types, alone and beside others, is supported or refused, but never fails."""
    beside = [
        "",
        ', "minProperties": 2',
        ', "required": [{}], "minProperties": 2',
        ', "format": "date", "pattern": "a"',
    ]
    beside.append(', "$ref": "#/allOf/0"')
    for value in VALUES:
        for others in beside:
            schema = f'{{"{keyword}": {value}{others}}}'
            for text in (schema, f'{{"properties": {{"x": {schema}}}}}'):
                sources = [ConstraintSource("json_schema", (text,))]
                sources.append(ConstraintSource("grammar", (f"start: %json {text}",)))
                assert {refusal_of(compiler, source) for source in sources} <= {None, Reason.INVALID_FIELD}, text


def refusal_of(compiler: Grammars, source: ConstraintSource) -> Reason | None:
    """Why a constraint is refused; None if it is not."""
    try:
        compiler._constrain(source, (EOS,), ())
    except StatusError as error:
        return error.reason
    return None


async def test_any_number_of_patterns_may_apply_to_different_texts(compiler: Grammars) -> None:
    texts = [{"type": "string", "pattern": f"^x{number}$"} for number in range(30)]
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "name": {"$ref": "#/anyOf/0"}}}
    schema = {"anyOf": [*texts, {"type": "array", "prefixItems": texts}, {"$ref": "#/$defs/node"}]}
    assert allowed_ids(await constraint_of(compiler, schema_source({**schema, "$defs": {"node": node}})))


@pytest.mark.parametrize(
    "source",
    [
        ConstraintSource("json_schema", ('{"type": ',)),
        ConstraintSource("json_schema", ('{"items": ' * 5000,)),
        ConstraintSource("json_schema", ('{"items": ' * 5000 + "{}" + "}" * 5000,)),
        ConstraintSource("regex", ("(",)),
        ConstraintSource("regex", (r"a(?!b)",)),
        ConstraintSource("grammar", ("hello",)),
        ConstraintSource("grammar", ("start: missing",)),
        ConstraintSource("grammar", ('start: %json {"not": {}, "x-guidance": {"lenient": true}}',)),
    ],
)
async def test_what_is_not_of_its_language_is_refused(compiler: Grammars, source: ConstraintSource) -> None:
    with pytest.raises(StatusError) as caught:
        await constraint_of(compiler, source)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, source.field)
    assert len(caught.value.message) < 500


def _chain(first: str, rule: str, last: str, length: int) -> str:
    rules = "".join(rule.format(number, number + 1) for number in range(length))
    return first + rules + last.format(length)


@pytest.mark.parametrize(
    "source",
    [
        ConstraintSource("grammar", (_chain("start: r0\n", "r{}: r{}\n", 'r{}: "a"\n', 10_000),)),
        ConstraintSource("grammar", (_chain("start: r0\n", f"r{{}}:{'(' * 25}r{{}}{')' * 25}\n", 'r{}: "a"\n', 1000),)),
        ConstraintSource("grammar", (_chain("start: T0\n", "T{}: T{}\n", 'T{}: "a"\n', 10_000),)),
        schema_source(
            {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)} | {"5000": True}}
        ),
    ],
    ids=["rules", "groups", "terminals", "references"],
)
async def test_a_constraint_of_many_steps_does_not_end_the_process(source: ConstraintSource) -> None:
    """Each of these constraints would overflow the stack of an ordinary thread. A router would then try the request at
    the next worker."""
    assert allowed_ids(await constraint_of(grammars(), source))


async def test_a_model_that_cannot_end_or_tells_no_bytes_takes_no_constraints() -> None:
    def unreadable() -> Vocabulary:
        raise VocabularyError("no bytes")

    for compiler in (Grammars(lambda: VOCABULARY, VOCAB_SIZE, []), Grammars(unreadable, VOCAB_SIZE, [EOS])):
        with pytest.raises(StatusError) as caught:
            await constraint_of(compiler, LETTERS)
        assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "sampling.constraint")


async def test_a_grammar_is_compiled_once_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "CACHED_GRAMMARS", 2)
    compiler = grammars()
    first = await constraint_of(compiler, LETTERS)
    assert (await constraint_of(compiler, LETTERS)).grammar is first.grammar
    for text in ("a", "b"):
        await constraint_of(compiler, ConstraintSource("regex", (text,)))
    assert len(compiler._cache) == 2
    assert (await constraint_of(compiler, LETTERS)).grammar is not first.grammar


async def test_grammars_that_took_long_to_compile_are_few_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_S", 0.0)
    compiler = grammars()
    running = await constraint_of(compiler, LETTERS)
    await constraint_of(compiler, ConstraintSource("regex", ("a",)))
    assert [source.texts for source in compiler._cache] == [("a",)]
    monkeypatch.setattr(grammar_compiler, "MAX_KEPT_S", running.grammar.cost_s / 2)
    with pytest.raises(StatusError, match="running requests take too much memory") as caught:
        await constraint_of(compiler, ConstraintSource("regex", ("b",)))
    assert (caught.value.reason, len(compiler._cache)) == (Reason.QUEUE_FULL, 0)
    del running
    async with asyncio.timeout(patience(20)):
        while compiler._kept:  # the thread that compiled one may hold it for a moment more
            await asyncio.sleep(0.001)
    assert allowed_ids(await constraint_of(compiler, ConstraintSource("regex", ("b",))))


async def test_more_constraints_than_the_bound_are_refused_with_a_time_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_PENDING", 1)
    gate = threading.Event()

    def gated() -> Vocabulary:
        assert gate.wait(patience(20))
        return VOCABULARY

    compiler = Grammars(gated, VOCAB_SIZE, [EOS])
    first = asyncio.create_task(constraint_of(compiler, LETTERS))
    await asyncio.sleep(0)
    with pytest.raises(StatusError) as caught:
        await constraint_of(compiler, ConstraintSource("regex", ("b",)))
    assert (caught.value.reason, caught.value.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    # Any number may ask for the same one. Those who go are not waited for, and those who stay get it.
    others = [asyncio.create_task(constraint_of(compiler, LETTERS)) for _ in range(100)]
    await asyncio.sleep(0)
    for gone in (first, others.pop()):
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
    gate.set()
    assert len({id(constraint) for constraint in await asyncio.gather(*others)}) == 1
    await constraint_of(compiler, ConstraintSource("regex", ("b",)))


async def test_a_constraint_that_nobody_waits_for_any_more_is_not_made() -> None:
    gate = threading.Event()
    num_read = 0

    def gated() -> Vocabulary:
        nonlocal num_read
        num_read += 1
        assert gate.wait(patience(20))
        return VOCABULARY

    compiler = Grammars(gated, VOCAB_SIZE, [EOS])
    texts = ("a", "b", "c")
    tasks = [asyncio.create_task(constraint_of(compiler, ConstraintSource("regex", (text,)))) for text in texts]
    await asyncio.sleep(0.05)  # two threads have begun with the first two
    tasks[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[2]
    assert len(compiler._pending) == 2
    gate.set()
    await asyncio.gather(*tasks[:2])
    assert not compiler._pending
    assert len(compiler._cache) == 2


async def test_a_compilation_that_takes_too_long_is_refused_and_those_behind_it_may_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_compiler, "COMPILE_TIMEOUT_S", 0.5)
    gate = threading.Event()

    def gated() -> Vocabulary:
        assert gate.wait(patience(20))
        return VOCABULARY

    compiler = Grammars(gated, VOCAB_SIZE, [EOS])
    sources = [ConstraintSource("regex", (text,)) for text in "abc"]
    refused = await asyncio.gather(*(constraint_of(compiler, source) for source in sources), return_exceptions=True)
    gate.set()
    slow, also_slow, queued = [error for error in refused if isinstance(error, StatusError)]
    assert slow.reason is also_slow.reason is Reason.INVALID_FIELD
    assert "longer than" in slow.message
    assert (queued.reason, queued.retry_after_s) == (Reason.QUEUE_FULL, 1.0)


async def test_tenants_share_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for very much takes one thread, waits behind itself, and is displaced where there is no room."""
    monkeypatch.setattr(grammar_compiler, "MAX_PENDING", 7)
    monkeypatch.setattr(grammar_compiler, "COMPILE_TIMEOUT_S", 60.0)
    gates = {text: threading.Event() for text in "abcdefghij"}
    begun: list[str] = []
    compiled = grammar_compiler._compiled

    def gated(tokenizer: object, source: ConstraintSource) -> object:
        kind, _, text = source.texts[0].partition("-")
        if kind == "fair":  # others are left of an earlier test
            begun.append(text)
            assert gates[text].wait(patience(20))
        return compiled(tokenizer, source)

    monkeypatch.setattr(grammar_compiler, "_compiled", gated)
    compiler = grammars()

    def ask(tenant: str, text: str) -> asyncio.Task[Constraint]:
        source = ConstraintSource("regex", (f"fair-{text}",))
        return asyncio.create_task(compiler.constrain(source, end_token_ids=[EOS], tenant=tenant))

    async def has_begun(texts: str) -> None:
        async with asyncio.timeout(patience(20)):
            while "".join(begun) != texts:
                await asyncio.sleep(0.001)

    of_a = [ask("A", text) for text in "abcdef"]
    await has_begun("a")
    of_b = [ask("B", text) for text in "gh"]  # the second one takes the place of A's last
    await has_begun("ag")
    with pytest.raises(StatusError, match="too many others") as caught:
        await of_a.pop()
    assert caught.value.reason is Reason.QUEUE_FULL
    gates["a"].set()
    await has_begun("agb")
    of_c = ask("C", "e")  # which A waits for too, behind others
    await asyncio.sleep(0)
    gates["g"].set()
    await has_begun("agbe")
    gates["e"].set()
    await has_begun("agbeh")
    for gate in gates.values():
        gate.set()
    await asyncio.gather(*of_a, *of_b, of_c)
    assert begun == list("agbehcd")
    assert not compiler._pending
    assert not compiler._tenants
    assert len(compiler._queue) == 0


async def test_many_patterns_of_property_names_are_refused_before_they_are_compared(compiler: Grammars) -> None:
    def schema(number: int) -> Schema:
        return {"type": "object", "patternProperties": {f"^p{i}_[a-z]+$": {"type": "null"} for i in range(number)}}

    assert allowed_ids(await constraint_of(compiler, schema_source(schema(60))))
    for refused in (schema(102), {"type": "array", "prefixItems": [schema(60) for _ in range(3)]}):
        with pytest.raises(StatusError, match="patternProperties have .* at most 5000") as caught:
            await constraint_of(compiler, schema_source(refused))
        assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, "sampling.constraint.json_schema")
    several = "start: " + " ".join(f"%json {json.dumps(schema(60))}" for _ in range(3))
    with pytest.raises(StatusError, match="patternProperties have 5310 pairs"):
        await constraint_of(compiler, ConstraintSource("grammar", (several,)))


# --- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 1},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": tuple((token_id, -100.0) for token_id in range(ord("a"), ord("z")))},
        {"logit_bias": ((SPECIAL, 100.0), (EOS, 100.0), (ord("7"), 100.0))},
        {"bad_words": tuple((token_id,) for token_id in range(256))},
        {"num_logprobs": 2},
    ],
)
async def test_an_answer_is_of_the_language_however_it_is_sampled(compiler: Grammars, fields: dict[str, Any]) -> None:
    for source in (LETTERS, ConstraintSource("regex", ("([a-z][0-9]){3,12}",))):
        tokens = answer(await constraint_of(compiler, source), **fields)
        assert tokens[-1] == EOS
        assert re.fullmatch(source.texts[0], text_of(tokens).decode())


async def test_seeds_reproduce_and_differ(compiler: Grammars) -> None:
    constraint = await constraint_of(compiler, LETTERS)
    assert answer(constraint, seed=1) == answer(constraint, seed=1)
    assert len({tuple(answer(constraint, seed=seed)) for seed in range(20)}) > 10


LONG = [
    ConstraintSource("choice", ("ab" * 800,)),
    ConstraintSource("choice", ("x" + "é日" * 300, "y" + "abcé" * 300)),
    ConstraintSource("regex", ("(aé){400}",)),
    ConstraintSource("grammar", (_chain("start: r0\n", "r{0}: r{1} r{1}\n", 'r{}: "abc"\n', 9),)),
    schema_source({"enum": ["a" + "é" * 600, "b"]}),
]


@pytest.mark.parametrize("source", LONG, ids=lambda source: f"{source.kind}-{len(source.texts[0])}")
async def test_of_a_long_text_that_must_follow_only_the_next_part_becomes_tokens(
    source: ConstraintSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the time of each step is proportional to the rest of the text. The masks do not change."""
    matcher = (await constraint_of(grammars(), source)).begin()
    monkeypatch.setattr(grammar_compiler, "MIN_WINDOW_BYTES", 1 << 20)
    whole = (await constraint_of(grammars(), source)).begin()
    generated: list[int] = []
    most_forced = 0
    while EOS not in (ids := _ids(whole, generated)):
        assert _ids(matcher, generated) == ids
        most_forced = max(most_forced, len(matcher.forced_tokens()))
        generated.append(ids[0])
        for either in (matcher, whole):
            either.advance(ids[0])
    assert _ids(matcher, generated) == ids
    assert len(generated) > 500
    assert 15 < most_forced <= 256


def _ids(matcher: Matcher, generated: list[int]) -> list[int]:
    allowed = matcher.allowed(generated).token_ids
    assert allowed is not None
    return allowed.tolist()  # type: ignore[no-any-return]


async def test_a_resumed_answer_goes_on_as_the_whole_one_did(compiler: Grammars) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}}}
    source = schema_source({**schema, "required": ["name"], "additionalProperties": False})
    whole = answer(await constraint_of(compiler, source))
    assert len(whole) > 6
    for cut in range(len(whole)):
        delivered = tuple(whole[:cut])
        assert answer(await constraint_of(compiler, source, generated=delivered), delivered) == whole


async def test_a_resumption_that_does_not_follow_the_grammar_is_refused(compiler: Grammars) -> None:
    with pytest.raises(StatusError) as caught:
        await constraint_of(compiler, LETTERS, generated=(A, ord("1")))
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, "resume_token_ids")
    assert not (await constraint_of(compiler, LETTERS)).grammar.is_spoiled


async def test_logprobs_are_of_the_model_not_of_what_the_constraint_left(compiler: Grammars) -> None:
    constraint = await constraint_of(compiler, ConstraintSource("regex", ("a",)))
    sampling = SamplingParams(max_tokens=1, seed=0, num_logprobs=1, constraint=constraint)
    logits = logits_at(0)
    (sampled,) = sample(BatchSampler(), [Request("r", [1], sampling, 0)], Logits(logits[None].copy()))
    assert sampled.token_id == A
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_token_ids == (int(logits.argmax()),)
    exact = logits.astype(np.float64)
    assert sampled.logprobs.logprob == pytest.approx(exact[A] - np.log(np.exp(exact).sum()), abs=1e-5)


async def test_draws_follow_the_distribution_over_what_is_allowed(compiler: Grammars) -> None:
    """Chi-square over 4,000 draws: the few tokens of a regular expression, and a mask over most of the vocabulary."""
    for source in (ConstraintSource("regex", ("[a-h]",)), ConstraintSource("regex", ("[^a-h]",))):
        constraint = await constraint_of(compiler, source)
        allowed = sorted(allowed_ids(constraint))
        logits = logits_at(3) / 3
        wanted = np.exp(logits[allowed].astype(np.float64))
        wanted /= wanted.sum()
        counts = dict.fromkeys(allowed, 0)
        sampler = BatchSampler()
        for start in range(0, 4000, 16):
            rows = [SamplingParams(max_tokens=1, seed=start + row, constraint=constraint) for row in range(16)]
            requests = [Request("r", [1], params, 0) for params in rows]
            for drawn in sample(sampler, requests, Logits(np.tile(logits, (16, 1)))):
                counts[drawn.token_id] += 1
        chi_square = sum((counts[i] - 4000 * p) ** 2 / (4000 * p) for i, p in zip(allowed, wanted, strict=True))
        assert chi_square <= len(allowed) + 5 * np.sqrt(2 * len(allowed))


# --- where an answer ends -------------------------------------------------------------------------------------------


async def test_an_end_token_is_allowed_only_where_the_grammar_may_end(compiler: Grammars) -> None:
    constraint = await constraint_of(compiler, ConstraintSource("regex", ("a{2,3}",)))
    assert allowed_ids(constraint) == {A}
    assert allowed_ids(constraint, (A, A)) == {A, EOS}
    assert allowed_ids(constraint, (A, A, A)) == {EOS}


async def test_with_ignore_eos_an_answer_goes_on_as_long_as_its_grammar_can(compiler: Grammars) -> None:
    constraint = await constraint_of(compiler, ConstraintSource("regex", ("x{2,30}",)), ends=())
    assert answer(constraint) == [X] * 30 + [EOS]


async def test_min_tokens_puts_the_end_off_as_far_as_the_grammar_goes(compiler: Grammars) -> None:
    constraint = await constraint_of(compiler, ConstraintSource("regex", ("x{2,30}",)))
    assert len(answer(constraint)) < 12
    assert len(answer(constraint, min_tokens=12)) >= 13
    assert answer(constraint, min_tokens=50) == [X] * 30 + [EOS]


async def test_a_stop_token_ends_an_answer_where_it_may_end_or_where_it_is_text(compiler: Grammars) -> None:
    may_end = await constraint_of(compiler, ConstraintSource("regex", ("x{2,3}",)), ends=(EOS, NEWLINE))
    assert allowed_ids(may_end, (X,)) == {X}
    assert allowed_ids(may_end, (X, X)) == {X, EOS, NEWLINE}
    is_text = await constraint_of(compiler, ConstraintSource("regex", ("x[xb]{9}",)), ends=(EOS, B))
    assert answer(is_text, stop_token_ids=frozenset({EOS, B}), logit_bias=((B, 50.0),)) == [X, B]


async def test_bad_words_are_kept_out_unless_the_grammar_leaves_nothing_else(compiler: Grammars) -> None:
    pair = await constraint_of(compiler, ConstraintSource("regex", ("[xa]{6}",)))
    assert text_of(answer(pair, bad_words=((A,),))) == b"xxxxxx"
    single = await constraint_of(compiler, ConstraintSource("regex", ("x{6}",)))
    assert text_of(answer(single, bad_words=((X,),))) == b"xxxxxx"


# --- in the engine --------------------------------------------------------------------------------------------------

STORY = ConstraintSource("regex", ("([a-z]{2,5} ){4}[a-z]+",))


async def test_preemption_changes_nothing(compiler: Grammars) -> None:
    """The same requests in an ample pool and in one that is far too small; rows with and without constraints mixed."""
    constraint = await constraint_of(compiler, STORY)
    answers = []
    for num_blocks in (200, 14):
        engine = make_engine(num_blocks=num_blocks)
        requests = []
        for seed in range(8):
            options = {"temperature": 1.0, "seed": seed, "stop_token_ids": frozenset({EOS})}
            chosen = {"constraint": constraint} if seed % 4 else {}
            requests.append(engine.request([seed, 2, 3, 4, 5], 32, **options, **chosen))
        engine.run()
        answers.append([engine.tokens[request] for request in requests])
        preemptions = engine.scheduler.stats.preemptions
    assert preemptions > 0
    assert answers[0] == answers[1]
    for seed, tokens in enumerate(answers[0]):
        if seed % 4:
            assert tokens[-1] == EOS or len(tokens) == 32
            assert re.fullmatch(r"([a-z]{2,5} ){4}[a-z]+", text_of(tokens).decode()) or len(tokens) == 32


async def test_max_tokens_cuts_an_answer(compiler: Grammars) -> None:
    engine = make_engine()
    constraint = await constraint_of(compiler, ConstraintSource("regex", ("[a-z]{20}",)))
    cut = engine.request([1, 2], 5, constraint=constraint, stop_token_ids=frozenset({EOS}))
    engine.run()
    assert engine.finish(cut) is FinishReason.LENGTH
    assert len(engine.tokens[cut]) == 5


async def test_a_grammar_that_grows_over_its_bounds_ends_its_request_and_is_compiled_anew() -> None:
    compiler = grammars()
    constraint = await constraint_of(compiler, LETTERS)
    matcher = constraint.begin()
    matcher.advance(ord("1"))
    few, _ = matcher.allowed([ord("1")])
    assert few is not None
    assert len(few) == 0
    assert matcher.has_failed
    request = Request("r", [1], SamplingParams(max_tokens=9, seed=0, constraint=constraint), 0)
    sampler = BatchSampler()
    sampler._processors._matchers[request] = matcher
    request.token_ids.append(ord("1"))
    assert sample(sampler, [request], Logits(logits_at(0)[None]))[0].token_id == -1
    assert (await constraint_of(compiler, LETTERS)).grammar is not constraint.grammar


async def test_a_matcher_that_is_ahead_of_its_request_starts_again(compiler: Grammars) -> None:
    matcher = (await constraint_of(compiler, ConstraintSource("regex", ("abx",)))).begin()
    matcher.advance(A)
    matcher.advance(B)
    assert list(matcher.allowed([A])[0] or []) == [B]
