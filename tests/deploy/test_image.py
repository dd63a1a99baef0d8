"""What the image is made of."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = ROOT / "Dockerfile"
LOCK = ROOT / "requirements.lock"


def locked() -> dict[str, str]:
    """Version of each locked distribution, by normalised name."""
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        name, version = re.fullmatch(r"([a-z0-9.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line).groups()  # type: ignore[union-attr]
        found[name] = version
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_locked_version_is_the_one_that_is_tested() -> None:
    constraints = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    tested = {normalised(name): version for name, version in constraints.items()}
    assert {name: tested.get(name) for name in locked()} == locked(), "make lock writes the file anew"


def test_everything_that_serving_converting_and_tracing_need_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = project["dependencies"] + extras["convert"] + extras["otel"]
    names = {normalised(re.split(r"[<>=\[; ]", requirement)[0]) for requirement in needed}
    assert names <= set(locked()), "make lock writes the file anew"


def test_every_package_is_sent_to_the_build() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {package.split(".")[1] for package in project["packages"]}
    sent = set(re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert folders <= sent


def test_the_image_runs_as_a_user_that_others_can_tell_from_root() -> None:
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert user == "10001:10001"


def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or str(ROOT / ".venv" / "bin" / "hadolint")
    if not Path(hadolint).exists():
        pytest.skip("hadolint is not installed; make check does that")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
