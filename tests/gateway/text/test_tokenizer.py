"""The tokenizer of a bundle: ids as the graph makes them, bytes of every token, and a clean end of the process."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openvino_tokenizers import tokenizer_pipeline as pipeline

from headrace.common.model_files.vocabulary import read_vocabulary
from headrace.gateway.text.chat_template import ChatTemplate
from headrace.gateway.text.detokenizer import detokenize
from headrace.gateway.text.models import load_text_side
from headrace.gateway.text.tokenizer import load_tokenizer
from headrace.gateway.upstream.bundle import (
    BundleError,
    eos_token_ids,
    read_bundle,
    special_tokens,
    template_sources,
)
from tests.patience import patience


def test_special_tokens_in_a_text_become_their_ids(tiny_text: Any, kit: Any) -> None:
    tokenizer = tiny_text.tokenizer
    ids = tokenizer.encode("<|im_start|>é<|im_end|>", add_special_tokens=False)
    assert ids == [1, *kit.tokens_of("é"), 2]


def test_the_beginning_of_sequence_is_added_only_on_request(tiny_text: Any) -> None:
    assert tiny_text.tokenizer.encode("hello", add_special_tokens=True) == [0, 262]
    assert tiny_text.tokenizer.encode("hello", add_special_tokens=False) == [262]
    assert tiny_text.tokenizer.encode("", add_special_tokens=False) == []


def test_the_table_has_the_bytes_of_every_token_and_knows_the_special_ones(tiny_text: Any, kit: Any) -> None:
    tokenizer = tiny_text.tokenizer
    singles = [bytes([i]) for i in range(256)]
    merged = [a + b for a, b in kit.MERGES]
    assert tokenizer.token_bytes == [text.encode() for text in kit.SPECIAL] + singles + merged
    assert tokenizer.special_ids == {0, 1, 2}


@given(text=st.text())
def test_a_text_survives_encoding_and_decoding(tiny_text: Any, text: str) -> None:
    tokenizer = tiny_text.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert detokenize(ids, tokenizer.token_bytes) == text


def test_threads_do_not_disturb_each_other(tiny_text: Any) -> None:
    texts = [f"hello w{i}" * 50 for i in range(40)]
    alone = [tiny_text.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda text: tiny_text.tokenizer.encode(text, add_special_tokens=True), texts))
    assert together == alone


def test_a_vocabulary_with_byte_fallback_gives_bytes_and_keeps_leading_spaces(kit: Any) -> None:
    vocab = ["<s>", "<0xE2>", "<0x82>", "<0xAC>", "▁the", "▁", "a", "<code>", "<span>", "<tool>"]
    decoding = [
        pipeline.VocabDecoderStep(vocab=vocab),
        pipeline.RegexDecodingStep.replace_sp_spaces(),
        pipeline.ByteFallbackStep(),
        pipeline.FuseStep(),
        pipeline.RegexDecodingStep.strip_forward_space(),
        pipeline.UTF8ValidateStep(),
    ]
    whole = pipeline.TokenizerPipeline(vocab=vocab, skip_tokens=[0])
    whole.add_steps(decoding)
    decoder = whole.get_detokenizer_ov_subgraph()
    token_bytes, special_ids = read_vocabulary(kit.core, decoder)
    assert token_bytes[:7] == [b"<s>", b"\xe2", b"\x82", b"\xac", b" the", b" ", b"a"]
    assert special_ids == {0}
    assert detokenize([4, 1, 2, 3], token_bytes, special_ids) == " the€"
    assert detokenize([7, 8, 9], token_bytes, special_ids) == "<code><span><tool>"


def test_an_encoder_needs_no_detokenizer(tiny_files: dict[str, bytes], tiny_text: Any) -> None:
    files = {name: raw for name, raw in tiny_files.items() if not name.startswith("openvino_detokenizer")}
    tokenizer = load_tokenizer(files)
    assert tokenizer.encode("hello", add_special_tokens=True) == [0, 262]
    assert (tokenizer.token_bytes, tokenizer.special_ids) == ([], frozenset())
    assert tokenizer.special_around == tiny_text.tokenizer.special_around


def test_a_missing_or_foreign_file_is_named(tiny_files: dict[str, bytes]) -> None:
    without = {name: raw for name, raw in tiny_files.items() if name != "openvino_detokenizer.bin"}
    with pytest.raises(BundleError, match=r"openvino_detokenizer\.bin is missing"):
        load_tokenizer(without)
    with pytest.raises(BundleError, match="cannot be used"):
        load_tokenizer({**tiny_files, "openvino_tokenizer.xml": b"<net/>"})
    swapped = {
        **tiny_files,
        "openvino_detokenizer.xml": tiny_files["openvino_tokenizer.xml"],
        "openvino_detokenizer.bin": tiny_files["openvino_tokenizer.bin"],
    }
    with pytest.raises(BundleError, match="does not decode through a vocabulary"):
        load_tokenizer(swapped)


def test_only_known_regular_files_of_a_bundle_are_read(kit: Any) -> None:
    raw = kit.tar_of({"config.json": b"{}", "../config.json": b"no", "other.txt": b"no", "/etc/config.json": b"no"})
    assert read_bundle(raw) == {"config.json": b"{}"}
    with pytest.raises(BundleError, match="not a tar archive"):
        read_bundle(b"no tar at all" * 100)
    with pytest.raises(BundleError, match="more than"):
        read_bundle(kit.tar_of({f"{i}": b"" for i in range(65)}))


def test_a_template_file_goes_before_the_tokenizers_configuration() -> None:
    config = (
        b'{"chat_template": "from config", "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null}'
    )
    files = {"tokenizer_config.json": config}
    assert template_sources(files) == {"default": "from config"}
    assert template_sources({**files, "chat_template.jinja": b"own file"}) == {"default": "own file"}
    assert special_tokens(files) == {"bos_token": "<s>", "eos_token": "</s>"}
    both = {**files, "chat_template.json": b'{"chat_template": "of the processor"}'}
    assert template_sources(both) == {"default": "of the processor"}
    assert template_sources({**both, "chat_template.jinja": b"own file"}) == {"default": "own file"}
    named = b'{"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}'
    assert template_sources({"tokenizer_config.json": named}) == {"default": "a", "tool_use": "b"}
    with pytest.raises(BundleError, match=r"tokenizer_config\.json"):
        template_sources({"tokenizer_config.json": b"[]"})


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("file", "raw"),
    [
        ("chat_template.jinja", MARK + b"{% if true %}\r\nhi{% endif %}"),
        ("template.jinja", b"{% if true %}\r\nhi{% endif %}"),
        ("tokenizer.jinja", "{% if true %}\nhi{% endif %}".encode("utf-16")),
        ("chat_template.json", MARK + b'{\r\n"chat_template": "{% if true %}\\r\\nhi{% endif %}"}\r\n'),
        ("tokenizer_config.json", MARK + b'{"chat_template": "\\ufeff{% if true %}\\nhi{% endif %}"}'),
    ],
)
def test_byte_order_marks_and_line_ends_are_no_part_of_a_template(file: str, raw: bytes) -> None:
    sources = template_sources({file: raw})
    assert sources == {"default": "{% if true %}\nhi{% endif %}"}
    assert ChatTemplate(sources, {}).render([{"role": "user", "content": "x"}]).text == "hi"


def test_files_of_templates_have_an_order_and_named_ones_join_them() -> None:
    files = {"chat_template.jinja": b"a", "template.jinja": b"b", "tokenizer.jinja": b"c"}
    assert template_sources(files) == {"default": "a"}
    del files["chat_template.jinja"]
    assert template_sources(files) == {"default": "b"}
    files |= {
        "additional_chat_templates/tool_use.jinja": b"t",
        "tokenizer_config.json": b'{"chat_template": [{"name": "default", "template": "d"}, {"name": "rag", '
        b'"template": "r"}, {"name": "broken"}]}',
    }
    assert template_sources(files) == {"default": "b", "tool_use": "t", "rag": "r"}


def test_tokens_that_end_answers_are_read_leniently() -> None:
    files = {
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "config.json": b'{"x": Infinity, "eos_token_id": 3}',
    }
    assert eos_token_ids(files) == {1, 2}


def test_a_model_without_a_usable_template_can_still_complete_texts(tiny_files: dict[str, bytes], kit: Any) -> None:
    graphs = {name: raw for name, raw in tiny_files.items() if name != "chat_template.jinja"}
    bare = load_text_side(kit.tar_of(graphs))
    assert bare.template is not None
    assert bare.template.takes_one_text
    assert bare.template.render([{"role": "user", "content": "hi"}]).text == "hi"
    broken = load_text_side(kit.tar_of({**graphs, "chat_template.jinja": b"{% if %}"}))
    assert "not valid Jinja" in broken.template_problem
    bare.tokenizer.close()
    broken.tokenizer.close()


@pytest.mark.parametrize("closing", ["tokenizer.close()", ""])
def test_a_process_that_loaded_a_tokenizer_ends_cleanly(
    tiny_files: dict[str, bytes], tmp_path: Path, closing: str
) -> None:
    for name, raw in tiny_files.items():
        (tmp_path / name).write_bytes(raw)
    program = (
        "import sys; from pathlib import Path; from headrace.gateway.text.tokenizer import load_tokenizer\n"
        "files = {path.name: path.read_bytes() for path in Path(sys.argv[1]).iterdir()}\n"
        "tokenizer = load_tokenizer(files); print(tokenizer.encode('hello', add_special_tokens=False))\n" + closing
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[262]\n"), done.stderr
