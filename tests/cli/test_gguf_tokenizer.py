"""Tokenizers of GGUF files: llama.cpp's ids, kinds of tokens, what comes around a text, and files that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import openvino as ov
import pytest
from gguf import TokenType
from openvino_tokenizers.tokenizer_pipeline import RegexSplitStep

from headrace.cli.gguf.pre_tokenizers import _LATER, _SPACE, PRE_TOKENIZERS, _any, _class
from headrace.cli.gguf.tokenizer import write_tokenizer
from headrace.cli.gguf.vocabulary import Vocabulary, VocabularyError, read_vocabulary
from headrace.cli.models.convert import _write_tokenizer, convert
from headrace.common.model_files.gguf_files import metadata_of, open_gguf
from headrace.gateway.text.detokenizer import detokenize
from headrace.gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.cli.llama_cpp import BLOCK_LINES, RECORD, SENTENCEPIECE, converted, hashes, write_named
from tests.cli.tokenizer_files import (
    byte_level_tokens,
    sentencepiece_tokens,
    write_byte_level,
    write_file,
    write_sentencepiece,
)
from tests.cli.tokenizer_lines import lines
from tests.gguf_models import TinyModel, write_gguf

EXPECTED: dict[str, list[str]] = json.loads(RECORD.read_bytes())
# Names that mean the same are tested once.
DIFFERENT = {pre_tokenizer: name for name, pre_tokenizer in reversed(PRE_TOKENIZERS.items())}
# In a process of its own, because GenAI shares OpenVINO's global state with the process that uses it.
GENAI = """
import json, sys, openvino_genai
tokenizer = openvino_genai.Tokenizer(sys.argv[1])
print(json.dumps([tokenizer.encode("12 the").input_ids.data[0].tolist(), tokenizer.decode([16, 17])]))
"""
core = ov.Core()


def vocabulary_of(path: Path) -> Vocabulary:
    reader = open_gguf(path)
    return read_vocabulary(reader, metadata_of(reader))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return converted(write_byte_level(tmp_path_factory.mktemp("llama3") / "m.gguf", "llama-bpe"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return converted(write_sentencepiece(tmp_path_factory.mktemp("spm") / "m.gguf"))


@pytest.mark.parametrize("name", [*DIFFERENT.values(), *SENTENCEPIECE])
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """1,000 lines of mixed text and code. `python -m tests.cli.llama_cpp` compares 10,000, and shows what differs."""
    tokenizer = converted(write_named(tmp_path / "m.gguf", name))
    found = tokenizer.encode_many(list(lines(BLOCK_LINES)), add_special_tokens=True)
    assert hashes(found) == EXPECTED[name][:1]


def test_names_that_mean_the_same_have_the_same_ids() -> None:
    assert set(EXPECTED) == {*PRE_TOKENIZERS, *SENTENCEPIECE}
    for name, meaning in PRE_TOKENIZERS.items():
        assert EXPECTED[name][0] == EXPECTED[DIFFERENT[meaning]][0], name


@pytest.mark.parametrize("name", DIFFERENT.values())
def test_texts_may_be_long(name: str, tmp_path: Path) -> None:
    """The matcher finds nothing once its stack is full, and the text would stay one piece."""
    tokenizer = converted(write_named(tmp_path / "m.gguf", name))
    part = "Grün aBc d'Être x12345 (y); \n"
    two, three = (tokenizer.encode(part * count, add_special_tokens=False) for count in (2, 3))
    # The first and the last part may have tokens of their own: a space in front, white space before nothing.
    begin = next(i for i in range(len(three)) if two[: i + 1] != three[: i + 1])
    end = begin + len(three) - len(two)
    assert three == two[:begin] + three[begin:end] + two[begin:]
    found = tokenizer.encode(part * 5000, add_special_tokens=False)
    # Not in the assertion itself: pytest takes minutes for the difference of lists of this length.
    is_same = found == two[:begin] + three[begin:end] * 4998 + two[begin:]
    assert is_same


def test_classes_of_characters_are_those_of_llama_cpp() -> None:
    """A later version of OpenVINO may know more characters: then the list of later ones has to grow."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    raw = np.frombuffer("".join(characters).encode(), np.uint8)
    counts = {}
    classes = {name: _any(_class(name)) for name in _LATER} | {"spaces": _SPACE}
    for name, expression in classes.items():
        inputs = [ov.opset13.parameter([-1], ov.Type.i32) for _ in range(4)] + [ov.opset13.parameter([-1], ov.Type.u8)]
        outputs = RegexSplitStep(expression, behaviour="remove").get_ov_subgraph([node.output(0) for node in inputs])
        compiled = core.compile_model(ov.Model(outputs, inputs), "CPU")
        zero, one, end = (np.array([value], np.int32) for value in (0, 1, len(raw)))
        found = compiled([zero, one, zero, end, raw])
        rest = sum(len(raw[begin:end].tobytes().decode()) for begin, end in zip(found[2], found[3], strict=True))
        counts[name] = len(characters) - rest
    assert counts == {"L": 136_726, "M": 2_450, "N": 1_831, "P": 842, "S": 7_775, "spaces": 25}


