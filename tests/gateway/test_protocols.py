"""A protocol is a folder that can be deleted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHERS = (
    "tests/gateway/openai/test_http_chat.py",
    "tests/gateway/responses/test_store.py",
    "tests/gateway/grpc_text/test_service.py",
)


@pytest.mark.parametrize("protocol", ["anthropic", "console"])
def test_without_a_protocol_the_others_work(tmp_path: Path, protocol: str) -> None:
    for name in ("protos", "common", "gateway", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    shutil.rmtree(tmp_path / "gateway" / protocol)
    table = tmp_path / "gateway" / "endpoints.py"
    lines = table.read_text().splitlines(keepends=True)
    names_it = re.compile(rf"\.{protocol} |\b{protocol}(_description)?\.")
    table.write_text("".join(line for line in lines if names_it.search(line) is None))
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "headrace").symlink_to("..")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *OTHERS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "links")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
