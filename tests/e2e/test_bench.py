"""The benchmark client against real servers: every API that it speaks, and prompts of exact lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.bench.__main__ import main
from headrace.bench.apis import BACKENDS
from tests.e2e.serving import Serve, pulled_model, serving
from tests.e2e.small_model import small_model

pytestmark = pytest.mark.e2e
# So few that equal answers of a small model, which says little, are no finding.
LENGTHS = ("--num-prompts", "4", "--input-len", "48", "--output-len", "5")


@pytest.fixture(scope="module")
def small() -> Iterator[Serve]:
    with serving(model=small_model()) as serve:
        yield serve


def measured(serve: Serve, path: Path, *args: str) -> dict[str, Any]:
    saving = ("--save-detailed", "--result-filename", str(path / "r.json"), "--disable-tqdm")
    done = CliRunner().invoke(main, [serve.base_url, *LENGTHS, *saving, *args])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((path / "r.json").read_text())
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_api_gives_the_same_counts(small: Serve, tmp_path: Path, backend: str) -> None:
    can_ignore = backend not in ("ollama", "tgi")
    found = measured(small, tmp_path, "--backend", backend, "--max-concurrency", "3")
    assert (found["completed"], found["failed"]) == (4, 0)
    assert found["headrace"]["answers_counted_by"] == "the server's usage"
    assert all(0 < length <= 5 for length in found["output_lens"])
    if can_ignore:
        assert found["output_lens"] == [5] * 4
        assert found["headrace"]["finish_reasons"] == {"length": 4}
    around = {found["input_lens"][i] - 48 for i in range(4)}
    assert len(around) == 1  # those of a chat template, if there is one
    assert (around == {0}) is (backend not in ("openai-chat", "openai-responses", "ollama"))


@pytest.mark.parametrize("counted", [("--tokenizer", "MODEL"), ()])
def test_prompts_have_their_exact_lengths_whoever_counts(
    small: Serve, tmp_path: Path, counted: tuple[str, ...]
) -> None:
    args = [str(pulled_model()) if arg == "MODEL" else arg for arg in counted]
    random = measured(small, tmp_path, *args, "--input-dist", "lognormal", "--random-prefix-len", "20")
    assert random["headrace"]["answers_are_right"]
    trace = tmp_path / "trace.jsonl"
    lengths = [70, 600, 1030]
    rows = [{"timestamp": 5 * n, "input_length": n, "output_length": 3, "hash_ids": [0, n, n]} for n in lengths]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--timed-trace-chunk-hash-size", "512")
    found = measured(small, tmp_path, *args, *flags, "--num-prompts", "3", "--timed-trace-sec-multiplier", "0.0001")
    assert found["input_lens"] == lengths


def test_users_ask_on_behind_what_was_said(small: Serve, tmp_path: Path) -> None:
    args = ("--backend", "openai-chat", "--dataset-name", "multi_turn", "--multi-turn-think-time", "0.01")
    found = measured(
        small, tmp_path, *args, "--multi-turn-users", "2", "--multi-turn-turns", "50", "--num-prompts", "4"
    )
    assert found["completed"] == 4
    assert max(found["input_lens"]) > min(found["input_lens"]) + 48