def test_tokens_keep_their_kinds(llama3: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer, tokens in ((llama3, byte_level_tokens()), (sentencepiece, sentencepiece_tokens())):
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        assert tokenizer.special_ids == {ids["<|bos|>"], ids["<|eos|>"], ids["<unk>"]}
        found = tokenizer.encode("<|bos|>a<tool_call>b<unk>", add_special_tokens=False)
        assert {ids["<|bos|>"], ids["<tool_call>"], ids["<unk>"]} < set(found)
        assert ids["<unused0>"] not in tokenizer.encode("<unused0>", add_special_tokens=False)
        shown = detokenize([*found, ids["<unused0>"]], tokenizer.token_bytes, tokenizer.special_ids)
        assert shown.replace(" ", "") == "a<tool_call>b"
    bytes_of = {token: sentencepiece.token_bytes[at] for at, token in enumerate(sentencepiece_tokens())}
    assert bytes_of["<0x0A>"] == b"\n"
    assert bytes_of["<0xE2>"] == b"\xe2"
    assert bytes_of["\u2581f"] == b" f"


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "hello", "a\0b", "<|eos|>", "  <|eos|>  x  ", "日本 ꙮ \U0001f9ff", "<0x41>"]
)
def test_a_text_comes_back_from_its_ids(text: str, llama3: Tokenizer, sentencepiece: Tokenizer) -> None:
    ids = llama3.encode(text, add_special_tokens=False)
    assert detokenize(ids, llama3.token_bytes, frozenset()) == text
    ids = sentencepiece.encode(text, add_special_tokens=False)
    # Texts, also those behind a special token, begin with a space.
    parts = [f" {part}" if part else "" for part in text.split("<|eos|>")]
    assert detokenize(ids, sentencepiece.token_bytes, frozenset()) == "<|eos|>".join(parts)
    texts = [text, "", "x y", text]
    assert llama3.encode_many(texts, add_special_tokens=True) == [
        llama3.encode(one, add_special_tokens=True) for one in texts
    ]
    assert llama3.encode_many(["", ""], add_special_tokens=True) == [[0], [0]]


def test_texts_that_are_already_split_have_the_same_ids(llama3: Tokenizer, sentencepiece: Tokenizer) -> None:
    """As the gateway tokenizes users' texts that look like control tokens."""
    for tokenizer in (llama3, sentencepiece):
        assert tokenizer.added_tokens is not None
        text = "<|bos|>a x<|eos|> for<tool_call>\n"
        found = tokenizer.added_tokens.split(text)
        pieces = [(piece, tokenizer.added_tokens.fullmatch(piece) is not None) for piece in found if piece]
        assert [piece for piece, is_added in pieces if is_added] == ["<|bos|>", "<|eos|>", "<tool_call>"]
        assert tokenizer.encode_pieces([pieces, []]) == [tokenizer.encode(text, add_special_tokens=False), []]
        (as_text,) = tokenizer.encode_pieces([[(text, False)]])
        assert not tokenizer.special_ids & set(as_text)
        assert detokenize(as_text, tokenizer.token_bytes).removeprefix(" ") == text
        assert set(tokenizer.control_texts([], tokenizer.special_tokens)) >= {"<|bos|>", "<|eos|>"}


