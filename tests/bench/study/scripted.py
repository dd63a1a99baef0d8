"""A study over servers with scripts: in this process, so that a start takes no time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from headrace.bench.lengths import Lengths
from headrace.bench.study import recipes
from headrace.bench.study.conduct import Study
from headrace.bench.study.directory import Settings, StudyDirectory
from headrace.bench.study.kinds import Kind, MissingError
from headrace.bench.study.model import StudiedModel
from headrace.bench.study.processes import Command, ServerError
from headrace.bench.study.recipes import OURS, QUICK, Run, Scale
from tests.bench.scripted_server import served

# No seconds: each run has as few requests as there may be, however fast this machine is.
TINY = dataclasses.replace(QUICK, repetitions=2, repetitions_of_others=2, seconds=0.0, capacity_prompts=12)


def model(directory: Path, name: str = "scripted") -> StudiedModel:
    return StudiedModel(name, directory, 1000, 640, 10, 2048)


@dataclass
class ScriptedKind:
    """A server whose answers follow a script; the model's name in its requests is the script."""

    name: str = OURS
    missing: str = ""
    cannot: str = ""
    to_install: str = ""
    need_bytes: int = 0
    start_s: float = 0.0
    preemptions: str = ""
    started: list[Run] = field(default_factory=list)

    def outlook(self) -> str:
        if self.missing:
            raise MissingError(self.missing)
        return self.to_install

    def prepare(self) -> None:
        self.outlook()

    def version(self) -> str:
        return "1"

    def command(self, run: Run, model: StudiedModel, port: int) -> Command:
        if self.cannot:
            raise MissingError(self.cannot)
        self.started.append(run)
        return Command([self.name], {"A": "b"})

    def memory_bytes(self, run: Run, model: StudiedModel) -> int:
        return self.need_bytes


class ScriptedServer:
    """One that has no process."""

    def __init__(self, url: str, fails: str) -> None:
        self.url = url
        self._fails = fails

    def check(self) -> None:
        if self._fails:
            raise ServerError(self._fails)

    def cpu_s(self) -> float:
        return 0.0

    def memory_bytes(self) -> int:
        return 1 << 20


def study(
    path: Path,
    *kinds: Kind,
    models: tuple[str, ...] = ("scripted",),
    scale: Scale = TINY,
    fails: str = "",
    sharegpt: Path | None = None,
    port: int | None = None,
) -> tuple[Study, StudyDirectory, list[str]]:
    """A study, its directory, and what it says."""
    said: list[str] = []
    directory = StudyDirectory(path)
    directory.open(Settings(scale.name, 0, models[0], "made up", "a machine"))

    @contextlib.asynccontextmanager
    async def launch(
        name: str, command: Command, port: int, log_path: Path, timeout_s: float
    ) -> AsyncIterator[ScriptedServer]:
        async with served(port) as url:
            yield ScriptedServer(url, fails if name == fails.split(" ")[0] else "")

    studied = [model(path, name) for name in models]
    load = dataclasses.replace(recipes.workload(sharegpt), outputs=Lengths("uniform", 6, 0.5))
    return Study(directory, scale, 0, studied, kinds, port, said.append, load, launch, False), directory, said
