"""What the converter makes of a GGUF file's metadata. The conversion itself is run by tests/e2e."""

from __future__ import annotations

import pytest

from headrace.cli.models.convert import ConversionError, check_convertible, config_of, generation_config_of

METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 8192,
    "llama.vocab_size": 49152,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_the_context_length_is_that_of_the_architecture() -> None:
    assert config_of(METADATA) == {
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_a_vocabulary_that_is_not_stated_is_counted() -> None:
    metadata = {**METADATA, "tokenizer.ggml.tokens.count": 7}
    del metadata["llama.vocab_size"]
    assert config_of(metadata)["vocab_size"] == 7


def test_a_file_without_context_length_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"llama\.context_length"):
        config_of({"general.architecture": "llama"})


@pytest.mark.parametrize(
    ("extra", "ends"),
    [({}, 2), ({"tokenizer.ggml.eot_token_id": 5}, [2, 5]), ({"tokenizer.ggml.eot_token_id": 2}, 2)],
)
def test_every_token_that_ends_a_turn_ends_a_generation(extra: dict[str, int], ends: int | list[int]) -> None:
    assert generation_config_of({**METADATA, **extra})["eos_token_id"] == ends


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"general.architecture": "phi3"}, "architecture is phi3, and only GGUF files of llama, qwen2, qwen3"),
        ({"rope_freqs.weight": True}, "rotary frequencies are scaled"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary frequencies are scaled"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused_before(extra: dict[str, object], problem: str) -> None:
    check_convertible({**METADATA, "rope_freqs.weight": False, "llama.rope.scaling.type": "none"})
    with pytest.raises(ConversionError, match=problem):
        check_convertible({**METADATA, **extra})
