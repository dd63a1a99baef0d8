"""The command: what it refuses, and that a summary needs no server."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.bench.__main__ import main
from headrace.bench.study.directory import Settings, StudyDirectory
from headrace.bench.study.recipes import GENAI, OURS
from tests.bench.study.test_summary import RUNS, finished


def command(*args: str) -> Result:
    return CliRunner().invoke(main, ["study", *args], prog_name="headrace bench")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--only", "3,9"), "'9' is none of 1, 2, 3, 4, 5, rates"),
        (("--peers", "tgi"), "'tgi' is none of openvino-genai, llama.cpp, vllm, none"),
        (("--gguf", "m"), "'m' is not NAME=PATH"),
        (("--gguf", "m=/no/such/file"), "there is no /no/such/file"),
        (("--model", "./no-such-model"), "has no config.json; give a text model that `headrace models list` shows"),
        (("--summary", "-d", "/no/such/study"), "/no/such/study has no study; name the directory of one"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_remedy(args: tuple[str, ...], words: str) -> None:
    result = command(*args)
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.stderr.strip().splitlines()) <= 4


def test_a_dry_run_shows_the_runs_and_writes_nothing(tmp_path: Path) -> None:
    for name in ("config.json", "openvino_model.bin"):
        (tmp_path / name).write_text('{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}')
    args = ("--dry-run", "--only", "1,5", "--peers", "none", "-d", str(tmp_path / "study"))
    result = command(*args, "--model", str(tmp_path), "--model", "owner/name")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "owner/name: to be fetched"
    assert "experiment 1, throughput by rate and batch: 18 runs, about " in result.stdout
    assert "experiment 5, throughput by model size: 4 runs, about " in result.stdout
    assert result.stdout.rstrip().endswith(f"a file for each run in {tmp_path / 'study' / 'runs'}")
    assert not (tmp_path / "study").exists()
    other = StudyDirectory(tmp_path / "study")
    other.open(Settings("full", 5, "m", "made up", "a machine"))
    result = command(*args, "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "has a study with seed 5, not 0" in result.stderr


def test_an_environment_of_an_unknown_peer_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "openvino_model.bin"):
        (tmp_path / name).write_text('{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}')
    result = command("--model", str(tmp_path), "--environment", f"tgi={tmp_path}", "-d", str(tmp_path / "study"))
    assert result.exit_code == 2
    assert "'tgi' is none of openvino-genai, llama.cpp, vllm" in result.output


def test_a_summary_is_written_again_without_any_server(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path)
    directory.open(Settings("full", 0, "m", "made up", "a machine"))
    for each in (finished(OURS, "inf", 1, 600, 100), finished(GENAI, "inf", 1, 500, 200)):
        directory.add(each)
    result = command("--summary", "-d", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "headrace has 1.20 times the throughput of openvino-genai" in result.stdout
    assert {path.name for path in tmp_path.glob("summary.*")} == {"summary.txt", "summary.md", "summary.html"}
    assert (tmp_path / "summary.txt").read_text() in result.stdout
    assert len(list(tmp_path.glob("pictures/3-*.svg"))) == 4


def test_wrong_answers_make_the_exit_status_1(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path)
    directory.open(Settings("full", 0, "m", "made up", "a machine"))
    for each in RUNS:
        directory.add(each)
    result = command("--summary", "-d", str(tmp_path))
    assert result.exit_code == 1
    assert "error: in 1 runs answers were wrong or requests failed; they are marked" in result.stderr
