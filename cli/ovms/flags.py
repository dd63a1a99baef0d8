"""The flags of OVMS's command `ovms`, and how `headrace ovms` treats each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.cli.ovms.graphs import Calculator
from headrace.cli.ovms.options import CLASSIC, DEVICE, Fate, Option, OptionError
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK, TASK_UNSPECIFIED, Task


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag. `kind` is text, whole (a number), switch (without a value), or bool (true or false). `what` is how it is
    applied, or what to use instead; `without_effect` are values that need no word."""

    name: str
    kind: str
    fate: Fate
    what: str
    without_effect: tuple[Any, ...] = ()

    @property
    def parameter(self) -> str:
        """The name of the flag as a parameter in Python."""
        return self.name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class GraphFlag:
    """A flag that is an option of a graph, or a property in its `plugin_config`, of models for some tasks."""

    name: str
    kind: str
    option: str
    tasks: tuple[Task, ...]
    is_property: bool = False


def _applied(name: str, kind: str, what: str) -> Flag:
    return Flag(name, kind, Fate.APPLIED, what)


def _named(name: str, kind: str, what: str, *without_effect: Any) -> Flag:
    return Flag(name, kind, Fate.NAMED, what, without_effect)


def _refused(name: str, kind: str, what: str) -> Flag:
    return Flag(name, kind, Fate.REFUSED, what)


_IMAGES = "headrace generates no images or speech; leave it out, or use OVMS for it"
_GRPC = "the gRPC API shares the gateway's process and its limits"
_CORS = "pages of allowed origins may use the methods and headers of the API"
FLAGS: tuple[Flag, ...] = (
    _applied("rest_port", "whole", "`--port` of `headrace serve`; 8000 by default"),
    _applied("rest_bind_address", "text", "`--host` of `headrace serve`, one address; 0.0.0.0 by default, as in OVMS"),
    _applied("port", "whole", "`--grpc-port` of `headrace serve`; by default there is no gRPC API"),
    _applied("grpc_bind_address", "text", "it must be that of the HTTP API: both APIs are of one gateway"),
    _applied("config_path", "text", "`--config` of `headrace serve`; a directory stands for its `config.json`"),
    _applied("file_system_poll_wait_seconds", "whole", "`--config-poll-s` of `headrace serve`; 1 by default"),
    _applied("model_name", "text", "the model's name in requests"),
    _applied("model_path", "text", "the directory of the model or its graph, or a GGUF file"),
    _applied("model_repository_path", "text", "the directory of all models; `OVMS_MODEL_REPOSITORY_PATH` by default"),
    _applied("source_model", "text", "OWNER/NAME on the hub, pulled into the repository if it is not there"),
    _applied("gguf_filename", "text", "the GGUF file of `--source_model`; of several pieces, the first one"),
    _applied("overwrite_models", "switch", "files in the repository are replaced"),
    _applied(
        "weight-format",
        "text",
        "weights of an export: int4, int8, fp16 or bf16; by default int8, or int4 if that fits better",
    ),
    _applied(
        "extra_quantization_params", "text", "`--group-size` and `--ratio` as in `headrace pull`; others are refused"
    ),
    _applied("task", "text", "text_generation, embeddings or rerank; by default that of the files; others are refused"),
    _applied("target_device", "text", DEVICE),
    _applied("plugin_config", "text", "as in graphs"),
    _applied("pull", "switch", "pulls the model into the repository, with a graph, and serves nothing"),
    _applied("configure", "switch", "writes `graph.pbtxt` for the model, and serves nothing"),
    _applied("list_models", "switch", "lists the models of the repository"),
    _applied("add_to_config", "switch", "adds the model to the file of `--config_path`"),
    _applied("remove_from_config", "switch", "removes the model from the file of `--config_path`"),
    _applied("log_level", "text", "`--log-level` of `headrace serve`; TRACE is debug"),
    _applied("log_path", "text", "log lines are also appended to this file"),
    _applied("api_key_file", "text", "its first line is the key of all APIs; `API_KEY` by default"),
    _applied("allowed_local_media_path", "text", "`--allowed-local-media-path` of `headrace serve`"),
    _applied("allowed_media_domains", "text", "`--allowed-media-domains` of `headrace serve`, for each of the list"),
    _applied("allowed_origins", "text", "`--cors-origin` of `headrace serve`, for each of the list"),
    _named("allowed_methods", "text", _CORS, "*"),
    _named("allowed_headers", "text", _CORS, "*"),
    _named("allow_credentials", "switch", "browsers send no cookies; keys are in headers"),
    _named("metrics_enable", "switch", "`/metrics` is always on"),
    _named("metrics_list", "text", "`/metrics` has headrace's own metrics", ""),
    _named("grpc_workers", "whole", _GRPC, 1),
    _named("grpc_max_threads", "whole", _GRPC),
    _named("grpc_memory_quota", "whole", _GRPC),
    _named("grpc_channel_arguments", "text", _GRPC),
    _named("rest_workers", "whole", "one process answers HTTP; the models' workers compute"),
    _named("cache_dir", "text", "models compile at each start"),
    _named("custom_node_resources_cleaner_interval_seconds", "whole", "there are no custom nodes"),
    _named("verbose_response", "switch", "`return_token_ids` and `logprobs` of a request show more of an answer"),
    _named("trace_path", "text", "use `--otlp-endpoint` of `headrace serve`"),
    _named("nireq", "whole", "use `--max_num_seqs`", 0),
    _named("model_version_policy", "text", "a model has one version, its files"),
    _refused("cpu_extension", "text", "layers of other libraries are not loaded; leave it out"),
    *(
        _refused(name, "text", CLASSIC)
        for name in ("batch_size", "shape", "layout", "mean", "scale", "color_format", "precision")
    ),
    *(
        _refused(name, "text", _IMAGES)
        for name in (
            "resolution",
            "max_resolution",
            "default_resolution",
            "max_num_images_per_prompt",
            "num_images_per_prompt",
            "guidance_scale",
            "default_num_inference_steps",
            "max_num_inference_steps",
            "source_loras",
            "model_type",
        )
    ),
)

_TEXT = TASK_UNSPECIFIED
_EMBED = TASK_EMBED
_RANK = TASK_RANK
GRAPH_FLAGS: tuple[GraphFlag, ...] = (
    GraphFlag("max_num_seqs", "whole", "max_num_seqs", (_TEXT,)),
    GraphFlag("max_num_batched_tokens", "whole", "max_num_batched_tokens", (_TEXT,)),
    GraphFlag("cache_size", "whole", "cache_size", (_TEXT,)),
    GraphFlag("dynamic_split_fuse", "bool", "dynamic_split_fuse", (_TEXT,)),
    GraphFlag("enable_prefix_caching", "bool", "enable_prefix_caching", (_TEXT,)),
    GraphFlag("pipeline_type", "text", "pipeline_type", (_TEXT,)),
    GraphFlag("tool_parser", "text", "tool_parser", (_TEXT,)),
    GraphFlag("reasoning_parser", "text", "reasoning_parser", (_TEXT,)),
    GraphFlag("enable_tool_guided_generation", "bool", "enable_tool_guided_generation", (_TEXT,)),
    GraphFlag("cache_interval_multiplier", "whole", "cache_interval_multiplier", (_TEXT,)),
    GraphFlag("draft_source_model", "text", "draft_models_path", (_TEXT,)),
    GraphFlag("kv_cache_precision", "text", "KV_CACHE_PRECISION", (_TEXT,), is_property=True),
    GraphFlag("max_prompt_len", "whole", "MAX_PROMPT_LEN", (_TEXT,), is_property=True),
    GraphFlag("model_distribution_policy", "text", "MODEL_DISTRIBUTION_POLICY", (_TEXT,), is_property=True),
    GraphFlag("num_streams", "whole", "NUM_STREAMS", (_EMBED, _RANK), is_property=True),
    GraphFlag("normalize", "bool", "normalize_embeddings", (_EMBED,)),
    GraphFlag("truncate", "bool", "truncate", (_EMBED,)),
    GraphFlag("pooling", "text", "pooling", (_EMBED,)),
    GraphFlag("max_allowed_chunks", "whole", "max_allowed_chunks", (_RANK,)),
)


@dataclass(slots=True)
class GraphFlags:
    """The options of a graph that flags give, and properties for its `plugin_config`."""

    options: dict[str, Any] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)


def notes_of(given: Mapping[str, Any]) -> list[str]:
    """Notes about the given flags that have no effect. Raises OptionError for a flag that is refused."""
    notes = []
    for flag in FLAGS:
        value = given.get(flag.parameter)
        if value is None or value is False or value in flag.without_effect:
            continue
        if flag.fate is Fate.REFUSED:
            raise OptionError(f"--{flag.name} is not supported: {flag.what}")
        if flag.fate is Fate.NAMED:
            notes.append(f"--{flag.name} has no effect: {flag.what}")
    return notes


def graph_flags(given: Mapping[str, Any], calculator: Calculator) -> GraphFlags:
    """The options of a graph of this kind. Raises OptionError for a flag of another task, or a wrong value."""
    found = GraphFlags()
    for flag in GRAPH_FLAGS:
        value = given.get(flag.name)
        if value is None:
            continue
        if calculator.task not in flag.tasks:
            raise OptionError(f"--{flag.name} is not for models of {calculator.names[0]}; leave it out")
        if flag.is_property:
            found.properties[flag.option] = value
        else:
            found.options[flag.option] = _checked(flag, value, calculator)
    return found


def has_graph_flags(given: Mapping[str, Any]) -> bool:
    """Whether flags describe a graph."""
    return any(given.get(flag.name) is not None for flag in GRAPH_FLAGS)


def _checked(flag: GraphFlag, value: Any, calculator: Calculator) -> Any:
    option: Option = next(one for one in calculator.options if one.name == flag.option)
    if isinstance(option.kind, tuple) and value not in option.kind:
        raise OptionError(f"--{flag.name} must be one of {', '.join(map(str, option.kind))}, not {value}")
    return value
