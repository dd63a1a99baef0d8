"""A process of the tests that dies is reported with how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inner_pytest import failed_run
from tests.last_words import ending


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
    printed = failed_run(tmp_path, "-n", "1", "--max-worker-restart", "0", "--timeout", "2")
    for words in said:
        assert words in printed
    assert not list(tmp_path.glob("headrace-tests-*"))


def test_an_end_is_told_by_signal_or_status() -> None:
    assert ending(-9) == "the process was ended by SIGKILL"
    assert ending(3) == "the process ended itself with status 3"
    assert "not known" in ending(None)
