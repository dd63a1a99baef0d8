"""On emulated CPUs, the worker knows the largest step for which prompts are exact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.lesser_cpu import environment_of, why_not

# The largest exact step in both modes, over all types of weights.
_PROBE = """
import openvino as ov
from headrace.worker.model.exact_rows import _rows_alike
assert "with-traps" in ov.__file__, ov.__file__
core = ov.Core()
kinds = (ov.Type.u4, ov.Type.i4, ov.Type.u8, ov.Type.i8)
for mode in ("PERFORMANCE", "ACCURACY"):
    properties = {"EXECUTION_MODE_HINT": mode, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 2}
    print(min(_rows_alike(core, kind, properties) for kind in kinds))
"""


@pytest.mark.parametrize(("cpu", "expected"), [("avx2", [80, 80]), ("avx2-vnni", [1024, 80]), ("avx512", [1024, 1024])])
def test_the_largest_exact_step_is_found(tmp_path: Path, cpu: str, expected: list[int]) -> None:
    if reason := why_not(cpu):
        pytest.skip(reason)
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], env=environment_of(cpu, tmp_path), capture_output=True, text=True, check=False
    )
    assert probe.returncode == 0, probe.stderr
    assert [int(line) for line in probe.stdout.split()] == expected
