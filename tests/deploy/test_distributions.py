"""The wheel and the source distribution have all of the tree, and the wheel runs outside of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from headrace.common.version import headrace_version
from tests.deploy.distributions import ROOT, built_sdist, built_wheel, tree
from tests.test_architecture import FOLDERS


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(sdist, tmp_path_factory.mktemp("wheel"))


def test_a_source_distribution_has_the_whole_tree(sdist: Path) -> None:
    packed = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert set(tree()) <= packed
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= packed


def test_a_wheel_has_the_tree_and_nothing_else(wheel: Path) -> None:
    names = sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)
    named = {folder: package for package, folder in FOLDERS.items()}
    parts = [name.partition("/") for name in tree()]
    assert names == sorted(f"headrace/{named.get(top, top)}/{rest}" for top, _, rest in parts)


def test_a_wheel_has_every_extra_that_documents_and_messages_name(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    provided = set(message_from_bytes(archive.read(name)).get_all("Provides-Extra", []))
    places = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / one for one in tree() if one.endswith(".py")),
    ]
    found = [one for path in places for one in re.findall(r"headrace\[([a-z,-]+)\]", path.read_text())]
    named = {extra for one in found for extra in one.split(",")}
    assert {"encryption", "export", "kv-events", "otel", "ray"} <= named <= provided


def test_a_wheel_runs_outside_of_the_tree(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)

    def run(*arguments: str) -> str:
        # A path of the environment comes before the editable install.
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run([sys.executable, *arguments], cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert Path(run("-c", "import headrace.cli.main as m; print(m.__file__)").strip()).is_relative_to(site)
    command = "from headrace.cli.main import main; main()"
    assert headrace_version() in run("-c", command, "--version")
    assert "--workers" in run("-c", command, "serve", "--help")
    assert "--listen" in run("-m", "headrace.router", "--help")
