"""Runs pytest in a process of its own, for tests of what our plugins do with tests that hang or die."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import patience

_ROOT = Path(__file__).parents[1]


def failed_run(folder: Path, *flags: str) -> str:
    """What pytest prints of the tests in a folder, of which some must fail."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.time_limits",
        "-p",
        "tests.last_words",
        "--rootdir",
        str(folder),
    ]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:schemathesis", *flags, str(folder)],
        cwd=folder,
        env={"PYTHONPATH": str(_ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout
