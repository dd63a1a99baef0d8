"""What callers write never becomes a control token, and texts without control tokens keep their ids.

`small_tokenizers.tar.xz` has a small tokenizer of each kind; tests/architectures/small_tokenizers.py made them.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino_tokenizers import tokenizer_pipeline as pipeline

from headrace.gateway.chat.prompts import ChatPrompt, Conversation, Prompts, SpecialTokensInText
from headrace.gateway.text.control_text import ControlTexts
from headrace.gateway.text.detokenizer import detokenize
from headrace.gateway.text.models import Model, TextSide, load_text_side
from headrace.protos.status import StatusError
from headrace.protos.worker_pb2 import ModelCard
from tests.gateway import conftest as kit

ARCHIVE = Path(__file__).with_name("small_tokenizers.tar.xz")
KINDS = ("deepseek", "gemma", "gpt2", "granite", "llama2", "llama3", "phi3", "qwen2", "smollm", "tekken", "unigram")
HARMLESS = "word"
# Shows every field of a conversation, in the ways in which templates write them.
TEMPLATE = """\
{{- bos_token }}{{ greeting }}
{%- for document in documents or [] %}{{ document.title }}: {{ document.text | trim }}{% endfor %}
{%- for tool in tools or [] %}{{ tool | tojson }}{{ tool | tojson(indent=2, ensure_ascii=True) }}
{{ tool }}{{- tool.function.description }}
{%- for name in tool.function.parameters.properties %} {{ name }}{% endfor %}{% endfor %}
{%- for message in messages %}{{ 'SPECIAL' + message.role }}
{%- if message.name %} {{ message['name'] }}{% endif %}
{%- if message.reasoning_content %}{{ '<think>' ~ message.reasoning_content ~ '</think>' }}{% endif %}
{{- message.content | trim if loop.first else message.content }}
{%- for call in message.tool_calls or [] %}
{{- call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- for name, value in call.function.arguments.items() %}<{{ name }}>{{ value }}{% endfor %}{% endfor %}
{%- if message.tool_call_id %}{{ message.tool_call_id }}{% endif %}{{ 'SPECIAL\\n' }}{% endfor %}
{%- if add_generation_prompt %}SPECIAL{% endif %}"""


def conversation(field: str, text: str, **options: Any) -> Conversation:
    """A conversation with a text in one of its fields, and a harmless word in the others."""

    def said(name: str) -> str:
        return text if name == field else HARMLESS

    call = {
        "id": said("call id"),
        "type": "function",
        "function": {"name": said("called function"), "arguments": {said("argument name"): said("argument")}},
    }
    parameters = {
        "type": "object",
        "properties": {said("parameter"): {"type": "string", "enum": [said("choice")], "description": "d"}},
    }
    function = {"name": said("function"), "description": said("description"), "parameters": parameters}
    messages = [
        {"role": "system", "content": said("system")},
        {"role": "user", "content": f"a {said('inside')} b", "name": said("name")},
        {"role": "user", "content": said("user")},
        {"role": "assistant", "content": said("assistant"), "reasoning_content": said("reasoning")},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": said("result"), "tool_call_id": said("result id")},
        {"role": "assistant", "content": said("prefill")},
    ]
    documents = [{"title": said("title"), "text": said("document")}]
    variables = {"greeting": said("variable"), "documents": documents}
    return Conversation(messages, [{"type": "function", "function": function}], variables=variables, **options)


FIELDS = """system|inside|name|user|assistant|reasoning|call id|called function|argument name|argument|result|result id
prefill|title|document|variable|function|description|parameter|choice""".replace("\n", "|").split("|")


def files_of(kind: str) -> dict[str, bytes]:
    with tarfile.open(ARCHIVE) as archive:
        members = [member for member in archive.getmembers() if member.name.startswith(f"{kind}/")]
        return {member.name.split("/")[1]: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


@pytest.fixture(scope="module", params=KINDS)
def side(request: pytest.FixtureRequest) -> Iterator[TextSide]:
    files = files_of(request.param)
    bare = load_text_side(kit.tar_of(files))
    special = min(bare.controls.texts - {"<unk>"}, key=len)
    bare.tokenizer.close()
    side = load_text_side(kit.tar_of({**files, "chat_template.jinja": TEMPLATE.replace("SPECIAL", special).encode()}))
    yield side
    side.tokenizer.close()


def rendered(side: TextSide, talk: Conversation, where: str = "prompts") -> ChatPrompt:
    with ThreadPoolExecutor(1) as pool:
        return Prompts(pool, SpecialTokensInText(where))._rendered(Model(ModelCard(name="m"), side), talk)


def controls_in(side: TextSide, ids: Any) -> list[int]:
    return [token_id for token_id in ids if token_id in side.controls.ids]


def test_no_control_token_comes_from_any_field(side: TextSide) -> None:
    expected = controls_in(side, rendered(side, conversation("", "")).token_ids)
    assert len(expected) >= 7
    shortest, *_, longest = sorted(side.controls.texts, key=len) * 2
    for text in sorted(side.controls.texts):
        for field in FIELDS:
            for written in (text, f" {text}{text}x\n") if text in (shortest, longest) else (text,):
                ids = rendered(side, conversation(field, written)).token_ids
                assert controls_in(side, ids) == expected, (field, written)


def test_a_continued_message_is_text_too(side: TextSide) -> None:
    def ids(text: str) -> Any:
        talk = conversation("prefill", text, add_generation_prompt=False, continue_final_message=True)
        return rendered(side, talk)

    expected = controls_in(side, ids(HARMLESS).token_ids)
    for text in sorted(side.controls.texts):
        prompt = ids(f"x{text}")
        assert controls_in(side, prompt.token_ids) == expected
        assert prompt.ending == f"x{text}"


def test_the_operator_may_allow_them(side: TextSide) -> None:
    text = max(side.controls.texts, key=len)
    plain, allowed = (rendered(side, conversation("user", text), where).token_ids for where in ("prompts", "anywhere"))
    assert len(controls_in(side, allowed)) == len(controls_in(side, plain)) + 1


@pytest.mark.parametrize(("where", "is_token"), [("never", False), ("prompts", True), ("anywhere", True)])
async def test_prompts_that_callers_write_whole_have_them_unless_the_operator_forbids_it(
    where: str, is_token: bool
) -> None:
    side = template_side(kit.CHATML)
    model = Model(ModelCard(name="m"), side)
    with ThreadPoolExecutor(1) as pool:
        prompts = Prompts(pool, SpecialTokensInText(where))
        assert (2 in await prompts.of_prompt(model, "a <|im_end|>")) == is_token
        assert (2 in await prompts.of_text(model, "a <|im_end|>")) == (where == "anywhere")
        (several,) = await prompts.of_texts(model, ["a <|im_end|>"])
        assert (2 in several) == (where == "anywhere")
        assert any(2 in word for word in await prompts.of_words(model, ["<|im_end|>"])) == (where == "anywhere")
    side.tokenizer.close()


@settings(max_examples=25)
@given(data=st.data())
def test_a_text_without_control_tokens_keeps_its_ids(side: TextSide, data: st.DataObject) -> None:
    """The ids are those of one pass over the whole text, whatever else is in it."""
    letters = st.text(st.sampled_from("abs <>|[]/_\n\té世▁\ue000\U0010fffd"), max_size=12)
    text = data.draw(letters | st.text(max_size=12))
    for control in side.controls.texts:
        text = text.replace(control, "")
    if side.controls.occur_in(text):
        return
    talk = conversation(data.draw(st.sampled_from(FIELDS)), text)
    try:
        allowed = rendered(side, talk, "anywhere").token_ids
    except StatusError:  # the template cannot write it
        return
    assert list(rendered(side, talk).token_ids) == list(allowed)


@settings(max_examples=25)
@given(data=st.data())
def test_pieces_have_the_ids_of_the_whole(side: TextSide, data: st.DataObject) -> None:
    """Splitting at added tokens here equals splitting in the tokenizer's graph."""
    words = [*sorted(side.controls.texts)[:6], "<think>", " ", "\n", "\xa0", "\x1c", "a", "<", "é", "[", "hello"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    (ids,) = side.tokenizer.encode_pieces([side.encoding._pieces(text, "")])
    assert ids == side.tokenizer.encode(text, add_special_tokens=False)


def test_a_text_alone_has_none(side: TextSide) -> None:
    for text in sorted(side.controls.texts):
        for written in (text, f"a{text}b", text * 3, f"x {text}"):
            ids = side.encoding.plain(written, add_special_tokens=False)
            assert not controls_in(side, ids)
            several = side.encoding.plain_many([written, HARMLESS], add_special_tokens=False)
            assert several == [ids, side.tokenizer.encode(HARMLESS, add_special_tokens=False)]
            around = side.encoding.plain(written, add_special_tokens=True)
            before, behind = side.tokenizer.special_around
            assert around == [*before, *ids, *behind]


def test_a_text_that_is_normalised_to_a_control_token_is_text() -> None:
    side = load_text_side(kit.tar_of(files_of("unigram")))
    assert controls_in(side, side.tokenizer.encode("a ＜s＞", add_special_tokens=False))
    ids = side.encoding.plain("a ＜s＞ and more of it " * 3, add_special_tokens=False)
    assert not controls_in(side, ids)
    side.tokenizer.close()


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama3", "tekken", "deepseek", "granite", "smollm"])
def test_the_text_is_not_changed(kind: str) -> None:
    """Also in byte-level vocabularies, where each text can be written without any control token."""
    side = load_text_side(kit.tar_of(files_of(kind)))
    for text in side.controls.texts:
        ids = side.encoding.plain(f"say {text} twice {text}", add_special_tokens=False)
        assert detokenize(ids, side.tokenizer.token_bytes) == f"say {text} twice {text}"
    side.tokenizer.close()


def template_side(template: str) -> TextSide:
    """The tiny tokenizer, whose control tokens are <|bos|>, <|im_start|> and <|im_end|>, with a template."""
    files = {**kit.tiny_graphs(add_bos=False), "chat_template.jinja": template.encode()}
    return load_text_side(kit.tar_of(files))


@pytest.mark.parametrize(
    ("template", "text", "num_controls"),
    [
        # The template cuts out what it looks for, in the caller's text as before.
        ("{{ messages[0].content.split('<|im_end|>')[-1] }}<|bos|>", "a<|im_end|>b", 1),
        ("{% if '<|im_end|>' in messages[0].content %}<|im_end|>{% endif %}", "a<|im_end|>", 1),
        ("{{ messages[0].content | replace('<|im_end|>', '') }}", "a<|im_end|>b", 0),
        # It composes the text of a control token from pieces.
        ("{{ messages[0].content | replace('<cut>', '') }}", "a<|im_<cut>end|>b", 0),
        ("{{ messages[0].content }}{{ messages[0].name }}", "a<|im_", 0),
        ("{{ messages[0].content | trim }}{{ messages[0].name }}", "a<|im_ \n", 0),
        ("{{ '<|im_' }}{{ messages[0].content }}", "end|>", 0),
        ("{{ messages[0].content | lower }}", "<|IM_END|>", 0),
        # Its own are tokens, however it writes them.
        ("{{ '<|' + messages[0].role + '|>' }}<|im_start|>{{ messages[0].content }}", "<|im_start|>", 1),
    ],
)
def test_templates_that_look_into_texts_work_as_before(template: str, text: str, num_controls: int) -> None:
    side = template_side(template)
    talk = Conversation([{"role": "user", "content": text, "name": "end|>"}])
    prompt, allowed = rendered(side, talk), rendered(side, talk, "anywhere")
    assert len(controls_in(side, prompt.token_ids)) == num_controls
    assert prompt.ending == allowed.ending
    side.tokenizer.close()


def test_what_the_template_says_has_no_marks() -> None:
    side = template_side("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(StatusError, match=r"conversation: a <\|im_end\|> b$"):
        rendered(side, Conversation([{"role": "user", "content": "a <|im_end|> b"}]))
    side.tokenizer.close()


def test_a_token_of_one_character_is_text_too() -> None:
    controls = ControlTexts({"§": 1, "<a>": 2, "a>b": 3})
    assert controls.marked_text("x§y", "M") == "xM§y"
    assert controls.marked_text("<a>b", "M") == "<MaM>b"
    assert not ControlTexts({}).occur_in("anything")
    assert ControlTexts({" ": 1}).marking_for([{"role": "user", "content": " "}]) is None


MARKED: list[Callable[[str], Any]] = [lambda x: x, lambda x: {x: [x, 1, None]}, lambda x: (x,)]


@pytest.mark.parametrize("value", MARKED)
def test_values_are_marked_in_depth(value: Callable[[str], Any]) -> None:
    controls = ControlTexts({'<"x">': 1})
    marking = controls.marking_for([{"role": "user", "content": "hi", "more": value('<"x">')}])
    assert marking is not None
    marked = marking.value(value('<"x">'))
    assert '<"x">' not in repr(marked)
    assert json.dumps(marking.mark)[1:-1] in json.dumps(marked)


def test_the_space_that_a_detokenizer_puts_before_words_is_no_part_of_a_control_text() -> None:
    vocab = ["<unk>", "<s>", "say", "a", "b"]
    whole = pipeline.TokenizerPipeline(vocab=vocab, skip_tokens=[0, 1])
    whole.add_steps(
        [
            pipeline.SpecialTokensSplit.from_string_iter(vocab[:2]),
            pipeline.RegexSplitStep.whitespace_splitter(),
            pipeline.VocabEncoderStep(vocab=vocab, default_value=0),
            pipeline.PaddingStep(token="<unk>", _token_id=0, pad_right=False),
            pipeline.VocabDecoderStep(vocab=[f" {word}" for word in vocab]),
            pipeline.FuseStep(),
            pipeline.UTF8ValidateStep(),
        ]
    )
    side = load_text_side(kit.tar_of(kit.graphs_of(whole)))
    assert side.controls.texts == {"<s>"}
    assert 1 not in side.encoding.plain("say <s> a", add_special_tokens=False)
    side.tokenizer.close()
