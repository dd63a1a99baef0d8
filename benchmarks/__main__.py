"""Benchmarks of engine and servers, one after the other: `make bench`, or of some: `python -m benchmarks engine`.
Nothing else should run on the machine meanwhile."""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.machine import describe
from headrace.cli.models.model_cache import model_directory

MODEL = "smollm2-135m"
# What each runs, in turn. Where the two sides need not be alike, each has what suits it best.
RUNS: dict[str, list[str]] = {
    "engine": [
        "engine.throughput --case closed behind identical",
        "engine.throughput --case poisson --our-tokens 1024",
        "engine.throughput --case mixed --our-tokens 512 --our-mixed-tokens 512 --their-tokens 512",
    ],
    "http_throughput": ["gateway.http_throughput"],
    "overhead": ["engine.overhead", "engine.overhead --text"],
    "fan_out": ["gateway.fan_out"],
    "speculation": ["engine.speculation"],
    "lora": ["models.lora", "models.lora_churn"],
}


def main() -> int:
    """Run each benchmark in a separate process. Returns the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(RUNS)}")
    names = parser.parse_args().names or list(RUNS)
    if unknown := set(names) - set(RUNS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    subprocess.run([sys.executable, "-m", "headrace.cli", "pull", MODEL], check=True)
    print(describe(), flush=True)
    failed = 0
    for run in (run for name in names for run in RUNS[name]):
        print(f"\n== {run}", flush=True)
        module, *options = run.split()
        command = [sys.executable, "-m", f"benchmarks.{module}", str(model_directory(MODEL)), *options]
        failed += subprocess.run(command).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
