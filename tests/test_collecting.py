"""Each process of a run begins to collect with files of its own, and all have the tests in one order."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.inner_pytest import inner_run

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
    done = inner_run(folder, tmp_path, ["tests.collecting"], "-n", "2")
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
