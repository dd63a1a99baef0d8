"""The command against a server whose times are known: figures, text, JSON, report, warnings and refusals."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.bench.__main__ import main
from headrace.bench.apis import api_of
from headrace.bench.benchmark import BenchmarkError, first_model, waited
from headrace.bench.connection import Client
from headrace.bench.options.dataset import without_effect
from headrace.bench.options.parsing import spelled_out
from headrace.bench.options.values import Objective
from headrace.bench.report import text_table
from headrace.bench.saved import of
from headrace.bench.serve import load_text, plan_of, serve
from headrace.bench.target import target_of
from headrace.bench.texts import Writer
from headrace.bench.tokens import WordCounter
from headrace.common.commands import run
from tests.bench.scripted_server import scripted_server, served

# What scripts made for `vllm bench serve` read.
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "latencies", "queue_times"),
    *(f"{kind}_{metric}_ms" for metric in ("ttft", "tpot", "itl") for kind in ("mean", "median", "std", "p99")),
}
VLLM_DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"),
}
VLLM_LINES = (
    ("Successful requests", "Failed requests", "Maximum request concurrency", "Request rate configured (RPS)"),
    ("Benchmark duration (s)", "Total input tokens", "Total generated tokens", "Request throughput (req/s)"),
    ("Request goodput (req/s)", "Output token throughput (tok/s)", "Peak output token throughput (tok/s)"),
    ("Peak concurrent requests", "Total token throughput (tok/s)", "Mean TTFT (ms)", "Median TTFT (ms)"),
    ("P99 TTFT (ms)", "Mean TPOT (ms)", "Mean ITL (ms)", "P99 ITL (ms)"),
)
SMALL = ["--num-prompts", "12", "--input-len", "40", "--output-len", "6", "--disable-tqdm"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as found:
        yield found


def bench(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), prog_name="headrace bench", auto_envvar_prefix="HEADRACE_BENCH")


def saved(tmp_path: Path, url: str, *args: str) -> dict[str, Any]:
    result = bench(url, *SMALL, "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json", *args)
    assert result.exit_code in (0, 1), result.output
    found: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return found


def test_figures_are_those_of_the_servers_script(url: str, tmp_path: Path) -> None:
    found = saved(
        tmp_path,
        url,
        "--model",
        "ttft=400,gap=100",
        "--request-rate",
        "40",
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
    )
    # Generous: the machine may be busy, and a timer never comes early.
    assert 400 <= found["mean_ttft_ms"] < 700
    assert 80 < found["median_tpot_ms"] < 160
    assert 80 < found["median_itl_ms"] < 160
    assert 900 <= found["mean_e2el_ms"] < 1400
    assert found["mean_tpot_ms"] == pytest.approx((found["mean_e2el_ms"] - found["mean_ttft_ms"]) / 5, rel=0.01)
    assert (found["completed"], found["failed"]) == (12, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12 * 40, 12 * 6)
    assert found["output_throughput"] == pytest.approx(72 / found["duration"])
    assert found["max_concurrent_requests"] == 12


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_json_has_the_keys_that_scripts_read(url: str, tmp_path: Path, backend: str) -> None:
    args = ("--backend", backend, "--metadata", "version=1", "host=a", "--seed", "3", "--label", "mine")
    found = saved(tmp_path, url, *args)
    assert set(found) == VLLM_KEYS | {"version", "host", "headrace"}
    assert (found["request_rate"], found["max_concurrency"], found["tokenizer_id"]) == ("inf", None, None)
    assert (found["backend"], found["label"], found["model_id"]) == (backend, "mine", "scripted")
    detailed = saved(tmp_path, url, "--save-detailed", "--model", "ttft=10,gap=10")
    assert set(detailed) == VLLM_KEYS | VLLM_DETAILS | {"headrace"}
    assert all(len(detailed[key]) == 12 for key in VLLM_DETAILS)
    assert detailed["output_lens"] == [6] * 12
    assert detailed["input_lens"] == [40] * 12
    for ttft, gaps, latency in zip(detailed["ttfts"], detailed["itls"], detailed["latencies"], strict=True):
        assert len(gaps) == 5
        assert latency >= ttft + sum(gaps) - 1e-9


def test_the_text_has_the_lines_that_eyes_know(url: str) -> None:
    args = ("--request-rate", "50", "--max-concurrency", "8", "--goodput", "ttft:5s", "tpot:500", "--ignore-eos")
    result = bench("serve", "--base-url", f"{url}/v1", *SMALL, *args)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "============ Serving Benchmark Result ============" in lines
    assert lines.count("=" * 50) == 1
    for name in (name for names in VLLM_LINES for name in names):
        (line,) = (line for line in lines if line.startswith(f"{name}:"))
        assert math.isfinite(float(line[len(name) + 1 :]))
    assert "---------------Time to First Token----------------" in lines
    assert re.search(r"^Request goodput \(req/s\): +[\d.]+", result.stdout, re.MULTILINE)
    assert re.search(r"^Requests that meet every --goodput: +12 of 12", result.stdout, re.MULTILINE)
    assert re.search(r"^Late sends \(> 10 ms\): +\d+ of 12", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("script", "kind"),
    [("short=2", "too_short"), ("empty=1", "empty"), ("reason=0", "no_finish_reason"), ("seen=9", "prompt_truncated")],
)
def test_a_server_that_answers_wrongly_cannot_be_overlooked(url: str, tmp_path: Path, script: str, kind: str) -> None:
    page = tmp_path / "r.html"
    args = ("--model", script, "--save-result", "--result-dir", str(tmp_path), "--html", str(page))
    result = bench(url, *SMALL, "--result-filename", "r.json", *args)
    assert result.exit_code == 1
    assert result.stderr.count("!!! WRONG ANSWERS: 12 of 12") >= 2
    assert f"WRONG ({kind}):" in result.stdout
    own = json.loads((tmp_path / "r.json").read_text())["headrace"]
    assert (own["answers_are_right"], own["findings"][0]["kind"]) == (False, kind)
    assert '<div class="wrong">' in page.read_text()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("status=429", "HTTP 429"),
        ("status=500", "HTTP 500"),
        ("cut=3,gap=1", "disconnected"),
        ("bad=1", "malformed"),
    ],
)
def test_failures_are_counted_by_kind(url: str, tmp_path: Path, script: str, kind: str) -> None:
    found = saved(tmp_path, url, "--model", script, "--save-detailed")
    assert (found["completed"], found["failed"]) == (0, 12)
    assert found["headrace"]["errors_by_kind"] == {kind: 12}
    assert all(found["errors"])
    assert found["mean_ttft_ms"] == 0


def test_a_request_that_takes_too_long_has_timed_out(url: str, tmp_path: Path) -> None:
    found = saved(tmp_path, url, "--model", "ttft=60000", "--request-timeout", "0.2", "--num-prompts", "2")
    assert found["headrace"]["errors_by_kind"] == {"timeout": 2}


@pytest.mark.parametrize("script", ["close=1", "split=1", "role=1", "usage=0"])
def test_other_ways_to_stream_are_the_same_to_the_client(url: str, tmp_path: Path, script: str) -> None:
    found = saved(tmp_path, url, "--model", f"{script},ttft=5", "--max-concurrency", "3")
    assert (found["completed"], found["total_output_tokens"]) == (12, 72)
    assert found["headrace"]["answers_are_right"]
    source = found["headrace"]["answers_counted_by"]
    assert source == ("/tokenize of the server" if script == "usage=0" else "the server's usage")


def test_a_server_that_is_not_there_is_said_in_one_sentence() -> None:
    result = bench("http://127.0.0.1:9", *SMALL)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot connect to http://127.0.0.1:9")
    assert result.stderr.count("\n") == 1


def test_a_server_that_starts_is_waited_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def main() -> str:
        client = Client(target_of(url, {}, None, False), 60.0)
        failed = asyncio.Event()

        async def ask() -> str:
            try:
                return await first_model(client, api_of("openai", None))
            except BenchmarkError:
                failed.set()
                raise

        model = asyncio.create_task(waited(ask, 60.0))
        await failed.wait()
        async with served(int(url.rsplit(":", 1)[1])):
            try:
                return await model
            finally:
                client.close()

    assert asyncio.run(main()) == "scripted"


def test_probes_are_told_beside_the_load(url: str, tmp_path: Path) -> None:
    args = ("--model", "ttft=30,gap=30", "--max-concurrency", "1", "--probe-request-rate", "200", "--save-result")
    result = bench(url, *SMALL, *args, "--result-filename", str(tmp_path / "r.json"))
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["completed"] == 12
    assert found["probe_completed"] > 0
    assert found["probe_failed"] == 0
    assert 30 <= found["probe_median_e2el_ms"] <= found["probe_p99_e2el_ms"] <= found["probe_max_e2el_ms"]
    assert "------------------Probe Requests------------------" in result.stdout
    assert "Probe requests completed:" in result.stdout


def test_what_the_server_drafted_is_told_as_vllm_does(url: str, tmp_path: Path) -> None:
    args = ("--model", "drafts=1", "--save-result", "--result-filename", str(tmp_path / "r.json"))
    result = bench(url, *SMALL, *args)
    found = json.loads((tmp_path / "r.json").read_text())
    assert {key.removeprefix("spec_decode_"): value for key, value in found.items() if "spec_decode" in key} == {
        "acceptance_rate": 50.0,
        "acceptance_length": 2.0,
        "num_drafts": 72,
        "draft_tokens": 144,
        "accepted_tokens": 72,
        "per_position_acceptance_rates": [1.0, 0.0],
    }
    assert "---------------Speculative Decoding---------------" in result.stdout
    assert re.search(r"^  Position 0: +100\.00 *$", result.stdout, re.MULTILINE)


def test_a_ramp_tells_when_it_reached_each_whole_rate(url: str, tmp_path: Path) -> None:
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "20", "--ramp-up-end-rps", "22")
    events = saved(tmp_path, url, *ramp)["rps_change_events"]
    assert [event["rps"] for event in events] == [20, 21, 22]
    times = [datetime.datetime.fromisoformat(event["timestamp"]) for event in events]
    assert times == sorted(times)


def test_what_the_server_found_in_its_cache_is_told(url: str, tmp_path: Path) -> None:
    assert saved(tmp_path, url, "--model", "cached=10")["headrace"]["cached_share"] == 0.25
    assert saved(tmp_path, url)["headrace"]["cached_share"] is None
    assert re.search(
        r"^Prompt tokens from the cache \(%\): +25\.00", bench(url, *SMALL, "--model", "cached=10").stdout, re.M
    )


def test_the_profiler_of_the_server_runs_during_the_load(url: str) -> None:
    def profiled() -> list[str]:
        with urllib.request.urlopen(f"{url}/profiled") as answer:
            return [each["id"] for each in json.load(answer)["data"]]

    before = len(profiled())
    assert bench(url, *SMALL, "--profile").exit_code == 0
    assert profiled()[before:] == ["/start_profile", "/stop_profile"]


def test_plots_are_pages_beside_the_result(url: str, tmp_path: Path) -> None:
    args = ("--plot-timeline", "--timeline-itl-thresholds", "1,2", "--plot-dataset-stats", "--model", "ttft=9,gap=9")
    result = bench(url, *SMALL, *args, "--result-filename", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    timeline = (tmp_path / "r.timeline.html").read_text()
    assert timeline.count("<title>request ") == 12
    assert "from 2 ms on" in timeline
    assert "40 tokens in, 6 out" in timeline
    lengths = (tmp_path / "r.dataset_stats.html").read_text()
    assert "Tokens of prompts: mean 40.0, 40 to 40" in lengths
    assert "Tokens of answers: mean 6.0" in lengths
    assert lengths.count("<svg") == 3


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["http://a", "--backend", "tgi", "--min-p", "0.1"], "--min-p: the API tgi has no such parameter"),
        (["http://a", "--chat-template-kwargs", '{"a": 1}'], "add --backend openai-chat"),
        (["http://a", "--num-prompts", "-1"], "random reads none; give a number of requests"),
        (["http://a", "--custom-output-len", "0"], "or -1 for those of the file"),
        (["http://a", "--random-range-ratio", '{"in": 1}'], "neither a number from 0 to below 1"),
        (["http://a", "--plot-timeline", "--timeline-itl-thresholds", "50,25"], "not two rising numbers"),
        (["serve"], "name the server by its URL"),
        (["compare"], "'compare' is neither a command (calibrate, report, serve, study) nor the URL of a server"),
        (["127.0.0.1:8000"], "did you mean http://127.0.0.1:8000?"),
        (["http://a", "--host", "b"], "the server is named twice"),
        (["http://a", "--dataset-name", "sharegpt"], "or generate requests of similar lengths: --dataset-name random"),
        (["http://a", "--dataset-name", "custom", "--dataset-path", "/none"], "--dataset-path /none: there is no such"),
        (["http://a", "--html", f"{__file__}/r.html"], f"cannot write to {__file__}/r.html: {__file__} is not a dir"),
        (["http://a", "--result-dir", f"{__file__}/r"], f"cannot write to {__file__}/r: {__file__} is not a directory"),
        (["http://a", "--save-result", "--result-filename", f"{__file__}/r"], f"{__file__} is not a directory"),
        (["http://a", "--result-filename", "/"], "it is a directory; give its name to --result-dir"),
        (["http://a", "--dataset-path", "x"], "random reads no file"),
        (["http://a", "--self-timed"], "is for --dataset-name timed_trace"),
        (
            ["http://a", "--dataset-name", "timed_trace", "--dataset-path", __file__, "--request-rate", "2"],
            "--no-self-timed",
        ),
        (["http://a", "--backend", "tgi", "--ignore-eos"], "cannot continue after the end"),
        (["http://a", "--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["http://a", "--ramp-up-end-rps", "4"], "need --ramp-up-strategy"),
        (["http://a", "--sweep", "--num-prompts", "5"], "leave --num-prompts out"),
        (["http://a", "--goodput", "speed:5"], "is not METRIC:TIME with one of ttft, tpot, e2el"),
        (["http://a", "--goodput", "ttft:2m"], "such as ttft:2s or tpot:100ms"),
        (["http://a", "--metadata", "x"], "is not NAME=VALUE"),
        (["http://a", "--request-rate", "0"], "neither a positive number nor inf"),
        (["http://a", "--extra-body", "[1]"], "not an object in JSON"),
        (["http://a", "--percentile-metrics", "ttft,speed"], "'speed' is none of"),
        (["http://a", "--metric-percentiles", "101"], "numbers from 0 to 100"),
        (["http://a", "--header", "x y=1"], "is not a header"),
        (["https://a", "--ca-file", "/does/not/exist"], "no certificates that can be used"),
        (["report", "/does/not/exist"], "cannot read /does/not/exist"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_remedy(args: list[str], sentence: str) -> None:
    result = bench(*args)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr


def test_a_file_that_cannot_be_used_is_refused(url: str, tmp_path: Path) -> None:
    result = bench(url, "--dataset-name", "custom", "--dataset-path", str(tmp_path / "none"), *SMALL)
    assert (result.exit_code, "cannot read --dataset-path" in result.stderr) == (2, True)
    result = bench(url, "--tokenizer", str(tmp_path), *SMALL)
    assert (result.exit_code, "has no openvino_tokenizer.xml" in result.stderr) == (2, True)


@pytest.mark.parametrize(("said", "limit_ms"), [("ttft:500", 500), ("ttft:500ms", 500), ("ttft:1.5s", 1500)])
def test_a_limit_without_a_unit_is_in_milliseconds(said: str, limit_ms: float) -> None:
    assert Objective().convert(said, None, None) == ("ttft", limit_ms)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ("--request-rate", "50"),
            "12 requests (random), prompts of 40 tokens and answers of 6 on average, 50 requests",
        ),
        (("--request-rate", "6", "--max-concurrency", "3"), "6 requests a second, during 2 s, at most 3 at a time"),
        ((), "on average, all at once"),
        (("--max-concurrency", "3"), "on average, 3 at a time"),
        (
            ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "20", "--ramp-up-end-rps", "40"),
            "from 20 to 40 a sec",
        ),
        (("--dataset-name", "multi_turn"), "8 users who think for 10 s on average"),
        (("--dataset-name", "multi_turn", "--request-rate", "3"), "3 conversations a second, during "),
    ],
)
def test_the_load_is_told_before_it_begins(args: tuple[str, ...], told: str) -> None:
    context = serve.make_context("serve", ["http://a", *SMALL, *args])
    plan = plan_of(context.params)
    drawn = asyncio.run(plan.workload.draw(Writer(["a"], ["b"], WordCounter(), 0), plan.num_prompts, plan.seed))
    assert told in load_text(plan, drawn.conversations)


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["http://a", "--api-key", "x"], "'--header'"),
        (["http://a", "--slo", "ttft:5"], "'--goodput'"),
        (["http://a", "--duration", "60"], "'--num-prompts'"),
        (["http://a", "--trace", "x"], "'--dataset-name', '--dataset-path'"),
        (["study", "--resume"], "'--directory'"),
        (["study", "--list"], "'--dry-run'"),
        (["calibrate", "--time", "5"], "'--seconds'"),
    ],
)
def test_words_of_other_clients_lead_to_a_flag(args: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(main, "headrace bench", args) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_flag_that_the_dataset_does_not_read_is_told(url: str) -> None:
    args = ("--multi-turn-think-time", "3", "--sonnet-input-len", "40", "--random-prefix-len", "4")
    result = bench(url, *SMALL, *args)
    assert result.exit_code == 0, result.output
    told = [line for line in result.stderr.splitlines() if "has no effect" in line]
    assert told == [
        "--multi-turn-think-time has no effect on --dataset-name random: it is for multi_turn",
        "--sonnet-input-len has no effect on --dataset-name random: it is for sonnet",
    ]
    assert without_effect("prefix_repetition", {"input_len", "output_len", "seed"}) == [
        "--input-len has no effect on --dataset-name prefix_repetition: it is for random, sonnet, multi_turn"
    ]


def test_requests_that_the_model_will_refuse_for_their_length_are_told_before_the_load(
    url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    lengths = ((300, 4), (509, 4), (900, 4))
    trace.write_text("\n".join(json.dumps({"timestamp": 0, "input_length": i, "output_length": o}) for i, o in lengths))
    of_trace = ("--dataset-name", "timed_trace", "--dataset-path", str(trace))

    def told(*args: str) -> list[str]:
        result = bench(url, "--num-prompts", "3", "--disable-tqdm", *args)
        assert result.exit_code == 0, result.output
        return [line for line in result.stderr.splitlines() if "refused" in line]

    sentence = "have more tokens, with their answers, than the 512 that the model takes, and will be refused: "
    assert told("--model", "short", *of_trace) == [f"2 of 3 requests {sentence}--max-total-len 512 avoids them"]
    assert told("--model", "short", *of_trace, "--max-total-len", "512") == []
    assert told("--model", "short", "--input-len", "600", "--output-len", "4") == [
        f"3 of 3 requests {sentence}give shorter lengths"
    ]
    assert told("--model", "unlisted", *of_trace) == []


def test_several_values_may_follow_one_flag() -> None:
    args = ["--goodput", "ttft:5", "tpot:6ms", "--metadata", "a=1", "b=http://x", "http://s", "--max_concurrency", "3"]
    assert spelled_out(args) == [
        *("--goodput", "ttft:5", "--goodput", "tpot:6ms", "--metadata", "a=1", "--metadata", "b=http://x"),
        *("http://s", "--max-concurrency", "3"),
    ]


def test_several_runs_are_one_report(url: str, tmp_path: Path) -> None:
    for name, more in (("ours", ["--save-detailed"]), ("theirs", ["--save-result"])):
        args = ("--model", "ttft=5,gap=5", "--label", name, "--result-filename", str(tmp_path / f"{name}.json"))
        assert bench(url, *SMALL, *args, *more).exit_code == 0
    theirs = json.loads((tmp_path / "theirs.json").read_text())
    del theirs["headrace"]  # as another client saves it
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    out = tmp_path / "report.html"
    result = bench(
        "report", str(tmp_path / "ours.json"), str(tmp_path / "theirs.json"), "-o", str(out), "--title", "A <b>"
    )
    assert result.exit_code == 0, result.output
    told = result.stdout.splitlines()
    assert [cell.strip() for cell in told[0].split("|")] == ["", "ours", "theirs"]
    assert [cell.strip() for cell in told[2].split("|")] == ["requests", "12", "12"]
    assert len({line.index("|") for line in told}) == 1
    page = out.read_text()
    assert "<h1>A &lt;b&gt;</h1>" in page
    assert page.count("<svg") >= 7
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    for name in ("ours", "theirs"):
        assert f"{name}</th>" in page
    for title in (
        "Throughput against latency",
        "Pareto",
        "TTFT: share of requests",
        "ITL: share of gaps",
        "Timeline of ours",
    ):
        assert title in page
    assert "Timeline of theirs" not in page


def test_runs_with_long_names_are_numbered() -> None:
    runs = [of(name, {"duration": 1.0, "completed": 2}) for name in ("short", "a name that is longer than a column")]
    told = text_table(runs).splitlines()
    assert told[:2] == ["1: short", "2: a name that is longer than a column"]
    assert [cell.strip() for cell in told[2].split("|")] == ["", "1", "2"]
    assert max(map(len, told)) < 80


def test_a_wrong_run_is_told_in_a_report_of_several(url: str, tmp_path: Path) -> None:
    for name, script in (("right", "ttft=5"), ("wrong", "empty=1")):
        args = (
            "--model",
            script,
            "--label",
            name,
            "--save-result",
            "--result-filename",
            str(tmp_path / f"{name}.json"),
        )
        bench(url, *SMALL, *args)
    out = tmp_path / "report.html"
    result = bench("report", *(str(tmp_path / f"{name}.json") for name in ("right", "wrong")), "-o", str(out))
    assert "!!! wrong: WRONG ANSWERS: 12 of 12 answers without any text." in result.stderr
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("wrong answers"))
    assert [cell.strip() for cell in row.split("|")] == ["wrong answers", "0", "12"]
    page = out.read_text()
    assert 'wrong<br><span class="bad">wrong answers</span></th>' in page
    assert "right</th>" in page


def test_a_result_is_appended_as_a_line(url: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for _ in range(2):
        assert bench(url, *SMALL, "--append-result", "--result-filename", str(path)).exit_code == 0
    assert [json.loads(line)["completed"] for line in path.read_text().splitlines()] == [12, 12]


def test_the_help_has_a_section_for_each_subject() -> None:
    shown = bench("serve", "--help").stdout
    titles = [line for line in shown.splitlines() if re.match(r"[A-Z].*:$", line)]
    assert titles[:5] == [
        "The server:",
        "What is asked:",
        "When it is asked:",
        "How it is asked:",
        "What is told and kept:",
    ]
    listed = [line.split()[0].rstrip(",") for line in shown.splitlines() if line.startswith("  --")]
    assert len(listed) == len(set(listed))
    assert "--random-mm-bucket-config" not in listed  # refused
    assert shown.index("Examples:") < shown.index("The server:")
