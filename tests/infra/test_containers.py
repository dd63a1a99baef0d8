"""What is published, in containers: the image with the README's line, and the wheel where there is no compiler.

Needs a container engine (tests/infra/engine.py) with the image `headrace` (docker build -t headrace .) and the image
that it is built on: HEADRACE_PYTHON_IMAGE, by default python:3.11-slim-bookworm. `python -m tests.soak containers` runs
these tests and those of compose.yaml.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.distributions import built_sdist, built_wheel
from tests.deploy.test_image import LOCK, locked
from tests.e2e.serving import MODEL, until
from tests.infra import engine
from tests.infra.engine import ENTER, PYTHON_IMAGE, ROOT, docker
from tests.patience import patience

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NAME, VOLUME, PORT = "headrace-test-run", "headrace-test-models", 18010
READY_BOUND_S = 60.0
COMPILERS = ("cc", "gcc", "g++", "clang", "tcc", "make", "ld", "rustc", "go")
SBOM = "/opt/headrace/share/headrace/sbom.cdx.json"

_no_image = engine.why_not("headrace")
_no_base = engine.why_not(PYTHON_IMAGE)
needs_image = pytest.mark.skipif(_no_image is not None, reason=_no_image or "")
needs_base = pytest.mark.skipif(
    _no_base is not None or os.environ.get("HEADRACE_SOAK") != "1",
    reason=_no_base or "it downloads 300 MB: python -m tests.soak containers",
)


@pytest.fixture(scope="module")
def models() -> Iterator[None]:
    """The volume with the demo model."""
    docker("rm", "--force", NAME, check=False)
    docker("volume", "rm", "--force", VOLUME)
    engine.make_models_volume(VOLUME)
    yield
    docker("volume", "rm", "--force", VOLUME)


@contextmanager
def container(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A container named NAME from `docker run`, removed after the block. Prints its log."""
    begun = subprocess.Popen(["docker", "run", "--name", NAME, *command], stdout=subprocess.PIPE, text=True)
    try:
        yield begun
    finally:
        print(docker("logs", "--tail", "50", NAME, check=False))
        docker("rm", "--force", NAME, check=False)
        begun.wait(patience(60))


def answer() -> str:
    """The capital of France, as the server at the published port says; empty if there is no answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
    ask = ["curl", "-s", url, "-H", "Content-Type: application/json", "-d", json.dumps({**body, "max_tokens": 16})]
    done = subprocess.run([*ENTER, *ask], capture_output=True, text=True, check=False)
    try:
        return str(json.loads(done.stdout)["choices"][0]["message"]["content"])
    except (ValueError, KeyError):
        return ""


def cpu_seconds() -> float:
    """CPU time that the container has had so far, which tells of an idle machine on a busy one."""
    version_2 = "sed -n 's/^usage_usec \\(.*\\)/\\1000/p' /sys/fs/cgroup/cpu.stat"
    used = f"cat /sys/fs/cgroup/cpuacct/cpuacct.usage 2>/dev/null || {version_2}"
    return int(docker("exec", NAME, "sh", "-c", used)) / 1e9


def programs(*names: str) -> str:
    """Which of these programs are in the container."""
    return docker("exec", NAME, "sh", "-c", f"for name in {' '.join(names)}; do command -v $name; done; true").strip()


def run_of_the_readme() -> list[str]:
    """What the README says behind `docker run`, for the image, the port and the volume of the tests."""
    (line,) = re.findall(r"^docker run (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = shlex.split(line)
    (image,) = [word for word in words if word.startswith("ghcr.io/")]
    ours = {image: "headrace", "8000:8000": f"{PORT}:8000", "headrace:/models": f"{VOLUME}:/models"}
    assert ours.keys() <= set(words)
    return [ours.get(word, word) for word in words]


@needs_image
@pytest.mark.usefixtures("models")
def test_the_line_of_the_readme_serves_the_image_that_was_built_here() -> None:
    begun_s = time.monotonic()
    with container(*run_of_the_readme()) as running:
        assert running.stdout is not None
        ready = running.stdout.readline()
        assert ready.startswith("ready: http://"), ready
        assert "Paris" in answer()
        print(f"first answer {time.monotonic() - begun_s:.1f} s after docker run")
        until(lambda: health() == "healthy", "the container is healthy", READY_BOUND_S)
        assert docker("exec", NAME, "id", "-u").strip() == "10001"
        assert programs(*COMPILERS) == ""
        has_pip = "import importlib.util as u; print(u.find_spec('pip') or u.find_spec('setuptools'))"
        assert docker("exec", NAME, "python", "-c", has_pip).strip() == "None"
        docker("stop", "--time", "30", NAME)
        assert docker("inspect", "-f", "{{.State.ExitCode}}", NAME).strip() == "0", "it ends by itself"


def health() -> str:
    """What the engine says of the container's health check."""
    return docker("inspect", "-f", "{{.State.Health.Status}}", NAME).strip()


