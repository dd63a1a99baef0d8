"""What a summary says of runs: means and spreads, ratios of the same repetition, marks, text, markdown and page."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from headrace.bench.study.directory import Finished
from headrace.bench.study.pages import page, pictures
from headrace.bench.study.recipes import GENAI, LLAMA_CPP, OURS, Run
from headrace.bench.study.summary import Table, as_markdown, as_text, head_of, tables


def finished(
    server: str, rate: str, repetition: int, throughput: float, p99: float, wrong: bool = False, others: float = 0.0
) -> Finished:
    result: dict[str, Any] = {
        "output_throughput": throughput,
        "median_ttft_ms": p99 / 2,
        "p99_ttft_ms": p99,
        "median_tpot_ms": 20.0,
        "failed": 0,
        "headrace": {"answers_are_right": not wrong},
    }
    run = Run("3", server, "m", rate, 30, 64, 32_768, repetition)
    return Finished(
        run, result, {"preemptions": None, "version": "1.2", "command": f"{server} --flag"}, {"cores_of_others": others}
    )


RUNS = [
    finished(OURS, "inf", 1, 600, 100),
    finished(OURS, "inf", 2, 660, 120),
    finished(GENAI, "inf", 1, 500, 400),
    finished(GENAI, "inf", 2, 600, 200, wrong=True),
    finished(LLAMA_CPP, "inf", 1, 200, 90),
    finished(LLAMA_CPP, "inf", 2, 200, 110, others=1.0),
    finished(OURS, "0.5", 1, 60, 50),
    finished(OURS, "0.5", 2, 62, 50),
]


def third() -> Table:
    (table,) = tables(RUNS)
    return table


def test_rows_stand_by_rate_and_ours_before_its_peers() -> None:
    rows = [(row.across, row.series, row.marks) for row in third().rows]
    assert rows == [("0.5", OURS, ""), ("inf", OURS, ""), ("inf", GENAI, "!"), ("inf", LLAMA_CPP, "*")]


def test_a_cell_is_the_mean_with_the_least_and_the_most() -> None:
    cells = third().rows[1].cells
    assert cells["output_throughput"].told("{:.0f}") == "630 (600 to 660)"
    assert "preemptions" not in cells


def test_verdicts_compare_runs_of_one_repetition_with_the_best_peer_of_each_figure() -> None:
    assert third().verdicts == [
        "requests/s inf: headrace has 1.15 (1.10 to 1.20) times the throughput of openvino-genai and "
        "1.10 (1.09 to 1.11) times the p99 TTFT of llama.cpp"
    ]


def test_marks_are_explained_only_if_they_are_there_and_each_server_has_its_command() -> None:
    head = head_of([third()], RUNS)
    assert [words[:2] for words in head[:3]] == ["Fi", "!:", "*:"]
    assert head[3:] == [f"{server} 1.2: {server} --flag" for server in (OURS, GENAI, LLAMA_CPP)]
    assert head_of(tables(RUNS[:1]), RUNS[:1]) == [f"{OURS} 1.2: {OURS} --flag"]


def test_text_and_markdown_have_every_cell() -> None:
    text = as_text([third()], ["a machine"], ["vllm: not installed"])
    assert "3. Servers side by side\n=======================" in text
    assert "630.0 (600.0 to 660.0)" in text
    assert text.endswith("Left out: vllm: not installed\n")
    markdown = as_markdown([third()], "Study of m", ["a machine"], [])
    assert (
        "| inf | openvino-genai! | 550.0 (500.0 to 600.0) | 150 (100 to 200) | 300 (200 to 400) | 20.0 (20.0 to 20.0) |"
        in (markdown)
    )
    columns = {line.count("|") for line in markdown.splitlines() if line.startswith("|")}
    assert columns == {7}


def test_the_page_has_a_chart_for_each_figure_and_needs_no_other_file() -> None:
    made = page([third()], "Study of <m>", ["a machine"], ["vllm: <none>"])
    assert "Study of &lt;m&gt;" in made
    assert "vllm: &lt;none&gt;" in made
    assert made.count("<svg") == 4
    assert ">inf</text>" in made
    assert "http" not in made
    assert "<script" not in made


def test_each_chart_is_a_picture_with_its_own_key() -> None:
    made = dict(pictures([third()]))
    assert set(made) == {f"3-{name}" for name in third().figures}
    for picture in made.values():
        root = ElementTree.fromstring(picture)
        texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
        assert {OURS, GENAI, LLAMA_CPP, "inf", "0.5"} <= set(texts)
