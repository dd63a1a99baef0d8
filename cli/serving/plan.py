"""Decides which processes serve models on one host, with their arguments and CPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cli.hosting.settings import ModelOptions, ModelRules
from headrace.cli.serving.placement import WorkerPlace
from headrace.common import worker_flags

# The share of the available memory for the KV caches of all workers together. A single worker takes the same share.
_KV_CACHE_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to supervise.

    Others reach it at `address`: a gRPC target or an http URL. `cpus` is its affinity mask; if empty, it inherits the
    supervisor's. Processes stop in the order of `stop_phase`, lowest first. A process with a `memory_flag` gets an
    in-memory file that it keeps across restarts, passed as the flag with the value `fd:N`. If an essential process
    refuses its flags, all processes stop.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    address: str
    cpus: tuple[int, ...] = ()
    stop_phase: int = 0
    memory_flag: str | None = None
    is_essential: bool = True


@dataclass(frozen=True, slots=True)
class SecurityFiles:
    """Absolute paths of the files with keys, certificates and secrets; None if not used."""

    api_keys: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_dir: Path | None = None
    join_token_file: Path | None = None
    admin_key_file: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model and its workers. `places` has one entry for each worker, and worker i (from 0) has the number
    `first_worker` + i on the host.

    `kv_share` is the share of these workers in the memory for KV caches, if no size is given. With None, the option of
    `headrace serve` applies. A pinned model is loaded at the start; others on demand, and unloaded after `idle_s`
    seconds without requests. `num_bytes` is the memory of all its workers, and `kv_cache_bytes` that of their KV caches
    within it; both are 0 if nothing limits them.
    """

    name: str
    directory: Path
    places: tuple[WorkerPlace, ...]
    first_worker: int = 0
    kv_share: float = 1.0
    kv_cache_gb: float | None = None
    is_essential: bool = True
    is_pinned: bool = True
    is_encoder: bool = False
    """Whether it encodes texts beside models that generate. Options for generation and KV caches apply only to the
    latter."""
    idle_s: float | None = None
    num_bytes: int = 0
    kv_cache_bytes: int = 0
    options: ModelOptions = field(default_factory=ModelOptions)
    rules: ModelRules = field(default_factory=ModelRules)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of `headrace serve` that all models share. With None, the process uses its default.

    The first `prefill_workers` workers of each model compute long prompts, and the others the rest; with 0 all do both.
    `grpc_port` 0 turns the gRPC API off. The router serves its metrics at `metrics_port`, and worker i (from 0) at
    `metrics_port` + 1 + i.
    """

    host: str
    port: int
    grpc_port: int
    socket_directory: Path
    aliases: tuple[str, ...] = ()
    shadows: tuple[str, ...] = ()
    worker: Mapping[str, Any] = field(default_factory=dict)
    """The options that are passed on to workers, by their names in `worker_flags`."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_templates: tuple[str, ...] = ()
    special_tokens_in_text: str | None = None
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: Path | None = None
    mcp_servers: tuple[str, ...] = ()
    mcp_headers: Path | None = None
    mcp_config: Path | None = None
    ollama_manage: bool = False
    ollama_blobs: Path | None = None
    cors_origins: tuple[str, ...] = ()
    redis_url: str | None = None
    batch_store: str | None = None
    created_record: Path | None = None
    log_level: str | None = None
    log_format: str | None = None
    otlp_endpoint: str | None = None
    metrics_port: int | None = None
    plain_grpc: bool = False
    warm_restart: bool = True
    prefill_workers: int = 0
    files: SecurityFiles = field(default_factory=SecurityFiles)
    has_rules: bool = False
    """Whether models have parsers and limits of their own, without which no request may be answered."""

    @property
    def url(self) -> str:
        """The base URL of the API, without /v1."""
        return base_url(self.host, self.port, "http" if self.files.tls_cert is None else "https")


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The options of `headrace serve --join`: a model, the address of the worker that has the first stage, and that at
    which the first stage of this host listens; further ones take the ports after it."""

    name: str
    directory: Path
    join: str
    listen: str
    kv_cache_gb: float | None = None
    log_level: str | None = None
    log_format: str | None = None
    otlp_endpoint: str | None = None
    files: SecurityFiles = field(default_factory=SecurityFiles)


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """SCHEME://HOST:PORT, with brackets around an IPv6 address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def router_address(options: ServeOptions) -> str:
    """The router's gRPC target."""
    return f"unix:{options.socket_directory / 'router.sock'}"


