"""Builds the wheel and the source distribution that are published."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_SHIPPED = {"benchmarks", "tests"}
FOR_CHECKS = {ROOT / "protos" / "released.binpb"}
_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def tree() -> list[str]:
    """Every file of the packages, by its path below the root."""
    tops = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in NOT_SHIPPED]
    files = {path for top in tops for path in top.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    return sorted(str(path.relative_to(ROOT)) for path in files - FOR_CHECKS)


def built_sdist(folder: Path) -> Path:
    """The source distribution, unpacked below `folder`. It is built in a copy, because building leaves files behind."""
    source, packed, unpacked = (folder / name for name in ("source", "sdist", "unpacked"))
    for made in (source, packed, unpacked):
        made.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copyfile(ROOT / name, source / name)
    for top in {name.partition("/")[0] for name in tree()} | NOT_SHIPPED:
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(_build("sdist", source, packed)) as archive:
        archive.extractall(unpacked, filter="data")
    (top_folder,) = unpacked.iterdir()
    return top_folder


def built_wheel(sdist: Path, folder: Path) -> Path:
    """The wheel, built of an unpacked source distribution into `folder`."""
    return _build("wheel", sdist, folder)


def _build(kind: str, source: Path, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, f"build_{kind}", str(folder)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built
