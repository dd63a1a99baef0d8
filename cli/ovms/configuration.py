"""Reads the configuration file of OVMS: a JSON object that lists graphs and directories of models.

    {"model_config_list": [{"config": {"name": ..., "base_path": ...}}],
     "mediapipe_config_list": [{"name": ..., "base_path": ..., "graph_path": ..., "subconfig": ...}]}

A model that cannot be served is a problem of its own: the others are served, as OVMS does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cli.hosting.settings import ModelSettings
from headrace.cli.ovms.graphs import CALCULATORS, Calculator, Graph, read_graph
from headrace.cli.ovms.options import (
    CONFIGURATION,
    EMBEDDINGS,
    GRAPH_ENTRY,
    MODEL_ENTRY,
    Draft,
    Fate,
    Option,
    OptionError,
    fit_steps,
    take_all,
)
from headrace.common.commands import CommandError
from headrace.common.model_files.networks import has_network
from headrace.common.model_files.task import task_of
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK, TASK_UNSPECIFIED, Task

GRAPH_NAME = "graph.pbtxt"
SUBCONFIG_NAME = "subconfig.json"
_TASKS = {TASK_UNSPECIFIED: "text_generation", TASK_EMBED: "embeddings", TASK_RANK: "rerank"}
VERSION = re.compile(r"[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class Configuration:
    """The models of a file that can be served, the settings without effect, and the reasons why other models are not
    served."""

    models: tuple[ModelSettings, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_json(path: Path) -> Any:
    """The content of a configuration. Raises CommandError if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{path} is not JSON: {error}") from None


def read_configuration(path: Path) -> Configuration:
    """Read the file. Raises CommandError if it cannot be read, is not JSON, or has another structure."""
    content = read_json(path)
    models: list[ModelSettings] = []
    notes: list[str] = []
    problems: list[str] = []
    try:
        entries = list(_entries(content, path.parent.absolute()))
        _take_rest(content, notes)
    except OptionError as error:
        raise CommandError(f"{path}: {error}") from None
    # A graph's own configuration may name further models.
    while entries:
        entry = entries.pop(0)
        if any(entry.name == model.name for model in models):
            problems.append(f"{entry.name}: the name is there twice; the first one is served")
            continue
        try:
            entries += _entries_of_subconfig(entry)
            model, own_notes = entry.read()
        except OptionError as error:
            problems.append(f"{entry.name}: {error}")
        else:
            models.append(model)
            notes += [f"{entry.name}: {note}" for note in own_notes]
    return Configuration(tuple(models), tuple(notes), tuple(problems))


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of one of the two lists. `directory` is that of its file."""

    name: str
    values: Mapping[str, Any]
    directory: Path
    is_graph: bool

    @property
    def base(self) -> Path:
        """The directory of the graph or the model. Raises OptionError."""
        return Draft(self.directory).path(self.values.get("base_path") or self.name)

    def graph_path(self) -> Path | None:
        """The graph; None for a model without one. Raises OptionError if there must be a graph."""
        path = Draft(self.base).path(self.values.get("graph_path") or GRAPH_NAME)
        in_version = self.base / "1" / GRAPH_NAME
        if not path.is_file() and "graph_path" not in self.values and in_version.is_file():
            path = in_version
        if path.is_file():
            return path
        if self.is_graph or "graph_path" in self.values:
            raise OptionError(f"there is no graph {path}")
        return None

    def read(self) -> tuple[ModelSettings, list[str]]:
        """The model, and what has no effect. Raises OptionError."""
        path = self.graph_path()
        draft = Draft(self.directory)
        take_all(GRAPH_ENTRY if self.is_graph else MODEL_ENTRY, self.values, draft)
        if path is not None:
            model, notes = model_of_graph(self.name, read_graph(path), path.parent)
            if draft.options or draft.settings:
                given = ", ".join(name for name in ("target_device", "plugin_config") if name in self.values)
                notes.append(f"{given} of the entry has no effect: the graph {path} decides")
            return model, [*draft.notes, *notes]
        draft.settings["model"] = str(_model_directory(self.base).resolve())
        calculator = _calculator_for(task_of(Path(draft.settings["model"])))
        return finish(draft, self.name, calculator), draft.notes


def model_of_graph(name: str, graph: Graph, directory: Path) -> tuple[ModelSettings, list[str]]:
    """The model of a graph, whose paths are relative to the directory, and what has no effect. Raises OptionError."""
    draft = Draft(directory)
    take_all(graph.calculator.options, graph.values, draft)
    return finish(draft, name, graph.calculator), draft.notes


def finish(draft: Draft, name: str, calculator: Calculator) -> ModelSettings:
    """The model whose options were taken, after the defaults of its kind. Raises OptionError if its files are of
    another kind."""
    path = Path(draft.settings["model"])
    if path.is_dir() and has_network(path) and (found := task_of(path)) != calculator.task:
        raise OptionError(
            f"{path} has a model for {_TASKS[found]}, and {calculator.names[0]} is for {_TASKS[calculator.task]}"
        )
    if calculator.options is EMBEDDINGS:
        draft.options.setdefault("pooling", "cls")
        draft.options.setdefault("normalizes", True)
    if calculator.task != TASK_UNSPECIFIED:
        for setting in ("kv_precision", "speculation"):
            if draft.options.pop(setting, None) is not None:
                draft.notes.append(f"plugin_config: the {setting} has no effect: the model has no KV cache")
    fit_steps(draft)
    return draft.finished(name)


def calculator_named(task: str) -> Calculator:
    """The calculator of a task of OVMS. Raises OptionError for one that headrace does not serve."""
    found = {_TASKS[calculator.task]: calculator for calculator in CALCULATORS}
    if task not in found:
        raise OptionError(
            f"task {task} is not supported: there are {', '.join(found)}; use OVMS to generate images, and for speech"
        )
    return found[task]


def _calculator_for(task: Task) -> Calculator:
    return next(calculator for calculator in CALCULATORS if calculator.task == task)


def _model_directory(base: Path) -> Path:
    """A directory of a model without a graph. Raises OptionError if headrace does not serve it."""
    if base.suffix == ".gguf" and base.is_file():
        return base
    if not base.is_dir():
        raise OptionError(f"there is no directory {base}")
    if has_network(base) and (base / "config.json").is_file():
        return base
    versions = sorted(path.name for path in base.iterdir() if path.is_dir() and VERSION.fullmatch(path.name))
    if versions:
        raise OptionError(
            f"{base} has versions of a model with tensors as inputs, which headrace does not serve; use OVMS for it"
        )
    raise OptionError(f"{base} has neither {GRAPH_NAME} nor a model for texts")


def _entries(content: Any, directory: Path) -> Iterator[_Entry]:
    """The entries of a configuration. Raises OptionError if it has another form."""
    if not isinstance(content, Mapping):
        raise OptionError("it must be a JSON object")
    known = [option.name for option in CONFIGURATION]
    for name in content:
        if name not in known:
            raise OptionError(f"it has an unknown field {name!r}; there are {', '.join(known)}")
    if not ("model_config_list" in content or "mediapipe_config_list" in content):
        raise OptionError("it has neither model_config_list nor mediapipe_config_list")
    for name, is_graph in (("mediapipe_config_list", True), ("model_config_list", False)):
        entries = content.get(name, [])
        if not isinstance(entries, list):
            raise OptionError(f"{name} must be a list")
        for number, entry in enumerate(entries):
            at = f"{name}[{number}]"
            if not is_graph:
                if not isinstance(entry, Mapping) or list(entry) != ["config"]:
                    raise OptionError(f'{at} must be an object with "config" alone')
                entry = entry["config"]
            yield _checked(entry, at, directory, is_graph=is_graph)


def _checked(entry: Any, at: str, directory: Path, *, is_graph: bool) -> _Entry:
    if not isinstance(entry, Mapping):
        raise OptionError(f"{at} must be an object")
    options: Sequence[Option] = GRAPH_ENTRY if is_graph else MODEL_ENTRY
    known = {option.name: option for option in options}
    for name, value in entry.items():
        if name not in known:
            raise OptionError(f"{at} has an unknown field {name!r}; there are {', '.join(known)}")
        if known[name].kind == "string" and not isinstance(value, str):
            raise OptionError(f"{at}.{name} must be a text")
    if not entry.get("name"):
        raise OptionError(f"{at} has no name")
    return _Entry(entry["name"], entry, directory, is_graph)


def _entries_of_subconfig(entry: _Entry) -> list[_Entry]:
    """The models in a graph's own configuration. Raises OptionError."""
    path = Draft(entry.base).path(entry.values.get("subconfig") or SUBCONFIG_NAME)
    if not path.is_file():
        if "subconfig" in entry.values:
            raise OptionError(f"there is no subconfig {path}")
        return []
    try:
        return list(_entries(json.loads(path.read_text(encoding="utf-8-sig")), path.parent))
    except ValueError as error:
        raise OptionError(f"{path} is not JSON: {error}") from None
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None


def _take_rest(content: Mapping[str, Any], notes: list[str]) -> None:
    draft = Draft(Path())
    take_all([option for option in CONFIGURATION if option.fate is Fate.NAMED], content, draft)
    notes += draft.notes
