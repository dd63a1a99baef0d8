"""`headrace ovms`: the command line of OpenVINO Model Server. It serves with headrace, and manages repositories."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import click

from headrace.cli.export.options import exported_weights
from headrace.cli.export.weights import BF16, EXPORTED, INT4
from headrace.cli.hosting.finding import find_draft_model
from headrace.cli.hosting.settings import HostSettings, ModelSettings
from headrace.cli.models.reference import parse_reference
from headrace.cli.ovms.configuration import GRAPH_NAME, calculator_named, finish, model_of_graph
from headrace.cli.ovms.flags import (
    FLAGS,
    GRAPH_FLAGS,
    Flag,
    GraphFlag,
    GraphFlags,
    graph_flags,
    has_graph_flags,
    notes_of,
)
from headrace.cli.ovms.graphs import CALCULATORS, Calculator, read_graph
from headrace.cli.ovms.options import Draft, OptionError, take_all, take_device, take_plugin_config
from headrace.cli.ovms.repository import add_to_config, graph_text, place_model, remove_from_config, servables
from headrace.cli.serving.configured import ModelsFile
from headrace.cli.serving.serve import Listening, Run, serve
from headrace.common.commands import CommandError
from headrace.common.model_files.networks import has_network
from headrace.common.model_files.task import task_of
from headrace.common.stores.api_keys import ApiKey, new_id, sha256_of, write_keys

_DEFAULT_PORT = 8000
_ALL_ADDRESSES = "0.0.0.0"  # as OVMS listens
_LEVELS = {"TRACE": "debug", "DEBUG": "debug", "INFO": "info", "WARNING": "warning", "ERROR": "error"}
_PLUGIN = "plugin_config"
_Command = TypeVar("_Command", bound=Callable[..., None])


def _flags(command: _Command) -> _Command:
    flags: list[Flag | GraphFlag] = [*FLAGS, *GRAPH_FLAGS]
    for flag in reversed(flags):
        command = _option(flag)(command)
    return command


def _option(flag: Flag | GraphFlag) -> Callable[[_Command], _Command]:
    spelled = [f"--{flag.name}"] + ([f"--{flag.name.replace('-', '_')}"] if "-" in flag.name else [])
    what = flag.what if isinstance(flag, Flag) else f"the option {flag.option} of a graph"
    if isinstance(flag, Flag) and flag.fate.value != "applied":
        what = f"{flag.fate.value}: {what}"
    shown = f"{what[:1].upper()}{what[1:]}.".replace("`", "")
    if flag.kind == "switch":
        return click.option(*spelled, is_flag=True, help=shown)
    kinds: Mapping[str, click.ParamType[Any]] = {"whole": click.IntRange(0), "bool": click.BOOL, "text": click.STRING}
    envvar = "OVMS_MODEL_REPOSITORY_PATH" if flag.name == "model_repository_path" else None
    return click.option(*spelled, type=kinds[flag.kind], envvar=envvar, help=shown)


@click.command("ovms")
@_flags
def ovms(**given: Any) -> None:
    """Serve models as OpenVINO Model Server (OVMS) does: its flags, with headrace.

    Flags without effect are named with what to use instead; those that headrace cannot do are refused.
    """
    begun_s = time.monotonic()
    try:
        notes = notes_of(given)
        if not (_manages(given) or given["pull"] or given["configure"]):
            _serve(given, notes, begun_s)
        for note in notes:
            click.echo(note, err=True)
        if given["list_models"]:
            for name in servables(_repository(given)):
                click.echo(name)
        elif given["add_to_config"] or given["remove_from_config"]:
            _change_config(given)
        elif given["pull"]:
            directory = _pulled(given)
            click.echo(f"{_source(given)} is in {directory}")
        else:
            directory = Path(_required(given, "model_path", "the model's directory"))
            path = _write_graph(directory, given)
            click.echo(f"wrote {path}")
    except OptionError as error:
        raise CommandError(str(error)) from None


def _manages(given: Mapping[str, Any]) -> bool:
    named = [name for name in ("list_models", "add_to_config", "remove_from_config") if given[name]]
    if len(named) > 1:
        raise OptionError(f"--{named[0]} and --{named[1]} exclude each other")
    return bool(named)


def _required(given: Mapping[str, Any], name: str, what: str) -> str:
    if not given[name]:
        raise OptionError(f"--{name} is missing; give {what}")
    return cast("str", given[name])


def _repository(given: Mapping[str, Any]) -> Path:
    return Path(_required(given, "model_repository_path", "the directory of all models"))


def _source(given: Mapping[str, Any]) -> str:
    return cast("str", given["source_model"] or _required(given, "model_name", "OWNER/NAME on the hub"))


# -- configurations and graphs --------------------------------------------------------------------------------------


def _config_path(given: Mapping[str, Any]) -> Path:
    if given["config_path"] is None and given["model_repository_path"]:
        return Path(given["model_repository_path"], "config.json")
    path = Path(_required(given, "config_path", "the configuration file"))
    return path / "config.json" if path.is_dir() else path


def _change_config(given: Mapping[str, Any]) -> None:
    config = _config_path(given)
    name = _required(given, "model_name", "the model's name")
    if given["remove_from_config"]:
        remove_from_config(config, name)
        click.echo(f"{name} is removed from {config}")
        return
    take_device(Draft(Path()), given["target_device"] or "")
    more = {key: given[key] for key in ("target_device",) if given[key]}
    if given[_PLUGIN]:
        take_plugin_config(Draft(Path()), given[_PLUGIN])
        more[_PLUGIN] = json.loads(given[_PLUGIN])
    add_to_config(config, name, _base_path(given, config, name), more)
    click.echo(f"{name} is added to {config}")


def _base_path(given: Mapping[str, Any], config: Path, name: str) -> str:
    """The path of a model for a configuration: as given, or within the repository. Raises OptionError."""
    if given["model_path"] is not None and given["model_repository_path"] is None:
        if not Path(config.parent, given["model_path"]).exists():
            raise OptionError(f"--model_path {given['model_path']} does not exist; it is relative to {config}")
        return str(given["model_path"])
    path = Path(_repository(given), given["model_path"] or name).absolute()
    if not path.exists():
        raise OptionError(f"there is no model {path}; pull it with --pull, or give --model_path")
    below = config.parent.absolute()
    return str(path.relative_to(below) if path.is_relative_to(below) else path)


def _write_graph(directory: Path, given: Mapping[str, Any], draft: str | None = None) -> Path:
    """Write the graph of a model whose files are in a directory, as flags describe it. `draft` is the path of its draft
    model, if the flags name one. Raises OptionError."""
    if not directory.is_dir() and directory.suffix != ".gguf":
        raise OptionError(f"--model_path {directory} is no directory")
    models_path = "./" if directory.is_dir() else directory.name
    calculator = _calculator(given, directory)
    flags = _values(given, calculator)
    values = {"models_path": models_path, **flags.options}
    if "draft_models_path" in values:
        values["draft_models_path"] = draft or str(find_draft_model(values["draft_models_path"]))
    if flags.properties:
        values[_PLUGIN] = json.dumps(flags.properties)
    path = (directory if directory.is_dir() else directory.parent) / GRAPH_NAME
    trial = Draft(path.parent)
    take_all(calculator.options, values, trial)
    finish(trial, "m", calculator)
    for note in trial.notes:
        click.echo(note, err=True)
    path.write_text(graph_text(calculator, values), encoding="utf-8")
    return path


def _calculator(given: Mapping[str, Any], directory: Path) -> Calculator:
    """The kind of graph for a model. Raises OptionError."""
    if given["task"]:
        return calculator_named(given["task"])
    found = task_of(directory)
    return next(calculator for calculator in CALCULATORS if calculator.task == found)


def _values(given: Mapping[str, Any], calculator: Calculator) -> GraphFlags:
    """The options of a graph as flags give them. Raises OptionError."""
    found = graph_flags(given, calculator)
    device = next(option.name for option in calculator.options if option.name in ("device", "target_device"))
    if given["target_device"]:
        found.options[device] = given["target_device"]
    if given[_PLUGIN]:
        try:
            found.properties = {**json.loads(given[_PLUGIN]), **found.properties}
        except (ValueError, TypeError):
            raise OptionError("--plugin_config must be a JSON object") from None
    return found


# -- pulling --------------------------------------------------------------------------------------------------------


def _pulled(given: Mapping[str, Any]) -> Path:
    """The directory of a model in the repository, after pulling it if it is not there. Raises CommandError."""
    # Imported late: most uses need no network.
    from headrace.cli.models.pull import pull_model, source_of

    source = _source(given)
    reference = parse_reference(source)
    if reference is None:
        raise OptionError(f"--source_model must be OWNER/NAME on the hub, not {source!r}")
    target = _repository(given) / reference.repository
    if has_network(target) and not given["overwrite_models"]:
        click.echo(f"{source} is in {target} already", err=True)
        if not (target / GRAPH_NAME).is_file() or has_graph_flags(given):
            _write_graph(target, given, _pulled_draft(given, target))
        return target
    group_size, ratio = _quantisation(given["extra_quantization_params"] or "")
    weights = _weights(given["weight_format"])
    exported = exported_weights(weights or (INT4 if group_size or ratio else None), group_size, ratio)
    if given["gguf_filename"]:
        stem = Path(given["gguf_filename"]).name.removesuffix(".gguf")
        reference = replace(reference, quantisation=stem.partition("-00001-of-")[0])
    cached = pull_model(source_of(str(reference), None, exported), force=given["overwrite_models"])
    place_model(cached, target)
    _write_graph(target, given, _pulled_draft(given, target))
    return target


def _pulled_draft(given: Mapping[str, Any], target: Path) -> str | None:
    """Put the draft model into the model's directory, as OVMS does. Returns its path there."""
    named = given["draft_source_model"]
    if not named or Path(named).is_dir():
        return None
    name = named.replace("/", "-")
    if not (target / name).is_dir():
        place_model(find_draft_model(named), target / name)
    return str(name)


