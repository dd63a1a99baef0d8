"""`headrace serve`: serves a model on this host until it is stopped.

It checks the ports, finds or pulls the model, and starts all processes at once. Standard output gets one line,
`ready: URL`; everything else goes to standard error. Slow imports are deferred, to be ready within seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click

from headrace.cli.errors import EXIT_FAILED, CommandError
from headrace.cli.fleet.http_probe import http_status
from headrace.cli.fleet.run_state import (
    ProcessRecord,
    RunState,
    ServeRecord,
    make_socket_directory,
    own_start_ticks,
)
from headrace.cli.models.catalogue import CATALOGUE, DEFAULT_MODEL
from headrace.cli.models.model_cache import (
    cached_names,
    check_model_directory,
    is_model_name,
    model_directory,
    read_manifest,
)
from headrace.cli.models.offline import offline_option
from headrace.cli.models.reference import parse_reference
from headrace.cli.models.requirements import GIB, available_memory, check_weights_fit
from headrace.cli.models.short_names import SHORT_NAMES
from headrace.cli.serving.draft_model import draft_model_option
from headrace.cli.serving.first_requests import first_requests
from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.machine import describe_plan
from headrace.cli.serving.placement import place_workers
from headrace.cli.serving.plan import SecurityFiles, ServeOptions, processes_of, router_address
from headrace.cli.serving.ports import check_port, free_port, is_free
from headrace.cli.serving.supervisor import Supervisor
from headrace.cli.serving.topology import read_topology

_POLL_UNTIL_READY_S = 0.03
_POLL_WHEN_READY_S = 0.5
_PATIENCE_S = 15.0
_LOG_FLUSH_S = 1.0


def find_model(model: str, *, offline: bool = False, num_workers: int = 1) -> tuple[Path, str]:
    """Return the directory and name of MODEL, after pulling or converting it if necessary. Raises CommandError if there
    is no such model, or if the weights of `num_workers` workers do not fit into memory."""
    directory, name = _find_model(model, offline=offline, num_workers=num_workers)
    check_weights_fit(name, (directory / "openvino_model.bin").stat().st_size, num_workers)
    return directory, name


def _find_model(model: str, *, offline: bool, num_workers: int) -> tuple[Path, str]:
    path, reference = Path(model).expanduser(), parse_reference(model)
    name = model if reference is None else reference.name
    if is_model_name(name) and model_directory(name).exists():
        directory = model_directory(name)
        check_model_directory(directory)
        return directory, name
    if path.is_dir() and path.suffix != ".gguf":
        check_model_directory(path)
        manifest = read_manifest(path)
        return path.absolute(), manifest.name if manifest is not None else path.resolve().name
    if path.suffix == ".gguf" or model in CATALOGUE or model in SHORT_NAMES or reference is not None:
        # A deferred import: serving a cached model does not need it.
        from headrace.cli.models.pull import pull_model, source_of

        source = source_of(model)
        return pull_model(source, offline=offline, num_workers=num_workers), source.name
    known = ", ".join(sorted({*CATALOGUE, *cached_names()}))
    raise CommandError(
        f"unknown model {model!r}: it is not one of {known}, nor a directory, a .gguf file or a hub's OWNER/NAME; "
        "headrace models catalogue lists more names"
    )


def choose_grpc_port(host: str, port: int, wanted: int | None, log: LogSink) -> int:
    """The port of the gRPC API; 0 for none. Raises CommandError if the requested port is not free."""
    if wanted is not None:
        if wanted == port:
            raise CommandError(f"--grpc-port and --port are both {port}; choose another --grpc-port")
        if wanted:
            check_port(host, wanted, "--grpc-port")
        return wanted
    if is_free(host, port + 1):
        return port + 1
    log.line("serve", f"no gRPC API: port {port + 1} is not free; choose another port with --grpc-port")
    return 0


def check_memory(kv_cache_gb: float | None, num_workers: int, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Raise CommandError if the requested KV caches do not fit into memory. Each worker also checks its own limits."""
    available = available_memory(meminfo)
    if kv_cache_gb is None or available is None:
        return
    available_gb = available / GIB
    if num_workers * kv_cache_gb > available_gb:
        of_each = f"{kv_cache_gb:g} GiB" if num_workers == 1 else f"{num_workers} times {kv_cache_gb:g} GiB"
        raise CommandError(
            f"--kv-cache-gb asks for {of_each}, but only {available_gb:.1f} GiB of memory are available; choose a "
            "smaller size, or omit the flag"
        )