def host_address(options: ServeOptions) -> str:
    """The gRPC target at which `headrace serve` itself answers."""
    return f"unix:{options.socket_directory / 'host.sock'}"


def front_specs(options: ServeOptions, python: str) -> tuple[ProcessSpec, ...]:
    """The processes that all models share. `python` is the interpreter that runs them."""
    return (_gateway(options, python), _router(options, python))


def worker_specs(options: ServeOptions, model: ModelPlan, python: str) -> tuple[ProcessSpec, ...]:
    """The processes of a model."""
    return tuple(_worker(options, model, python, index, place) for index, place in enumerate(model.places))


def _worker(options: ServeOptions, model: ModelPlan, python: str, index: int, place: WorkerPlace) -> ProcessSpec:
    number = model.first_worker + index
    name = f"worker-{number}"
    address = f"unix:{options.socket_directory / name}.sock"
    argv = [python, "-m", "headrace.worker", "--model", str(model.directory), "--name", model.name]
    argv += ["--worker-id", name, "--listen", address, "--router", router_address(options)]
    argv += ["--threads", str(place.num_threads)]
    argv += ["--memory-node", str(place.node)] if place.num_ranks == 1 else []
    is_divided = model.options.worker.get("tensor_parallel") or options.worker.get("tensor_parallel")
    own = {**model.options.worker, "kv_cache_gb": model.kv_cache_gb}
    own["tensor_parallel"] = place.num_ranks if is_divided else None
    argv += worker_flags.arguments(options.worker, own, is_encoder=model.is_encoder)
    argv += _kv_cache_shares(options, model, place) + _of_encoders(model)
    if options.prefill_workers and not model.is_encoder:
        argv += ["--role", "prefill" if index < options.prefill_workers else "decode"]
    argv += _metrics(options, 1 + number) + _observation(options) + _membership(options)
    # Each stage of a pipeline has its part of the KV cache, in memory of its own.
    is_whole = num_stages(model.options.worker, options.worker) == 1
    memory_flag = "--kv-memory" if options.warm_restart and is_whole else None
    return ProcessSpec(
        name,
        "worker",
        tuple(argv),
        address,
        place.cpus,
        stop_phase=1,
        memory_flag=memory_flag,
        is_essential=model.is_essential,
    )


def stage_specs(options: StageOptions, places: Sequence[WorkerPlace], python: str) -> tuple[ProcessSpec, ...]:
    """The processes that are stages of a pipeline on another host."""
    return tuple(_stage(options, places, python, index, place) for index, place in enumerate(places))


def _stage(
    options: StageOptions, places: Sequence[WorkerPlace], python: str, index: int, place: WorkerPlace
) -> ProcessSpec:
    listen = _address_after(options.listen, index)
    argv = [python, "-m", "headrace.worker", "--serve-stage", "--model", str(options.directory), "--name", options.name]
    argv += ["--listen", listen, "--join", options.join]
    argv += ["--threads", str(place.num_threads)]
    # Each rank takes the memory of its own node.
    argv += ["--memory-node", str(place.node)] if place.num_ranks == 1 else ["--tensor-parallel", str(place.num_ranks)]
    if options.kv_cache_gb is not None:
        argv += ["--kv-cache-gb", str(options.kv_cache_gb)]
    elif len(places) > 1:
        argv += kv_cache_shares(place, places)
    argv += _observation(options) + _membership(options)
    return ProcessSpec(f"stage-{index}", "stage", tuple(argv), listen, place.cpus)


def _address_after(address: str, count: int) -> str:
    """HOST:PORT with a higher port, or the path of a socket with a number."""
    if not count:
        return address
    host, _, port = address.rpartition(":")
    return f"{address}.{count}" if address.startswith("unix:") else f"{host}:{int(port) + count}"


def num_stages(own: Mapping[str, Any], of_all: Mapping[str, Any]) -> int:
    """The number of stages among which a model's layers are divided, from its own worker options or those for all
    models."""
    return int(own.get("pipeline") or of_all.get("pipeline") or 1)


def _of_encoders(model: ModelPlan) -> list[str]:
    """The options of models that encode texts."""
    argv = _given("--pooling", model.options.pooling)
    if model.options.normalizes is not None:
        argv += ["--normalize" if model.options.normalizes else "--no-normalize"]
    return argv


def _kv_cache_shares(options: ServeOptions, model: ModelPlan, place: WorkerPlace) -> list[str]:
    """The share of a worker's KV cache in the memory, if no size is given. A single worker has its own default."""
    is_sized = model.kv_cache_gb is not None or options.worker.get("kv_cache_gb") is not None
    if model.is_encoder or is_sized or (len(model.places) == 1 and model.kv_share == 1.0):
        return []
    return kv_cache_shares(place, model.places, model.kv_share)


def kv_cache_shares(place: WorkerPlace, places: Sequence[WorkerPlace], kv_share: float = 1.0) -> list[str]:
    """The flags for the KV cache at one of the `places` of a host, whose workers together have the share `kv_share`."""
    num_on_node = max(sum(node in other.nodes for other in places) for node in place.nodes)
    share = _KV_CACHE_SHARE * kv_share
    return [
        *("--kv-cache-share", str(share / len(places))),
        *("--kv-cache-node-share", str(share / num_on_node)),
    ]


def _router(options: ServeOptions, python: str) -> ProcessSpec:
    address = router_address(options)
    argv = [python, "-m", "headrace.router", "--listen", address, *_metrics(options, 0), *_observation(options)]
    argv += _given("--max-ttft", options.worker.get("max_ttft")) + _membership(options) + _calls(options)
    return ProcessSpec("router", "router", tuple(argv), address, stop_phase=1)


def _gateway(options: ServeOptions, python: str) -> ProcessSpec:
    argv = [python, "-m", "headrace.gateway", "--host", options.host, "--port", str(options.port)]
    argv += ["--router", router_address(options), "--model-host", host_address(options)]
    argv += ["--await-model-host"] if options.has_rules else []
    argv += [part for alias in options.aliases for part in ("--alias", alias)]
    argv += [part for shadow in options.shadows for part in ("--shadow", shadow)]
    argv += _given("--grpc-port", options.grpc_port or None)
    argv += _given("--tool-parser", options.tool_parser) + _given("--reasoning-parser", options.reasoning_parser)
    argv += [part for template in options.chat_templates for part in ("--chat-template", template)]
    argv += _given("--special-tokens-in-text", options.special_tokens_in_text)
    argv += [part for name in options.allowed_media_domains for part in ("--allowed-media-domains", name)]
    argv += _given("--allowed-local-media-path", options.allowed_local_media_path)
    argv += [part for server in options.mcp_servers for part in ("--mcp-server", server)]
    argv += _given("--mcp-headers", options.mcp_headers) + _given("--mcp-config", options.mcp_config)
    argv += ["--ollama-manage"] if options.ollama_manage else []
    argv += _given("--ollama-blobs", options.ollama_blobs and options.ollama_blobs.absolute())
    argv += [part for origin in options.cors_origins for part in ("--cors-origin", origin)]
    argv += _given("--redis", options.redis_url) + _given("--batch-store", options.batch_store)
    argv += _observation(options) + _membership(options) + _calls(options)
    for flag in ("api_keys", "tls_cert", "tls_key", "admin_key_file"):
        argv += _given(f"--{flag.replace('_', '-')}", getattr(options.files, flag))
    return ProcessSpec("gateway", "gateway", tuple(argv), options.url)


def _membership(options: ServeOptions | StageOptions) -> list[str]:
    """The flags by which the processes authenticate one another."""
    files = options.files
    return [*_given("--tls-dir", files.tls_dir), *_given("--join-token-file", files.join_token_file)]


def _calls(options: ServeOptions) -> list[str]:
    """The flags for calls from gateway to router and from router to workers."""
    return ["--plain-grpc"] if options.plain_grpc else []


def _observation(options: ServeOptions | StageOptions) -> list[str]:
    """The flags for logs and traces, the same for every process."""
    level = _given("--log-level", options.log_level)
    log_format = _given("--log-format", options.log_format)
    return [*level, *log_format, *_given("--otlp-endpoint", options.otlp_endpoint)]


def _metrics(options: ServeOptions, offset: int) -> list[str]:
    if options.metrics_port is None:
        return []
    host = f"[{options.host}]" if ":" in options.host else options.host
    return ["--metrics", f"{host}:{options.metrics_port + offset}"]


def _given(flag: str, value: float | str | Path | None) -> list[str]:
    return [] if value is None else [flag, str(value)]
