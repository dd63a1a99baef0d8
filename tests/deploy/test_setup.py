"""What `make check`, `make test` and CI set up and run, in which order and what side by side.

Python, npm and all programs of environments are a script that notes how it was called.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).parents[2]
# What targets of the Makefile are older or newer than.
SOURCES = (
    ".ci/run",
    "Makefile",
    "pyproject.toml",
    "setup.py",
    "constraints.txt",
    "compose.yaml",
    "tests/fetch_tools.py",
    "tests/e2e/clients/requirements.txt",
    "tests/e2e/clients/aider_requirements.txt",
    "tests/e2e/clients/package.json",
    "tests/e2e/clients/package-lock.json",
    "tests/architectures/requirements.txt",
    "tests/architectures/encoder_requirements.txt",
)
CHECKERS = ("ruff", "mypy", "buf", "hadolint", "check-jsonschema", "actionlint")

# A call is a line of $LOG when it begins, and another when it ends. One whose words have $FAILS in them fails, with two
# lines.
# Of two calls whose words have $ONE and $OTHER in them, neither goes on before both have begun.
PROGRAM = r"""#!/bin/sh
call="$(basename "$0") $*"
echo "begins $call" >> "$LOG"
meet() {
    case "$call" in *"$1"*)
        for _ in $(seq 1000); do
            grep "^begins" "$LOG" | grep -qF -e "$2" && return
            sleep 0.03
        done
        echo "$2 does not begin beside $1" >&2
        exit 1;;
    esac
}
if [ -n "$ONE" ]; then meet "$ONE" "$OTHER"; meet "$OTHER" "$ONE"; fi
case "$call" in
    *" -m venv "*)
        for folder; do :; done
        mkdir -p "$folder/bin"
        touch "$folder/pyvenv.cfg"
        for name in python pip pytest PROGRAMS; do ln -sf "$0" "$folder/bin/$name"; done;;
    *tests.fetch_tools*) mkdir -p "$3";;
    *" --target "*) mkdir -p "$(echo "$call" | sed 's/.* --target \([^ ]*\).*/\1/')";;
    "npm pack "*)
        mkdir package && touch package/axe.min.js && tar -czf axe-core-4.14.1.tgz package;;
esac
if [ -n "$FAILS" ]; then
    case "$call" in *"$FAILS"*)
        echo "first line of $FAILS" >&2
        sleep 0.1
        echo "second line of $FAILS" >&2
        exit 1;;
    esac
