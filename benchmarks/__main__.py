"""Benchmarks, one after the other: `python -m benchmarks [NAME...] [OPTIONS]`. Options go to each program that it runs.

Without a name, engine and servers are compared with their peers. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.machine import describe
from headrace.cli.models.model_cache import model_directory

MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Benchmark:
    """Programs of this package with their options, which take the directory of the demo model first or find it."""

    about: str
    runs: tuple[str, ...]
    takes_model: bool = True
    by_default: bool = True


# Where the two sides need not be alike, each has what suits it best.
BENCHMARKS = {
    "engine": Benchmark(
        "the engine beside openvino-genai",
        (
            "engine.throughput --case closed behind identical",
            "engine.throughput --case poisson --our-tokens 1024",
            "engine.throughput --case mixed --our-tokens 512 --our-mixed-tokens 512 --their-tokens 512",
        ),
    ),
    "http_throughput": Benchmark("the whole system over HTTP, beside its peer", ("gateway.http_throughput",)),
    "overhead": Benchmark("what the engine adds to a bare loop", ("engine.overhead", "engine.overhead --text")),
    "fan_out": Benchmark("several choices of one request", ("gateway.fan_out",)),
    "speculation": Benchmark("drafts, with and without, and beside a peer's prompt lookup", ("engine.speculation",)),
    "trees": Benchmark("trees and drafts of heads with known answers", ("engine.draft_trees",), by_default=False),
    "lora": Benchmark(
        "adapters in one batch, and more of them than fit into memory", ("models.lora", "models.lora_churn")
    ),
    "router": Benchmark(
        "placement and forwarding, beside peers (make bench-peers)",
        ("router.decision", "router.fleet", "router.overhead"),
        takes_model=False,
        by_default=False,
    ),
    "gateway": Benchmark(
        "CPU per streamed token, idle streams, open connections",
        ("gateway.tokens",),
        takes_model=False,
        by_default=False,
    ),
    "kv": Benchmark("cached prefixes after a worker died", ("cache.restart",), takes_model=False, by_default=False),
    "embeddings": Benchmark(
        "embeddings, beside openvino-genai and sentence-transformers (make bench-peers)",
        ("models.embeddings",),
        takes_model=False,
        by_default=False,
    ),
}


def command_of(run: str, benchmark: Benchmark, more: list[str]) -> list[str]:
    """The command of one program."""
    module, *options = run.split()
    model = [str(model_directory(MODEL))] if benchmark.takes_model else []
    return [sys.executable, "-m", f"benchmarks.{module}", *model, *options, *more]


def main() -> int:
    """Run each benchmark in a separate process. Returns the number of failures."""
    about = "\n".join(
        f"  {name:16} {benchmark.about}{'' if benchmark.by_default else '; only by name'}"
        for name, benchmark in BENCHMARKS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"benchmarks:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run")
    arguments, more = parser.parse_known_args()
    names = arguments.names or [name for name, benchmark in BENCHMARKS.items() if benchmark.by_default]
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    subprocess.run([sys.executable, "-m", "headrace.cli", "pull", MODEL], check=True)
    print(describe(), flush=True)
    # A peer logs each of its decisions otherwise.
    environment = {"DYN_LOG": "error", **os.environ}
    failed = 0
    for name in names:
        for run in BENCHMARKS[name].runs:
            print(f"\n== {run}", flush=True)
            command = command_of(run, BENCHMARKS[name], more)
            failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
