"""The command's output and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.sim.__main__ import main

SMALL = ["--requests", "60", "--workers", "2", "--output-mean", "10", "--system-prompts", "4"]


def test_json_has_a_report_of_each_policy_asked_for() -> None:
    result = CliRunner().invoke(main, [*SMALL, "--policy", "headrace", "--policy", "random", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [report["policy"] for report in answer["policies"]] == ["headrace", "random"]
    assert answer["rate_per_s"] == pytest.approx(0.7 * answer["capacity_per_s"])
    assert all(report["num_requests"] == 60 for report in answer["policies"])


def test_the_table_names_every_policy() -> None:
    result = CliRunner().invoke(main, [*SMALL, "--rate", "4"])
    assert result.exit_code == 0, result.output
    for policy in ("headrace", "oracle", "least-loaded", "round-robin", "consistent-hashing", "random"):
        assert policy in result.stdout


def test_pictures_are_counted_and_their_requests_reported_by_themselves() -> None:
    asked = ["--image-share", "0.5", "--image-family", "smolvlm:low", "--pictures", "3", "--rate", "0.5"]
    result = CliRunner().invoke(main, [*SMALL, *asked, "--policy", "headrace", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)["policies"][0]
    assert 3 <= report["num_images_encoded"] <= 6
    assert report["image_ttft_ms"]["mean"] > report["ttft_ms"]["mean"]


def test_one_command_compares_numbers_of_routers() -> None:
    asked = ["--turns", "4", "--burst", "3", "--routers", "1", "--routers", "4"]
    result = CliRunner().invoke(main, [*SMALL, *asked, "--policy", "headrace", "--policy", "oracle", "--json"])
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)["policies"]
    assert [(report["policy"], report["num_routers"]) for report in reports] == [
        ("headrace", 1),
        ("headrace", 4),
        ("oracle", 1),
    ]
    assert reports[0]["ttft_ms"] != reports[1]["ttft_ms"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--trace", "/does/not/exist"], "error: cannot read --trace"),
        (["--step-cost", "/does/not/exist"], "error: cannot read --step-cost"),
        ([*SMALL, "--kv-tokens", "512"], "increase --kv-tokens"),
        ([*SMALL, "--turns", "4", "--burst", "200"], "give more --conversations, or a smaller --burst"),
        ([*SMALL, "--prefill-workers", "2", "--workers", "2"], "give more --workers"),
        ([*SMALL, "--prefill-workers", "1"], "say how fast with --peer-rate"),
        ([*SMALL, "--prefill-workers", "1", "--peer-rate", "9"], "not for consistent-hashing, least-loaded, longest-"),
        ([*SMALL, "--shared-disk"], "say with --disk-tokens how much it holds"),
        ([*SMALL, "--encode-workers", "1"], "say with --image-share how many requests bring one"),
        ([*SMALL, "--image-share", "1", "--encode-workers", "2"], "leaves no worker for text; give more --workers"),
        ([*SMALL, "--image-share", "1", "--encode-where-first"], "those that encode; give --encode-workers"),
        ([*SMALL, "--workers", "16"], "too few to measure the capacity"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_remedy(args: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_trace_is_read_and_too_long_requests_are_left_out(tmp_path: Path) -> None:
    lines = [
        {
            "timestamp": 100 * number,
            "input_length": length,
            "output_length": 4,
            "hash_ids": list(range(-(-length // 512))),
        }
        for number, length in enumerate([700, 900, 100_000])
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["--trace", str(path), "--rate", "1", "--kv-tokens", "50000", "--policy", "headrace", "--json"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_requests"] == 2
    assert "dropped 1 requests" in result.stderr
