"""Files of OVMS's repositories that commands write and list: graphs, configurations, and directories of models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.cli.models.model_cache import MANIFEST_NAME, building_at, link_or_copy
from headrace.cli.ovms.configuration import GRAPH_NAME, VERSION, read_json
from headrace.cli.ovms.graphs import Calculator
from headrace.common.commands import CommandError
from headrace.common.model_files.networks import has_network
from headrace.common.stores.files import replace_file
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_UNSPECIFIED

_LOOP = """\
  input_stream: "LOOPBACK:loopback"
  output_stream: "LOOPBACK:loopback"
  input_stream_info: {
    tag_index: "LOOPBACK:0"
    back_edge: true
  }
  input_stream_handler {
    input_stream_handler: "SyncSetInputStreamHandler"
    options {
      [mediapipe.SyncSetInputStreamHandlerOptions.ext] {
        sync_set { tag_index: "LOOPBACK:0" }
      }
    }
  }
"""


def graph_text(calculator: Calculator, values: Mapping[str, Any]) -> str:
    """A graph that OVMS and headrace read, with these options."""
    is_llm = calculator.task == TASK_UNSPECIFIED
    prefix = "HTTP_" if is_llm else ""
    packet = "LLM_NODE_RESOURCES:llm"
    if not is_llm:
        name = "EMBEDDINGS" if calculator.task == TASK_EMBED else "RERANK"
        packet = f"{name}_NODE_RESOURCES:{name.lower()}_servable"
    kinds = {option.name: option.kind for option in calculator.options}
    lines = [f"      {name}: {_literal(value, kinds[name])}\n" for name, value in values.items()]
    return (
        "# Written by headrace ovms\n"
        f'input_stream: "{prefix}REQUEST_PAYLOAD:input"\n'
        f'output_stream: "{prefix}RESPONSE_PAYLOAD:output"\n'
        "node {\n"
        f'  name: "{calculator.names[0].removeprefix("Http")}"\n'
        f'  calculator: "{calculator.names[0]}"\n'
        f'  input_stream: "{prefix}REQUEST_PAYLOAD:input"\n'
        f'  output_stream: "{prefix}RESPONSE_PAYLOAD:output"\n'
        f'  input_side_packet: "{packet}"\n'
        f"{_LOOP if is_llm else ''}"
        "  node_options: {\n"
        f"    [type.googleapis.com/mediapipe.{calculator.message}]: {{\n"
        f"{''.join(lines)}"
        "    }\n"
        "  }\n"
        "}\n"
    )


def _literal(value: Any, kind: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=True) if kind == "string" else str(value)


def servables(repository: Path) -> list[str]:
    """The models of a repository: paths of directories with a graph, a model for texts or versions, sorted. Raises
    CommandError if there is no such directory."""
    if not repository.is_dir():
        raise CommandError(f"--model_repository_path {repository} is no directory")
    return sorted(str(path.relative_to(repository)) for path in _servables(repository))


def _servables(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if not path.is_dir():
            continue
        if (path / GRAPH_NAME).is_file() or has_network(path) or _has_versions(path):
            yield path
        else:
            yield from _servables(path)


def _has_versions(path: Path) -> bool:
    return any(one.is_dir() and VERSION.fullmatch(one.name) and any(one.iterdir()) for one in path.iterdir())


def add_to_config(config: Path, name: str, base_path: str, more: Mapping[str, Any]) -> None:
    """Add a model to a configuration, which need not exist. Raises CommandError if it has the name already."""
    content = _content(config) if config.exists() else {"model_config_list": []}
    if name in _names(content):
        raise CommandError(f"{config} has a model {name!r} already; remove it first, or choose another name")
    entries = content.setdefault("model_config_list", [])
    if not isinstance(entries, list):
        raise CommandError(f"{config} has a model_config_list that is no list")
    entries.append({"config": {"name": name, "base_path": base_path, **more}})
    _write(config, content)


def remove_from_config(config: Path, name: str) -> None:
    """Remove a model from a configuration. Raises CommandError if it does not have it."""
    content = _content(config)
    if name not in _names(content):
        raise CommandError(f"{config} has no model {name!r}; there are {', '.join(_names(content)) or 'none'}")
    content["model_config_list"] = [
        entry for entry in content.get("model_config_list", []) if entry["config"]["name"] != name
    ]
    if "mediapipe_config_list" in content:
        content["mediapipe_config_list"] = [one for one in content["mediapipe_config_list"] if one["name"] != name]
    _write(config, content)


def _content(config: Path) -> dict[str, Any]:
    content = read_json(config)
    if not isinstance(content, dict):
        raise CommandError(f"{config} must be a JSON object")
    return content


def _names(content: Mapping[str, Any]) -> list[str]:
    try:
        models = [entry["config"]["name"] for entry in content.get("model_config_list", [])]
        return [*models, *(entry["name"] for entry in content.get("mediapipe_config_list", []))]
    except (KeyError, TypeError):
        raise CommandError("the configuration has an entry without a name; mend it first") from None


def _write(config: Path, content: Mapping[str, Any]) -> None:
    mode = config.stat().st_mode & 0o777 if config.exists() else 0o644
    replace_file(config, f"{json.dumps(content, indent=4, ensure_ascii=False)}\n".encode(), mode)


def place_model(cached: Path, target: Path) -> None:
    """Put the files of a model of the cache into a directory of a repository: as links to the same bytes if both are on
    one disk, else as copies. What was there is replaced, when the new files are complete."""
    with building_at(target) as fresh:
        shutil.copytree(
            cached, fresh, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST_NAME), copy_function=link_or_copy
        )
