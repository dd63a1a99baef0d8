"""`python -m headrace.worker`: the command and its flags."""

from __future__ import annotations

from headrace.common import startup

if __name__ == "__main__":
    startup.before_imports()

import os
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
import uvloop

from headrace.common.commands import SectionedCommand, told
from headrace.common.flags import SECTIONS, FiniteRange, membership_options, observation_options
from headrace.common.host_memory import GIB
from headrace.common.kernel_files import cpu_quota
from headrace.common.model_files.cache import find_directory
from headrace.common.telemetry.logs import configure_logging
from headrace.common.telemetry.tracing import FLUSH_TRACES_S, TracingUnavailableError, start_tracing, stop_tracing
from headrace.common.worker_flags import (
    DEFAULT_AWAIT_STAGES,
    DEFAULT_KV_DISK_GB,
    DEFAULT_MAX_ADAPTERS,
    worker_options,
)
from headrace.protos.cache_eviction import OFF
from headrace.protos.status import StatusError
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.encoder.pooling import Pooling
from headrace.worker.host.advertise import advertised_address, fleet_address
from headrace.worker.host.children import end_children
from headrace.worker.host.numa import bind_memory, unbind_memory, usable_cpus
from headrace.worker.host.pinning import warn_if_not_pinned
from headrace.worker.ranks.places import places_of
from headrace.worker.server.adapters import check_name
from headrace.worker.serving import serve
from headrace.worker.stage_serving import serve_stage

DRAIN_TIMEOUT_S = 2.0
# Options whose fields in the configuration have other names.
_RENAMED = ("kv_cache_gb", "window_cache", "serve_stage")
_OF_PROCESS = ("log_level", "log_format", "otlp_endpoint")
_NEED_DRAFT_MODEL = {
    "draft": "a smaller model",
    "eagle3": "heads in the format of EAGLE-3",
    "medusa": "heads in the format of Medusa",
    "mtp": "a checkpoint with a layer that predicts more tokens",
}