@dataclass(slots=True)
class Serving:
    """One run of `headrace serve`: its supervisor, its record for other commands, and its messages."""

    options: ServeOptions
    log: LogSink
    begun_s: float
    supervisor: Supervisor = field(init=False)
    state: RunState = field(init=False)
    num_stop_signals: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        specs = processes_of(self.options, sys.executable)
        self.supervisor = Supervisor(specs, self.log, on_change=self._write_record)
        self.state = RunState(self.options.port)

    async def run(self) -> int:
        """Serve until a signal arrives or a process refuses its flags. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._on_stop_signal)
        watcher = asyncio.create_task(self._watch_readiness())
        try:
            await self.supervisor.run()
        finally:
            watcher.cancel()
            self.state.remove(self._record())
        if self.supervisor.failure is not None:
            raise CommandError(self.supervisor.failure)
        return EXIT_FAILED if self.num_stop_signals > 1 else 0

    def _on_stop_signal(self) -> None:
        self.num_stop_signals += 1
        if self.num_stop_signals == 1:
            self.log.line("serve", "stopping; press Ctrl-C again to kill")
            self.supervisor.stop()
        else:
            self.supervisor.kill()

    async def _watch_readiness(self) -> None:
        """Announce the first readiness on standard output, and log later losses and recoveries."""
        host, port = self.options.host, self.options.port
        since_s, announced, is_reported = self.begun_s, False, False
        while self.num_stop_signals == 0:
            ready = await http_status(host, port, "/health/ready", scheme=self.options.url.partition(":")[0]) == 200
            waited_s = time.monotonic() - since_s
            if ready and not announced:
                self._announce(waited_s)
                announced, is_reported = True, False
            elif ready and is_reported:
                self.log.line("serve", f"ready again after {waited_s:.1f} s")
                is_reported = False
            elif not ready and announced and not is_reported and self.num_stop_signals == 0:
                self.log.line("serve", "not ready: no model is available at the moment")
                is_reported, since_s = True, time.monotonic()
            elif not ready and not announced and not is_reported and waited_s > _PATIENCE_S:
                self.log.line("serve", f"not ready after {waited_s:.0f} s; the logs above show the reason")
                is_reported = True
            await asyncio.sleep(_POLL_WHEN_READY_S if ready else _POLL_UNTIL_READY_S)

    def _announce(self, waited_s: float) -> None:
        url = self.options.url
        print(f"ready: {url}/v1", flush=True)
        self.log.line("serve", f"{self.options.model_name} is ready after {waited_s:.1f} s; try:")
        for command in first_requests(url, self.options.model_name, self.options.model_directory):
            self.log.line("serve", f"  {command}")
        if self.options.grpc_port:
            self.log.line("serve", f"gRPC on {self.options.host}:{self.options.grpc_port}; Ctrl-C stops")

    def _write_record(self) -> None:
        self.state.write(self._record())

    def _record(self) -> ServeRecord:
        options = self.options
        return ServeRecord(
            pid=os.getpid(),
            start_ticks=own_start_ticks(),
            url=options.url,
            tls_dir=_text(options.files.tls_dir),
            join_token_file=_text(options.files.join_token_file),
            host=options.host,
            port=options.port,
            grpc_port=options.grpc_port,
            model=options.model_name,
            router_address=router_address(options),
            socket_directory=str(options.socket_directory),
            processes=tuple(
                ProcessRecord(
                    name=process.spec.name,
                    role=process.spec.role,
                    pid=process.pid,
                    address=process.spec.address,
                    state=process.state.value,
                    restarts=process.num_restarts,
                    started_s=process.started_s,
                )
                for process in self.supervisor.processes
            ),
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _file_option(flag: str, help: str, variable: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    # The processes read the same variable.
    return click.option(flag, type=click.Path(path_type=Path), envvar=variable, help=help)


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="HTTP port; 0 for any.")
@click.option(
    "--grpc-port", type=click.IntRange(0, 65535), help="Port of the gRPC API; 0 for none.  [default: port + 1 if free]"
)
@click.option("--workers", type=click.IntRange(1, 256), help="Number of workers.  [default: one for each NUMA node]")
@click.option("--threads", type=click.IntRange(1), help="Threads of each worker.  [default: its physical cores]")
@click.option("--kv-cache-gb", type=click.FloatRange(0, min_open=True), help="KV cache of each worker, in GiB.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Largest batch of each worker, in sequences.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Cap on the tokens of a step.")
@click.option(
    "--max-num-mixed-tokens", type=click.IntRange(1), help="Cap on the tokens of a step with running streams."
)
@click.option(
    "--execution-mode",
    type=click.Choice(["performance", "accuracy"]),
    help="Compute in the fastest precision, or in that of the model.  [default: performance]",
)
@click.option(
    "--decode-graph",
    type=click.Choice(["auto", "on", "off"]),
    help="Hold the weights twice, to speed up small batches on CPUs with AMX.  [default: auto]",
)
@click.option(
    "--speculation",
    type=click.Choice(["auto", "off", "ngram", "draft"]),
    help="Verify several proposed tokens in a step: when it makes answers faster, never, always, or with --draft-model."
    "  [default: draft with --draft-model, else auto; off on CPUs with AMX]",
)
@draft_model_option
@click.option(
    "--kv-precision",
    type=click.Choice(["u8", "u4", "bf16", "f32"]),
    help="Precision of the KV cache. A lower precision holds more tokens.  [default: u8]",
)
@click.option(
    "--max-context-tokens",
    type=click.IntRange(2),
    help="Maximum length of prompt and answer together, in tokens.  [default: the model's]",
)
@click.option(
    "--max-ttft",
    type=click.FloatRange(0, min_open=True),
    help="Maximum time that a request waits for others, in seconds.",
)
@click.option(
    "--stuck-after-s",
    type=click.FloatRange(0, min_open=True),
    help="Seconds without a step after which a worker that has work counts as failed.  [default: 60]",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=PATH",
    help="LoRA adapter: a directory in PEFT's format, or a GGUF file. Requests select it by NAME as their model. May "
    "be repeated.",
)
@click.option(
    "--max-adapters",
    type=click.IntRange(0, 1024),
    help="Maximum adapters in a worker's memory; 0 for none.  [default: the number of --adapter, at most 16]",
)
@click.option("--name", help="Name of the model in requests.  [default: the model's own]")
@click.option(
    "--tool-parser", help="Format of the model's tool calls; see headrace gateway --help.  [default: detected]"
)
@click.option("--reasoning-parser", help="Format of the model's reasoning.  [default: detected]")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="Origin of web pages that may call the API; * for any. May be repeated.",
)
@click.option("--redis", "redis_url", help="Redis for rate limits, shared with the gateways of other hosts.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Minimum level of log lines, for all processes.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    envvar="HEADRACE_LOG_FORMAT",
    help="Format of log lines, for all processes.  [default: text]",
)
@click.option("--otlp-endpoint", help="Send the traces of all processes there by OTLP, for example http://HOST:4317.")
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535 - 256),
    help="Port of the router's metrics. The workers' metrics use the ports after it.  [default: none]",
)
@click.option(
    "--plain-grpc",
    is_flag=True,
    help="Use one RPC for each request to router and workers, for proxies that balance or observe RPCs.",
)
@click.option(
    "--warm-restart/--no-warm-restart",
    default=True,
    show_default=True,
    help="Keep a failed worker's KV cache, so that the process that replaces it has the cached prefixes.",
)
@click.option(
    "--kv-disk",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Directory on a fast disk for cached prefixes evicted from the KV caches.  [default: none]",
)
@click.option(
    "--kv-disk-gb",
    type=click.FloatRange(0, min_open=True),
    help="Size of each model's files in --kv-disk, in GiB.  [default: 16]",
)
@_file_option(
    "--kv-disk-key", "Encrypt the files in --kv-disk with the key in this file.", "HEADRACE_WORKER_KV_DISK_KEY"
)
@_file_option("--api-keys", "Require an API key from this file; see headrace keys.", "HEADRACE_GATEWAY_API_KEYS")
@_file_option("--admin-key-file", "File with the key for loading LoRA adapters over HTTP.", "HEADRACE_ADMIN_KEY_FILE")
@_file_option("--tls-cert", "Serve HTTPS, and gRPC over TLS, with this certificate chain.", "HEADRACE_GATEWAY_TLS_CERT")
@_file_option("--tls-key", "Private key of --tls-cert.", "HEADRACE_GATEWAY_TLS_KEY")
@_file_option("--tls-dir", "Mutual TLS between processes, with ca.pem, cert.pem and key.pem there.", "HEADRACE_TLS_DIR")
@_file_option(
    "--join-token-file", "File with the secret that the processes present to one another.", "HEADRACE_JOIN_TOKEN_FILE"
)
@offline_option
@click.option("--dry-run", is_flag=True, help="Print the cores that each worker would get, and exit.")
def serve(
    model: str,
    host: str,
    port: int,
    grpc_port: int | None,
    workers: int | None,
    threads: int | None,
    name: str | None,
    offline: bool,
    dry_run: bool,
    **given: Any,
) -> None:
    """Serve MODEL on this host.

    MODEL is a name in the cache or the catalogue, OWNER/NAME[:QUANTISATION][@REVISION] on a hub, a directory with an
    OpenVINO model, or a GGUF file. Models of the catalogue or a hub are pulled if missing.
    """
    begun_s = time.monotonic()
    places = place_workers(read_topology(), workers, threads)
    if dry_run:
        click.echo(describe_plan(places))
        return
    log = LogSink(sys.stderr.buffer, colour=sys.stderr.isatty(), as_json=given["log_format"] == "json")
    try:
        if port:
            check_port(host, port, "--port")
        else:
            port = free_port(host)
        chosen_grpc_port = choose_grpc_port(host, port, grpc_port, log)
        check_memory(given["kv_cache_gb"], len(places))
        directory, found_name = find_model(model, offline=offline, num_workers=len(places))
        files = {field.name: given.pop(field.name) for field in fields(SecurityFiles)}
        options = ServeOptions(
            model_directory=directory,
            model_name=name or found_name,
            host=host,
            port=port,
            grpc_port=chosen_grpc_port,
            places=places,
            socket_directory=make_socket_directory(port),
            files=SecurityFiles(**{name: path and path.absolute() for name, path in files.items()}),
            **given,
        )
        status = asyncio.run(Serving(options, log, begun_s).run())
    finally:
        log.close(_LOG_FLUSH_S)
    sys.exit(status)