def _weights(named: str | None) -> str | None:
    if named is None or named in EXPORTED:
        return named
    if named == "fp32":
        click.echo(f"--weight-format {named}: weights are exported as bf16", err=True)
        return BF16
    raise OptionError(f"--weight-format {named} is not supported; say one of {', '.join(EXPORTED)}")


def _quantisation(text: str) -> tuple[str | None, float | None]:
    """The group size and the ratio in parameters of optimum-cli. Raises OptionError for others."""
    words = iter(shlex.split(text))
    found: dict[str, str | None] = {"--group-size": None, "--ratio": None}
    for word in words:
        name, _, value = word.partition("=")
        if name not in found:
            raise OptionError(
                f"--extra_quantization_params {word} is not supported; export the model with optimum-cli, and give its "
                "directory as --model_path"
            )
        found[name] = value or next(words, None)
    ratio = found["--ratio"]
    try:
        return found["--group-size"], None if ratio is None else float(ratio)
    except ValueError:
        raise OptionError(f"--extra_quantization_params: --ratio must be a number, not {ratio}") from None


# -- serving --------------------------------------------------------------------------------------------------------


def _serve(given: Mapping[str, Any], notes: Sequence[str], begun_s: float) -> None:
    """Serve until stopped, and end the process. Raises CommandError."""
    file = None
    if given["config_path"] is not None:
        _refuse_beside_config(given)
        poll_s = (
            1.0 if given["file_system_poll_wait_seconds"] is None else float(given["file_system_poll_wait_seconds"])
        )
        file = ModelsFile(_config_path(given).absolute(), ModelSettings(""), poll_s)
        settings, own_notes = file.settings()
    else:
        model, own_notes = _model(given)
        settings = HostSettings((model,))
    with tempfile.TemporaryDirectory(prefix="headrace-ovms-") as private:
        options = _options_of_serve()
        options |= {"log_level": _log_level(given["log_level"]), "api_keys": _api_keys(given, Path(private))}
        if given["allowed_origins"] is not None:
            options["cors_origins"] = tuple(one.strip() for one in given["allowed_origins"].split(",") if one.strip())
        if given["allowed_media_domains"] is not None:
            options["allowed_media_domains"] = (given["allowed_media_domains"],)
        if given["allowed_local_media_path"] is not None:
            options["allowed_local_media_path"] = Path(given["allowed_local_media_path"])
        where = _listening(given)
        all_notes = [*notes, *own_notes]
        if where.host == _ALL_ADDRESSES and options["api_keys"] is None:
            all_notes.append(
                "all addresses of this host are served without a key, as by OVMS; --api_key_file or "
                "--rest_bind_address 127.0.0.1 restrict it"
            )
        stream = None if given["log_path"] is None else _Both(given["log_path"])
        run = Run(
            settings,
            where,
            options,
            notes=all_notes,
            begun_s=begun_s,
            file=file,
            stream=cast("BinaryIO | None", stream),
        )
        run.serve()


