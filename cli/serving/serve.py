"""`headrace serve`: serves a model on this host until it is stopped.

It checks the ports, finds or pulls the model, and starts all processes at once. Standard output gets one line,
`ready: URL`; everything else goes to standard error. Slow imports are deferred, to be ready within seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import click

from headrace.cli.fleet.run_state import make_socket_directory
from headrace.cli.hosting.finding import check_memory, find_draft_model
from headrace.cli.hosting.memory import budget_of
from headrace.cli.hosting.settings import HostSettings, ModelRules, ModelSettings, check_names, read_settings
from headrace.cli.models.catalogue import DEFAULT_MODEL
from headrace.cli.models.completers import complete_known_models
from headrace.cli.models.model_cache import offline_option
from headrace.cli.serving import joining
from headrace.cli.serving.configured import ModelsFile
from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.machine import describe_plan
from headrace.cli.serving.model_plans import (
    WHOLE_MODELS,
    Sizing,
    aliases_of,
    places_of,
    plan_models,
    with_usual_workers,
)
from headrace.cli.serving.placement import WorkerPlace, nodes_with_cores, told_of_sharing
from headrace.cli.serving.plan import ModelPlan, SecurityFiles, ServeOptions, num_stages
from headrace.cli.serving.ranks import Ranks
from headrace.cli.serving.running import Serving
from headrace.cli.serving.topology import Topology, read_topology
from headrace.common.commands import CommandError, SectionedCommand
from headrace.common.flags import SECTIONS, FiniteRange
from headrace.common.kernel_files import format_list
from headrace.common.ports import check_port, chosen_port, is_free
from headrace.common.worker_flags import DEFAULT_AWAIT_STAGES, WORKER_FLAGS, serve_options


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


def _file_option(flag: str, help: str, variable: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    # The processes read the same variable.
    return click.option(flag, type=click.Path(path_type=Path), envvar=variable, help=help)


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("models", nargs=-1, metavar="[MODEL]...", shell_complete=complete_known_models)
@click.option(
    "--models",
    "models_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file that describes the models, instead of MODEL.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration of OpenVINO Model Server (config.json) that names the models, instead of MODEL. POST "
    "/v1/config/reload reloads it.",
)
@click.option(
    "--config-poll-s",
    type=FiniteRange(0),
    help="Check --config for changes every this many seconds, and reload it. 0: never.  [default: 0]",
)
@click.option("--on-demand", is_flag=True, help="Load each MODEL when a request needs it, not at the start.")
@click.option(
    "--idle-s",
    type=FiniteRange(0, min_open=True),
    help="Unload models that are loaded on demand after this many seconds without requests.  [default: never]",
)
@click.option(
    "--memory-gb",
    type=FiniteRange(0, min_open=True),
    help="Memory limit of all models together, in GiB. Models on demand are unloaded to make room for others.  "
    "[default: 80 % of the available memory if models are loaded on demand, else no limit]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="HTTP port; 0 for any free one."
)
@click.option(
    "--grpc-port", type=click.IntRange(0, 65535), help="Port of the gRPC API; 0 for none.  [default: port + 1 if free]"
)
@click.option("--workers", type=click.IntRange(1, 256), help="Number of workers.  [default: one for each NUMA node]")
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of each worker.  [default: the physical cores of its node]"
)
@serve_options
@click.option("--name", help="Name of the model in requests.  [default: the model's own]")
@click.option(
    "--tool-parser",
    help="Format of the model's tool calls; see headrace gateway --help.  [default: detected from the chat template]",
)
@click.option(
    "--reasoning-parser",
    help="Format of the model's reasoning; see headrace gateway --help.  [default: detected from the chat template]",
)
@click.option(
    "--chat-template",
    "chat_templates",
    multiple=True,
    metavar="NAME=FILE",
    help="A chat template that requests may name; see headrace gateway --help. May be repeated.",
)
@click.option(
    "--special-tokens-in-text",
    type=click.Choice(("never", "prompts", "anywhere")),
    help="Where the text of a special token, such as <|im_end|>, becomes the token: never, in prompts that callers "
    "write whole, as for /v1/completions, or also anywhere in chats.  [default: prompts]",
)
@click.option(
    "--allowed-media-domains",
    multiple=True,
    metavar="NAME[,NAME...]",
    help="Fetch images by http and https from these hosts; see headrace gateway --help.  [default: none]",
)
@click.option(
    "--allowed-local-media-path",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Read images of file: URLs from files below this directory.  [default: none]",
)
@click.option(
    "--mcp-server",
    "mcp_servers",
    multiple=True,
    metavar="NAME=URL",
    help="An MCP server whose tools responses may offer to the model; see headrace gateway --help. May be repeated.",
)
@click.option(
    "--mcp-headers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON file with HTTP headers for the MCP servers, such as their keys.  [default: none]",
)
@click.option(
    "--mcp-config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Further MCP servers, in the JSON format that agents use; also programs that the gateway starts.  [default: "
    "none]",
)
@click.option(
    "--ollama-manage",
    is_flag=True,
    help="Let clients of Ollama's API name and unload models; see headrace gateway --help.",
)
@click.option(
    "--ollama-blobs",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --ollama-manage, let clients create models from GGUF files, which they upload into this directory.  "
    "[default: none]",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="Origin of web pages that may call the API; * for any. May be repeated.",
)
@click.option(
    "--batch-store",
    metavar="DIR|URL",
    help="Where files and batches of the Batch API are kept: a directory, a bucket (s3://, gs://, az://), or none.  "
    "[default: ~/.local/share/headrace/batches/PORT]",
)
@click.option("--redis", "redis_url", help="Redis for rate limits, shared with the gateways of other hosts.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Minimum level of log lines, for all processes.  [default: info]",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    envvar="HEADRACE_LOG_FORMAT",
    help="Format of log lines, for all processes.  [default: text]",
)
@click.option(
    "--otlp-endpoint",
    help="Send traces of all processes by OTLP to this endpoint, such as http://HOST:4317. Needs headrace[otel].",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535 - 256),
    help="Port of the router's metrics. The workers' metrics use the ports after it.  [default: none]",
)
@click.option(
    "--plain-grpc",
    is_flag=True,
    help="Call router and workers with one RPC for each request, for proxies that balance or observe RPCs.",
)
@click.option(
    "--warm-restart/--no-warm-restart",
    default=True,
    show_default=True,
    help="Keep a failed worker's KV cache, so that the process that replaces it has the cached prefixes.",
)
@click.option(
    "--prefill-workers",
    type=click.IntRange(0),
    default=0,
    help="Number of each model's workers that are reserved for long prompts. Their answers continue at the others.  "
    "[default: 0, all workers do both]",
)
@_file_option("--api-keys", "Require an API key from this file; see headrace keys.", "HEADRACE_GATEWAY_API_KEYS")
@_file_option(
    "--admin-key-file",
    "File with the admin key, which callers need to load models and LoRA adapters and to drain workers over HTTP.  "
    "[default: none, nobody may]",
    "HEADRACE_ADMIN_KEY_FILE",
)
@_file_option("--tls-cert", "Serve HTTPS, and gRPC over TLS, with this certificate chain.", "HEADRACE_GATEWAY_TLS_CERT")
@_file_option("--tls-key", "Private key of --tls-cert.", "HEADRACE_GATEWAY_TLS_KEY")
@_file_option(
    "--tls-dir",
    "Use mutual TLS between processes, with ca.pem, cert.pem and key.pem in this directory.",
    "HEADRACE_TLS_DIR",
)
@_file_option(
    "--join-token-file", "File with the secret that processes must present to one another.", "HEADRACE_JOIN_TOKEN_FILE"
)
@click.option(
    "--join",
    metavar="ADDR",
    help="Instead of serving MODEL, compute some of its layers for the headrace serve --pipeline that has "
    "--await-stages at this host:port.",
)
@click.option(
    "--stage-listen",
    metavar="ADDR",
    help="With --join: host:port at which this stage listens for the previous one.  [default: 0.0.0.0:50071]",
)
@offline_option
@click.option("--dry-run", is_flag=True, help="Print the cores that each worker would use, and exit.")
@click.pass_context
def serve(
    context: click.Context,
    /,
    models: tuple[str, ...],
    models_file: Path | None,
    config: Path | None,
    config_poll_s: float | None,
    on_demand: bool,
    idle_s: float | None,
    memory_gb: float | None,
    host: str,
    port: int,
    grpc_port: int | None,
    workers: int | None,
    threads: int | None,
    name: str | None,
    join: str | None,
    stage_listen: str | None,
    offline: bool,
    dry_run: bool,
    **given: Any,
) -> None:
    """Serve each MODEL on this host.

    MODEL is a name in the cache or the catalogue, OWNER/NAME[:QUANTISATION][@REVISION] on a hub, a directory with an
    OpenVINO model, or a GGUF file. Models of the catalogue or a hub are pulled if missing. Without MODEL, the demo
    model is served.
    """
    begun_s = time.monotonic()
    if join is not None:
        joining.refuse_other_flags(context)
        joining.join(models, join, stage_listen, security_files(given), context.params)
        return
    if stage_listen is not None:
        raise CommandError("--stage-listen is for a stage; name with --join where it joins")
    named = NamedModels(models, name=name, workers=workers, threads=threads, on_demand=on_demand, idle_s=idle_s)
    check_disk(given)
    notes: Sequence[str] = ()
    file = None
    if config is not None:
        refuse_beside_config(named, models_file, given)
        file = ModelsFile(config.absolute(), named.settings().models[0], config_poll_s or 0.0)
        settings, notes = file.settings()
    elif config_poll_s is not None:
        raise CommandError("--config-poll-s needs a configuration; name it with --config")
    else:
        settings = settings_of_flags(named, models_file, given)
    where = Listening(host, port, grpc_port)
    run = Run(settings, where, given, memory_gb=memory_gb, notes=notes, offline=offline, begun_s=begun_s, file=file)
    if dry_run:
        places = run.places(run.ranks(click.echo))
        click.echo(describe_plan([place for of_model in places for place in of_model]))
        return
    run.serve()


@dataclass(frozen=True, slots=True)
class Listening:
    """The addresses on which a server listens. If no gRPC port is given, the next port is used if it is free. A gRPC
    port of 0 turns gRPC off."""

    host: str
    port: int
    grpc_port: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a server that is about to begin: its models, where it listens, and the options of all models in
    `given`. `notes` are lines for its log."""

    settings: HostSettings
    where: Listening
    given: dict[str, Any]
    memory_gb: float | None = None
    notes: Sequence[str] = ()
    offline: bool = False
    begun_s: float = field(default_factory=time.monotonic)
    stream: BinaryIO | None = None
    """Where its log goes, instead of standard error."""
    file: ModelsFile | None = None
    """The configuration that names the models, if it can be read again."""

    def ranks(self, tell: Callable[[str], None]) -> Ranks:
        """Choose the number of ranks of each model. `tell` gets the reason of each choice."""
        given = self.given
        asked = (given["tensor_parallel"], given["target_tpot_ms"], has_adapters(given))
        return Ranks(*asked, self.offline, tell, given["pipeline"])

    def places(self, ranks: Ranks) -> list[tuple[WorkerPlace, ...]]:
        """The places of each model's workers. Also logs that workers share cores, and the nodes that compute nothing.
        Raises CommandError."""
        machine, given = read_topology(), self.given
        models = [with_usual_workers(model, given) for model in self.settings.models]
        places = checked_places(machine, models, given["prefill_workers"], ranks)
        for model, of_model in zip(models, places, strict=True):
            if num_stages(model.options.worker, given) > 1 and len(of_model) > 1:
                raise CommandError(
                    "--pipeline is for a model with one worker, because a stage computes for one worker at a time; "
                    "leave out --workers"
                )
            if sharing := told_of_sharing(machine, of_model):
                ranks.tell(sharing)
        if models != list(self.settings.models) and not given["stages"]:
            _tell_of_idle_nodes(machine, places, given["await_stages"] or DEFAULT_AWAIT_STAGES, ranks.tell)
        return places

    def serve(self) -> NoReturn:
        """Serve until stopped, and end the process with the exit status. Raises CommandError."""
        settings = self.settings
        given = self.given
        host = self.where.host
        offline = self.offline
        topology = read_topology()
        stream = self.stream or sys.stderr.buffer
        colour = self.stream is None and sys.stderr.isatty()
        log = LogSink(stream, colour=colour, as_json=given["log_format"] == "json")
        try:
            ranks = self.ranks(lambda why: log.line("serve", why))
            places = self.places(ranks)
            for note in self.notes:
                log.line("serve", note)
            port = chosen_port(host, self.where.port)
            if given["draft_model"] is not None:
                given["draft_model"] = find_draft_model(given["draft_model"], offline=offline)
            sizing = sizing_of(settings, self.memory_gb, topology, given)
            plans = planned(settings, places, sizing, offline=offline)
            aliases, shadows = aliases_of(plans, settings)
            options = ServeOptions(
                files=security_files(given),
                host=host,
                port=port,
                grpc_port=choose_grpc_port(host, port, self.where.grpc_port, log),
                socket_directory=make_socket_directory(port),
                aliases=aliases,
                shadows=shadows,
                has_rules=self.file is not None or any(plan.rules != ModelRules() for plan in plans),
                batch_store=batch_store_of(given.pop("batch_store"), port),
                created_record=created_record_of(self.where.port) if given.get("ollama_manage") else None,
                worker={flag.option: given.pop(flag.option) for flag in WORKER_FLAGS},
                **given,
            )
            serving = Serving(options, plans, sizing, log, self.begun_s, ranks, file=self.file)
            sys.exit(asyncio.run(serving.run()))
        finally:
            log.close()


