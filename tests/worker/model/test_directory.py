"""Model directories: whole, broken, and what their files say."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import tarfile
from pathlib import Path

import pytest

from headrace.common.model_files.config import config_in
from headrace.common.model_files.networks import required_files
from headrace.common.model_files.task import task_of
from headrace.gateway.upstream.bundle import read_bundle
from headrace.protos.inference_pb2 import TASK_UNSPECIFIED
from headrace.worker.config import ConfigurationError
from headrace.worker.model.directory import UNKNOWN_CONTEXT_TOKENS, context_of, has_windows, read_model_dir
from headrace.worker.model_card import known_tokens

TOKENIZER_XML = '<net><rt_info><eos_token_id value="7" /><chat_template value="hello" /></rt_info></net>'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in required_files(()):
        (tmp_path / name).write_text(TOKENIZER_XML if name.endswith(".xml") else "weights")
    return tmp_path


def test_a_whole_directory_is_read(model: Path) -> None:
    (model / "config.json").write_text('{"max_position_embeddings": 512, "eos_token_id": 3}')
    (model / "generation_config.json").write_text(
        '{"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "do_sample": true, "bos_token_id": 9,'
        ' "max_new_tokens": 300}'
    )
    read = read_model_dir(model)
    assert (read.max_context_tokens, read.eos_token_ids) == (512, (1, 2))
    assert read.sampling == {"temperature": 0.6, "top_k": 20.0, "max_tokens": 300}
    assert read.created_s == int((model / "openvino_model.bin").stat().st_mtime)


def test_the_end_tokens_come_from_the_first_file_that_names_them(model: Path) -> None:
    assert read_model_dir(model).eos_token_ids == (7,)
    (model / "config.json").write_text('{"eos_token_id": 3}')
    assert read_model_dir(model).eos_token_ids == (3,)


def test_of_a_multimodal_model_the_part_for_text_counts(model: Path) -> None:
    (model / "config.json").write_text(
        '{"model_type": "sees", "text_config": {"max_position_embeddings": 99, "eos_token_id": [5, 6],'
        ' "layer_types": ["sliding_attention"]}, "vision_config": {"layer_types": []}}'
    )
    read = read_model_dir(model)
    assert (read.max_context_tokens, read.eos_token_ids) == (99, (5, 6))
    assert has_windows(config_in(model / "config.json"))


def test_a_context_ends_with_the_first_chunk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """OpenVINO's paging loses chunks, and Llama 4 would answer wrongly behind its first one."""
    caplog.set_level(logging.INFO)
    text = {"attention_chunk_size": 8192, "max_position_embeddings": 1 << 20, "layer_types": ["chunked_attention"]}
    assert context_of({"model_type": "llama4", "text_config": text}, tmp_path) == 8192
    assert "see chunks of 8192 tokens: serving contexts of up to one chunk" in caplog.text
    assert context_of({"text_config": {**text, "max_position_embeddings": 512}}, tmp_path) == 512
    assert context_of({"text_config": {**text, "attention_chunk_size": None}}, tmp_path) == 1 << 20
    assert has_windows({"text_config": {**text, "attention_chunk_size": None}})


def test_a_multimodal_model_has_two_networks(model: Path) -> None:
    for suffix in ("xml", "bin"):
        (model / f"openvino_model.{suffix}").rename(model / f"openvino_language_model.{suffix}")
    with pytest.raises(
        ConfigurationError, match=r"openvino_text_embeddings_model\.xml is missing.*_model\.bin is missing"
    ):
        read_model_dir(model)
    for suffix in ("xml", "bin"):
        (model / f"openvino_text_embeddings_model.{suffix}").write_text("<net/>")
    assert read_model_dir(model).created_s == int((model / "openvino_language_model.bin").stat().st_mtime)
    assert task_of(model) == TASK_UNSPECIFIED


def test_a_model_that_recommends_greedy_gets_temperature_zero(model: Path) -> None:
    (model / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}')
    assert read_model_dir(model).sampling == {"temperature": 0.0}


def test_recommendations_that_no_request_may_have_are_not_used(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "generation_config.json").write_text(
        '{"temperature": 5.0, "top_p": 0, "top_k": -1, "min_p": NaN, "repetition_penalty": 1e999,'
        ' "max_new_tokens": 99999999999}'
    )
    assert read_model_dir(model).sampling == {"top_k": 0.0}
    assert "recommends a temperature of 5" in caplog.text


@pytest.mark.parametrize(
    ("ends", "found"), [("-1", (7,)), ("[-1, 3]", (3,)), ("[]", (7,)), ("true", (7,)), (str(1 << 70), (7,))]
)
def test_end_tokens_that_are_none_do_not_count(model: Path, ends: str, found: tuple[int, ...]) -> None:
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    assert read_model_dir(model).eos_token_ids == found


def test_end_tokens_beyond_the_vocabulary_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    assert known_tokens([2, 1000, 5], 1000) == [2, 5]
    assert "[1000], which its vocabulary of 1000 does not have" in caplog.text


def test_an_unknown_context_is_short_and_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_model_dir(model).max_context_tokens == UNKNOWN_CONTEXT_TOKENS
    assert "max_position_embeddings" in caplog.text


def test_a_nested_text_config_is_read(model: Path) -> None:
    (model / "config.json").write_text('{"text_config": {"max_position_embeddings": 99}}')
    assert read_model_dir(model).max_context_tokens == 99


@pytest.mark.parametrize("name", ["n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx"])
def test_the_context_has_other_names_too(model: Path, name: str) -> None:
    (model / "config.json").write_text(f'{{"{name}": 77}}')
    assert read_model_dir(model).max_context_tokens == 77


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_a_context_ends_where_other_rotary_factors_begin(
    model: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "config.json").write_text(
        f'{{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,'
        f' "rope_scaling": {{"type": "{kind}"}}}}'
    )
    with caplog.at_level("INFO"):
        assert read_model_dir(model).max_context_tokens == 4096
    assert "--max-context-tokens" in caplog.text


def test_every_wrong_file_is_named(model: Path) -> None:
    (model / "openvino_model.bin").unlink()
    (model / "openvino_tokenizer.bin").write_text("")
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigurationError) as caught:
        read_model_dir(model)
    for part in ("openvino_model.bin is missing", "openvino_tokenizer.bin is empty", "config.json is not JSON"):
        assert part in str(caught.value)


def test_a_file_that_may_not_be_read_is_refused_by_its_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(ConfigurationError, match="openvino_detokenizer.bin cannot be read: Permission denied; let"):
        read_model_dir(model)


def test_a_network_of_any_bytes_is_left_to_who_loads_it(model: Path) -> None:
    (model / "openvino_model.xml").write_bytes(b'<net names="\xff\xfe,logits">')
    assert task_of(model) == TASK_UNSPECIFIED


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000])
def test_json_of_any_depth_is_refused_by_its_name(model: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match="config.json is not JSON .nested too deeply"):
        read_model_dir(model)
    assert config_in(model / "config.json") == {}


def test_a_directory_that_is_not_there_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="headrace pull"):
        read_model_dir(tmp_path / "none")


def test_the_bundle_is_the_same_bytes_for_the_same_files_and_holds_no_weights(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages }}")
    first = read_model_dir(model)
    os.utime(model / "chat_template.jinja", (1, 1))
    second = read_model_dir(model)
    assert first.tokenizer_bundle == second.tokenizer_bundle
    assert first.tokenizer_sha256 == hashlib.sha256(first.tokenizer_bundle).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(first.tokenizer_bundle)) as tar:
        assert tar.getnames() == [
            "chat_template.jinja",
            "openvino_detokenizer.bin",
            "openvino_detokenizer.xml",
            "openvino_tokenizer.bin",
            "openvino_tokenizer.xml",
        ]


def test_the_bundle_of_a_model_has_the_settings_of_images_if_it_has_networks_for_them(model: Path) -> None:
    """A model without these networks keeps the bundle that it has always had."""
    settings = ("preprocessor_config.json", "processor_config.json")
    for network in ("openvino_language_model", "openvino_text_embeddings_model"):
        for suffix in ("xml", "bin"):
            (model / f"{network}.{suffix}").write_text("text")
    (model / "openvino_model.xml").unlink()
    (model / "config.json").write_text('{"model_type": "llava"}')
    before = read_model_dir(model).tokenizer_bundle
    for name in settings:
        (model / name).write_text("{}")
    assert read_model_dir(model).tokenizer_bundle == before
    for suffix in ("xml", "bin"):
        (model / f"openvino_vision_embeddings_model.{suffix}").write_text("image")
    files = read_bundle(read_model_dir(model).tokenizer_bundle)
    assert files.keys() - read_bundle(before).keys() == set(settings)
    (model / settings[0]).write_text("{")
    with pytest.raises(ConfigurationError, match="preprocessor_config.json is not JSON"):
        read_model_dir(model)


@pytest.mark.parametrize(("cap", "warns"), [(50.0, True), (None, False)])
def test_a_cap_of_scores_that_graphs_leave_out_is_said(
    model: Path, caplog: pytest.LogCaptureFixture, cap: float | None, warns: bool
) -> None:
    config = {"max_position_embeddings": 512, "attn_logit_softcapping": cap}
    (model / "config.json").write_text(json.dumps(config))
    read_model_dir(model)
    assert any("attn_logit_softcapping" in record.message for record in caplog.records) == warns


def test_gemma_2_27b_which_needs_the_cap_is_refused(model: Path) -> None:
    largest = {"model_type": "gemma2", "num_hidden_layers": 46, "max_position_embeddings": 8192}
    for config in (largest, {"model_type": "paligemma", "text_config": {**largest, "attn_logit_softcapping": 50.0}}):
        (model / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigurationError, match=r"cannot be served: its scores of attention are capped, .* 9B"):
            read_model_dir(model)
    for config in ({**largest, "num_hidden_layers": 42}, {**largest, "attn_logit_softcapping": None}):
        (model / "config.json").write_text(json.dumps(config))
        assert read_model_dir(model).max_context_tokens == 8192
