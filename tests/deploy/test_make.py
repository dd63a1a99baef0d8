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


def test_a_check_has_all_parts_that_there_are() -> None:
    parts = re.search(r"^CHECKS := (.*)$", MAKEFILE, re.MULTILINE)
    assert parts is not None
    assert sorted(parts[1].split()) == sorted(re.findall(r"^(check/[a-z]+):$", MAKEFILE, re.MULTILINE))


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


def test_nothing_is_published_that_was_not_tested_or_without_provenance() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    published = {"pypi", "image", "chart"}
    for name in published:
        assert "test" in jobs[name]["needs"]
        allowed = jobs[name]["permissions"]
        assert (allowed["attestations"], allowed["id-token"]) == ("write", "write")
        (attested,) = [one for one in jobs[name]["steps"] if "attest-build-provenance" in one.get("uses", "")]
        of_registry = name != "pypi"
        assert ("subject-digest" if of_registry else "subject-path") in attested["with"]
        assert ("packages" in allowed) == of_registry == attested["with"].get("push-to-registry", False)
    assert set(jobs["notes"]["needs"]) == published
    writers = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writers == {*published, "notes"}, "no other job may change anything"


def test_a_chart_is_published_for_the_image_of_its_version_and_its_digest_is_attested(tmp_path: Path) -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["chart"]
    assert "image" in job["needs"]
    steps = {step.get("name", step.get("uses")): step for step in job["steps"]}
    digest = "sha256:" + "1" * 64
    (tmp_path / "bin").mkdir()
    helm = tmp_path / "bin" / "helm"
    helm.write_text(f"#!/bin/sh\necho \"$@\" >> calls; [ $1 = push ] && echo 'Digest: {digest}' >&2; cat > /dev/null\n")
    helm.chmod(0o755)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "headrace-9.8.7.tgz").touch()
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "GITHUB_REF_NAME": "v9.8.7",
        "GITHUB_REPOSITORY_OWNER": "owner",
        "GITHUB_ACTOR": "me",
        "GITHUB_OUTPUT": "output",
        "TOKEN": "secret",
    }
    for name in ("Compare the chart's version with the tag", "Push the chart"):
        command = ["bash", "-eo", "pipefail", "-c", steps[name]["run"]]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdin=subprocess.DEVNULL)
    assert (tmp_path / "output").read_text() == f"digest={digest}\n"
    calls = (tmp_path / "calls").read_text()
    assert "push dist/headrace-9.8.7.tgz oci://ghcr.io/owner/charts\n" in calls
    assert "secret" not in calls
