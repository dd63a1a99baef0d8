"""`python -m headrace.gateway`: the command line of the gateway."""

from __future__ import annotations

from headrace.common import startup

if __name__ == "__main__":
    startup.before_imports()

import resource
import sys
from collections.abc import Callable
from typing import Any

import click
import uvloop

from headrace.common.aliases import Aliases, parse_aliases
from headrace.common.commands import SectionedCommand, told
from headrace.common.flags import SECTIONS, FiniteRange, cluster_options, observation_options
from headrace.common.kubernetes.services import is_service, service_of
from headrace.common.parser_names import (
    AUTO,
    NONE,
    REASONING_FORMAT_NAMES,
    TOOL_FORMAT_NAMES,
    reasoning_parser_named,
    tool_parser_named,
)
from headrace.common.telemetry.logs import configure_logging
from headrace.common.telemetry.tracing import FLUSH_TRACES_S, TracingUnavailableError, start_tracing, stop_tracing
from headrace.gateway.chat.formats import parse_parsers
from headrace.gateway.chat.prompts import SpecialTokensInText
from headrace.gateway.edge.settings import EdgeSettingsError, edge_options
from headrace.gateway.edge.spans import ACCESS
from headrace.gateway.images.sources import image_options
from headrace.gateway.picking.tls import PickerTls
from headrace.gateway.protocol import CannotServeError
from headrace.gateway.protocols import PROTOCOLS
from headrace.gateway.server import Settings, serve
from headrace.gateway.text.chat_template import read_templates

DRAIN_TIMEOUT_S = 2.0
EXIT_USAGE = 2
MAX_FILES = 65_536


def _checked_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        _, _, port = address.rpartition(":")
        if is_service(address):
            try:
                service_of(address)
            except ValueError as error:
                raise click.BadParameter(str(error)) from None
        if address.startswith(("http:", "https:")) or not (address.startswith("unix:") or port.isdecimal()):
            raise click.BadParameter(f"{address[:200]!r} is not an address: write HOST:PORT or unix:/PATH")
    return addresses


