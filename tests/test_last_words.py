"""A process of the tests that dies is reported with how it ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.last_words import ending
from tests.patience import patience

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("dies", "said"),
    [
        ("os.kill(os.getpid(), 9)", ["the process was ended by SIGKILL", "before", "MiB"]),
        ("ctypes.string_at(0)", ["the process was ended by SIGSEGV", "Segmentation fault", "test_dying.py"]),
        # No alarm interrupts this.
        ("sum(itertools.repeat(0))", ["the process ended itself with status 1", "Timeout", "test_dying.py"]),
    ],
)
def test_the_report_of_a_test_whose_process_died_says_how(tmp_path: Path, dies: str, said: list[str]) -> None:
    (tmp_path / "conftest.py").write_text("from tests import time_limits\n\ntime_limits._NATIVE_S = 0.2\n")
    (tmp_path / "test_dying.py").write_text(f"import ctypes, itertools, os\n\n\ndef test_it():\n    {dies}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "--max-worker-restart", "0", "--timeout", "2"]
    more = [
        "-p",
        "tests.last_words",
        "-p",
        "tests.time_limits",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",
        "--rootdir",
        str(tmp_path),
        "-c",
        "pytest.ini",
    ]
    done = subprocess.run(
        [*command, *more, str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for words in said:
        assert words in done.stdout


def test_an_end_is_told_by_signal_or_status() -> None:
    assert ending(-9) == "the process was ended by SIGKILL"
    assert ending(3) == "the process ended itself with status 3"
    assert "not known" in ending(None)
