"""A container engine, for tests that run what is published in containers.

Where clients must enter a network namespace to reach published ports, HEADRACE_TEST_ENTER has the command that runs
another one there.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

from tests.e2e.serving import pulled_model
from tests.patience import patience

ROOT = Path(__file__).parents[2]
ENTER = shlex.split(os.environ.get("HEADRACE_TEST_ENTER", ""))
PYTHON_IMAGE = os.environ.get("HEADRACE_PYTHON_IMAGE", "python:3.11-slim-bookworm")
"""That on which the image `headrace` is built."""
USER = "10001:10001"
"""That of the image (Dockerfile)."""


def docker(*args: str, check: bool = True, **variables: str) -> str:
    """Run docker with additional variables of the environment; returns what it writes."""
    done = subprocess.run(
        ["docker", *args], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or not check, f"docker {' '.join(args)}: {done.stderr}"
    return done.stdout


def why_not(*images: str, compose: bool = False) -> str | None:
    """Why tests that need an engine with these images cannot run here; None if they can."""
    commands = [
        ("info",),
        *([("compose", "version")] if compose else []),
        *(("image", "inspect", one) for one in images),
    ]
    try:
        for command in commands:
            if subprocess.run(["docker", *command], capture_output=True, check=False, timeout=patience(20)).returncode:
                return f"docker {' '.join(command)} fails here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no container engine answers here: {error}"
    return None


def make_models_volume(name: str, *labels: str) -> None:
    """A volume with the demo model as `headrace pull` leaves it in /models, so that nothing is fetched."""
    docker("volume", "create", name, *(part for label in labels for part in ("--label", label)))
    mount = Path(json.loads(docker("volume", "inspect", name))[0]["Mountpoint"])
    model = pulled_model()
    target = mount / "models" / model.name
    target.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(model.resolve()), str(target)], check=True)
    subprocess.run(["chown", "-R", USER, str(mount)], check=True)
