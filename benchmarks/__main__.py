"""All benchmarks, one after the other: `make bench`. Nothing else should run on the machine meanwhile."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.machine import describe
from headrace.cli.model_cache import model_directory

MODEL = "smollm2-135m"


def main() -> int:
    """Run each in a process of its own; the number of those that failed."""
    subprocess.run([sys.executable, "-m", "headrace.cli", "pull", MODEL], check=True)
    print(describe(), flush=True)
    failed = 0
    for name in ("engine", "http_throughput", "overhead"):
        print(f"\n== {name}", flush=True)
        failed += (
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}", str(model_directory(MODEL))]).returncode != 0
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