@click.command(
    cls=SectionedCommand,
    sections=SECTIONS,
    context_settings={"auto_envvar_prefix": "HEADRACE_GATEWAY", "show_default": True},
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="Port of the HTTP API; 0 for any free one.")
@click.option("--grpc-port", default=0, type=click.IntRange(0, 65535), help="Port of the gRPC API; 0 for none.")
@click.option(
    "--router",
    "routers",
    multiple=True,
    required=True,
    envvar="HEADRACE_GATEWAY_ROUTER",
    callback=lambda context, option, addresses: _checked_addresses(addresses),
    metavar="ADDR",
    help="Address of a router (or worker): HOST:PORT, unix:/PATH, dns:///NAME:PORT, or "
    "kubernetes:///SERVICE[.NAMESPACE]:PORT for all pods of a Service. May be repeated.",
)
@click.option(
    "--drain-timeout",
    default=DRAIN_TIMEOUT_S,
    type=FiniteRange(min=0),
    help="Seconds that running requests have to finish after SIGTERM. No other gateway can continue them.",
)
@click.option(
    "--worker-wait",
    "worker_wait_s",
    type=FiniteRange(min=0),
    help="Maximum seconds that a new request waits for a reachable worker. Default: as long as its client waits.",
)
@click.option(
    "--tool-parser",
    "tool_parsers",
    multiple=True,
    envvar="HEADRACE_GATEWAY_TOOL_PARSER",
    callback=lambda context, parameter, values: _parsers(values, tool_parser_named),
    metavar="[MODEL=]NAME",
    help="Format of tool calls, instead of the one detected from the chat template: "
    f"{', '.join((AUTO, NONE, *TOOL_FORMAT_NAMES))}. The names of OVMS and vLLM, such as hermes3, mean the same.",
)
@click.option(
    "--reasoning-parser",
    "reasoning_parsers",
    multiple=True,
    envvar="HEADRACE_GATEWAY_REASONING_PARSER",
    callback=lambda context, parameter, values: _parsers(values, reasoning_parser_named),
    metavar="[MODEL=]NAME",
    help="Format of reasoning, instead of the one detected from the chat template: "
    f"{', '.join((AUTO, NONE, *REASONING_FORMAT_NAMES))}. The names of OVMS and vLLM, such as qwen3, mean the same.",
)
@click.option(
    "--chat-template",
    "chat_templates",
    multiple=True,
    envvar="HEADRACE_GATEWAY_CHAT_TEMPLATE",
    callback=lambda context, parameter, values: _chat_templates(values),
    metavar="NAME=FILE",
    help="A Jinja chat template that requests may select with the field chat_template, instead of the model's own. "
    "Requests cannot send the text of a template. May be repeated.",
)
@click.option(
    "--special-tokens-in-text",
    type=click.Choice([where.value for where in SpecialTokensInText]),
    default=SpecialTokensInText.PROMPTS.value,
    callback=lambda context, parameter, value: SpecialTokensInText(value),
    help="Where the text of a special token, such as <|im_end|>, becomes the token: in prompts that callers write "
    "whole, as for /v1/completions (prompts); also in chats (anywhere); or never.",
)
@click.option(
    "--model-host",
    help="Address of the `headrace serve` that loads and unloads the models of its host. Default: none; the models "
    "are then those that routers list.",
)
@click.option(
    "--await-model-host",
    is_flag=True,
    help="Let requests wait until the models of --model-host are known, because it sets parsers and limits of models.",
)
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="ALIAS=MODEL[:WEIGHT,...]",
    help="Another name for a model, or for several that share its requests, such as gpt-4o=a:90,b:10. May be repeated.",
)
@click.option(
    "--shadow",
    "shadows",
    multiple=True,
    metavar="ALIAS=MODEL:PERCENT",
    help="Send copies of a share of an alias's requests to a model, and drop its answers. May be repeated.",
)
@click.option(
    "--endpoint-picker",
    metavar="HOST:PORT",
    help="Serve an endpoint picker of the Gateway API Inference Extension (Envoy's ext_proc) at this address: it tells "
    "proxies where to send requests.",
)
@click.option(
    "--endpoint-port",
    type=click.IntRange(1, 65535),
    default=8000,
    help="Port of the gateways on the workers' hosts, to which --endpoint-picker sends requests.",
)
@click.option(
    "--endpoint-picker-tls",
    type=click.Choice([choice.value for choice in PickerTls]),
    callback=lambda context, parameter, value: None if value is None else PickerTls(value),
    help="TLS of --endpoint-picker. fleet: with the certificate of --tls-dir; mutual: the same, and proxies must show "
    "a certificate of the same authority; self-signed: with a certificate that is created at the start, which proxies "
    "cannot verify. Default: fleet with --tls-dir, else none.",
)
@click.option(
    "--plain-grpc",
    is_flag=True,
    help="Call routers with one RPC for each request, for proxies that balance or observe RPCs.",
)
@cluster_options
@image_options
@edge_options
@observation_options
@click.option("--access-log/--no-access-log", default=False, help="Log every request.")
def command(
    log_level: str,
    log_format: str,
    access_log: bool,
    otlp_endpoint: str | None,
    drain_timeout: float,
    aliases: tuple[str, ...],
    shadows: tuple[str, ...],
    **options: Any,
) -> None:
    """Serve the HTTP APIs, such as OpenAI's, for the models that routers know."""
    configure_logging(log_level, log_format)
    ACCESS.disabled = not access_log
    names = _aliases(aliases, shadows)
    start_tracing("gateway", otlp_endpoint)
    _raise_file_limit()
    flags = {option.name: options.pop(option.name) for option in _PROTOCOL_OPTIONS if option.name is not None}
    uvloop.run(serve(Settings(drain_timeout_s=drain_timeout, aliases=names, protocol_flags=flags, **options)))


_PROTOCOL_OPTIONS = [option for protocol in PROTOCOLS.values() for option in protocol.options]
command.params.extend(_PROTOCOL_OPTIONS)


def _parsers(values: tuple[str, ...], named: Callable[[str], str]) -> dict[str, str]:
    try:
        return parse_parsers(values, named)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _chat_templates(values: tuple[str, ...]) -> dict[str, str]:
    try:
        return read_templates(values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _aliases(aliases: tuple[str, ...], shadows: tuple[str, ...]) -> Aliases:
    try:
        return parse_aliases(aliases, shadows)
    except ValueError as error:
        raise click.UsageError(f"--alias or --shadow: {error}") from error


def _raise_file_limit() -> None:
    """Raise the limit of open files to the system's maximum. The default of a shell allows few connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Run the command; exit status 2 and one sentence on standard error if the flags are wrong."""
    try:
        command.main(prog_name="headrace gateway", standalone_mode=False)
    except click.UsageError as error:
        sys.exit(told(error))
    except (click.ClickException, CannotServeError, EdgeSettingsError, TracingUnavailableError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"error: {message}", err=True)
        sys.exit(EXIT_USAGE)
    finally:
        stop_tracing(FLUSH_TRACES_S)


if __name__ == "__main__":
    startup.after_imports()
    main()
