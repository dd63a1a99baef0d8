"""Runs pytest in a process of its own, for tests of what our plugins do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.patience import patience

_ROOT = Path(__file__).parents[1]


def inner_run(folder: Path, temporary: Path, plugins: Sequence[str], *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder with these plugins of ours, and `temporary` for their files."""
    loaded = [part for name in (*plugins, "no:cacheprovider", "no:schemathesis") for part in ("-p", name)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *loaded, "--rootdir", str(folder), *flags, str(folder)],
        cwd=folder,
        env={"PYTHONPATH": str(_ROOT), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


def failed_run(folder: Path, *flags: str) -> str:
    """What pytest prints of the tests in a folder, of which some must fail: those that hang or die."""
    done = inner_run(folder, folder, ("tests.time_limits", "tests.last_words"), *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout
