"""`python -m headrace.worker`: the command and its flags."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import uvloop

from headrace.common.telemetry.logs import FORMATS, LEVELS, configure_logging
from headrace.common.telemetry.tracing import FLUSH_TRACES_S, TracingUnavailableError, start_tracing, stop_tracing
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.engine.watchdog import DEFAULT_STUCK_AFTER_S
from headrace.worker.host.advertise import advertised_address, way_to_the_fleet
from headrace.worker.host.numa import bind_memory
from headrace.worker.kv.memory import GIB
from headrace.worker.serving import serve

DRAIN_TIMEOUT_S = 2.0


@click.command(context_settings={"auto_envvar_prefix": "HEADRACE_WORKER", "show_default": True})
@click.option(
    "--model",
    "model_dir",
    required=True,
    envvar="HEADRACE_WORKER_MODEL",
    type=click.Path(path_type=Path),
    help="Model directory.",
)
@click.option("--name", help="Name of the model in requests; by default the directory's.")
@click.option("--worker-id", help="Stable name of this worker; by default host and listen address.")
@click.option("--listen", default="127.0.0.1:50061", help="host:port or unix:/path to serve gRPC on.")
@click.option("--advertise", help="Address for routers; by default --listen, or the way to the router.")
@click.option(
    "--router",
    "routers",
    multiple=True,
    envvar="HEADRACE_WORKER_ROUTER",
    help="Router to register with; may be given several times.",
)
@click.option(
    "--redis",
    "redis_url",
    envvar="HEADRACE_WORKER_REDIS",
    help="Redis to publish this worker in: redis://HOST:PORT/DB, or redis+sentinel://HOST:PORT,.../SERVICE.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=click.FloatRange(0),
    default=DRAIN_TIMEOUT_S,
    help="Seconds that running requests may take to end after SIGTERM; then routers resume them elsewhere.",
)
@click.option("--threads", type=click.IntRange(1), help="Cores to compute with; by default all usable ones.")
@click.option("--kv-cache-gb", type=click.FloatRange(0, min_open=True), help="Size of the KV cache in GiB.")
@click.option(
    "--kv-cache-share",
    type=click.FloatRange(0, 0.95, min_open=True),
    default=0.4,
    help="Part of the available memory to use for it when no size is given.",
)
@click.option("--kv-precision", type=click.Choice(["u8", "u4", "bf16", "f32"]), default="u8")
@click.option("--execution-mode", type=click.Choice(["performance", "accuracy"]), default="performance")
@click.option(
    "--decode-graph",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    help="Hold the weights twice, and compute decode steps of few sequences faster; by default on CPUs with AMX where "
    "the copy takes a tenth of the memory at most.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    help="Most requests in the running batch; by default 128, or fewer where steps are smaller.",
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(1),
    help="Most tokens in a step; by default 1024, or as many as are exact on this CPU.",
)
@click.option(
    "--max-num-mixed-tokens",
    type=click.IntRange(1),
    help="Most tokens in a step that computes prompts and running streams; by default --max-num-batched-tokens.",
)
@click.option(
    "--max-ttft-s",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    help="Refuse requests that would wait longer than this for others; their own prompt does not count.",
)
@click.option(
    "--stuck-after-s",
    type=click.FloatRange(0, min_open=True),
    default=DEFAULT_STUCK_AFTER_S,
    help="Count as failed while there is work and no step ends for so long; more where steps are expected to be long.",
)
@click.option(
    "--target-tpot-ms",
    type=click.FloatRange(0, min_open=True),
    help="Size steps so that running streams get a token this often; by default every 150 ms, or in 1.9 times the "
    "time that a step takes without prompts.",
)
@click.option(
    "--max-pause-ms",
    type=click.FloatRange(0),
    help="How long running streams wait for prompts in a row, half of the time at most; by default 300, "
    "and not at all with --target-tpot-ms.",
)
@click.option("--max-num-waiting", type=click.IntRange(0), default=1024, help="Most requests waiting.")
@click.option("--max-context-tokens", type=click.IntRange(2), help="Prompt and answer at most; by default the model's.")
@click.option(
    "--kv-cache-node-share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.4,
    help="No more than this share of what its NUMA node has, where there are several.",
)
@click.option(
    "--memory-node",
    type=click.IntRange(0),
    help="NUMA node to take memory from; by default that of the CPUs it is started on.",
)
@click.option("--huge-pages/--no-huge-pages", default=True, help="Ask the kernel for huge pages for the KV cache.")
@click.option("--metrics", help="host:port to serve Prometheus metrics on.")
@click.option(
    "--tls-dir",
    envvar="HEADRACE_TLS_DIR",
    type=click.Path(path_type=Path),
    help="Mutual TLS with all others of the fleet: ca.pem, cert.pem and key.pem there, read again when they change.",
)
@click.option(
    "--join-token-file",
    envvar="HEADRACE_JOIN_TOKEN_FILE",
    type=click.Path(path_type=Path),
    help="File with the secret that every caller has to present as well.",
)
@click.option(
    "--insecure",
    is_flag=True,
    envvar="HEADRACE_INSECURE",
    help="Serve beyond this host without certificates and join token: who reaches the port may do everything.",
)
@click.option("--probe", help="host:port to answer gRPC health on too, without TLS.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", help="Least level of log lines.")
@click.option("--log-format", type=click.Choice(FORMATS), default="text", help="Log lines for people or for machines.")
@click.option("--otlp-endpoint", help="Send traces there by OTLP, such as http://HOST:4317; needs headrace[otel].")
def command(
    log_level: str, log_format: str, otlp_endpoint: str | None, kv_cache_gb: float | None, **options: Any
) -> None:
    """Serve one model on the cores of one NUMA node."""
    configure_logging(log_level, log_format)
    kv_cache_bytes = None if kv_cache_gb is None else int(kv_cache_gb * GIB)
    try:
        config = config_of(Path(str(options.pop("model_dir"))), kv_cache_bytes, options)
        # Threads inherit it from the one that starts them: before there are any.
        config = replace(config, memory_node=bind_memory(config.memory_node))
        start_tracing("worker", otlp_endpoint)
        uvloop.run(serve(config))
    except (ConfigurationError, TracingUnavailableError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.stderr.flush()
        os._exit(2)
    stop_tracing(FLUSH_TRACES_S)
    sys.stderr.flush()
    # The model's memory goes with the process; taking it apart first only makes stopping slower.
    os._exit(0)


def config_of(model_dir: Path, kv_cache_bytes: int | None, options: dict[str, Any]) -> WorkerConfig:
    """The flags as one configuration, what was left out filled in. ConfigurationError for those that exclude others."""
    if options["target_tpot_ms"] is not None and options["max_pause_ms"]:
        raise ConfigurationError("streams never wait for prompts with --target-tpot-ms; leave out --max-pause-ms")
    listen, way = options["listen"], way_to_the_fleet(options["routers"], options["redis_url"])
    found = {
        "name": options["name"] or model_dir.resolve().name,
        "decode_graph": {"auto": None, "on": True, "off": False}[options["decode_graph"]],
        "worker_id": options["worker_id"] or f"{socket.gethostname()}/{listen}",
        "advertise": options["advertise"] or advertised_address(listen, way),
    }
    return WorkerConfig(**{**options, **found, "model_dir": model_dir, "kv_cache_bytes": kv_cache_bytes})


def main() -> None:
    """Run the command; exit status 2 and one sentence on standard error if what was asked cannot be done."""
    try:
        command.main(prog_name="headrace worker", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
