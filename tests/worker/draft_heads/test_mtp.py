"""A layer that predicts more tokens computes what numpy computes from the same files. It reads the last hidden states
of all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from headrace.common.model_files.heads import HeadsKind, heads_kind
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads.eagle_graph import build_mtp
from headrace.worker.draft_heads.features import LastStateReader
from headrace.worker.draft_heads.mtp_files import read_mtp
from headrace.worker.model.lm_head import replace_head
from tests.worker.draft_heads.files import mtp_config, mtp_reference, mtp_tensors, write_heads
from tests.worker.draft_heads.test_eagle_graph import NUM_TOKENS, SIZE, VOCAB_SIZE, Heads, target_with

SMALL = mtp_config(hidden_size=SIZE, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB_SIZE)


def test_the_graph_computes_what_the_files_say(tmp_path: Path) -> None:
    tensors = mtp_tensors(SMALL, 48)
    rng = np.random.default_rng(1)
    table, features = (rng.standard_normal((rows, SIZE)).astype(np.float32) for rows in (VOCAB_SIZE, NUM_TOKENS))
    tokens = rng.integers(0, VOCAB_SIZE, NUM_TOKENS)
    files = read_mtp(write_heads(tmp_path, SMALL, tensors))
    assert heads_kind(tmp_path) is HeadsKind.MTP
    heads = Heads(build_mtp(files, target_with(table)))
    first = heads.run(0, tokens[:36], features[:36])
    singly = [heads.run(past, tokens[past : past + 1], features[past : past + 1]) for past in range(36, NUM_TOKENS)]
    for part, expected in enumerate(mtp_reference(SMALL, tensors, table[tokens], features)):
        found = np.concatenate([first[part], *(each[part] for each in singly)])
        np.testing.assert_allclose(found, expected, atol=3e-3)


def test_the_vocabulary_may_be_that_of_the_embeddings(tmp_path: Path) -> None:
    tensors = mtp_tensors(SMALL, 48)
    tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    config = {**SMALL, "tie_word_embeddings": True}
    files = read_mtp(write_heads(tmp_path, config, tensors))
    np.testing.assert_array_equal(files.weights["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert "embed_tokens.weight" not in files.weights, "those of the target's graph are used"


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"model.mtp_layers.0.input_proj.weight": None}, "have no input_proj.weight, which a layer that predicts more"),
        ({"lm_head.weight": None}, "have no lm_head.weight"),
        ({"lm_head.weight": np.zeros((299, SIZE), np.float32)}, "lm_head.weight of shape .299, 64., and .* .300, 64."),
        ({"model.mtp_layers.0.self_attn.q_proj.bias": np.zeros(3, np.float32)}, "q_proj.bias of shape .3."),
    ],
)
def test_other_layers_are_refused(tmp_path: Path, tensors: dict[str, Any], problem: str) -> None:
    changed = {name: values for name, values in {**mtp_tensors(SMALL, 48), **tensors}.items() if values is not None}
    with pytest.raises(ConfigurationError, match=problem):
        read_mtp(write_heads(tmp_path, SMALL, changed))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    others = {"model.layers.61.eh_proj.weight": np.zeros((SIZE, 2 * SIZE), np.float32)}
    with pytest.raises(ConfigurationError, match="no model.mtp_layers.0.input_proj.weight; .* read as MiMo has them"):
        read_mtp(write_heads(tmp_path, SMALL, others))


def test_the_last_states_are_those_of_all_tokens(tmp_path: Path) -> None:
    files = read_mtp(write_heads(tmp_path, SMALL, mtp_tensors(SMALL, 48)))
    table = np.random.default_rng(3).standard_normal((VOCAB_SIZE, SIZE)).astype(np.float32)
    model = target_with(table, num_logits=VOCAB_SIZE)
    LastStateReader(files).prepare(model)
    replace_head(model, is_bfloat16=False)
    tokens = np.array([5, 9, 200])
    request = ov.Core().compile_model(model, "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"}).create_infer_request()
    request.infer({"input_ids": tokens, "rows": np.array([2])})
    np.testing.assert_allclose(request.get_tensor("features").data, table[tokens] ** 2, rtol=1e-6)
    assert request.get_tensor("logits").shape[0] == 1
    narrow = target_with(table[:, :32].copy())
    with pytest.raises(ConfigurationError, match="hidden states of size 64, and this model's have 32"):
        LastStateReader(files).prepare(narrow)