@needs_image
def test_the_image_has_what_its_bill_of_materials_says() -> None:
    bill = json.loads(docker("run", "--rm", "--entrypoint", "cat", "headrace", SBOM))
    listed = {one["purl"].split("?")[0] for one in bill["components"]}
    # setuptools only builds.
    locks = {name: version for name, version in locked().items() if name != "setuptools"}
    assert {f"pkg:pypi/{name}@{version}" for name, version in locks.items()} <= listed
    installed = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    names = docker("run", "--rm", "--entrypoint", "/opt/headrace/bin/python", "headrace", "-I", "-c", installed)
    found = {re.sub(r"[-_.]+", "-", one).lower() for one in names.split()}
    ours = {one.removeprefix("pkg:pypi/").replace("@", "==") for one in listed if one.startswith("pkg:pypi/")}
    assert {re.sub(r"[-_.]+", "-", one) for one in ours} == {one for one in found if not one.startswith("headrace==")}
    packages = docker("run", "--rm", "--entrypoint", "dpkg-query", "headrace", "-W", "-f", "${Package}@${Version} ")
    debian = {one.removeprefix("pkg:deb/debian/") for one in listed if one.startswith("pkg:deb/")}
    assert debian == set(packages.split())


@needs_base
@pytest.mark.usefixtures("models")
def test_a_wheel_answers_within_a_minute_where_there_is_no_compiler(tmp_path: Path) -> None:
    """The minute is of an idle machine, and does not count what is downloaded: the wheels of others are there."""
    built, wheels = tmp_path / "built", tmp_path / "wheels"
    built.mkdir()
    wheel = built_wheel(built_sdist(tmp_path), built)
    # The lock also has what only an older 3.11 than that of the tests needs.
    fetch = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", str(wheels)]
    subprocess.run([sys.executable, *fetch, "--require-hashes", "-r", str(LOCK)], check=True, timeout=patience(300))
    shutil.copy(wheel, wheels)
    mounts = ["-v", f"{wheels}:/wheels:ro", "-v", f"{VOLUME}:/models", "-e", "HEADRACE_CACHE=/models"]
    with container(*mounts, "-p", f"{PORT}:8000", PYTHON_IMAGE, "sleep", "infinity"):
        until(lambda: "true" in docker("inspect", "-f", "{{.State.Running}}", NAME, check=False), "it runs")
        assert programs(*COMPILERS) == ""
        begun_s = time.monotonic()
        install = "pip install --quiet --root-user-action ignore --no-index --find-links /wheels headrace"
        docker("exec", NAME, "sh", "-c", install)
        installed_s = time.monotonic()
        docker(
            "exec", "--detach", NAME, "sh", "-c", "cd $(mktemp -d) && exec headrace serve --host 0.0.0.0 > /log 2>&1"
        )
        try:
            until(lambda: "Paris" in answer(), "the first answer", READY_BOUND_S)
        finally:
            print(docker("exec", NAME, "cat", "/log", check=False))
        print(
            f"first answer {time.monotonic() - begun_s:.1f} s after pip install began, "
            f"{time.monotonic() - installed_s:.1f} s after it ended; {cpu_seconds():.1f} s of CPU"
        )
