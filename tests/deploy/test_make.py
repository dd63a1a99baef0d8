"""The Makefile, the programs beside it, and the workflow that runs what CI runs."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from benchmarks.__main__ import BENCHMARKS, command_of
from tests import soak

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_target_that_is_told_has_one_rule() -> None:
    told = re.findall(r"^\t@echo 'make (\S+)", MAKEFILE, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    rules = re.findall(r"^([a-z0-9-]+):(?!=)", MAKEFILE, re.MULTILINE)
    assert {name for name in rules if rules.count(name) > 1} == set()
    assert set(told) | {"help"} == set(phony[1].split())
    assert set(phony[1].split()) == set(rules)


@pytest.mark.parametrize("name", soak.SOAKS)
def test_a_soak_runs_tests_that_there_are_and_that_soak(name: str) -> None:
    assert "HEADRACE_SOAK" in "".join((ROOT / path).read_text() for path in soak.SOAKS[name].paths)
    assert soak.command_of(name, ["-k", "x"])[-2:] == ["-k", "x"]


def test_options_of_pytest_come_after_two_dashes() -> None:
    assert soak.split(["chaos", "--", "-k", "x"]) == (["chaos"], ["-k", "x"])
    assert soak.split(["chaos"]) == (["chaos"], [])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_programs_that_there_are(name: str) -> None:
    benchmark = BENCHMARKS[name]
    for run in benchmark.runs:
        _, _, module, *arguments = command_of(run, benchmark, ["--rounds", "3"])
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
        assert arguments[-2:] == ["--rounds", "3"]


def test_the_workflow_runs_what_ci_runs_on_the_oldest_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    # YAML 1.1 reads the key `on` as true.
    assert set(workflow[True]) == {"pull_request", "push", "workflow_call"}
    steps = workflow["jobs"]["run"]["steps"]
    assert steps[-1]["run"] == ".ci/run"
    assert next(step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")) == "3.11"


def test_a_release_is_built_on_the_image_of_the_compose_files_and_of_the_version_of_its_tag() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = {
        step["name"]: step["run"] for job in workflow["jobs"].values() for step in job.get("steps", ()) if "run" in step
    }
    found = re.search(r"\$\((sed .*)\)", steps["Read the digest of the base image"])
    assert found is not None
    base = subprocess.run(found[1], shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert f"${{PYTHON_IMAGE:-{base}}}" in (ROOT / "compose.yaml").read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert "dist/headrace-${GITHUB_REF_NAME#v}.tar.gz" in steps["Compare the version with the tag"]
    name = subprocess.run(
        'echo "headrace-${GITHUB_REF_NAME#v}.tar.gz"',
        shell=True,
        env={"GITHUB_REF_NAME": f"v{version}"},
        capture_output=True,
    )
    assert name.stdout.decode().strip() == f"headrace-{version}.tar.gz"


def test_nothing_is_published_that_was_not_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    for name in ("pypi", "image"):
        assert "test" in jobs[name]["needs"]
        assert jobs[name]["permissions"]["attestations"] == "write"
    assert set(jobs["notes"]["needs"]) == {"pypi", "image"}