@click.command(
    cls=SectionedCommand,
    sections=SECTIONS,
    context_settings={"auto_envvar_prefix": "HEADRACE_WORKER", "show_default": True},
)
@click.option(
    "--model",
    "model_dir",
    required=True,
    envvar="HEADRACE_WORKER_MODEL",
    metavar="NAME_OR_DIR",
    help="Directory of the model, or its name in the cache (`headrace models list`).",
)
@click.option("--name", help="Name of the model in requests. Default: its name in the cache, or that of its directory.")
@click.option("--worker-id", help="Stable name of this worker. Default: host name and listen address.")
@click.option("--listen", default="127.0.0.1:50061", help="host:port or unix:/path to serve gRPC on.")
@click.option(
    "--advertise",
    help="Address at which routers reach this worker. Default: --listen, or this host's address toward the router.",
)
@click.option(
    "--router",
    "routers",
    multiple=True,
    envvar="HEADRACE_WORKER_ROUTER",
    help="Address of a router to register with. May be repeated.",
)
@click.option(
    "--redis",
    "redis_url",
    envvar="HEADRACE_WORKER_REDIS",
    help="Redis in which to announce this worker: redis://HOST:PORT/DB, or redis+sentinel://HOST:PORT,.../SERVICE.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=FiniteRange(0),
    default=DRAIN_TIMEOUT_S,
    help="Seconds that running requests have to finish after SIGTERM. Routers then resume them on other workers.",
)
@click.option("--threads", type=click.IntRange(1), help="Number of cores to compute with. Default: all usable cores.")
@worker_options
@click.option(
    "--serve-stage",
    is_flag=True,
    help="Be a stage of another worker's --pipeline instead of a worker. That worker calls --listen. When it ends, the "
    "stage starts again.",
)
@click.option(
    "--join",
    metavar="ADDR",
    help="With --serve-stage: join the worker that has --await-stages at this address. The previous stage calls "
    "--advertise.",
)
@click.option(
    "--kv-cache-share",
    type=FiniteRange(0, 0.95, min_open=True),
    default=0.4,
    help="Share of the available memory for the KV cache, if --kv-cache-gb is not given.",
)
@click.option("--max-num-waiting", type=click.IntRange(0), default=1024, help="Maximum number of waiting requests.")
@click.option(
    "--pooling",
    type=click.Choice([pooling.value for pooling in Pooling]),
    help="For an embedding model: the vector of a text is that of its first token (cls), that of its last token, or "
    "the mean of all. Default: as in its modules.json.",
)
@click.option(
    "--normalize/--no-normalize",
    "normalizes",
    default=None,
    help="For an embedding model: scale vectors to length 1. Default: as in its modules.json.",
)
@click.option(
    "--kv-cache-node-share",
    type=FiniteRange(0, 1, min_open=True),
    default=0.4,
    help="Maximum share of a NUMA node's free memory for the KV cache, if there are several nodes.",
)
@click.option(
    "--memory-node",
    type=click.IntRange(0),
    help="NUMA node to allocate memory on. Default: the node of the CPUs on which the worker is started.",
)
@click.option(
    "--huge-pages/--no-huge-pages", default=True, help="Use huge pages for the KV cache, if the kernel has them."
)
@click.option(
    "--kv-memory",
    help="Directory in a tmpfs or hugetlbfs for the KV cache, so that cached prefixes survive a failure of this "
    "process. Default: private memory.",
)
@click.option(
    "--keep-kv-memory",
    is_flag=True,
    help="Keep the KV cache in --kv-memory after an orderly stop too, for the next start.",
)
@click.option(
    "--kv-peers/--no-kv-peers",
    default=True,
    help="Exchange cached prefixes with other workers of the fleet, if that is faster than computing them.",
)
@click.option(
    "--kv-handover-gb",
    type=FiniteRange(0),
    default=4.0,
    help="Maximum size of the cached prefixes that this worker hands over to others when it drains, in GiB; most "
    "recently used first. 0: none.",
)
@click.option(
    "--role",
    type=click.Choice(["both", "prefill", "decode"]),
    default="both",
    help="Requests that routers send to this worker. prefill: only long prompts, whose answers continue at another "
    "worker; decode: all other requests; both: all. Ignored if no worker has the other role.",
)
@click.option(
    "--step-log",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append the size and time of each step to this file, as JSON lines. `headrace bench calibrate` reads them.",
)
@click.option(
    "--vllm-metrics",
    is_flag=True,
    help="Publish the metrics under the names of vLLM too, for schedulers that read them.",
)
@click.option(
    "--kv-events",
    metavar="ADDR",
    help="Publish the changes of the prefix cache in vLLM's format at this ZeroMQ address, such as tcp://*:5557. Needs "
    "headrace[kv-events].",
)
@click.option(
    "--kv-events-replay",
    metavar="ADDR",
    help="ZeroMQ address at which subscribers of --kv-events request missed events.",
)
@click.option("--kv-events-topic", metavar="TEXT", help="Topic of --kv-events. Default: kv@ADVERTISE@NAME.")
@membership_options
@observation_options
def command(log_level: str, log_format: str, otlp_endpoint: str | None, **options: Any) -> None:
    """Serve one model on the cores of one NUMA node."""
    configure_logging(log_level, log_format)
    try:
        config = config_of(options)
        warn_if_not_pinned(config.tensor_parallel)
        cpus = usable_cpus()
        # Threads inherit the affinity and the memory policy, so these are set before any other thread exists.
        config = placed(config)
        node = bind_memory(config.memory_node)
        # Each rank of a divided model has a node of its own.
        config = config if config.rank_cpus else replace(config, memory_node=node)
        start_tracing("worker", otlp_endpoint)
        if config.serves_stage:
            if uvloop.run(serve_stage(config)):
                start_again(cpus, is_bound=node is not None)
        else:
            uvloop.run(serve(config))
    except (ConfigurationError, TracingUnavailableError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.stderr.flush()
        os._exit(2)
    stop_tracing(FLUSH_TRACES_S)
    sys.stderr.flush()
    # The kernel frees the model's memory faster than Python would.
    os._exit(0)


def start_again(cpus: Collection[int], *, is_bound: bool) -> NoReturn:
    """Replace this process by a new one with the same arguments and the same process id, on these CPUs. This frees all
    that was loaded, and ends the ranks of a divided stage. `is_bound` if this process has set its memory policy, which
    the new one would take for its starter's. Does not return."""
    end_children()
    if is_bound:
        unbind_memory()
    os.sched_setaffinity(0, cpus)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def placed(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration with the CPUs of each rank, if the model is divided among ranks. Also moves this process
    to the CPUs of the first rank. ConfigurationError if there are too few CPUs."""
    if config.tensor_parallel == 1:
        return config
    cpus = places_of(usable_cpus(), config.tensor_parallel)
    quota = cpu_quota()
    threads = config.threads
    if threads is None and quota is not None:
        threads = max(1, min(len(cpus[0]), int(quota / config.tensor_parallel)))
    os.sched_setaffinity(0, cpus[0])
    return replace(config, rank_cpus=cpus, threads=threads)


def config_of_arguments(arguments: Sequence[str]) -> WorkerConfig:
    """The configuration of a worker with these arguments. ConfigurationError, or click's, if they are wrong."""
    options = command.make_context("worker", list(arguments)).params
    return config_of({name: options[name] for name in options if name not in _OF_PROCESS})


def config_of(options: dict[str, Any]) -> WorkerConfig:
    """The configuration that the flags describe. ConfigurationError if flags contradict each other."""
    if options["keep_kv_memory"] and options["kv_memory"] is None:
        raise ConfigurationError("--keep-kv-memory needs a directory; give it with --kv-memory")
    if options["kv_disk_key"] is not None and options["kv_disk"] is None:
        raise ConfigurationError("--kv-disk-key encrypts the files in a directory; name it with --kv-disk")
    if options["kv_disk_gb"] is not None and options["kv_disk"] is None:
        raise ConfigurationError("--kv-disk-gb is the size of the files in a directory; name it with --kv-disk")
    if options["kv_events"] is None and (options["kv_events_replay"] or options["kv_events_topic"]):
        raise ConfigurationError("--kv-events-replay and --kv-events-topic need --kv-events ADDR")
    if options["vllm_metrics"] and options["metrics"] is None:
        raise ConfigurationError("--vllm-metrics needs --metrics HOST:PORT")
    if options["role"] != "both" and not options["kv_peers"]:
        raise ConfigurationError(
            f"--role {options['role']} moves cached prefixes between workers; leave out --no-kv-peers"
        )
    check_pipeline(options["pipeline"], options["stages"], options["await_stages"], serves_stage=options["serve_stage"])
    check_join(options["join"], serves_stage=options["serve_stage"])
    check_speculation(options["speculation"], options["draft_model"])
    model_dir, name = find_directory(options["model_dir"])
    name = options["name"] or name
    kv_cache_gb = options["kv_cache_gb"]
    listen = options["listen"]
    peer = options["join"] or fleet_address(options["routers"], options["redis_url"])
    awaits = options["pipeline"] > 1 and not options["stages"]
    found = {
        "model_dir": model_dir,
        "name": name,
        "kv_cache_bytes": None if kv_cache_gb is None else int(kv_cache_gb * GIB),
        "kv_disk_gb": options["kv_disk_gb"] or DEFAULT_KV_DISK_GB,
        "decode_graph": {"auto": None, "on": True, "off": False}[options["decode_graph"]],
        "cache_eviction": None if options["cache_eviction"] == OFF else options["cache_eviction"],
        "trims_windows": options["window_cache"] == "trim",
        "rank_cpus": (),
        "serves_stage": options["serve_stage"],
        "await_stages": (options["await_stages"] or DEFAULT_AWAIT_STAGES) if awaits else None,
        "worker_id": options["worker_id"] or f"{socket.gethostname()}/{listen}",
        "advertise": options["advertise"] or advertised_address(listen, peer),
        **adapters_of(options["adapters"], options["max_adapters"], name),
    }
    given = {name: value for name, value in options.items() if name not in _RENAMED}
    return WorkerConfig(**{**given, **found})


def check_pipeline(num_stages: int, stages: Sequence[str], await_stages: str | None, *, serves_stage: bool) -> None:
    """Check the flags of a pipeline. ConfigurationError if they contradict each other, or unless --stage names either
    all other stages or none."""
    if serves_stage and (num_stages > 1 or stages or await_stages):
        raise ConfigurationError(
            "--serve-stage gets its layers from the worker that calls it; leave out --pipeline, --stage and "
            "--await-stages, which are for that worker"
        )
    if await_stages and num_stages == 1:
        raise ConfigurationError("--await-stages is for a pipeline; say with --pipeline how many stages it has")
    if await_stages and stages:
        raise ConfigurationError("--stage names the stages that --await-stages waits for; leave out one of them")
    if len(stages) not in (0, num_stages - 1):
        raise ConfigurationError(
            f"--pipeline {num_stages} needs a --stage for each of the {num_stages - 1} stages besides this worker, and "
            f"{len(stages)} are given; name all of them, or none if they join"
        )
    for address in stages:
        check_address("--stage", address)
    if await_stages:
        check_address("--await-stages", await_stages)


def check_join(address: str | None, *, serves_stage: bool) -> None:
    """Raise ConfigurationError if --join is given to a process that is not a stage, or if its address is not valid."""
    if address is None:
        return
    if not serves_stage:
        raise ConfigurationError(
            "--join offers a stage to a worker, and this is a worker; add --serve-stage, or use headrace serve --join"
        )
    check_address("--join", address)


def check_address(flag: str, address: str) -> None:
    """Raise ConfigurationError, which names `flag`, unless the address is HOST:PORT or unix:/PATH."""
    host, _, port = address.rpartition(":")
    if not address.startswith("unix:") and not (host and port.isdecimal()):
        raise ConfigurationError(f"{flag} must be HOST:PORT or unix:/PATH, not {address!r}")


def check_speculation(speculation: str | None, draft_model: Path | None) -> None:
    """Raise ConfigurationError if a draft model is given but not used, or needed but not given."""
    if speculation in _NEED_DRAFT_MODEL and draft_model is None:
        needed = _NEED_DRAFT_MODEL[speculation]
        raise ConfigurationError(f"--speculation {speculation} needs {needed}; name the directory with --draft-model")
    if speculation not in (None, *_NEED_DRAFT_MODEL) and draft_model is not None:
        raise ConfigurationError(f"--speculation {speculation} does not use --draft-model; leave out one of them")


def adapters_of(named: Sequence[str], most: int | None, model: str) -> dict[str, Any]:
    """The settings `adapters` and `max_adapters` (how many fit into memory) that the flags describe. ConfigurationError
    if a flag is not of the form NAME=PATH, or if the flags contradict each other."""
    adapters: dict[str, Path] = {}
    for text in named:
        name, is_named, path = text.partition("=")
        if not is_named or not path:
            raise ConfigurationError(f"--adapter must be NAME=PATH, not {text!r}")
        if name in adapters:
            raise ConfigurationError(f"--adapter names {name!r} twice")
        try:
            check_name(name, model)
        except StatusError as error:
            raise ConfigurationError(f"--adapter {text}: {error.message.replace('lora_name', 'NAME')}") from None
        adapters[name] = Path(path).absolute()
    if adapters and most == 0:
        raise ConfigurationError("--max-adapters 0 leaves no room for --adapter; leave out one of them")
    return {
        "adapters": tuple(adapters.items()),
        "max_adapters": min(len(adapters), DEFAULT_MAX_ADAPTERS) if most is None else most,
    }


def main() -> None:
    """Run the command. If the flags are wrong, print one sentence and exit with status 2."""
    try:
        command.main(prog_name="headrace worker", standalone_mode=False)
    except click.UsageError as error:
        sys.exit(told(error))
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    startup.after_imports()
    main()
