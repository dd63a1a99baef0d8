"""A protocol is a folder that can be deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.gateway import protocols

ROOT = Path(__file__).parents[2]
# A protocol's own tests, and which of them are run without the others.
TESTS = {
    "openai": ("openai/test_http_chat.py", "v3 or usage"),
    "rerank": ("rerank/test_rerank.py", "pair"),
    "responses": ("responses/test_responses.py", "stored"),
    "anthropic": ("anthropic/test_messages.py", "count"),
    "ollama": ("ollama/test_ollama.py", "listed or context_of"),
    "tgi": ("tgi/test_tgi.py", "details or info"),
    "kserve": ("kserve/test_http.py", "described or slashes"),
    "adapters": ("adapters/test_adapters.py", "wrong"),
    "grpc_text": ("grpc_text/test_service.py", "tokens"),
    "console": ("console/test_console.py", "host"),
}
# Start the gateway's command without the protocol; it has no option of it.
HELP = "import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module('headrace.gateway', run_name='__main__')"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source of the gateway and its tests."""
    for name in ("protos", "common", "gateway", "tests/gateway", "tests/__init__.py", "pyproject.toml"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "headrace").symlink_to("..")
    return tmp_path


def run_in(tree: Path, *arguments: str) -> str:
    """The output of a Python process that imports the copy."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "links")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    return ran.stdout


def test_each_protocol_has_tests() -> None:
    assert set(TESTS) == set(protocols.NAMES)


@pytest.mark.parametrize("protocol", protocols.NAMES)
def test_without_a_protocol_the_others_work(tree: Path, protocol: str) -> None:
    shutil.rmtree(tree / "gateway" / protocol)
    shutil.rmtree(tree / "tests" / "gateway" / protocol)
    table = tree / "gateway" / "protocols.py"
    lines = table.read_text().splitlines(keepends=True)
    remaining = [line for line in lines if line != f'    "{protocol}",\n']
    assert len(remaining) == len(lines) - 1
    table.write_text("".join(remaining))
    others = [f"tests/gateway/{path}" for name, (path, _) in TESTS.items() if name != protocol]
    names = " or ".join(f"({chosen})" for name, (_, chosen) in TESTS.items() if name != protocol)
    report = run_in(tree, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-k", names, *others)
    assert " passed" in report
    flags = {flag for option in protocols.PROTOCOLS[protocol].options for flag in option.opts}
    shown = run_in(tree, "-c", HELP)
    assert "--grpc-port" in shown
    assert not {flag for flag in flags if flag in shown}