def _tell_of_idle_nodes(
    machine: Topology, places: Sequence[Sequence[WorkerPlace]], joins: str, tell: Callable[[str], None]
) -> None:
    """Log the NUMA nodes on which no worker runs, because a pipeline has only one worker here. `joins` is the address
    at which other stages may join."""
    used = {node for of_model in places for place in of_model for node in place.nodes}
    idle = [node.number for node in nodes_with_cores(machine) if node.number not in used]
    if idle:
        cpus = format_list(core.cpus[0] for node in idle for core in machine.cores_of(node))
        tell(
            f"a pipeline has one worker, so NUMA node {format_list(idle)} computes nothing yet; divide the worker with "
            f"--tensor-parallel, or for a further stage there: taskset --cpu-list {cpus} headrace serve MODEL --join "
            f"{joins.replace('0.0.0.0:', '127.0.0.1:')}"
        )


def batch_store_of(given: str | None, port: int) -> str | None:
    """The place where the server at a port stores files and batches; None for nowhere. By default, each server has its
    own: gateways with the same place share its batches and must serve the same models."""
    if given is not None:
        is_place = "://" in given or given == "none"
        return None if given == "none" else given if is_place else str(Path(given).absolute())
    return str(_data_directory() / "batches" / str(port))


def created_record_of(port: int) -> Path | None:
    """The file in which the server of a port keeps what clients create, for its next start. None if it takes any free
    port, because no later server is the same one."""
    return _data_directory() / "created" / f"{port}.json" if port else None


def _data_directory() -> Path:
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path("~/.local/share").expanduser()) / "headrace"


def checked_places(
    topology: Topology,
    models: Sequence[ModelSettings],
    num_prefill_workers: int,
    ranks: Ranks = WHOLE_MODELS,
) -> list[tuple[WorkerPlace, ...]]:
    """The places of each model's workers. Raises CommandError if a model would have no worker for answers."""
    places = places_of(topology, models, ranks)
    fewest = min(map(len, places))
    if num_prefill_workers and num_prefill_workers >= fewest:
        raise CommandError(
            f"--prefill-workers {num_prefill_workers} leaves no worker for answers, because a model has {fewest} worker"
            f"{'s' if fewest > 1 else ''}; give fewer, or more --workers"
        )
    return places


def planned(
    settings: HostSettings, places: Sequence[tuple[WorkerPlace, ...]], sizing: Sizing, *, offline: bool
) -> Sequence[ModelPlan]:
    """The plan of each model. Raises CommandError."""
    if sizing.budget_bytes is None:
        images_gb = sizing.image_cache_gb if sizing.max_images != 0 else None
        check_memory({"--kv-cache-gb": sizing.kv_cache_gb, "--image-cache-gb": images_gb}, sum(map(len, places)))
    plans = plan_models(settings.models, places, sizing, offline=offline)
    check_names([(plan.name, one) for plan, one in zip(plans, settings.models, strict=True)], settings.aliases)
    return plans


