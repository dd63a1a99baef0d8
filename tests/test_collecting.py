"""Each process of a run begins to collect with files of its own, and all have the tests in one order."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.patience import patience

ROOT = Path(__file__).parents[1]
# Notes which process imports the file.
FILE = """
import os
from pathlib import Path

with Path({noted!r}).open("a") as noted:
    noted.write(os.environ.get("PYTEST_XDIST_WORKER", "main") + " " + Path(__file__).stem + "\\n")

def test_second(): pass
def test_first(): pass
"""


def test_processes_begin_elsewhere_and_end_with_one_order(tmp_path: Path) -> None:
    noted, folder = tmp_path / "noted", tmp_path / "tests"
    for part in ("a", "b"):
        (folder / part).mkdir(parents=True)
        for number in range(2):
            (folder / part / f"test_{part}{number}.py").write_text(FILE.format(noted=str(noted)))
    plugins = ["-p", "tests.collecting", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-n", "2", "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    # Processes that have tests in different orders run none.
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
    imported = defaultdict(list)
    for line in noted.read_text().splitlines():
        process, file = line.split()
        imported[process].append(file)
    assert imported == {
        "gw0": ["test_a0", "test_a1", "test_b0", "test_b1"],
        "gw1": ["test_b1", "test_b0", "test_a1", "test_a0"],
    }