@pytest.mark.parametrize(
    ("write", "before", "behind"),
    [
        (lambda path: write_byte_level(path, "llama-bpe"), [0], []),
        (lambda path: write_byte_level(path, "llama-bpe", add_bos_token=False), [], []),
        (lambda path: write_byte_level(path, "qwen2"), [], []),
        (lambda path: write_byte_level(path, "qwen2", add_bos_token=True, add_eos_token=True), [0], [1]),
        (lambda path: write_byte_level(path, "qwen2", add_bos_token=True, bos_token_id=10**6), [], []),
        (lambda path: write_byte_level(path, None), [], []),
        (write_sentencepiece, [0], []),
        (lambda path: write_sentencepiece(path, add_bos_token=False, add_eos_token=True), [], [1]),
    ],
)
def test_the_file_says_what_comes_around_a_text(
    write: Callable[[Path], Path], before: list[int], behind: list[int], tmp_path: Path
) -> None:
    tokenizer = converted(write(tmp_path / "m.gguf"))
    assert tokenizer.special_around == (before, behind)


def test_a_space_comes_before_a_text_if_the_file_says_so(sentencepiece: Tokenizer, tmp_path: Path) -> None:
    without = converted(write_sentencepiece(tmp_path / "m.gguf", add_space_prefix=False))
    ids = {token: token_id for token_id, token in enumerate(sentencepiece_tokens())}
    assert sentencepiece.encode("f", add_special_tokens=False) == [ids["\u2581f"]]
    assert without.encode("f", add_special_tokens=False) != [ids["\u2581f"]]
    assert sentencepiece.encode("<|eos|>f", add_special_tokens=False) == [ids["<|eos|>"], ids["\u2581f"]]


def test_a_file_that_names_no_pre_tokenizer_is_split_by_the_default_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = open_gguf(write_byte_level(tmp_path / "m.gguf", None))
    vocabulary = _write_tokenizer(reader, metadata_of(reader), 0, tmp_path)
    assert vocabulary.pre_tokenizer == PRE_TOKENIZERS["default"]
    assert "warning: it names no pre-tokenizer" in capsys.readouterr().err


def test_ends_of_answers_are_no_text(tmp_path: Path) -> None:
    tokens = byte_level_tokens() | {"<|im_end|>": TokenType.USER_DEFINED, "<|end|>": TokenType.NORMAL}
    vocabulary = vocabulary_of(
        write_file(tmp_path / "m.gguf", tokens, {"model": "gpt2", "pre": "qwen2", "merges": ["a b"]})
    )
    ends = [list(tokens).index(token) for token in ("<|im_end|>", "<|end|>")]
    assert vocabulary.end_ids == ends
    assert {vocabulary.kinds[end] for end in ends} == {TokenType.CONTROL}
    tokens |= {"<|return|>": TokenType.CONTROL, "<|call|>": TokenType.CONTROL}
    harmony = vocabulary_of(
        write_file(tmp_path / "m.gguf", tokens, {"model": "gpt2", "pre": "gpt-4o", "merges": ["a b"]})
    )
    assert [harmony.tokens[end] for end in harmony.end_ids] == ["<|im_end|>", "<|return|>", "<|call|>"]


