"""What the files of an encoder say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.common.model_files.task import missing_of_model, task_of
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK, TASK_UNSPECIFIED
from headrace.worker.config import ConfigurationError
from headrace.worker.encoder.files import pair_tokens, read_encoder_files, refuse_embedder_with_cache
from headrace.worker.encoder.pooling import Activation, Pooling

PREFIX = "sentence_transformers.models."
MODULES = [
    {"idx": 0, "path": "", "type": PREFIX + "Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": PREFIX + "Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": PREFIX + "Normalize"},
]
BERT = {"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101]}}


def directory(path: Path, **files: Any) -> Path:
    """A directory with these files; `__` in a name is a slash."""
    for name, content in {"config": {"max_position_embeddings": 512}, **files}.items():
        file = path / (name.replace("__", "/") + ".json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    return path


def network(path: Path, *names: str, state: bool = False) -> Path:
    ports = "".join(f'<port id="0" names="{name}"/>' for name in names)
    kind = "ReadValue" if state else "Result"
    (path / "openvino_model.xml").write_text(f'<net><layer type="{kind}"/>{ports}</net>')
    return path


@pytest.mark.parametrize(
    ("names", "state", "classes", "task"),
    [
        (["input_ids", "last_hidden_state"], False, ["BertModel"], TASK_EMBED),
        (["input_ids", "token_embeddings,100", "sentence_embedding"], False, ["BertModel"], TASK_EMBED),
        (["input_ids", "logits"], False, ["XLMRobertaForSequenceClassification"], TASK_RANK),
        (["input_ids", "logits"], False, ["LlamaForCausalLM"], TASK_UNSPECIFIED),
        (["input_ids", "beam_idx", "last_hidden_state"], False, ["LlamaForCausalLM"], TASK_UNSPECIFIED),
        (["input_ids", "last_hidden_state"], True, ["LlamaForCausalLM"], TASK_UNSPECIFIED),
    ],
)
def test_the_network_shows_the_task(
    tmp_path: Path, names: list[str], state: bool, classes: list[str], task: int
) -> None:
    directory(tmp_path, config={"architectures": classes})
    assert task_of(network(tmp_path, *names, state=state)) == task


def test_only_models_that_generate_text_need_a_detokenizer(tmp_path: Path) -> None:
    directory(tmp_path, config={"architectures": ["BertModel"]})
    for name in ("openvino_model.bin", "openvino_tokenizer.xml", "openvino_tokenizer.bin"):
        (tmp_path / name).touch()
    assert missing_of_model(network(tmp_path, "last_hidden_state")) == []
    detokenizer = ["openvino_detokenizer.xml", "openvino_detokenizer.bin"]
    assert missing_of_model(network(tmp_path, "logits", "beam_idx")) == detokenizer
    (tmp_path / "openvino_tokenizer.xml").unlink()
    assert missing_of_model(network(tmp_path, "last_hidden_state")) == ["openvino_tokenizer.xml"]


def test_a_directory_without_a_network_has_the_ordinary_task(tmp_path: Path) -> None:
    assert task_of(tmp_path) == task_of(tmp_path / "nowhere") == TASK_UNSPECIFIED


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, Pooling.CLS),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
    ],
)
def test_pooling_and_normalisation_are_those_of_the_files(tmp_path: Path, config: Any, pooling: Pooling) -> None:
    files = {"modules": MODULES, "1_Pooling__config": config}
    found = read_encoder_files(directory(tmp_path, **files), TASK_EMBED, None)
    assert (found.pooling, found.normalizes, found.max_tokens) == (pooling, True, 512)
    directory(tmp_path, modules=MODULES[:2])
    assert not read_encoder_files(tmp_path, TASK_EMBED, None).normalizes


def test_flags_replace_the_stages_of_the_files(tmp_path: Path) -> None:
    directory(tmp_path, modules=MODULES, **{"1_Pooling__config": {"pooling_mode": "mean"}})
    found = read_encoder_files(tmp_path, TASK_EMBED, None, pooling="last")
    assert (found.pooling, found.normalizes) == (Pooling.LAST, True)
    found = read_encoder_files(tmp_path, TASK_EMBED, None, normalizes=False)
    assert (found.pooling, found.normalizes) == (Pooling.MEAN, False)


def test_with_both_flags_there_need_be_no_stages_in_files(tmp_path: Path) -> None:
    found = read_encoder_files(directory(tmp_path), TASK_EMBED, None, pooling="cls", normalizes=True)
    assert (found.pooling, found.normalizes) == (Pooling.CLS, True)
    with pytest.raises(ConfigurationError, match=r"modules\.json is missing"):
        read_encoder_files(tmp_path, TASK_EMBED, None, pooling="cls")


def test_flags_for_vectors_are_refused_for_models_that_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="this model ranks texts"):
        read_encoder_files(directory(tmp_path), TASK_RANK, None, pooling="cls")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "modules.json is missing; copy it"),
        ({"modules": MODULES[:1]}, "no stage Pooling"),
        ({"modules": [MODULES[0], {"type": PREFIX + "Dense", "path": "2_Dense"}]}, "a stage Dense"),
        ({"modules": MODULES, "1_Pooling__config": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
        (
            {
                "modules": MODULES,
                "1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            },
            "cls_token and pooling_mode_mean_tokens",
        ),
        ({"modules": MODULES}, "of no kind"),
    ],
)
def test_what_cannot_be_done_with_vectors_is_refused(tmp_path: Path, files: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        read_encoder_files(directory(tmp_path, **files), TASK_EMBED, None)


def test_the_longest_text_is_the_files_own_unless_told_otherwise(tmp_path: Path) -> None:
    files = {"modules": MODULES, "1_Pooling__config": {"pooling_mode": "cls"}}
    directory(tmp_path, sentence_bert_config={"max_seq_length": 256}, **files)
    assert read_encoder_files(tmp_path, TASK_EMBED, None).max_tokens == 256
    assert read_encoder_files(tmp_path, TASK_EMBED, 400).max_tokens == 400
    with pytest.raises(ConfigurationError, match="more than the model's longest text, 512 tokens"):
        read_encoder_files(tmp_path, TASK_EMBED, 513)


def test_positions_of_roberta_begin_behind_its_padding_token(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 514, "model_type": "xlm-roberta", "pad_token_id": 1}
    directory(tmp_path, config=config, modules=MODULES, **{"1_Pooling__config": {"pooling_mode": "cls"}})
    found = read_encoder_files(tmp_path, TASK_EMBED, None)
    assert (found.max_tokens, found.pad_token_id) == (512, 1)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (directory(tmp_path) / "modules.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"modules.json is not JSON"):
        read_encoder_files(tmp_path, TASK_EMBED, None)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (BERT["post_processor"], ((101,), (102,), (102,))),
        ({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}, ((0,), (2, 2), (2,))),
        (
            {
                "type": "Sequence",
                "processors": [
                    {"type": "ByteLevel"},
                    {
                        "type": "TemplateProcessing",
                        "pair": [
                            {"SpecialToken": {"id": "<s>", "type_id": 0}},
                            {"Sequence": {"id": "A", "type_id": 0}},
                            {"SpecialToken": {"id": "</s>", "type_id": 0}},
                            {"SpecialToken": {"id": "</s>", "type_id": 0}},
                            {"Sequence": {"id": "B", "type_id": 0}},
                            {"SpecialToken": {"id": "</s>", "type_id": 0}},
                        ],
                        "special_tokens": {"<s>": {"ids": [0]}, "</s>": {"ids": [2]}},
                    },
                ],
            },
            ((0,), (2, 2), (2,)),
        ),
    ],
)
def test_the_tokenizer_says_what_stands_around_and_between_two_texts(processor: Any, expected: Any) -> None:
    assert pair_tokens({"post_processor": processor}, Path("m"))[:3] == expected


def test_without_a_known_tokenizer_a_reranker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer.json is missing"):
        read_encoder_files(directory(tmp_path), TASK_RANK, None)


def test_the_prompt_of_a_language_model_that_ranks_is_in_a_file_of_its_own(tmp_path: Path) -> None:
    prompt = {"prefix": [7, 8], "query_before": "Q: ", "query_after": "\nD: ", "separator": [], "suffix": [9]}
    directory(tmp_path, reranker_prompt={**prompt, "document_before": ""}, tokenizer=BERT)
    found = read_encoder_files(tmp_path, TASK_RANK, None).pair
    assert found == ((7, 8), (), (9,), "Q: ", "\nD: ", "")
    directory(tmp_path, reranker_prompt=prompt)
    with pytest.raises(ConfigurationError, match=r"reranker_prompt.json is damaged \('document_before'\)"):
        read_encoder_files(tmp_path, TASK_RANK, None)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, Activation.SIGMOID),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, Activation.IDENTITY),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, Activation.SIGMOID),
    ],
)
def test_the_activation_of_scores_is_the_files_own(tmp_path: Path, config: Any, activation: Activation) -> None:
    directory(tmp_path, config={"max_position_embeddings": 512, **config}, tokenizer=BERT)
    assert read_encoder_files(tmp_path, TASK_RANK, None).activation is activation


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    config = {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}
    with pytest.raises(ConfigurationError, match=r"torch.nn.Tanh"):
        read_encoder_files(directory(tmp_path, config=config, tokenizer=BERT), TASK_RANK, None)


@pytest.mark.parametrize(
    ("names", "state", "files", "is_refused"),
    [
        (["input_ids", "last_hidden_state"], True, {}, True),
        (["input_ids", "beam_idx", "logits"], True, {"modules": MODULES}, True),
        (["input_ids", "beam_idx", "logits"], True, {}, False),
        (["input_ids", "logits", "last_hidden_state"], True, {}, False),
        (["input_ids", "last_hidden_state"], False, {"modules": MODULES}, False),
    ],
)
def test_an_embedder_that_was_exported_for_text_is_refused(
    tmp_path: Path, names: list[str], state: bool, files: dict[str, Any], is_refused: bool
) -> None:
    network(directory(tmp_path, **files), *names, state=state)
    if not is_refused:
        refuse_embedder_with_cache(tmp_path)
        return
    with pytest.raises(ConfigurationError, match="an embedding model with a KV cache.*--task feature-extraction"):
        refuse_embedder_with_cache(tmp_path)
