"""Progress in lines and as a bar."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

import pytest

from headrace.cli.models.progress import BarProgress, PlainProgress, PlainStages, stages
from headrace.cli.serving.run import _ready_line
from headrace.common.commands import duration
from headrace.common.load_stages import LoadStage, line_of, stage_in
from tests.cli.terminal import on_terminal


def test_a_line_comes_every_three_seconds_with_share_and_rate() -> None:
    moments = [(1.0, 0), (2.0, 1_000_000), (4.0, 8_000_000), (5.0, 9_000_000), (8.0, 20_000_000)]
    clock = iter([0.0, *(now_s for now_s, _ in moments)])
    lines: list[str] = []
    progress = PlainProgress("m", lines.append, lambda: next(clock))
    for _, done in moments:
        progress.at(done, 40_000_000)
    assert lines == [
        "m: 8 of 40 MB (20 %), 2.0 MB/s, 16 s left",
        "m: 20 of 40 MB (50 %), 3.0 MB/s, 7 s left",
    ]


def test_without_a_total_there_is_no_share() -> None:
    now_s = 0.0
    lines: list[str] = []
    progress = PlainProgress("m", lines.append, lambda: now_s)
    progress.at(0, None)
    now_s = 4.0
    progress.at(8_000_000, None)
    assert lines == ["m: 8 MB, 2.0 MB/s"]


def test_brackets_in_the_name_of_a_file_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with BarProgress("owner/name model[/q4].gguf") as progress:
        progress.at(1, 2)
    assert "model[/q4].gguf" in capsys.readouterr().err


def test_the_time_that_is_left_follows_from_the_rate() -> None:
    clock = iter([0.0, 1.0, 5.0])
    lines: list[str] = []
    progress = PlainProgress("m", lines.append, lambda: next(clock))
    progress.at(0, 1_000_000_000)
    progress.at(10_000_000, 1_000_000_000)
    assert lines == ["m: 10 of 1000 MB (1 %), 2.0 MB/s, 8 min 15 s left"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599.0, "59 min 59 s"), (7384.0, "2 h 3 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_stage_is_told_when_it_has_lasted_twice_as_long_as_the_last_time() -> None:
    now_s = 0.0
    lines: list[str] = []
    shown = PlainStages("m", lines.append, lambda: now_s)
    for now_s in range(100):
        if now_s == 2:
            shown.at("compiling")
        if now_s == 90:
            shown.at("warming up")
        shown.tick()
    shown.end()
    now_s = 1000.0
    shown.tick()
    assert lines == [f"m: still compiling, {text} so far" for text in ("10 s", "20 s", "40 s", "1 min 20 s")]


def test_without_a_terminal_short_stages_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with stages("m") as at:
        at("compiling")
        at("warming up")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_the_stage_and_keeps_what_took_long(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from headrace.cli.models import progress\n"
        "progress._WORTH_TELLING_S = 0.0\n"
        "with progress.stages('m[/x]') as at:\n"
        "    at('compiling')\n"
        "    sys.stdin.readline()\n"
        "    at('warming up')\n"
    )
    with on_terminal(sys.executable, "-c", program, env=os.environ, cwd=tmp_path) as shown:
        shown.until("m[/x]: compiling 0:00:")
        shown.type("\n")
        shown.until("m[/x]: compiling took ")
        shown.until("m[/x]: warming up took ")
        assert shown.end() == 0


@pytest.mark.parametrize("before", ["worker-0 | 12:00:00,000 INFO headrace.worker.loading [-] ", '{"message":"'])
def test_a_log_tells_the_stage_of_a_load(before: str) -> None:
    for stage in LoadStage:
        assert stage_in(f"{before}{line_of(stage)}") is stage
    assert stage_in(f"{before}warmed up in 0.4 s") is None


class Process:
    """A server that has written its ready line."""

    def __init__(self, stdout: IO[str]) -> None:
        self.stdout = stdout


def test_run_shows_the_stage_of_the_worker_that_is_furthest(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    reader, writer = os.pipe()
    seen: list[str] = []

    def at(stage: str) -> None:
        seen.append(stage)
        if stage == "starting the server":
            with log.open("a") as file:
                compiling = line_of(LoadStage.COMPILING)
                file.write(f"worker-0 | {compiling}\nworker-1 | {compiling}\nworker-0 | load")
        elif stage == LoadStage.COMPILING:
            with log.open("a") as file:
                file.write(f"ing: {LoadStage.WARMING}\nworker-1 | {line_of(LoadStage.HASHING)}\n")
        else:
            os.write(writer, b"ready: http://127.0.0.1:1/v1\n")

    with open(reader) as stdout:
        line = _ready_line(cast("subprocess.Popen[str]", Process(stdout)), log, at)
    os.close(writer)
    assert line == "ready: http://127.0.0.1:1/v1\n"
    assert seen == ["starting the server", LoadStage.COMPILING, LoadStage.WARMING]