fi
echo "ends $call" >> "$LOG"
""".replace("PROGRAMS", " ".join(CHECKERS))


class Clone:
    """A clone in which nothing is set up, on a machine whose python and npm are `PROGRAM`."""

    def __init__(self, folder: Path) -> None:
        self._root, self._log, programs = folder / "clone", folder / "log", folder / "bin"
        programs.mkdir()
        for name in ("python3.11", "npm"):
            (programs / name).write_text(PROGRAM)
            (programs / name).chmod(0o755)
        for source in SOURCES:
            (self._root / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, self._root / source)
        self._environment = {"PATH": os.pathsep.join((str(programs), os.defpath)), "LOG": str(self._log)}

    def run(self, *command: str, fails: str = "", meet: tuple[str, str] = ("", "")) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            command,
            cwd=self._root,
            env={**self._environment, "FAILS": fails, "ONE": meet[0], "OTHER": meet[1]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience(60),
            check=False,
        )

    def calls(self, words: str = "") -> list[str]:
        """The calls that have ended and have `words` in them, in this order."""
        ended = [line.removeprefix("ends ") for line in self.changes() if line.startswith("ends ")]
        return [call for call in ended if words in call]

    def most_at_a_time(self, words: str) -> int:
        """How many calls with `words` in them ran at a time."""
        changes = [1 if line.startswith("begins ") else -1 for line in self.changes() if words in line]
        return max(itertools.accumulate(changes))

    def changes(self) -> list[str]:
        """Each call twice, as it begins and as it ends; without that of the exports, which may end after pytest."""
        return [line for line in self._log.read_text().splitlines() if "every_run" not in line]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    if shutil.which("make", path=os.defpath) is None:
        pytest.skip("there is no make here")
    return Clone(tmp_path)


def test_ci_checks_sets_up_once_and_runs_every_test_at_the_end(clone: Clone) -> None:
    done = clone.run("bash", ".ci/run")
    assert done.returncode == 0, done.stdout
    calls = clone.calls()
    assert calls[-1] == "pytest -n 3 --no-loadscope-reorder"
    assert clone.calls("pytest") == calls[-1:], "the tests of the checks are among all"
    assert {call.partition(" ")[0] for call in calls} == {"python3.11", "npm", "pip", "pytest", *CHECKERS}
    assert len(calls) == len(set(calls)), "nothing is done twice"


def test_a_second_run_sets_nothing_up(clone: Clone) -> None:
    assert clone.run("make", "test").returncode == 0
    before = len(clone.calls())
    assert clone.run("make", "test", "ARGS=-k router").returncode == 0
    assert clone.calls()[before:] == ["pytest -n 3 --no-loadscope-reorder -k router"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("-e .[dev", "tests/e2e/clients/requirements.txt"),
        ("tests/e2e/clients/aider_requirements.txt", "tests/architectures/requirements.txt"),
    ],
)
def test_environments_are_set_up_side_by_side(clone: Clone, one: str, other: str) -> None:
    done = clone.run("make", "test-setup", meet=(one, other))
    assert done.returncode == 0, done.stdout


def test_checks_run_side_by_side(clone: Clone) -> None:
    done = clone.run("make", "check", meet=("mypy", "pytest --quiet"))
    assert done.returncode == 0, done.stdout


def test_one_pip_at_a_time_installs_into_an_environment(clone: Clone) -> None:
    done = clone.run("make", "check", "test-setup")
    assert done.returncode == 0, done.stdout
    assert len(clone.calls("-c constraints.txt")) == 3
    assert clone.most_at_a_time("-c constraints.txt") == 1


def test_no_check_runs_while_packages_are_installed_that_it_may_look_at(clone: Clone) -> None:
    done = clone.run("make", "check", "test-setup")
    assert done.returncode == 0, done.stdout
    changes = clone.changes()
    last = changes.index("ends " + clone.calls("-c constraints.txt")[-1])
    assert all(changes.index(f"begins {call}") > last for name in CHECKERS for call in clone.calls(f"{name} "))


@pytest.mark.parametrize(
    ("fails", "target"),
    [
        ("headrace[ray]", ".venv/.ray"),
        ("aider_requirements.txt", ".make/aider/.done"),
        ("npm install", ".make/clients/.done"),
    ],
)
def test_what_cannot_be_set_up_ends_the_run_and_says_why(clone: Clone, fails: str, target: str) -> None:
    done = clone.run("make", "test", fails=fails)
    assert done.returncode != 0
    assert f"first line of {fails}\n" in done.stdout
    assert re.search(rf"\*\*\* .*{re.escape(target)}\] Error 1", done.stdout)
    assert clone.calls("pytest") == []


@pytest.mark.parametrize("name", [*CHECKERS, "pytest"])
def test_a_check_that_fails_fails_all_and_its_lines_stay_together(clone: Clone, name: str) -> None:
    done = clone.run("make", "check", fails=f"{name} ")
    assert done.returncode != 0
    assert f"first line of {name} \nsecond line of {name} \n" in done.stdout
    assert re.search(r"\*\*\* .*check/[a-z]+\] Error 1", done.stdout)


def test_ci_ends_with_a_check_that_fails(clone: Clone) -> None:
    assert clone.run("bash", ".ci/run", fails="mypy").returncode != 0
    assert clone.calls("pytest") == []