def _refuse_beside_config(given: Mapping[str, Any]) -> None:
    names = ("model_name", "model_path", "source_model", "target_device", _PLUGIN, "task")
    of_one = [name for name in names if given[name]] + [
        flag.name for flag in GRAPH_FLAGS if given[flag.name] is not None
    ]
    if of_one:
        raise OptionError(f"--{of_one[0]} is for one model; with --config_path, say it in the model's entry or graph")


def _model(given: Mapping[str, Any]) -> tuple[ModelSettings, list[str]]:
    """The one model that flags name. Raises CommandError."""
    if given["source_model"]:
        directory = _pulled(given)
        name = given["model_name"] or given["source_model"]
    elif given["model_path"]:
        directory = Path(given["model_path"]).absolute()
        name = given["model_name"] or directory.name.removesuffix(".gguf")
    elif given["model_name"] and given["model_repository_path"]:
        directory = _repository(given).absolute() / given["model_name"]
        name = given["model_name"]
    else:
        raise OptionError(
            "no model is named; give --model_path and --model_name, --source_model and --model_repository_path, or "
            "--config_path"
        )
    graph = directory / GRAPH_NAME
    if graph.is_file() and not (given["task"] or has_graph_flags(given)):
        if given[_PLUGIN]:
            raise OptionError(f"--plugin_config is in the graph {graph}; change it there, or give --task too")
        take_device(Draft(directory), given["target_device"] or "")
        return model_of_graph(name, read_graph(graph), graph.parent)
    if not directory.exists():
        raise OptionError(f"there is no model {directory}")
    calculator = _calculator(given, directory)
    draft = Draft(directory)
    flags = _values(given, calculator)
    values = {"models_path": str(directory), **flags.options, _PLUGIN: flags.properties}
    if "draft_models_path" in values:
        placed = directory / values["draft_models_path"].replace("/", "-")
        values["draft_models_path"] = str(placed if placed.is_dir() else find_draft_model(values["draft_models_path"]))
    take_all(calculator.options, values, draft)
    return finish(draft, name, calculator), draft.notes


def _listening(given: Mapping[str, Any]) -> Listening:
    host = given["rest_bind_address"] or given["grpc_bind_address"] or _ALL_ADDRESSES
    if "," in host:
        raise OptionError(f"--rest_bind_address {host} has several addresses; give one, or {_ALL_ADDRESSES} for all")
    if given["grpc_bind_address"] not in (None, host):
        raise OptionError(f"--grpc_bind_address must be {host}, as for HTTP: both APIs are of one gateway")
    return Listening(host, given["rest_port"] or _DEFAULT_PORT, given["port"] or 0)


def _log_level(level: str | None) -> str | None:
    if level is not None and level.upper() not in _LEVELS:
        raise OptionError(f"--log_level must be one of {', '.join(_LEVELS)}, not {level}")
    return None if level is None else _LEVELS[level.upper()]


def _api_keys(given: Mapping[str, Any], private: Path) -> Path | None:
    """A file of keys with the one key that OVMS has; None without a key. Raises OptionError."""
    key = os.environ.get("API_KEY", "")
    if given["api_key_file"]:
        try:
            key = Path(given["api_key_file"]).read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--api_key_file {given['api_key_file']} cannot be read: {error}") from None
        if not key:
            raise OptionError(f"--api_key_file {given['api_key_file']} has no key in its first line")
    if not key:
        return None
    path = private / "api-keys"
    write_keys(path, [ApiKey(new_id(), sha256_of(key), "ovms", "ovms", int(time.time()))])
    return path


def _options_of_serve() -> dict[str, Any]:
    """The options of all models, as `headrace serve` has them without flags: from its variables, or its defaults."""
    context = serve.make_context("serve", [], auto_envvar_prefix="HEADRACE_SERVE")
    own = {"models", "models_file", "config", "config_poll_s", "on_demand", "idle_s", "memory_gb", "host", "port"}
    own |= {"grpc_port", "workers", "threads", "name", "join", "stage_listen", "offline", "dry_run"}
    return {name: value for name, value in context.params.items() if name not in own}


class _Both:
    """Standard error and a file. Raises CommandError if the file cannot be opened."""

    def __init__(self, path: str) -> None:
        try:
            self._file = open(path, "ab")  # noqa: SIM115  # it is open until the process ends
        except OSError as error:
            raise CommandError(f"--log_path {path} cannot be opened: {error.strerror}") from None

    def write(self, data: bytes) -> int:
        """Write to both."""
        self._file.write(data)
        return sys.stderr.buffer.write(data)

    def flush(self) -> None:
        """Flush both."""
        self._file.flush()
        sys.stderr.buffer.flush()
