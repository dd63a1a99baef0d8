"""What a checkpoint is for, from the files of its repository, and that an encoder is exported as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli.main import cli
from headrace.cli.models.encoders import task_of_checkpoint
from headrace.common.commands import CommandError
from tests.hub import Hub

PREFIX = "sentence_transformers.models."
BERT = {"model_type": "bert", "architectures": ["BertModel"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
RANKER = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def modules(*kinds: str) -> bytes:
    return json.dumps(
        [{"idx": number, "path": "", "type": PREFIX + kind} for number, kind in enumerate(kinds)]
    ).encode()


@pytest.mark.parametrize(
    ("name", "config", "stages", "task"),
    [
        ("BAAI/bge-small-en-v1.5", BERT, ("Transformer", "Pooling", "Normalize"), "vectors"),
        ("Qwen/Qwen3-Embedding-0.6B", QWEN3, ("Transformer", "Pooling", "Normalize"), "vectors"),
        ("BAAI/bge-reranker-base", RANKER, (), "scores"),
        ("Qwen/Qwen3-Reranker-0.6B", QWEN3, (), "scores"),
        ("z/ranker", QWEN3, ("Transformer", "LogitScore"), "scores"),
        ("Qwen/Qwen3-0.6B", QWEN3, (), "text"),
        ("o/m", {}, (), "text"),
    ],
)
def test_the_files_say_what_a_checkpoint_is_for(name: str, config: Any, stages: tuple[str, ...], task: str) -> None:
    files = {"modules.json": modules(*stages)} if stages else {}
    assert task_of_checkpoint(name, config, files) == task


@pytest.mark.parametrize(
    ("config", "files", "problem"),
    [
        (
            BERT,
            {"modules.json": modules("Transformer", "Pooling", "Dense")},
            "has a stage Dense, and only Normalize, Pooling",
        ),
        (BERT, {"modules.json": b"{}x"}, "has no list of stages"),
        ({**RANKER, "id2label": {"0": "a", "1": "b", "2": "c"}}, {}, "sorts texts into 3 classes"),
        ({**RANKER, "id2label": None}, {}, "sorts texts into 2 classes"),
    ],
)
def test_what_no_worker_serves_is_refused(config: Any, files: dict[str, bytes], problem: str) -> None:
    with pytest.raises(CommandError, match=problem):
        task_of_checkpoint("o/m", config, files)


def test_an_embedder_is_pulled_with_its_files_and_exported_as_one(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nshift 2\n[ "$1" = check ] && {{ echo "$3" >{tmp_path}/checked; exit 0; }}\n'
        f'cd "$2" && find . -type l | sort >{tmp_path}/files; echo "$4" >{tmp_path}/options\n'
        'echo "error: enough" >&2; exit 2\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("HEADRACE_EXPORT_PYTHON", str(python))
    files = {
        "config.json": json.dumps({**BERT, "torch_dtype": "float32"}).encode(),
        "model.safetensors": b"w" * 4_000_000,
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": b"{}",
        "tokenizer.json": b"{}",
        "README.md": b"",
    }
    hub.add("o/bge", files)
    pulled = CliRunner().invoke(cli, ["pull", "o/bge"])
    assert "o/bge: safetensors, to be exported with weights in fp16, 4.0 MB to download" in pulled.stderr
    assert "weights in fp16, because fewer bits would not make a model that encodes texts faster" in pulled.stderr
    assert (tmp_path / "checked").read_text().strip() == "vectors"
    options = json.loads((tmp_path / "options").read_text())
    assert (options["task"], options["mode"]) == ("vectors", "fp16")
    assert (tmp_path / "files").read_text().split() == [f"./{name}" for name in sorted(files) if name != "README.md"]
    assert (pulled.exit_code, "o/bge cannot be exported: enough" in pulled.stderr) == (2, True)
    refused = CliRunner().invoke(cli, ["pull", "o/bge", "--weights", "int4", "--awq", "--dataset", str(python)])
    assert (refused.exit_code, "o/bge:int4 generates no text; leave out --dataset" in refused.stderr) == (2, True)
