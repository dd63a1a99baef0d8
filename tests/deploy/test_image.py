"""The contents of the image."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_packages

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
    needed = project["dependencies"] + extras["otel"]
    names = {normalised(re.split(r"[<>=\[; ]", requirement)[0]) for requirement in needed}
    assert names <= set(locked()), "make lock writes the file anew"


def test_every_package_is_sent_to_the_build() -> None:
    folders = set(find_packages(str(ROOT), exclude=["*.*", "tests", "benchmarks"]))
    sent = set(re.findall(r"^!([\w.]+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert {*folders, "pyproject.toml", "setup.py"} <= sent


def module(name: str) -> Any:
    """A script of deploy/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "deploy" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_bill_of_materials_has_what_is_installed() -> None:
    """Runs the build's command for this interpreter."""
    command = [sys.executable, str(ROOT / "deploy" / "sbom.py"), sys.executable, str(LOCK)]
    bill = json.loads(subprocess.check_output(command))
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.5", 1)
    assert bill["metadata"]["component"]["name"] == "headrace"
    components = bill["components"]
    assert all({"type", "name", "version", "purl", "bom-ref"} <= set(component) for component in components)
    assert len({component["bom-ref"] for component in components}) == len(components)
    listed = {component["name"]: component for component in components if component["purl"].startswith("pkg:pypi/")}
    for name, version in locked().items():
        try:
            installed = distribution(name).version
        except PackageNotFoundError:
            continue
        assert listed[name]["version"] == installed
        assert ("hashes" in listed[name]) == (installed == version)
    assert "numpy" in listed


def test_the_bill_names_system_packages_and_licences() -> None:
    inspected = {
        "version": "1",
        "installed": [
            {"metadata": {"name": "A_b.c", "version": "1", "license_expression": "MIT"}},
            {"metadata": {"name": "headrace", "version": "2", "license": "Apache-2.0"}},
            {"metadata": {"name": "long", "version": "3", "license": "The whole text\nof a licence"}},
        ],
    }
    bill = module("sbom").bill_of(inspected, "a-b-c==1 --hash=sha256:" + "0" * 64, "libc6 2.36-9 amd64\n")
    assert [component["purl"] for component in bill["components"]] == [
        "pkg:deb/debian/libc6@2.36-9?arch=amd64",
        "pkg:pypi/a-b-c@1",
        "pkg:pypi/long@3",
    ]
    assert bill["components"][1]["hashes"] == [{"alg": "SHA-256", "content": "0" * 64}]
    assert bill["components"][1]["licenses"] == [{"expression": "MIT"}]
    assert "licenses" not in bill["components"][2]
    assert bill["metadata"]["component"]["type"] == "application"


def test_the_build_writes_the_bill_where_the_guide_says() -> None:
    (path,) = re.findall(r"deploy/sbom\.py \S+ \S+ > (\S+)", DOCKERFILE.read_text())
    assert path in (ROOT / "docs" / "how-to" / "compose.md").read_text()
    assert "!deploy/sbom.py" in (ROOT / ".dockerignore").read_text().splitlines()


def test_every_image_that_is_not_built_here_is_held_to_a_digest() -> None:
    pin = module("pin_images")
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert set(bases) == {"${PYTHON_IMAGE}"}
    found = set()
    for path in pin.files():
        text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
        for name, digest in pin.PINNED.findall(text):
            found.add((name, digest))
            text = text.replace(f"{name}@{digest}", "")
        assert not re.search(r"\b(redis|python):[0-9][0-9.]*-[a-z]", text), path
        for build in re.findall(r"^\s*build:.*$", text, re.MULTILINE):
            assert "PYTHON_IMAGE" in build, "a build by tag alone"
    assert {name for name, _ in found} == {"python:3.11-slim-bookworm", "redis:7-alpine"}
    assert len(found) == 2, "one digest for each image"


def test_digests_are_renewed_by_tag() -> None:
    old, new = "sha256:" + "0" * 64, "sha256:" + "1" * 64
    asked = []

    def digest_of(image: str) -> str:
        asked.append(image)
        return new

    text = f"image: ${{REDIS_IMAGE:-redis:7-alpine@{old}}}\nx: headrace:latest"
    renewed = module("pin_images").renewed(text, digest_of)
    assert renewed == text.replace(old, new)
    assert asked == ["redis:7-alpine"]


def test_the_image_runs_as_a_user_that_others_can_tell_from_root() -> None:
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert user == "10001:10001"


def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or str(ROOT / ".venv" / "bin" / "hadolint")
    if not Path(hadolint).exists():
        pytest.skip("hadolint is not installed; make check does that")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
