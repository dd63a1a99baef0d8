"""Types of the flags of all commands, and flags that several roles have, each declared once."""

from __future__ import annotations

import math
from collections.abc import Callable
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
