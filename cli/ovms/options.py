"""Every option of OVMS's graphs and of its configuration file, and how headrace treats it.

An option is applied, named or refused. A named option has no effect on answers: its model is served, and one line tells
the operator what to use instead. A refused option would change answers, or needs what headrace does not have: its model
is not served, and the error says what to do. `docs/reference/ovms.md` is written from these tables.

The names, types and defaults are those of OVMS's own files.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cli.hosting.settings import ModelOptions, ModelRules, ModelSettings
from headrace.common.parser_names import AUTO, reasoning_parser_named, tool_parser_named
from headrace.common.worker_flags import WORKER_FLAGS

ROOM_FOR_PROMPTS = 8
"""Tokens of a step that a worker needs beside one for each sequence."""
_REMOTE = ("gs://", "s3://", "azure://", "az://", "azfs://", "http://", "https://")


class OptionError(Exception):
    """A model cannot be served as its options say. The text names the option and the remedy."""


class Fate(enum.Enum):
    """How headrace treats an option."""

    APPLIED = "applied"
    NAMED = "named"
    REFUSED = "refused"


@dataclass(slots=True)
class Draft:
    """A model while its options are read. `directory` is that to which paths are relative."""

    directory: Path
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def path(self, text: str) -> Path:
        """A path as OVMS reads it. Raises OptionError if it is not on this host."""
        if text.startswith(_REMOTE):
            raise OptionError(f"{text} is not on this host; copy it, and name the copy")
        return Path(self.directory, text)

    def finished(self, name: str) -> ModelSettings:
        """The model."""
        passed = {flag.option for flag in WORKER_FLAGS} & self.options.keys()
        own = {option: value for option, value in self.options.items() if option not in passed}
        options = ModelOptions(**own, worker={option: self.options[option] for option in passed})
        return ModelSettings(name=name, options=options, rules=ModelRules(**self.rules), **self.settings)


Take = Callable[[Draft, Any], None]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a message or of a JSON object. `kind` is its type in a graph: string, bool, uint32, uint64, float, a
    tuple with the names of an enum, or the options of a message. `what` is how it is applied, or what to use instead.
    `take` applies it; the values `without_effect` need no word."""

    name: str
    kind: str | tuple[str, ...] | tuple[Option, ...]
    fate: Fate
    what: str
    take: Take
    is_required: bool = False
    without_effect: Collection[Any] = ()


def _applied(
    name: str, kind: str | tuple[str, ...] | tuple[Option, ...], what: str, take: Take, *, is_required: bool = False
) -> Option:
    return Option(name, kind, Fate.APPLIED, what, take, is_required)


def _named(name: str, kind: str | tuple[str, ...], what: str, without_effect: Collection[Any] = ()) -> Option:
    def take(draft: Draft, value: Any) -> None:
        if value not in without_effect:
            draft.notes.append(f"{name} has no effect: {what}")

    return Option(name, kind, Fate.NAMED, what, take, without_effect=without_effect)


def _refused(
    name: str, kind: str | tuple[str, ...] | tuple[Option, ...], what: str, without_effect: Collection[Any] = ()
) -> Option:
    def take(draft: Draft, value: Any) -> None:
        if value not in without_effect:
            raise OptionError(f"{name} is not supported: {what}")

    return Option(name, kind, Fate.REFUSED, what, take, without_effect=without_effect)


def _setting(name: str) -> Take:
    return lambda draft, value: draft.settings.update({name: value})


def _option(name: str) -> Take:
    return lambda draft, value: draft.options.update({name: value})


def _rule(name: str) -> Take:
    return lambda draft, value: draft.rules.update({name: value})


def _elsewhere(_draft: Draft, _value: Any) -> None:
    """For options that `configuration` applies itself."""


def take_all(options: Sequence[Option], values: Mapping[str, Any], draft: Draft) -> None:
    """Take all given values, in the order of `options`. Raises OptionError."""
    for option in options:
        if option.name in values:
            option.take(draft, values[option.name])


# -- devices and paths ----------------------------------------------------------------------------------------------

DEVICE = "`CPU`, or `AUTO` with the CPU among its devices; others are refused: headrace computes on CPUs only"


def take_device(draft: Draft, value: str) -> None:
    """Check the name of a device. Raises OptionError if it does not include the CPU."""
    kind, _, devices = value.upper().partition(":")
    named = [device.strip().partition(".")[0] for device in devices.split(",") if device.strip()]
    if kind in ("", "CPU"):
        return
    if kind == "AUTO" and (not named or "CPU" in named):
        if named:
            draft.notes.append(f"device {value} is the CPU: headrace computes on CPUs only")
        return
    raise OptionError(f"device {value} is not supported: headrace computes on CPUs only; say CPU, or use OVMS for it")


def _take_models_path(draft: Draft, value: str) -> None:
    path = draft.path(value)
    if not path.exists():
        raise OptionError(f"models_path {value} does not exist: there is no {path}")
    draft.settings["model"] = str(path.resolve())


def _take_draft_model(draft: Draft, value: str) -> None:
    if not value:
        return
    path = draft.path(value)
    if not path.is_dir():
        raise OptionError(f"draft_models_path {value} does not exist: there is no directory {path}")
    draft.options["draft_model"] = path.resolve()


def _take_eagle3(draft: Draft, value: bool) -> None:
    if value:
        draft.options["speculation"] = "eagle3"


# -- caches ---------------------------------------------------------------------------------------------------------

KV_PRECISIONS: Mapping[str, str] = {
    "u8": "u8",
    "i8": "u8",
    "int8": "u8",
    "u4": "u4",
    "i4": "u4",
    "int4": "u4",
    "bf16": "bf16",
    "f32": "f32",
    "fp32": "f32",
}


def take_kv_precision(draft: Draft, value: Any) -> None:
    """Set the precision of the KV cache. Raises OptionError for one that there is not."""
    text = str(value).lower()
    if not text:
        return
    if text not in KV_PRECISIONS:
        raise OptionError(f"KV_CACHE_PRECISION {value} is not supported; say u8, u4, bf16 or f32")
    draft.options["kv_precision"] = KV_PRECISIONS[text]


def take_cache_size(draft: Draft, value: int) -> None:
    """Set the size of the KV caches of all workers together, in GiB; 0 for headrace's own size."""
    if value:
        draft.options["kv_total_gb"] = float(value)


KV_CRUSH: tuple[Option, ...] = (
    _refused("budget", "uint64", "evicted tokens are not gathered into representatives; set it to 0", (0,)),
    _named("anchor_point_mode", ("RANDOM", "ZEROS", "ONES", "MEAN", "ALTERNATING"), "there is no KVCrush", ("RANDOM",)),
    _named("rng_seed", "uint64", "there is no KVCrush", (0,)),
)


def _inner(name: str, options: Sequence[Option], value: Mapping[str, Any], draft: Draft) -> Draft:
    """A draft with the options of a message within another. Raises OptionError."""
    found = Draft(draft.directory)
    try:
        take_all(options, value, found)
    except OptionError as error:
        raise OptionError(f"{name}.{error}") from None
    draft.notes += [f"{name}.{note}" for note in found.notes]
    return found


def _take_kv_crush(draft: Draft, value: Mapping[str, Any]) -> None:
    _inner("kv_crush_config", KV_CRUSH, value, draft)


CACHE_EVICTION: tuple[Option, ...] = (
    _applied(
        "aggregation_mode", ("SUM", "NORM_SUM"), "as in `--cache-eviction`; NORM_SUM by default", _setting("mode")
    ),
    _applied("start_size", "uint64", "as in `--cache-eviction`", _setting("start_size"), is_required=True),
    _applied("recent_size", "uint64", "as in `--cache-eviction`", _setting("recent_size"), is_required=True),
    _applied("max_cache_size", "uint64", "as in `--cache-eviction`", _setting("max_cache_size"), is_required=True),
    _refused("apply_rotation", "bool", "the keys that stay keep their positions; set it to false", (False,)),
    _named("snapkv_window_size", "uint64", "the scores are those of all queries of a step", (8,)),
    Option("kv_crush_config", KV_CRUSH, Fate.REFUSED, "its `budget` must be 0; see below", _take_kv_crush),
)


def _take_eviction(draft: Draft, value: Mapping[str, Any]) -> None:
    found = _inner("cache_eviction_config", CACHE_EVICTION, value, draft).settings
    sizes = ",".join(f"{name}={found[name]}" for name in ("max_cache_size", "start_size", "recent_size"))
    draft.options["cache_eviction"] = f"{sizes},aggregation_mode={found.get('mode', 'NORM_SUM').lower()}"


SPARSE_ATTENTION: tuple[Option, ...] = tuple(
    _refused(name, kind, "see `sparse_attention_config`")
    for name, kind in (
        ("mode", ("TRISHAPE", "XATTENTION")),
        ("num_last_dense_tokens_in_prefill", "uint64"),
        ("num_retained_start_tokens_in_cache", "uint64"),
        ("num_retained_recent_tokens_in_cache", "uint64"),
        ("xattention_threshold", "float"),
        ("xattention_block_size", "uint64"),
        ("xattention_stride", "uint64"),
    )
)

# -- parsers --------------------------------------------------------------------------------------------------------


def take_tool_parser(draft: Draft, value: str) -> None:
    """Set the format of tool calls; with an empty name it is detected. Raises OptionError for an unknown name."""
    try:
        draft.rules["tool_parser"] = tool_parser_named(value or AUTO)
    except ValueError as error:
        raise OptionError(f"tool_parser {error}") from None


def take_reasoning_parser(draft: Draft, value: str) -> None:
    """Set the format of reasoning; with an empty name it is detected. Raises OptionError for an unknown name."""
    try:
        draft.rules["reasoning_parser"] = reasoning_parser_named(value or AUTO)
    except ValueError as error:
        raise OptionError(f"reasoning_parser {error}") from None


def _take_response_parser(draft: Draft, value: str) -> None:
    if "tool_parser" not in draft.rules:
        take_tool_parser(draft, value)


# -- plugin_config --------------------------------------------------------------------------------------------------

_TRUE = (True, "true", "TRUE", "YES", "yes", "1")
_FALSE = (False, "false", "FALSE", "NO", "no", "0")


def _take_execution_mode(draft: Draft, value: Any) -> None:
    modes = {"ACCURACY": "accuracy", "PERFORMANCE": "performance"}
    if str(value).upper() not in modes:
        raise OptionError(f"EXECUTION_MODE_HINT {value} is not supported; say ACCURACY or PERFORMANCE")
    draft.options["execution_mode"] = modes[str(value).upper()]


def _take_precision(draft: Draft, value: Any) -> None:
    if str(value).lower() in ("f32", "fp32"):
        draft.options["execution_mode"] = "accuracy"
    elif str(value).lower() not in ("", "bf16", "f16", "fp16", "undefined", "dynamic"):
        raise OptionError(f"INFERENCE_PRECISION_HINT {value} is not supported; say f32, or leave it out")


def _take_threads(draft: Draft, value: Any) -> None:
    if not str(value).isdecimal():
        raise OptionError(f"INFERENCE_NUM_THREADS must be a whole number, not {value}")
    if int(value):
        draft.settings["threads"] = int(value)


def _take_lookup(draft: Draft, value: Any) -> None:
    if value in _TRUE:
        draft.options["speculation"] = "ngram"
    elif value not in _FALSE:
        raise OptionError(f"prompt_lookup must be true or false, not {value}")


_NODES = "there is one worker for each NUMA node, with one stream; `--workers` and `--threads` say otherwise"
_BY_SERVE = "`headrace serve` places workers on cores and sets their affinity; see `headrace topology`"
_NPU = "it is for NPUs; `--max-context-tokens` bounds prompts and answers"
_AT_START = "models compile at each start"
PLUGIN_CONFIG: tuple[Option, ...] = (
    _applied(
        "KV_CACHE_PRECISION", "string", "`--kv-precision`: u8, u4, bf16 or f32; others are refused", take_kv_precision
    ),
    _applied("EXECUTION_MODE_HINT", "string", "`--execution-mode`", _take_execution_mode),
    _applied(
        "INFERENCE_PRECISION_HINT",
        "string",
        "`f32` is `--execution-mode accuracy`; `bf16` and `f16` are the default, the fastest precision of the CPU",
        _take_precision,
    ),
    _applied("INFERENCE_NUM_THREADS", "string", "`--threads` of each worker", _take_threads),
    _applied("prompt_lookup", "bool", "`true` is `--speculation ngram`", _take_lookup),
    _named(
        "DYNAMIC_QUANTIZATION_GROUP_SIZE",
        "string",
        "the kernels use their own group size, as with 32; `--execution-mode accuracy` keeps activations unquantised",
        (32, "32"),
    ),
    _named("NUM_STREAMS", "string", _NODES, (1, "1", 0, "0", "AUTO")),
    _named("PERFORMANCE_HINT", "string", "steps batch all requests, and are as long as latency allows", ("LATENCY",)),
    _named("PERFORMANCE_HINT_NUM_REQUESTS", "string", "use `max_num_seqs`"),
    _named("MODEL_DISTRIBUTION_POLICY", "string", _NODES, ("",)),
    _named("ENABLE_CPU_PINNING", "bool", _BY_SERVE),
    _named("ENABLE_HYPER_THREADING", "bool", _BY_SERVE),
    _named("ENABLE_CPU_RESERVATION", "bool", _BY_SERVE),
    _named("SCHEDULING_CORE_TYPE", "string", _BY_SERVE),
    _named("AFFINITY", "string", _BY_SERVE),
    _named("COMPILATION_NUM_THREADS", "string", _BY_SERVE),
    _named("CACHE_DIR", "string", _AT_START, ("",)),
    _named("CACHE_MODE", "string", _AT_START),
    _named("ENABLE_MMAP", "bool", "weights are always mapped", _TRUE),
    _named("ATTENTION_BACKEND", "string", "attention is always paged", ("PA",)),
    _named("PERF_COUNT", "bool", "`/metrics` has the times of steps", _FALSE),
    _named("LOG_LEVEL", "string", "use `--log-level`"),
    _named("MAX_PROMPT_LEN", "string", _NPU),
    _named("MIN_RESPONSE_LEN", "string", _NPU),
    _named("DEVICE_PROPERTIES", "string", "properties of other devices do not concern the CPU"),
    _refused("KEY_CACHE_PRECISION", "string", "keys and values have one precision; use KV_CACHE_PRECISION"),
    _refused("VALUE_CACHE_PRECISION", "string", "keys and values have one precision; use KV_CACHE_PRECISION"),
    _refused("KEY_CACHE_GROUP_SIZE", "string", "keys are quantised by token; leave it out"),
    _refused("VALUE_CACHE_GROUP_SIZE", "string", "values are quantised by token; leave it out"),
)


def take_plugin_config(draft: Draft, value: str | Mapping[str, Any]) -> None:
    """Read `plugin_config`, a JSON object or its text. Raises OptionError."""
    if isinstance(value, str):
        if not value.strip():
            return
        try:
            value = json.loads(value)
        except ValueError as error:
            raise OptionError(f"plugin_config is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise OptionError("plugin_config must be a JSON object")
    known = {option.name: option for option in PLUGIN_CONFIG}
    found = Draft(draft.directory, draft.settings, draft.options, draft.rules)
    for name, one in value.items():
        if name not in known:
            raise OptionError(f"plugin_config has {name}, which headrace does not know; leave it out")
        try:
            known[name].take(found, one)
        except OptionError as error:
            raise OptionError(f"plugin_config: {error}") from None
    draft.notes += [f"plugin_config: {note}" for note in found.notes]


# -- the options of each calculator ---------------------------------------------------------------------------------

_SHARES_STEPS = "the draft model shares the steps and the KV blocks of the model"
_PLUGIN = "its properties, see there"


def _take_pipeline(draft: Draft, value: str) -> None:
    if value == "OMNI":
        raise OptionError("pipeline_type OMNI is not supported: headrace reads and writes no speech; use OVMS for it")


TEXT_GENERATION: tuple[Option, ...] = (
    _applied("models_path", "string", "the model's directory or GGUF file", _take_models_path, is_required=True),
    _applied("max_num_batched_tokens", "uint64", "`--max-num-batched-tokens`", _option("max_num_batched_tokens")),
    _applied("cache_size", "uint64", "`--kv-cache-gb`, divided among the workers; 0 is its default", take_cache_size),
    _applied("max_num_seqs", "uint64", "`--max-num-seqs`", _option("max_num_seqs")),
    _named(
        "dynamic_split_fuse",
        "bool",
        "long prompts are always divided into steps, beside running streams; answers stay the same",
        (True,),
    ),
    _applied("device", "string", DEVICE, take_device),
    _applied("plugin_config", "string", _PLUGIN, take_plugin_config),
    _applied("best_of_limit", "uint32", "requests with a larger `best_of` are refused", _rule("best_of_limit")),
    _applied(
        "max_tokens_limit",
        "uint32",
        "requests with a larger `max_tokens` are refused; it is also the default of `max_tokens`",
        _rule("max_tokens_limit"),
    ),
    _named(
        "enable_prefix_caching",
        "bool",
        "prefixes are always cached, and answers stay the same; requests with a `cache_salt` share nothing",
        (True,),
    ),
    _applied("draft_models_path", "string", "`--draft-model`", _take_draft_model),
    _applied("draft_device", "string", DEVICE, take_device),
    _named("draft_max_num_batched_tokens", "uint64", _SHARES_STEPS),
    _named("draft_cache_size", "uint64", _SHARES_STEPS),
    _named("draft_block_size", "uint64", _SHARES_STEPS),
    _named("draft_max_num_seqs", "uint64", _SHARES_STEPS),
    _named("draft_dynamic_split_fuse", "bool", _SHARES_STEPS),
    _applied("draft_eagle3_mode", "bool", "`--speculation eagle3`; heads in their published format", _take_eagle3),
    _applied(
        "pipeline_type",
        ("LM", "VLM", "LM_CB", "VLM_CB", "OMNI", "AUTO"),
        "all but `OMNI` are the same: a model reads images if its directory has networks for them; `OMNI` is refused",
        _take_pipeline,
    ),
    _applied("cache_eviction_config", CACHE_EVICTION, "`--cache-eviction`", _take_eviction),
    _applied("tool_parser", "string", "`--tool-parser` for this model", take_tool_parser),
    _applied("reasoning_parser", "string", "`--reasoning-parser` for this model", take_reasoning_parser),
    _applied("response_parser", "string", "as `tool_parser`; older versions have it", _take_response_parser),
    _named(
        "enable_tool_guided_generation",
        "bool",
        "calls follow their schemas if `tool_choice` requires them or a tool is `strict`; set one of them in requests",
        (False,),
    ),
    _refused(
        "sparse_attention_config",
        SPARSE_ATTENTION,
        "every token attends to all others, so answers would differ; remove it from the graph",
    ),
    _named("cache_interval_multiplier", "uint64", "states of recurrent layers are kept by headrace's own rule"),
    _named("block_size", "uint64", "the size of KV blocks is that of the kernels; older versions have it", (32,)),
    _named("chat_template_mode", ("MINJA", "JINJA"), "Jinja itself renders chat templates", ("JINJA",)),
)

_POOLING = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}
EMBEDDINGS: tuple[Option, ...] = (
    _applied("models_path", "string", "the model's directory", _take_models_path, is_required=True),
    _applied("normalize_embeddings", "bool", "`--normalize` of the worker; true by default", _option("normalizes")),
    _applied("target_device", "string", DEVICE, take_device),
    _applied("plugin_config", "string", _PLUGIN, take_plugin_config),
    _applied(
        "pooling",
        tuple(_POOLING),
        "`--pooling` of the worker; CLS by default",
        lambda draft, value: draft.options.update(pooling=_POOLING[value]),
    ),
    _applied(
        "truncate",
        "bool",
        "longer texts are truncated, unless the request has `truncate_prompt_tokens`",
        _rule("truncates_texts"),
    ),
)
RERANK: tuple[Option, ...] = (
    _applied("models_path", "string", "the model's directory", _take_models_path, is_required=True),
    _applied("max_allowed_chunks", "uint64", "requests with more documents are refused", _rule("max_documents")),
    _applied("max_position_embeddings", "uint64", "`--max-context-tokens`", _setting("max_context_tokens")),
    _applied("target_device", "string", DEVICE, take_device),
    _applied("plugin_config", "string", _PLUGIN, take_plugin_config),
)

# -- config.json ----------------------------------------------------------------------------------------------------

CLASSIC = "it is for models with tensors as inputs, which headrace does not serve; leave it out, or use OVMS for it"
GRAPH_ENTRY: tuple[Option, ...] = (
    _applied("name", "string", "the model's name in requests", _elsewhere, is_required=True),
    _applied("base_path", "string", "the graph's directory, relative to the file; by default `name`", _elsewhere),
    _applied("graph_path", "string", "the graph, relative to `base_path`; by default `graph.pbtxt`", _elsewhere),
    _applied(
        "subconfig",
        "string",
        "its models are served too; relative to `base_path`, by default `subconfig.json`",
        _elsewhere,
    ),
)
MODEL_ENTRY: tuple[Option, ...] = (
    *GRAPH_ENTRY,
    _applied("target_device", "string", DEVICE, take_device),
    _applied("plugin_config", "object", _PLUGIN, take_plugin_config),
    _named("nireq", "integer", "use `max_num_seqs` in the graph", (0,)),
    _named("allow_cache", "bool", _AT_START, (False,)),
    _named("model_version_policy", "object", "a model has one version, its files"),
    *(
        _refused(name, "object", CLASSIC)
        for name in (
            "batch_size",
            "shape",
            "layout",
            "mean",
            "scale",
            "color_format",
            "precision",
            "custom_loader_options",
        )
    ),
)
CONFIGURATION: tuple[Option, ...] = (
    _applied("mediapipe_config_list", "list", "graphs", _elsewhere),
    _applied(
        "model_config_list",
        "list",
        "directories with a graph, and of models that generate, embed or rank texts. Models with tensors as inputs are "
        "refused",
        _elsewhere,
    ),
    _named("monitoring", "object", "`/metrics` is always on, with headrace's own metrics"),
    _named("custom_loader_config_list", "list", "models are loaded from directories only", ([],)),
    _named("custom_node_library_config_list", "list", "there are no pipelines with nodes", ([],)),
    _named("pipeline_config_list", "list", "pipelines of models are not served; use OVMS for them", ([],)),
)


def fit_steps(draft: Draft) -> None:
    """Let the sequences of a step leave room for prompts, as a worker needs it. Raises OptionError if none would be
    left."""
    tokens = draft.options.get("max_num_batched_tokens")
    seqs = draft.options.get("max_num_seqs")
    if tokens is not None and tokens <= ROOM_FOR_PROMPTS:
        least = ROOM_FOR_PROMPTS + 1
        raise OptionError(f"max_num_batched_tokens {tokens} is too small for headrace; say at least {least}")
    if tokens is None or seqs is None or seqs + ROOM_FOR_PROMPTS <= tokens:
        return
    draft.options["max_num_seqs"] = fitting = tokens - ROOM_FOR_PROMPTS
    draft.notes.append(
        f"max_num_seqs is {fitting} instead of {seqs}: steps of max_num_batched_tokens {tokens} need room for prompts"
    )
