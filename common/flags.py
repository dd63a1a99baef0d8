"""Types of the flags of all commands, flags that several roles have, each declared once, and the sections of the help
of the commands that serve."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from headrace.common.kubernetes import CREDENTIALS
from headrace.common.telemetry.logs import FORMATS, LEVELS


class FiniteRange(click.FloatRange):
    """A finite number within bounds. click's own type also accepts nan, which passes any bound, and inf."""

    def _describe_range(self) -> str:
        """As click says it; empty without bounds, where click would name one."""
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Raises BadParameter."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class OutputPath(click.Path):
    """A file to be written, or a directory for such files. It is refused at once if it cannot be written, not after the
    work whose result it is to hold. Who writes makes the directories above it."""

    def __init__(self, *, is_directory: bool = False) -> None:
        super().__init__(path_type=Path, file_okay=not is_directory, dir_okay=is_directory)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises BadParameter."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        problem = why_not_writable(path)
        if problem:
            self.fail(f"cannot write to {path}: {problem}", param, ctx)
        return path


def why_not_writable(path: Path) -> str:
    """Why nothing can be written to a path, whose missing directories would be made; empty if it probably can."""
    whole = path.absolute()
    there = next(each for each in (whole, *whole.parents) if os.path.exists(each))
    if there != whole and not there.is_dir():
        return f"{there} is not a directory"
    needed = os.W_OK | os.X_OK if there.is_dir() else os.W_OK
    return "" if os.access(there, needed) else f"{there} is not writable"


def given_in(context: click.Context) -> set[str]:
    """The names of the parameters that the command line or the environment has, which are no defaults."""
    sources = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    return {name for name in context.params if context.get_parameter_source(name) in sources}


_Command = TypeVar("_Command", bound=Callable[..., Any])


def options_of(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """A decorator that adds options to a command, in this order."""

    def decorated(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


observation_options = options_of(
    click.option("--log-level", type=click.Choice(LEVELS), default="info", help="Minimum level of log lines."),
    click.option("--log-format", type=click.Choice(FORMATS), default="text", help="Format of log lines."),
    click.option(
        "--otlp-endpoint", help="Send traces by OTLP to this endpoint, such as http://HOST:4317. Needs headrace[otel]."
    ),
)
"""The decorator for logs and traces, which gateways, routers and workers have."""
cluster_options = options_of(
    click.option(
        "--kubernetes-api",
        envvar="HEADRACE_KUBERNETES_API",
        metavar="URL",
        help="Kubernetes API server, for kubernetes:/// addresses. Default: that of the cluster in which this process "
        "runs.",
    ),
    click.option(
        "--kubernetes-credentials",
        envvar="HEADRACE_KUBERNETES_CREDENTIALS",
        type=click.Path(path_type=Path),
        default=CREDENTIALS,
        metavar="DIR",
        help="Directory of a Kubernetes service account, with token, ca.crt and namespace. Changed files are read "
        "again.",
    ),
)
"""The decorator for the API server of Kubernetes, which gateways and routers have."""
membership_options = options_of(
    click.option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics at this address."),
    click.option(
        "--tls-dir",
        envvar="HEADRACE_TLS_DIR",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Use mutual TLS, with ca.pem, cert.pem and key.pem from this directory. Changed files are reloaded.",
    ),
    click.option(
        "--join-token-file",
        envvar="HEADRACE_JOIN_TOKEN_FILE",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File with a secret that every caller must present.",
    ),
    click.option(
        "--insecure",
        is_flag=True,
        envvar="HEADRACE_INSECURE",
        help="Allow other hosts to connect without TLS and join token. Anyone who reaches the port can do anything.",
    ),
    click.option("--probe", metavar="HOST:PORT", help="Additional address for gRPC health checks, without TLS."),
)
"""The decorator for the address of metrics, probes, and who may connect, which routers and workers have."""

SECTIONS: Mapping[str, Collection[str]] = {
    "Models": (
        "--model",
        "--models",
        "--config",
        "--config-poll-s",
        "--name",
        "--alias",
        "--shadow",
        "--model-host",
        "--await-model-host",
        "--on-demand",
        "--idle-s",
        "--cold-start",
        "--idle-after",
        "--scaling-window",
        "--memory-gb",
        "--adapter",
        "--max-adapters",
        "--pooling",
        "--normalize",
        "--ollama-manage",
        "--ollama-blobs",
        "--ollama-blobs-gb",
        "--offline",
    ),
    "Addresses and APIs": (
        "--host",
        "--port",
        "--grpc-port",
        "--listen",
        "--plain-grpc",
        "--cors-origin",
        "--console",
        "--endpoint-picker",
        "--endpoint-port",
        "--endpoint-picker-tls",
        "--scaler",
        "--probe",
    ),
    "Fleet": (
        "--router",
        "--worker",
        "--worker-id",
        "--advertise",
        "--redis",
        "--kubernetes-api",
        "--kubernetes-credentials",
        "--role",
        "--long-prompt-ms",
        "--lease",
        "--drain-timeout",
        "--worker-wait",
        "--capacity-wait",
        "--max-attempts",
        "--max-workers",
        "--max-sessions",
        "--max-index-entries",
    ),
    "Cores, NUMA nodes and hosts": (
        "--workers",
        "--threads",
        "--memory-node",
        "--tensor-parallel",
        "--pipeline",
        "--await-stages",
        "--stage",
        "--serve-stage",
        "--join",
        "--stage-listen",
        "--prefill-workers",
        "--dry-run",
    ),
    "KV cache": (
        "--kv-cache-gb",
        "--kv-cache-share",
        "--kv-cache-node-share",
        "--huge-pages",
        "--kv-precision",
        "--kv-disk",
        "--kv-disk-gb",
        "--kv-disk-key",
        "--kv-memory",
        "--keep-kv-memory",
        "--warm-restart",
        "--kv-peers",
        "--kv-handover-gb",
        "--window-cache",
        "--cache-eviction",
        "--kv-events",
        "--kv-events-replay",
        "--kv-events-topic",
    ),
    "Batches and latency": (
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--max-num-mixed-tokens",
        "--max-context-tokens",
        "--max-ttft",
        "--max-ttft-s",
        "--target-tpot-ms",
        "--stuck-after-s",
        "--execution-mode",
        "--decode-graph",
    ),
    "Speculative decoding": (
        "--speculation",
        "--draft-model",
        "--draft-tree-tokens",
        "--draft-tree-depth",
        "--draft-tree-top-k",
    ),
    "Chats and tools": (
        "--chat-template",
        "--tool-parser",
        "--reasoning-parser",
        "--special-tokens-in-text",
        "--mcp-server",
        "--mcp-headers",
        "--mcp-config",
        "--mcp-timeout",
        "--mcp-max-calls",
        "--mcp-output-kb",
    ),
    "Images": (
        "--allowed-media-domains",
        "--allowed-local-media-path",
        "--media-timeout",
        "--max-images",
        "--max-image-pixels",
        "--image-threads",
        "--image-cache-gb",
    ),
    "Stored responses, files and batches": (
        "--response-ttl",
        "--response-redis",
        "--response-tenant-mb",
        "--batch-store",
        "--batch-lines",
        "--batch-max-lines",
        "--batch-file-mb",
        "--batch-tenant-mb",
        "--batch-tenant-max",
        "--batch-retention-days",
        "--batch-lease",
    ),
    "Limits of requests and connections": (
        "--max-requests",
        "--max-in-flight",
        "--max-in-flight-per-tenant",
        "--tenant-weight",
        "--max-waiting",
        "--max-num-waiting",
        "--request-timeout",
        "--early-headers",
        "--max-connections",
        "--head-timeout",
        "--max-head-kb",
        "--body-timeout",
        "--max-body-mb",
        "--max-bodies-mb",
        "--max-request-mb",
        "--send-timeout",
    ),
    "Keys and certificates": (
        "--api-keys",
        "--api-keys-redis",
        "--admin-key-file",
        "--tls-cert",
        "--tls-key",
        "--tls-client-ca",
        "--tls-dir",
        "--join-token-file",
        "--insecure",
    ),
    "Logs, metrics and traces": (
        "--log-level",
        "--log-format",
        "--access-log",
        "--step-log",
        "--otlp-endpoint",
        "--metrics",
        "--metrics-port",
        "--open-metrics",
        "--vllm-metrics",
    ),
}
"""The sections of the help of `headrace serve`, gateways, routers and workers, with the flags of each. A flag is in the
same section in all of their helps."""
