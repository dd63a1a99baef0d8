"""The command: plans from files, and flags that are refused with the remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.bench.calibration import encoded, read
from headrace.plan.__main__ import main
from headrace.plan.__main__ import run as command
from headrace.plan.answer import ToldPresent, text, told
from headrace.plan.fleet import Fleet, Kind
from headrace.plan.load import Load, Requests, lengths
from headrace.plan.objectives import Limit, Objectives
from headrace.plan.planning import Options, Running, plan
from tests.plan.calibrations import calibration

QUICK = ["--prompt", "64", "--answer", "8", "--answer-dist", "fixed", "--seeds", "1", "--requests", "60"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_bytes(encoded(calibration()))
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_a_plan_says_what_to_start_what_breaks_first_and_draws_it(small: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = run("--calibration", small, "--rate", 4, "--tpot", "p95:100ms", *QUICK, "--html", page)
    assert result.exit_code == 0, result.output
    assert "1 host with 1 worker" in result.stdout
    assert "headrace serve small --workers 1 --threads 2 --kv-cache-gb" in result.stdout
    assert "what breaks first" in result.stdout
    assert "TTFT p95 token p95  busy" in result.stdout
    drawn = page.read_text()
    assert drawn.count("<svg") == 4
    assert "http" not in drawn.replace("http://HOST", "")


def test_of_a_trace_the_first_requests_are_planned_for_that_the_model_takes(small: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lengths = [9000, *[64] * 25, 9000]
    trace.write_text(
        "\n".join(
            json.dumps(
                {"timestamp": 500 * n, "input_length": length, "output_length": 4, "hash_ids": [n] * -(-length // 512)}
            )
            for n, length in enumerate(lengths)
        )
    )
    result = run("--calibration", small, "--trace", trace, "--requests", 20, "--seeds", 1, "--load", "2x")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == (
        "load      the first 20 requests of trace.jsonl, without 2 of more than the 8,192 tokens that the model takes, "
        "2 times as fast"
    )
    trace.write_text("\n".join(line for line in trace.read_text().splitlines() if "9000" in line))
    result = run("--calibration", small, "--trace", trace)
    assert result.exit_code == 2
    assert "fewer than two requests: 2 have more than the 8,192 tokens that the model takes" in result.stderr


def test_json_has_the_plan_the_limit_and_the_commands(small: Path) -> None:
    result = run("--calibration", small, "--rate", 4, *QUICK, "--json")
    (answer,) = json.loads(result.stdout)
    assert (answer["host"], answer["hosts"], answer["workers"], answer["cost"]) == ("small", 1, 1, None)
    assert answer["limit"] >= 1
    assert answer["breaks_first"]
    assert answer["plan"]["meets_objectives"]
    assert answer["curve"][-1]["meets_objectives"] is False
    assert answer["start"][0].startswith("headrace serve small")


def test_several_kinds_of_hosts_are_sorted_by_what_they_cost(small: Path, tmp_path: Path) -> None:
    quick = tmp_path / "quick.json"
    quick.write_bytes(encoded(calibration(speed=4)))
    files = ("--calibration", small, "--calibration", quick)
    load = ("--rate", 60, "--ttft", "200ms", *QUICK, "--json")
    cheap_small = json.loads(run(*files, *load, "--cost-per-host", "small=1", "--cost-per-host", "quick=90").stdout)
    assert [answer["host"] for answer in cheap_small] == ["small", "quick"]
    assert cheap_small[0]["cost"] == cheap_small[0]["hosts"] > 1
    cheap_quick = json.loads(run(*files, *load, "--cost-per-host", "small=9", "--cost-per-host", "quick=10").stdout)
    assert [answer["host"] for answer in cheap_quick] == ["quick", "small"]
    few = json.loads(run(*files, "--rate", 1, *QUICK, "--json").stdout)
    assert [(answer["host"], answer["hosts"]) for answer in few] == [("quick", 1), ("small", 1)]
    assert few[0]["limit"] > few[1]["limit"]


def test_a_spare_host_is_added(small: Path) -> None:
    (answer,) = json.loads(run("--calibration", small, "--rate", 2, *QUICK, "--spare-hosts", 1, "--json").stdout)
    assert (answer["hosts"], answer["spare_hosts"]) == (2, 1)
    assert any(line.startswith("headrace router") for line in answer["start"])


def test_a_given_number_of_hosts_is_enough_or_not(small: Path) -> None:
    load = ("--calibration", small, "--rate", 4, "--tpot", "p95:100ms", "--ttft", "p95:300ms", *QUICK)
    enough = run(*load, "--hosts", 1)
    assert enough.exit_code == 0
    assert "enough    yes: 1 host with 1 worker" in enough.stdout
    short = run(*load, "--hosts", 1, "--load", "20x")
    assert short.exit_code == 1
    assert "enough    no: 1 host does not meet the objectives" in short.stdout
    assert "hosts are enough" in short.stdout
    (answer,) = json.loads(run(*load, "--hosts", 1, "--load", "20x", "--json").stdout)
    assert answer["hosts"] == 0
    assert answer["hosts_needed"] > 1
    hopeless = run(*load, "--hosts", 1, "--load", "20x", "--max-hosts", 1)
    assert "no number up to --max-hosts is enough either; looser limits" in hopeless.stdout


def test_without_a_plan_the_status_is_1_and_it_says_why(small: Path) -> None:
    result = run("--calibration", small, "--rate", 2, "--tpot", "p95:2ms", *QUICK, "--max-hosts", 2)
    assert result.exit_code == 1
    assert "none: 2 hosts do not meet the objectives" in result.stdout
    assert "more hosts do not" in result.stdout
    assert re.search(r"time a token: p95 is \d+ ms, above 2 ms", result.stdout)


def test_a_queue_of_idle_workers_is_no_reason_to_buy_faster_ones(small: Path) -> None:
    result = run("--calibration", small, "--rate", 1, "--requests", 40, "--seeds", 1, "--max-hosts", 2)
    assert result.exit_code == 1
    assert "the queue grows" in result.stdout
    assert "more requests in each simulation (--requests) tell whether this is chance" in result.stdout


def test_the_calibration_of_the_model_in_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    result = run("small", "--rate", 2, *QUICK)
    assert result.exit_code == 2
    assert "there is no calibration of small: run `headrace bench calibrate small`" in result.stderr
    (tmp_path / "calibrations").mkdir()
    (tmp_path / "calibrations" / "small.json").write_bytes(encoded(calibration()))
    assert run("small", "--rate", 2, *QUICK).exit_code == 0
    result = run("large", "--rate", 2, *QUICK)
    assert result.exit_code == 2
    assert "there are calibrations of small" in result.stderr


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "which load? give --users with --every or --think-time, --rate, --trace, or --url"),
        (["--rate", "2", "--users", "5"], "--users and --rate are several loads"),
        (["--users", "5"], "--users needs either --every"),
        (["--users", "5", "--every", "2s", "--think-time", "3s"], "--users needs either --every"),
        (["--rate", "2", "--every", "5s"], "give the number of users with --users"),
        (["--users", "2", "--every", "0"], "--every must be above 0"),
        (["--rate", "2", "--think-time", "5s"], "--think-time is for --users"),
        (["--rate", "nan"], "not a finite number"),
        (["--users", "5", "--every", "soon"], "write one such as 25s"),
        (["--rate", "2", "--ttft", "2"], "'2' has no unit; write 2ms or 2s"),
        (["--rate", "2", "--ttft", "fast"], "write one such as p95:2s"),
        (["--rate", "2", "--html", f"{__file__}/plan.html"], f"{__file__} is not a directory"),
        (["--rate", "2", "--load", "much"], "write one such as 2x"),
        (["--rate", "2", "--prefixes", "3"], "give it with --shared-prefix"),
        (["--rate", "2", "--hosts", "2", "--spare-hosts", "1"], "leave --spare-hosts out"),
        (["--rate", "2", "--prompt", "9000"], "the model takes 8,192; give shorter ones"),
        (["--rate", "2", "--cost-per-host", "cheap"], "is not [NAME=]NUMBER, such as small=350"),
        (["--rate", "2", "--cost-per-host", "other=3"], "no calibration is called 'other'; there is small"),
        (["--trace", "none.jsonl"], "cannot read --trace"),
        (["--trace", "none.jsonl", "--answer", "3"], "a trace has its own requests; leave out --answer"),
        (["other", "--rate", "2"], "the calibration is of small, not of other"),
        (["--rate", "2", "--repeated-answer", "0.5"], "give their length with --turns"),
        (["--rate", "2", "--turns", "3", "--repeated-answer", "2"], "0<=x<=1"),
        (["--rate", "2e6"], "hosts such as small, by what its tokens cost, and --max-hosts is 64"),
        (["--users", "9000000", "--think-time", "1s"], "give a smaller load, or a larger --max-hosts"),
        (["--users", "9000000", "--think-time", "1s", "--ttft", "2s"], "give a smaller load, or a larger --max-hosts"),
    ],
)
def test_wrong_flags_are_refused_with_the_remedy(small: Path, flags: list[str], problem: str) -> None:
    result = run("--calibration", small, *flags)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--prompt", "64"], "a running fleet has its own requests; leave out --prompt"),
        (["--cost-per-host", "3"], "leave it out with --url"),
    ],
)
def test_a_running_fleet_has_requests_and_hosts_of_its_own(flags: list[str], problem: str) -> None:
    result = run("--url", "http://127.0.0.1:9", *flags)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())


def test_a_fleet_that_runs_is_judged_by_its_present_load_first(small: Path) -> None:
    """So that the reader sees how near the simulation comes."""
    load = Load(
        Requests(lengths("fixed", 64, 4000), lengths("fixed", 8, 4000), 64, 8), per_s=2.0, name="2 requests/s, as now"
    )
    options = Options((1,), 60, 0, 4, 1, (0.5,), Running(1, load, (0.5, 0.9)))
    fleet = Fleet(Kind("running", read(small)), 1)
    answer = plan(fleet, load.scaled(2), Objectives(Limit(95.0, 1.0), None), options, lambda line: None)
    assert answer.present is not None
    assert 1.7 < answer.present.trial.per_s < 2.4
    assert "present   time to the first token as measured: p50 500 ms, p95 900 ms" in text(answer)
    assert told(answer).present == ToldPresent(
        {
            name: round(1000 * value, 2)
            for name, value in (("p50", answer.present.trial.ttft.p50), ("p95", answer.present.trial.ttft.p95))
        },
        {"p50": 500.0, "p95": 900.0},
    )


def test_the_help_has_every_option_in_a_section() -> None:
    shown = run("--help").stdout
    *_, last = shown.split("\nOptions:\n")
    assert [line.split()[0] for line in last.splitlines() if line.strip().startswith("-")] == ["-h,"]
    assert "The objectives:" in shown


def test_a_mistake_is_told_in_one_line(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--calibration", str(small), "--rate", "4", "--spare-host", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no such option")
    assert line.endswith("see headrace plan --help")
    assert command(["--rate", "4", "--availability", "1"]) == 2
    assert "did you mean '--spare-hosts'?" in capsys.readouterr().err
    assert command(["--help"]) == 0
    assert command([]) == 2
    assert capsys.readouterr().err.startswith("error: which load?")


def test_a_fleet_that_cannot_be_asked_is_named() -> None:
    result = run("--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "cannot connect to http://127.0.0.1:9" in result.stderr
    assert run("--url", "localhost").exit_code == 2
