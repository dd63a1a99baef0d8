"""The committed code equals the output of the oldest supported generator."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run

ROOT = Path(__file__).parent.parent.parent


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    sources = [f"headrace/protos/{path.name}" for path in sorted((ROOT / "protos").glob("*.proto"))]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iheadrace/protos=protos", *outputs, *sources]
    run(command, cwd=ROOT, check=True)
    generated = sorted((tmp_path / "headrace" / "protos").iterdir())
    assert len(generated) == 3 * len(sources)
    for path in generated:
        assert path.read_text() == (ROOT / "protos" / path.name).read_text(), f"{path.name} is stale: make protos"