def sizing_of(settings: HostSettings, memory_gb: float | None, topology: Topology, given: Mapping[str, Any]) -> Sizing:
    """The sizes that determine the memory of models, from the flags."""
    on_demand = any(model.on_demand for model in settings.models)
    return Sizing(
        budget_of(memory_gb or settings.memory_gb, on_demand=on_demand),
        given["kv_cache_gb"],
        "amx_tile" in topology.cpu_flags,
        has_adapters(given),
        given["draft_model"],
        given["image_cache_gb"],
        given["max_images"],
        given["pipeline"],
    )


def has_adapters(given: Mapping[str, Any]) -> bool:
    """Whether flags give the models adapters."""
    return bool(given["adapters"] or given["max_adapters"])


@dataclass(frozen=True, slots=True)
class NamedModels:
    """The models that arguments name, and the flags that apply to each of them."""

    models: tuple[str, ...]
    name: str | None = None
    workers: int | None = None
    threads: int | None = None
    on_demand: bool = False
    idle_s: float | None = None

    def check(self) -> None:
        """Raise CommandError if the flags contradict each other."""
        if self.idle_s is not None and not self.on_demand:
            raise CommandError("--idle-s needs --on-demand: models that are loaded at the start are never unloaded")

    def settings(self) -> HostSettings:
        """The models, or the demo model if none is named."""
        one = ModelSettings(
            "", workers=self.workers, threads=self.threads, on_demand=self.on_demand, idle_s=self.idle_s
        )
        return HostSettings(tuple(replace(one, model=model) for model in self.models or (DEFAULT_MODEL,)))

    @property
    def flags(self) -> dict[str, Any]:
        """The flags. With a file of models, they are in the file instead."""
        return {
            "--workers": self.workers,
            "--threads": self.threads,
            "--on-demand": self.on_demand,
            "--idle-s": self.idle_s,
        }