@pytest.mark.parametrize(
    ("tokens", "settings", "problem"),
    [
        ({"a": TokenType.NORMAL}, {"model": "bert"}, "its tokenizer is of the kind bert"),
        (
            {"a": TokenType.NORMAL},
            {"model": "gpt2", "pre": "unheard"},
            "its pre-tokenizer is unheard, which is none of ",
        ),
        ({"a": TokenType.NORMAL, "b": TokenType.NORMAL}, {"model": "gpt2", "merges": ["a b"]}, "lacks the token 'ab'"),
        ({"a": TokenType.NORMAL, "ab": TokenType.NORMAL}, {"model": "gpt2", "merges": ["a b"]}, "lacks the token 'b'"),
        ({"▁a": TokenType.NORMAL}, {"model": "llama", "scores": [0.0]}, "lacks the token <0x00>"),
        (sentencepiece_tokens() | {"<0xZZ>": TokenType.BYTE}, {"model": "llama"}, "'<0xZZ>', which is to be a byte"),
    ],
)
def test_what_would_be_tokenized_wrongly_is_refused(
    tokens: dict[str, TokenType], settings: dict[str, object], problem: str, tmp_path: Path
) -> None:
    path = write_file(tmp_path / "m.gguf", tokens, settings)
    with pytest.raises(VocabularyError, match=problem):
        write_tokenizer(vocabulary_of(path), tmp_path, None, 0)


def test_merges_that_cannot_happen_are_left_out(tmp_path: Path) -> None:
    tokens = byte_level_tokens() | {"ab": TokenType.CONTROL, "abc": TokenType.NORMAL, "zz": TokenType.NORMAL}
    merges = ["a b", "ab c", "z z", "z z"]
    tokenizer = converted(write_file(tmp_path / "m.gguf", tokens, {"model": "gpt2", "pre": "gpt-2", "merges": merges}))
    names = list(tokens)
    assert [names[i] for i in tokenizer.encode("abc zz", add_special_tokens=False)] == ["ab", "c", "Ġ", "zz"]


def test_bytes_without_a_token_part_what_is_on_their_sides(tmp_path: Path) -> None:
    tokens = {token: kind for token, kind in byte_level_tokens().items() if len(token) == 1 and token != "b"}
    tokens |= {"ac": TokenType.NORMAL, "<|eos|>": TokenType.CONTROL}
    settings = {"model": "gpt2", "pre": "gpt-2", "merges": ["a c"], "add_bos_token": True}
    tokenizer = converted(write_file(tmp_path / "m.gguf", tokens, settings))
    found = tokenizer.encode_many(["abc", "ac<|eos|>b", "b", "bacb"], add_special_tokens=True)
    names = list(tokens)
    assert [[names[i] for i in ids[1:]] for ids in found] == [["a", "c"], ["ac", "<|eos|>"], [], ["ac"]]
    assert [ids[0] for ids in found] == [0] * 4
    write_tokenizer(vocabulary_of(tmp_path / "m.gguf"), tmp_path, None, 0)
    ElementTree.parse(tmp_path / "openvino_tokenizer.xml")  # as a worker reads it


def test_ids_beyond_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(write_byte_level(tmp_path / "m.gguf", "qwen2"))
    write_tokenizer(vocabulary, tmp_path, 1, len(vocabulary.tokens) + 3)
    tokenizer = load_tokenizer({file.name: file.read_bytes() for file in tmp_path.glob("openvino_*")})
    assert tokenizer.token_bytes[len(vocabulary.tokens) :] == [b""] * 3
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|eos|>"}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_converted_model_has_its_own_tokenizer(name: str, tmp_path: Path) -> None:
    """Both with openvino-genai's graph of the model and with ours."""
    convert(write_gguf(TinyModel(name, pieces=2 if name == "qwen3" else 1), tmp_path / "m.gguf"), tmp_path)
    tokenizer = load_tokenizer({file.name: file.read_bytes() for file in tmp_path.glob("openvino_*tokenizer.*")})
    tokens = tokenizer.token_bytes
    assert [tokens[i] for i in tokenizer.encode("12 the", add_special_tokens=True)] == [b"1", b"2", b" ", b"th", b"e"]
    assert (tmp_path / "openvino_model.bin").is_file()
    assert not list(tmp_path.glob(".convert.*"))
    done = subprocess.run([sys.executable, "-c", GENAI, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [tokenizer.encode("12 the", add_special_tokens=True), "12"]
    ends = json.loads((tmp_path / "generation_config.json").read_bytes())["eos_token_id"]
    assert [tokens[end] for end in ends] == [b"<|im_end|>", b"<|endoftext|>"]
