"""The wheel and the source distribution have all of the tree, and the wheel serves outside of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from headrace.common.version import headrace_version

ROOT = Path(__file__).parent.parent.parent
NOT_SHIPPED = {"benchmarks", "tests"}
FOR_CHECKS = {ROOT / "protos" / "released.binpb"}
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def tree() -> list[str]:
    """Every file of the packages, by its path below the root."""
    tops = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in NOT_SHIPPED]
    files = {path for top in tops for path in top.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    return sorted(str(path.relative_to(ROOT)) for path in files - FOR_CHECKS)


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build in `source`, into `folder`, and return the file."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked. It is built in a copy, because building leaves files behind."""
    source, folder, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "sdist", "unpacked"))
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copyfile(ROOT / name, source / name)
    for top in {name.partition("/")[0] for name in tree()} | NOT_SHIPPED:
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(build("sdist", source, folder)) as archive:
        archive.extractall(unpacked, filter="data")
    (top_folder,) = unpacked.iterdir()
    return top_folder


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel"))


def test_a_source_distribution_has_the_whole_tree(sdist: Path) -> None:
    packed = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert set(tree()) <= packed
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= packed


def test_a_wheel_has_the_tree_and_nothing_else(wheel: Path) -> None:
    names = sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)
    assert names == [f"headrace/{name}" for name in tree()]


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