def settings_of_flags(named: NamedModels, models_file: Path | None, given: dict[str, Any]) -> HostSettings:
    """The models that arguments or the file of --models describe. Raises CommandError if they contradict each other."""
    if models_file is not None:
        if named.models:
            raise CommandError("give either MODEL or --models, not both")
        for flag, value in named.flags.items():
            if value:
                raise CommandError(f"{flag} is for MODEL; with --models, say it in {models_file} for each model")
        settings = read_settings(models_file)
    else:
        named.check()
        settings = named.settings()
    if len(settings.models) == 1:
        (only,) = settings.models
        return replace(settings, models=(replace(only, name=named.name or only.name),))
    refuse_flags_of_one(named, given, "; with several, say it in a file for --models")
    return settings


def refuse_flags_of_one(named: NamedModels, given: Mapping[str, Any], why: str) -> None:
    """Raise CommandError for flags that are for a single model. `why` is the end of the sentence."""
    of_one = {
        "--name": named.name,
        "--draft-model": given["draft_model"],
        "--adapter": given["adapters"],
        "--max-adapters": given["max_adapters"],
    }
    for flag, value in of_one.items():
        if value:
            raise CommandError(f"{flag} is for one model{why}")


def check_disk(given: Mapping[str, Any]) -> None:
    """Raises CommandError if there are flags for a disk without a disk."""
    for flag, value in {"--kv-disk-gb": given["kv_disk_gb"], "--kv-disk-key": given["kv_disk_key"]}.items():
        if value is not None and given["kv_disk"] is None:
            raise CommandError(f"{flag} needs a directory; name it with --kv-disk")


def refuse_beside_config(named: NamedModels, models_file: Path | None, given: Mapping[str, Any]) -> None:
    """Raises CommandError for flags that do not go with --config."""
    if named.models or models_file is not None:
        raise CommandError("give either MODEL, --models or --config")
    named.check()
    refuse_flags_of_one(named, given, ", and --config names the models")


def security_files(given: dict[str, Any]) -> SecurityFiles:
    """Split the flags for security files from the given ones."""
    files = {field.name: given.pop(field.name) for field in fields(SecurityFiles)}
    return SecurityFiles(**{name: path and path.absolute() for name, path in files.items()})
