"""Long runs of tests: `python -m tests.soak NAME... [-- OPTIONS OF PYTEST]`

Nothing else should run on the machine meanwhile. HEADRACE_SEED repeats the choices of a run. With HEADRACE_SOAK_TALLY
(a file), the soaks `ranks`, `stages` and `stage-hosts` continue where the last run has ended, and print how often each
event has happened in all runs; HEADRACE_SOAK_MINUTES ends a run early.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Soak:
    """Tests that HEADRACE_SOAK=1 makes long."""

    about: str
    paths: tuple[str, ...]
    options: tuple[str, ...] = ()


SOAKS = {
    "survival": Soak(
        "the tests of survival and cancels again and again, for about an hour",
        (
            "tests/e2e/test_survival.py",
            "tests/e2e/test_cancels.py",
            "tests/e2e/test_redis.py",
            "tests/e2e/test_structured.py",
            "tests/e2e/test_engine_exact.py",
            "tests/e2e/test_warm_restart.py",
            "tests/worker/kv/test_warm_restart.py",
        ),
    ),
    "ranks": Soak(
        "two groups of two ranks, of which a process dies, stops or is slow, 200 times (HEADRACE_SOAK_ROUNDS); and "
        "prefixes that one hands over to the other",
        ("tests/e2e/test_tensor_parallel.py", "tests/e2e/test_kv_peers.py"),
        ("-n", "0", "-k", "what_happens or (hands and ranks)"),
    ),
    "stages": Soak(
        "two pipelines of two stages, one of them of two ranks each, of which a process dies, stops or is slow, 200 "
        "times (HEADRACE_SOAK_ROUNDS)",
        ("tests/e2e/test_pipeline.py",),
        ("-n", "0", "-k", "survive"),
    ),
    "stage-hosts": Soak(
        "a pipeline over two network namespaces, whose link is cut or of which one stands still, 20 times each with a "
        "stage that is named and with one that joins (HEADRACE_SOAK_ROUNDS)",
        ("tests/infra/test_stage_hosts.py",),
        ("-n", "0"),
    ),
    "chaos": Soak("an hour of random faults under random clients", ("tests/e2e/test_chaos.py",)),
    "kubernetes": Soak(
        "a real API server (make api-server): manifests and chart, and ten minutes of 500 changes a minute of the pods "
        "of a Service, with all faults of watches",
        ("tests/infra/test_api_server.py", "tests/router/test_services.py"),
        ("-n", "0", "-k", "real or test_api_server"),
    ),
    "containers": Soak(
        "the image, the wheel and compose.yaml in a container engine, which has the image `headrace`",
        ("tests/infra/test_containers.py", "tests/infra/test_compose.py"),
        ("-n", "0"),
    ),
    "packages": Soak(
        "the wheel with each extra, installed into an empty environment, does what the extra is for; a gigabyte is "
        "downloaded",
        ("tests/e2e/test_installed.py",),
        ("-n", "0"),
    ),
    "rolling-update": Soak(
        "an upgrade of the chart on a real API server replaces four workers, two routers and two gateways under load; "
        "a machine is drained; and models without workers get them with the first request",
        ("tests/infra/test_rolling_update.py", "tests/infra/test_node_drain.py", "tests/infra/test_scale_to_zero.py"),
        ("-n", "0", "-k", "whole or drained or held"),
    ),
    "models": Soak(
        "ten minutes of three models in memory for two, and kills",
        ("tests/infra/test_model_budget.py",),
        ("-n", "0"),
    ),
    "gateway": Soak(
        "20,000 requests made up from the OpenAPI document, and long runs of the properties of streams",
        ("tests/gateway/operations/test_schemathesis.py", "tests/gateway/chat/test_stream_equals_unary.py"),
        ("--timeout", "7200"),
    ),
    "images": Soak(
        "10,000 hostile images and URLs at a gateway, and 10,000 at a fleet that serves a vision-language model; "
        "10,000 pairs of images that are nearly equal in one worker's caches; 2,000 cancelled requests with images, "
        "and 40 deaths of the processes that encode them",
        (
            "tests/gateway/images/test_hostile.py",
            "tests/e2e/test_images_hostile.py",
            "tests/worker/engine/test_near_images.py",
            "tests/e2e/test_images_served.py",
        ),
        ("-n", "0", "--timeout", "7200"),
    ),
    "ray": Soak(
        "a cluster of Ray with three nodes: nodes and the head are lost, workers come and go, updates; and the files "
        "of deploy/ray by Ray's commands; 15 minutes",
        ("tests/e2e/test_ray_nodes.py", "tests/e2e/test_ray_serve.py"),
        ("-n", "0", "--timeout", "1800"),
    ),
    "envoy": Soak(
        "the endpoint picker behind Envoy: the hits of a longer trace, an endpoint and the picker that die, TLS",
        ("tests/gateway/picking/test_picker.py",),
        ("-n", "0", "--timeout", "1800"),
    ),
    "streams": Soak(
        "2,000 idle and 300 busy streams through two gateways while routers, Redis and workers are restarted in turn, "
        "for an hour or HEADRACE_SOAK_MINUTES",
        ("tests/e2e/test_many_streams.py",),
        ("-n", "0", "-k", "whole"),
    ),
    "speculation": Soak(
        "500 prompts with each proposer, up to 64 at once, compared with answers without drafts bit for bit; for hours",
        ("tests/e2e/test_speculation_exact.py",),
        ("-n", "0", "--timeout", "14400"),
    ),
    "step-cost": Soak(
        "what a worker learns of its steps, over a day of virtual time under each of four loads; about an hour",
        ("tests/sim/test_soak.py",),
        ("--timeout", "7200"),
    ),
}


def command_of(name: str, more: list[str]) -> list[str]:
    """The pytest command of a soak, one of SOAKS, with more options for pytest."""
    soak = SOAKS[name]
    return [sys.executable, "-m", "pytest", "-s", *soak.options, *soak.paths, *more]


def main() -> int:
    """Run soaks, one after the other. Returns the number of those that failed."""
    about = "\n".join(f"  {name:14} {soak.about}" for name, soak in SOAKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        epilog=f"soaks:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", choices=SOAKS, help="which to run")
    arguments, more = split(sys.argv[1:])
    names = parser.parse_args(arguments).names
    environment = {**os.environ, "HEADRACE_SOAK": "1"}
    return sum(
        subprocess.run(command_of(name, more), cwd=ROOT, env=environment, check=False).returncode != 0 for name in names
    )


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and those after "--"."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
