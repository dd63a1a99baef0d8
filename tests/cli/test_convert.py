"""Conversion of a GGUF file's metadata, and files that are refused. tests/cli/test_gguf.py tests the weights."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli.gguf.architectures import ARCHITECTURES, shape_of
from headrace.cli.models.convert import (
    ConversionError,
    can_genai_read,
    chat_templates_of,
    check_convertible,
    config_of,
    generation_config_of,
    pieces_of,
)
from tests.architectures.gguf_families import GGUF_FAMILIES

METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 8192,
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.vocab_size": 49152,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
TENSORS = ["token_embd.weight", "rope_freqs.weight", "blk.0.attn_q.weight", "blk.11.ffn_down.weight"]


def test_the_config_has_the_context_and_the_shape() -> None:
    assert config_of(METADATA) == {
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_a_vocabulary_that_is_not_stated_is_counted() -> None:
    metadata = {**METADATA, "tokenizer.ggml.tokens.count": 7}
    del metadata["llama.vocab_size"]
    assert config_of(metadata)["vocab_size"] == 7


def test_a_file_without_context_length_is_refused() -> None:
    metadata = {**METADATA}
    del metadata["llama.context_length"]
    with pytest.raises(ConversionError, match=r"its metadata has no llama\.context_length"):
        config_of(metadata)


@pytest.mark.parametrize(
    ("extra", "ends"),
    [({}, 2), ({"tokenizer.ggml.eot_token_id": 5}, [2, 5]), ({"tokenizer.ggml.eot_token_id": 2}, 2)],
)
def test_every_token_that_ends_a_turn_ends_a_generation(extra: dict[str, int], ends: int | list[int]) -> None:
    assert generation_config_of({**METADATA, **extra})["eos_token_id"] == ends


@pytest.mark.parametrize(
    ("stated", "window", "logit_cap", "score_cap"),
    [
        ({}, 4096, 30.0, 50.0),
        (
            {
                "gemma2.attention.sliding_window": 64,
                "gemma2.final_logit_softcapping": 20.0,
                "gemma2.attn_logit_softcapping": 40.0,
            },
            64,
            20.0,
            40.0,
        ),
    ],
)
def test_a_file_of_gemma_2_that_does_not_say_so_has_the_window_and_the_caps(
    stated: dict[str, float], window: int, logit_cap: float, score_cap: float
) -> None:
    metadata = {name.replace("llama.", "gemma2."): value for name, value in METADATA.items()}
    metadata |= {"general.architecture": "gemma2", "gemma2.block_count": 4, **stated}
    check_convertible(metadata, ["token_embd.weight", "blk.0.post_ffw_norm.weight", "blk.3.attn_q.weight"])
    shape = shape_of(metadata, {})
    assert [layer.window for layer in shape.layers] == [window, 0, window, 0]
    assert (shape.logit_cap, shape.attention_scale, shape.embedding_scale) == (logit_cap, 64**-0.5, 24.0)
    assert config_of(metadata)["attn_logit_softcapping"] == score_cap


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (
            {"general.architecture": "phi2"},
            "architecture is phi2, and GGUF files of llama, qwen2, .*, gemma3, .* can be",
        ),
        (
            {"general.architecture": "gemma2", "gemma2.block_count": 46},
            "its scores of attention are capped, which OpenVINO's paged .* use Gemma 2 9B, or Gemma 3",
        ),
        ({"general.architecture": "clip"}, r"it has the networks for images of a model \(mmproj\), not the model"),
        ({"llama.rope.scaling.type": "dynamic"}, "scaled by dynamic, and linear, yarn, longrope and Llama 3's factors"),
        ({"llama.rope.scaling.yarn_attn_factor": 0.5}, r"it has llama\.rope\.scaling\.yarn_attn_factor 0\.5, which is"),
        *(
            ({"tokenizer.ggml.model": kind}, rf"tokenizer is of the kind {kind}, and byte-level BPE \(gpt2\) and Sent")
            for kind in ("bert", "t5", "rwkv", "plamo2")
        ),
        ({"tokenizer.ggml.pre": "gemma4"}, "pre-tokenizer is gemma4, which is none of .*, llama-bpe, .*, qwen2, "),
        ({"llama.rope.dimension_count": 128}, "it rotates 128 numbers of heads of 64"),
        (
            {"llama.attention.sliding_window": 4096},
            r"it has llama\.attention\.sliding_window, which a plain llama model",
        ),
        ({"llama.attention.head_count_kv": [3, 1]}, r"its layers differ in llama\.attention\.head_count_kv"),
        ({"llama.attention.value_length": 128}, "keys and values differ in size"),
        ({"llama.expert_gating_func": 2}, r"it has llama\.expert_gating_func 2, which is not supported"),
        ({"llama.logit_scale": 2.0}, r"it has llama\.logit_scale, which a plain llama model does not have"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused_with_a_remedy(extra: dict[str, object], problem: str) -> None:
    check_convertible(
        {**METADATA, "llama.rope.scaling.type": "linear", "llama.attention.sliding_window": 8192}, TENSORS
    )
    with pytest.raises(ConversionError, match=f"{problem}.*take an OpenVINO version of the model"):
        check_convertible({**METADATA, **extra}, TENSORS)


@pytest.mark.parametrize(
    ("template", "bos", "expected"),
    [
        ("{{ bos_token }}hello", "<s>", "{{ bos_token }}hello"),
        ("<s>hello", "<s>", "<s>hello"),
        ("hello", "<s>", "{{ bos_token }}hello"),
        ("hello", "", "hello"),
        ("", "<s>", ""),
    ],
)
def test_a_template_writes_the_token_that_comes_before_every_text(template: str, bos: str, expected: str) -> None:
    found = chat_templates_of({"tokenizer.chat_template": template}, bos)
    assert found == ({"chat_template.jinja": expected} if expected else {})


def test_templates_for_tools_and_documents_get_their_files() -> None:
    metadata = {
        "tokenizer.chat_template": "{{ bos_token }}chat",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.rag": "<s>documents",
        "tokenizer.chat_template.other": "not read",
    }
    assert chat_templates_of(metadata, "<s>") == {
        "chat_template.jinja": "{{ bos_token }}chat",
        "additional_chat_templates/tool_use.jinja": "{{ bos_token }}tools",
        "additional_chat_templates/rag.jinja": "<s>documents",
    }


def test_an_end_that_only_its_text_names_ends_a_generation() -> None:
    assert generation_config_of(METADATA, [7, 2])["eos_token_id"] == [2, 7]


def test_a_tensor_that_no_plain_model_has_is_named() -> None:
    with pytest.raises(ConversionError, match=r"it has blk\.0\.attn_sinks\.weight"):
        check_convertible(METADATA, [*TENSORS, "blk.0.attn_sinks.weight"])


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    for number in (1, 3):
        (tmp_path / f"m-0000{number}-of-00003.gguf").touch()
    with pytest.raises(ConversionError, match=r"one of 3 pieces, and m-00002-of-00003\.gguf is not beside it"):
        pieces_of(tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(ConversionError, match=r"it is piece 3 of 3; name the first one, m-00001-of-00003\.gguf"):
        pieces_of(tmp_path / "m-00003-of-00003.gguf")
    assert pieces_of(tmp_path / "other.gguf") == [tmp_path / "other.gguf"]


@pytest.mark.parametrize(
    ("width", "kinds", "extra", "expected"),
    [
        (4096, ["Q4_0", "Q6_K"], {}, True),
        (4096, ["Q4_0"], {"llama.rope.scaling.type": "linear"}, False),
        (4096, ["Q4_K", "Q6_K"], {}, False),
        (4096, ["Q4_1"], {}, False),
        (576, ["Q4_1", "Q8_0"], {}, True),
        (576, ["Q5_0"], {}, False),
        (4096, ["Q4_0"], {"llama.expert_count": 8}, False),
        (4096, ["Q4_0"], {"llama.rope.scaling.factor": 2.0}, False),
        (4096, ["Q4_0"], {"general.architecture": "granite"}, False),
    ],
)
def test_minima_are_rounded_in_narrow_models_only(
    width: int, kinds: list[str], extra: dict[str, object], expected: bool
) -> None:
    tensors = {kind: SimpleNamespace(shape=[1, 1], tensor_type=SimpleNamespace(name=kind)) for kind in kinds}
    tensors["output_norm.weight"] = SimpleNamespace(shape=[1], tensor_type=SimpleNamespace(name="F32"))
    assert can_genai_read({**METADATA, "llama.embedding_length": width, **extra}, tensors) is expected
    assert not can_genai_read({**METADATA, **extra}, {**tensors, "rope_freqs.weight": tensors["output_norm.weight"]})


def test_the_guide_lists_the_architectures_that_tests_compare() -> None:
    guide = (Path(__file__).parents[2] / "docs/how-to/models.md").read_text()
    table = guide.partition("| `general.architecture` |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    assert named == set(ARCHITECTURES)
    assert named == {family.architecture for family in GGUF_FAMILIES.values()}
